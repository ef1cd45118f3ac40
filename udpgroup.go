package rdmanet

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/neterr"
)

// Multicast groups over the software device: those of UDP.

// join joins a group by the socket. The system hands what is sent to a group only to
// sockets that are bound to every address.
func (l *udpLink) join(ifi *net.Interface, group netip.Addr) error {
	if at := l.p.local.Addr(); !at.IsUnspecified() {
		return fmt.Errorf("a UDP socket at %v hears no groups: listen on every address, or by ListenMulticast: %w", at, errno.EADDRNOTAVAIL)
	}
	return l.option(func(fd int) error { return groupMember(fd, ifi, group, true) })
}

func (l *udpLink) leave(ifi *net.Interface, group netip.Addr) error {
	return l.option(func(fd int) error { return groupMember(fd, ifi, group, false) })
}

func (l *udpLink) setInterface(ifi *net.Interface) error {
	return l.option(func(fd int) error { return groupInterface(fd, l.p.local.Addr().Is4(), ifi) })
}

func (l *udpLink) setLoopback(on bool) error {
	return l.option(func(fd int) error { return groupLoopback(fd, l.p.local.Addr().Is4(), on) })
}

// option lets f set options of the socket.
func (l *udpLink) option(f func(fd int) error) error {
	c, err := l.conn.SyscallConn()
	if err != nil {
		return neterr.Inner(err)
	}
	e := c.Control(func(fd uintptr) { err = f(int(fd)) })
	if e != nil {
		return neterr.Inner(e)
	}
	return err
}
