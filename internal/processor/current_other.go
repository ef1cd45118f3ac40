//go:build !linux || !amd64

package processor

func current() (uint32, bool) { return 0, false }
