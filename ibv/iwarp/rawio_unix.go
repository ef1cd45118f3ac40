//go:build (linux && race) || darwin || illumos || openbsd

package iwarp

import (
	"golang.org/x/sys/unix"
)

// haveRawIO is true: the socket's descriptor can be read and written without blocking, with
// the runtime's poller.
const haveRawIO = true

// readv reads what has arrived. wait is set if nothing has.
func readv(fd uintptr, bufs [][]byte) (n int, wait bool, err error) {
	for {
		if len(bufs) == 1 {
			n, err = unix.Read(int(fd), bufs[0])
		} else {
			n, err = unix.Readv(int(fd), bufs)
		}
		switch err {
		case nil:
			return n, false, nil
		case unix.EINTR:
		case unix.EAGAIN:
			return 0, true, nil
		default:
			return 0, false, err
		}
	}
}

// writev writes what fits. wait is set if nothing does.
func writev(fd uintptr, bufs [][]byte) (n int, wait bool, err error) {
	for {
		if len(bufs) == 1 {
			n, err = unix.Write(int(fd), bufs[0])
		} else {
			n, err = unix.Writev(int(fd), bufs)
		}
		switch err {
		case nil:
			return n, false, nil
		case unix.EINTR:
		case unix.EAGAIN:
			return 0, true, nil
		default:
			return 0, false, err
		}
	}
}
