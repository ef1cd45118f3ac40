//go:build unix

package twin

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapped returns n bytes of a mapped file, and the function that unmaps it. Of these, good can be
// accessed: a file that has fewer than n was cut short.
func mapped(n, good int) ([]byte, func()) {
	page := os.Getpagesize()
	ends := (good + page - 1) / page * page // The file ends with a page.
	size := ends + (n-good+page-1)/page*page
	if size == 0 {
		return nil, nil
	}
	f, err := os.CreateTemp("", "twin")
	if err != nil {
		return nil, nil
	}
	defer f.Close()
	defer os.Remove(f.Name())
	if f.Truncate(int64(ends)) != nil {
		return nil, nil
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil
	}
	return mem[ends-good:][:n:n], func() { unix.Munmap(mem) }
}
