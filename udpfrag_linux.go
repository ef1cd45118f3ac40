package rdmanet

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// dontFragment has the kernel refuse a datagram that is too long for the way, as far
// as it knows it, and not cut it up (ip(7), IP_MTU_DISCOVER).
func dontFragment(network string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		if !strings.HasSuffix(network, "6") {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			return
		}
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		if err == nil { // for IPv4 by the same socket, where there is any
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
		}
	}); e != nil {
		return e
	}
	return err
}

// ownGroups has a socket hear the groups that it has joined itself, not those that others
// on the host have (ip(7), IP_MULTICAST_ALL). Old kernels have no such option for IPv6.
func ownGroups(_ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MULTICAST_ALL, 0)
		unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_ALL, 0)
	})
}
