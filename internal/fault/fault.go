// Package fault touches memory that may not be there: a mapped file that has been cut short, or
// pages that the program has protected. The system's calls return EFAULT for such memory. In Go
// code it ends the process, unless the goroutine has asked for a panic.
//
// Package rdmanet touches memory that a program has passed in this way only. Libraries of devices
// do not: rdma-core copies short messages itself.
package fault

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// ErrMidway is the error of a connection that has met such memory after a part of what was to be
// moved was gone. It matches errno.EFAULT.
var ErrMidway = fmt.Errorf("memory became inaccessible while data was moved from or to it (a call's memory must stay mapped, and a mapped file must keep its length, until the call has returned): %w", errno.EFAULT)

// pageSize is how far apart the bytes are that Readable and Writable touch.
var pageSize = uintptr(os.Getpagesize())

// Copy copies as the built-in function does, and returns how many bytes it has copied. The error
// is errno.EFAULT if the next one cannot be copied because of either memory.
func Copy(dst, src []byte) (n int, err error) {
	n = min(len(dst), len(src))
	for {
		good, ok := guard(dst[:n], src[:n], copyBytes)
		if ok {
			return n, err
		}
		// A copy need not begin with the first byte, so an earlier page may be bad too.
		n, err = good, errno.EFAULT
	}
}

// Readable returns how many bytes of p can be read, up to the first that cannot.
func Readable(p []byte) int {
	good, _ := guard(p, nil, readPages)
	return good
}

// Writable returns how many bytes of p can be written, up to the first that cannot. It writes
// what it has read to a byte of each page, so nobody else may be writing to p.
func Writable(p []byte) int {
	good, _ := guard(p, nil, writePages)
	return good
}

// Run runs access, which reads or writes p. The error is errno.EFAULT if a part of p cannot be
// accessed, and access has then ended in its middle.
func Run(p []byte, access func()) error {
	if _, ok := guard(p, nil, func(_, _ []byte) { access() }); !ok {
		return errno.EFAULT
	}
	return nil
}

// guard calls access with two memories, of which b may be nil. If a page of one of them cannot
// be accessed, ok is false, and good is how many bytes there are in front of that page. Any other
// panic goes on.
func guard(a, b []byte, access func(a, b []byte)) (good int, ok bool) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		if debug.SetPanicOnFault(old); !ok {
			good = caught(recover(), a, b)
		}
	}()
	access(a, b)
	return len(a), true
}

// caught returns how many bytes of a or b there are in front of the page whose fault is the
// cause of a panic. It panics again because of anything else.
func caught(cause any, a, b []byte) int {
	e, ok := cause.(interface {
		runtime.Error
		Addr() uintptr
	})
	if ok {
		for _, p := range [...][]byte{a, b} {
			if n, found := before(e.Addr(), p); found {
				return n
			}
		}
	}
	if cause != nil {
		panic(cause)
	}
	return 0 // The goroutine ends.
}

// before returns how many bytes of p are in front of the page of an address, and whether a part
// of p lies in that page. Some processors report the page only.
func before(addr uintptr, p []byte) (n int, found bool) {
	first, page := address(p), addr&^(pageSize-1)
	if len(p) == 0 || page+pageSize <= first || page >= first+uintptr(len(p)) {
		return 0, false
	}
	return int(max(page, first) - first), true
}

func address(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }

func copyBytes(dst, src []byte) { copy(dst, src) }

// toNextPage returns how many bytes there are from the beginning of p to the next page.
func toNextPage(p []byte) int { return int(pageSize - address(p)&(pageSize-1)) }

func readPages(p, _ []byte) {
	for len(p) > 0 {
		load(&p[0])
		p = p[min(toNextPage(p), len(p)):]
	}
}

func writePages(p, _ []byte) {
	for len(p) > 0 {
		store(&p[0], load(&p[0]))
		p = p[min(toNextPage(p), len(p)):]
	}
}

// The compiler would leave out a load whose result is not used, and a store of what was loaded.

//go:noinline
func load(b *byte) byte { return *b }

//go:noinline
func store(b *byte, v byte) { *b = v }
