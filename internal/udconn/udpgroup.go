package udconn

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/neterr"
)

// join joins a group. The system hands what is sent to a group only to sockets that are
// bound to every address.
func (u *udpSocket) join(ifi *net.Interface, group netip.Addr) error {
	if at := u.at.Addr(); !at.IsUnspecified() {
		return fmt.Errorf("a UDP socket at %v hears no groups: listen on every address, or by ListenMulticast: %w", at, errno.EADDRNOTAVAIL)
	}
	return u.option(func(fd int) error { return groupMember(fd, ifi, group, true) })
}

// leave leaves a group that was joined.
func (u *udpSocket) leave(ifi *net.Interface, group netip.Addr) error {
	return u.option(func(fd int) error { return groupMember(fd, ifi, group, false) })
}

// setInterface sets the interface by which datagrams to groups leave, nil for the one that the
// system's routes say.
func (u *udpSocket) setInterface(ifi *net.Interface) error {
	return u.option(func(fd int) error { return groupInterface(fd, u.at.Addr().Is4(), ifi) })
}

// setLoopback says whether members on this host get what the socket sends to groups.
func (u *udpSocket) setLoopback(on bool) error {
	return u.option(func(fd int) error { return groupLoopback(fd, u.at.Addr().Is4(), on) })
}

// option has f set an option of the socket.
func (u *udpSocket) option(f func(fd int) error) error {
	c, err := u.conn.SyscallConn()
	if err != nil {
		return neterr.Inner(err)
	}
	e := c.Control(func(fd uintptr) { err = f(int(fd)) })
	if e != nil {
		return neterr.Inner(e)
	}
	return err
}
