package rdmanet

import "golang.org/x/sys/unix"

const hugePage = 2 << 20 // of most machines; others lose nothing by it

// allocLarge maps n bytes where the kernel can back them with huge pages, and
// returns the whole mapping too, for freePages.
func allocLarge(n int) (mem, whole []byte, err error) {
	if whole, err = allocPages(n + hugePage); err != nil {
		return nil, nil, err
	}
	at := int(-addressOf(whole) & (hugePage - 1))
	mem = whole[at : at+n : at+n]
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without them it is slower, nothing else
	return mem, whole, nil
}
