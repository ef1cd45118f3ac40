//go:build linux && !race

package iwarp

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// haveRawIO is true: the socket's descriptor can be read and written without blocking, with
// the runtime's poller.
const haveRawIO = true

// A call on a non-blocking socket takes as long as its copying, some microseconds for the
// amounts that the device moves at a time. Syscall announces each call to the scheduler,
// which may cost more: it wakes the monitor thread, which then looks every 20 us. So only
// longer calls are announced.
const announceFrom = 128 << 10 // announceFrom is in bytes.

// The race detector needs the calls of rawio_unix.go, which tell it that a read from a
// socket depends on the write to it.

// readv reads what has arrived. wait is set if nothing has.
func readv(fd uintptr, bufs [][]byte) (n int, wait bool, err error) {
	return vectored(unix.SYS_READ, unix.SYS_READV, fd, bufs)
}

// writev writes what fits. wait is set if nothing does.
func writev(fd uintptr, bufs [][]byte) (n int, wait bool, err error) {
	return vectored(unix.SYS_WRITE, unix.SYS_WRITEV, fd, bufs)
}

func vectored(one, many, fd uintptr, bufs [][]byte) (int, bool, error) {
	var iov [batchChunks]unix.Iovec
	total := 0
	for i, b := range bufs {
		iov[i].Base = unsafe.SliceData(b)
		iov[i].SetLen(len(b))
		total += len(b)
	}
	for {
		var n uintptr
		var errno syscall.Errno
		switch {
		case len(bufs) == 1 && total < announceFrom:
			n, _, errno = syscall.RawSyscall(one, fd, uintptr(unsafe.Pointer(iov[0].Base)), uintptr(total))
		case total < announceFrom:
			n, _, errno = syscall.RawSyscall(many, fd, uintptr(unsafe.Pointer(&iov)), uintptr(len(bufs)))
		default:
			n, _, errno = syscall.Syscall(many, fd, uintptr(unsafe.Pointer(&iov)), uintptr(len(bufs)))
		}
		runtime.KeepAlive(bufs)
		switch errno {
		case 0:
			return int(n), false, nil
		case syscall.EINTR:
		case syscall.EAGAIN:
			return 0, true, nil
		default:
			return 0, false, errno
		}
	}
}
