//go:build linux || darwin

package udconn

import (
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// groupMember has a UDP socket join or leave a group (ip(7), ipv6(7)).
func groupMember(fd int, ifi *net.Interface, group netip.Addr, join bool) error {
	if group.Is4() {
		option := unix.IP_DROP_MEMBERSHIP
		if join {
			option = unix.IP_ADD_MEMBERSHIP
		}
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, option, mreqn(ifi, group.As4()))
	}
	option := unix.IPV6_LEAVE_GROUP
	if join {
		option = unix.IPV6_JOIN_GROUP
	}
	m := &unix.IPv6Mreq{Multiaddr: group.As16()}
	setIndex(&m.Interface, ifi)
	return unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, option, m)
}

func mreqn(ifi *net.Interface, group [4]byte) *unix.IPMreqn {
	m := &unix.IPMreqn{Multiaddr: group}
	setIndex(&m.Ifindex, ifi)
	return m
}

// setIndex sets a field whose type differs between systems.
func setIndex[T int32 | uint32](field *T, ifi *net.Interface) { *field = T(indexOf(ifi)) }

// groupInterface sets the interface by which a socket sends to groups. four is set for a
// socket of IPv4. Other sockets are of IPv6, and perhaps of both.
func groupInterface(fd int, four bool, ifi *net.Interface) error {
	set4 := func() error {
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, mreqn(ifi, [4]byte{}))
	}
	if four {
		return set4()
	}
	err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, indexOf(ifi))
	if err == nil {
		_ = set4() // A socket of IPv6 alone refuses it.
	}
	return err
}

// groupLoopback sets whether members on this host get what the socket sends.
func groupLoopback(fd int, four, on bool) error {
	value := 0
	if on {
		value = 1
	}
	set4 := func() error {
		return unix.SetsockoptByte(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_LOOP, byte(value))
	}
	if four {
		return set4()
	}
	err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_LOOP, value)
	if err == nil {
		_ = set4()
	}
	return err
}
