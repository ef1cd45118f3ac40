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
