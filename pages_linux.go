package rdmanet

import "golang.org/x/sys/unix"

// adviseHuge asks for huge pages where memory is to have small ones, as a system does
// whose transparent_hugepage is "always": for measurements only.
var adviseHuge = false

// smallPages has the kernel back a mapping with pages of the usual size only. Where
// transparent_hugepage is "always" the first byte written to it would take 2 MiB, and
// most of our memory is touched here and there. Kernels without huge pages refuse,
// and need no telling.
func smallPages(b []byte) {
	if adviseHuge {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	}
	_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE)
}

const dropsPages = true

// dropPages gives the pages of a part of a mapping back to the kernel. What is read
// there next is zero.
func dropPages(b []byte) error { return unix.Madvise(b, unix.MADV_DONTNEED) }
