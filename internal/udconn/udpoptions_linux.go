package udconn

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// dontFragment has the kernel refuse a datagram that is longer than the path's MTU, as far as
// the kernel knows it, and not fragment it (ip(7), IP_MTU_DISCOVER).
func dontFragment(network string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		if !strings.HasSuffix(network, "6") {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			return
		}
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		if err == nil { // The socket may send by IPv4 too.
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
		}
	}); e != nil {
		return e
	}
	return err
}

// ownGroups has a socket receive from the groups that it has joined itself, and not from those
// that others on the host have joined (ip(7), IP_MULTICAST_ALL). Old kernels have no such
// option for IPv6.
func ownGroups(_ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MULTICAST_ALL, 0)
		unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_ALL, 0)
	})
}
