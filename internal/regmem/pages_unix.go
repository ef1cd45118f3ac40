//go:build unix

package regmem

import "golang.org/x/sys/unix"

// AllocPages maps n bytes of zeroed memory outside the Go heap, or returns the system's
// error. Pages that nothing touches take no memory, and each touched page takes no more
// than itself.
func AllocPages(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err == nil {
		smallPages(b)
	}
	return b, err
}

// FreePages unmaps what [AllocPages] has returned, all of it, or returns the system's
// error.
func FreePages(b []byte) error { return unix.Munmap(b) }
