//go:build unix

package rdmanet

import "golang.org/x/sys/unix"

// allocPages maps n bytes of zeroed memory outside the Go heap. Pages that are
// not touched take no memory.
func allocPages(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

func freePages(b []byte) error { return unix.Munmap(b) }
