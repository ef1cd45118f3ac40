//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
)

// resident returns how many bytes of the process are in memory.
func resident() int64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, pages int64
	_, _ = fmt.Fscan(bytes.NewReader(b), &size, &pages)
	return pages * int64(os.Getpagesize())
}

// descriptors returns how many descriptors are open.
func descriptors() int {
	list, _ := os.ReadDir("/proc/self/fd")
	return len(list)
}
