//go:build unix

package rdmanet

import "golang.org/x/sys/unix"

// allocPages maps n bytes of zeroed memory outside the Go heap. Pages that are
// not touched take no memory, and each that is takes no more than itself.
func allocPages(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err == nil {
		smallPages(b)
	}
	return b, err
}

func freePages(b []byte) error { return unix.Munmap(b) }
