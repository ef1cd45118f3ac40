//go:build !unix

package main

func memlock() string { return "this system has no such limit" }
