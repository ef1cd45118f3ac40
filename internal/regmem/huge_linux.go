package regmem

import "golang.org/x/sys/unix"

const hugePage = 2 << 20 // hugePage is the size in bytes on most machines.

// allocLarge maps n bytes where the kernel can back them with huge pages. whole is the
// whole mapping, which FreePages takes.
func allocLarge(n int) (mem, whole []byte, err error) {
	if whole, err = AllocPages(n + hugePage); err != nil {
		return nil, nil, err
	}
	at := int(-addressOf(whole) & (hugePage - 1))
	mem = whole[at : at+n : at+n]
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // Memory without huge pages is slower, and nothing else.
	return mem, whole, nil
}
