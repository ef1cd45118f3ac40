//go:build linux && !race

package main

const shadowed = false
