//go:build !unix || solaris || illumos || aix

package main

func memlock() string { return "this system has no such limit" }
