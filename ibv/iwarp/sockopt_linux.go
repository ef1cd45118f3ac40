package iwarp

import "golang.org/x/sys/unix"

// notSent is how many bytes the socket holds that were not sent yet.
func notSent(fd uintptr) int {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQNSD)
	if err != nil {
		return 0
	}
	return n
}

// cork has the socket keep an incomplete segment until its direction ends, but for 200 ms at
// most.
func cork(fd uintptr) { unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, 1) }
