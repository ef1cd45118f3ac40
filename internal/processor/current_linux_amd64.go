package processor

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// segmentLimit loads the limit of the segment that Linux gives to each processor for this
// purpose: the number of the processor in its low twelve bits, and that of the NUMA node
// above them. ok is false if there is no such segment. The system's own getcpu does the
// same. RDPID and RDTSCP would be faster, but they return the numbers of the host's
// processors in some virtual machines.
func segmentLimit() (limit uint32, ok bool)

// trusted reports whether the segments have the numbers that the system uses. A hypervisor
// that keeps segments of its own could show those of its processors.
var trusted = sync.OnceValue(func() bool {
	for range 16 {
		before, ok := getcpu()
		if !ok {
			return false
		}
		limit, ok := segmentLimit()
		if after, _ := getcpu(); ok && before == after {
			return limit&0xfff == before
		}
	}
	return false
})

func getcpu() (n uint32, ok bool) {
	_, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&n)), 0, 0)
	return n, errno == 0
}

func current() (uint32, bool) {
	if !trusted() {
		return 0, false
	}
	limit, ok := segmentLimit()
	return limit & 0xfff, ok
}
