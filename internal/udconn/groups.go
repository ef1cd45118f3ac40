package udconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// groups is the multicast groups that a Conn is a member of, and how it sends to groups. One
// change is made at a time, with mu held. mu is taken before all other locks; no datagram
// takes it.
type groups struct {
	*shared
	recv *receiver
	udp  *udpSocket  // udp is nil if the socket is not open.
	rdma *rdmaGroups // rdma is nil if no RDMA device serves.

	mu      sync.Mutex
	members map[membership]*member
	ifi     *net.Interface // ifi is the interface that leads to groups, nil for the one of the routes.
}

// membership is a group, joined by an interface. ifi is 0 for the interface that the system
// chooses.
type membership struct {
	ifi   int
	group netip.Addr
}

// member is the devices by which a group was joined.
type member struct {
	ifi *net.Interface
	udp bool
	qp  *queuePair // qp is nil if no RDMA device has joined.
}

// join makes the Conn a member. Over UDP all is done or nothing. An RDMA device beside it may
// lack the group, as Conns that have both devices send to groups by UDP. The caller holds mu.
func (g *groups) join(ifi *net.Interface, group netip.Addr) error {
	group = group.WithZone("")
	key := membership{indexOf(ifi), group}
	switch {
	case g.closed.Load():
		return net.ErrClosed
	case g.connected():
		return fmt.Errorf("a connected one hears its peer only: %w", errno.EISCONN)
	case g.bound.IsValid() && g.bound.Is4() != group.Is4():
		return syscall.EAFNOSUPPORT
	case g.members[key] != nil:
		return errno.EADDRINUSE
	case len(g.members) >= g.Bounds.Groups:
		return fmt.Errorf("member of %d groups: %w", g.Bounds.Groups, errno.ENOBUFS)
	}
	m := &member{ifi: ifi}
	if g.udp != nil {
		if err := g.udp.join(ifi, group); err != nil {
			return err
		}
		m.udp = true
	}
	if g.rdma != nil {
		var err error
		m.qp, err = g.rdma.join(ifi, group)
		switch {
		case err == nil:
		case g.udp == nil:
			return err
		default:
			g.Log.Debug("rdmanet: does not hear the group by an RDMA device",
				"remote", net.UDPAddrFromAddrPort(netip.AddrPortFrom(group, g.local.Port())), "err", err)
		}
	}
	if g.members == nil {
		g.members = make(map[membership]*member)
	}
	g.members[key] = m
	return nil
}

// leave ends a membership. The caller holds mu.
func (g *groups) leave(ifi *net.Interface, group netip.Addr) (err error) {
	group = group.WithZone("")
	key := membership{indexOf(ifi), group}
	m := g.members[key]
	switch {
	case g.closed.Load():
		return net.ErrClosed
	case m == nil:
		return errno.EADDRNOTAVAIL
	}
	delete(g.members, key)
	if m.udp {
		err = g.udp.leave(ifi, group)
	}
	if m.qp != nil {
		err = errors.Join(err, g.rdma.leave(m.qp, group))
	}
	return err
}

// setLoopback says whether datagrams to groups that the Conn is a member of come back to it.
// The caller holds mu.
func (g *groups) setLoopback(on bool) error {
	if g.closed.Load() {
		return net.ErrClosed
	}
	if g.udp != nil {
		if err := g.udp.setLoopback(on); err != nil {
			return err
		}
	}
	g.recv.discardOwn.Store(!on)
	return nil
}

// setInterface sets the interface by which datagrams to groups leave. The caller holds mu.
func (g *groups) setInterface(ifi *net.Interface) error {
	if g.closed.Load() {
		return net.ErrClosed
	}
	if g.udp != nil {
		if err := g.udp.setInterface(ifi); err != nil {
			return err
		}
	}
	g.ifi = ifi
	if g.rdma != nil {
		g.rdma.dropPaths(nil, netip.Addr{})
	}
	return nil
}

// path returns the path to a port of a group over an RDMA device.
func (g *groups) path(ctx context.Context, to netip.AddrPort) (*path, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed.Load() {
		return nil, net.ErrClosed
	}
	return g.rdma.path(ctx, g.ifi, to)
}

// replace closes a queue pair that was removed, and joins its groups by another one, for as
// long as it takes.
func (g *groups) replace(q *queuePair) {
	g.mu.Lock()
	err := q.close()
	g.mu.Unlock()
	if err != nil {
		g.Log.Debug("rdmanet: queue pair for datagrams", "device", q.id.Device().Name(), "err", err)
	}
	for pause := g.Bounds.RejoinPause; g.rejoin(q) > 0; pause = min(2*pause, g.Bounds.MaxRejoinPause) {
		select {
		case <-time.After(pause):
		case <-g.ctx.Done():
			return
		}
	}
}

// rejoin tries to join the groups of a queue pair that was closed, and returns how many are
// left.
func (g *groups) rejoin(gone *queuePair) (left int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for key, m := range g.members {
		if m.qp != gone {
			continue
		}
		if g.closed.Load() {
			return 0
		}
		q, err := g.rdma.join(m.ifi, key.group)
		if err != nil {
			g.Log.Debug("rdmanet: group", "group", key.group, "local", g.laddr, "err", err)
			left++
			continue
		}
		m.qp = q
	}
	return left
}
