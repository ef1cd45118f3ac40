//go:build linux && race

package main

// shadowed says that the race detector has memory beside the program's, which it keeps.
const shadowed = true
