package regmem

import "golang.org/x/sys/unix"

// smallPages has the kernel back a mapping with pages of the usual size only. Where
// transparent_hugepage is "always" the first byte written to it would take 2 MiB, and
// most of the package's memory is touched here and there. Kernels without huge pages
// refuse, which changes nothing.
func smallPages(b []byte) {
	if AdviseHuge {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	}
	_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE)
}

// dropsPages is set where dropPages does what it says.
const dropsPages = true

// dropPages gives whole pages of a mapping back to the kernel. What is read there next is
// zero.
func dropPages(b []byte) error { return unix.Madvise(b, unix.MADV_DONTNEED) }
