package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Multicast groups over RDMA devices. Each is joined by an ID of its own, bound to the
// address that datagrams to it are to be from: the queue pair's may be of the other
// family. All of this is under the PacketConn's joining.

// udGroup is a group that a queue pair sends to, and hears if it is a member.
type udGroup struct {
	id     ibv.ID
	to     ibv.UDParam
	member bool
}

// join has a queue pair hear a group.
func (u *udSide) join(ifi *net.Interface, group netip.Addr) (*udQP, error) {
	ctx, cancel := context.WithTimeout(u.p.ctx, joinPatience)
	defer cancel()
	l, at, err := u.toward(ctx, ifi, group)
	if err != nil {
		return nil, err
	}
	if g := l.groups[group]; g != nil && g.member {
		return nil, errno.EADDRINUSE
	}
	_, err = l.join(ctx, at, group, true)
	return l, err
}

// toward returns the queue pair by which groups are reached through an interface, and
// the address there.
func (u *udSide) toward(ctx context.Context, ifi *net.Interface, group netip.Addr) (l *udQP, at netip.Addr, err error) {
	local := u.p.local.Addr()
	if ifi == nil {
		if local.IsUnspecified() {
			if local, err = sourceFor(group); err != nil {
				return nil, local, err
			}
		}
		l, err = u.open(ctx, local)
		return l, local, err
	}
	addrs, err := ifi.Addrs()
	if err != nil {
		return nil, at, err
	}
	err = fmt.Errorf("interface %s has no such address: %w", ifi.Name, errno.EADDRNOTAVAIL)
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		at, _ = netip.AddrFromSlice(n.IP)
		at = at.Unmap()
		if at.Is4() != group.Is4() || !local.IsUnspecified() && at != local.WithZone("") {
			continue
		}
		if at.Is6() && at.IsLinkLocalUnicast() {
			at = at.WithZone(ifi.Name)
		}
		if l, err = u.open(ctx, at); err == nil {
			return l, at, nil
		}
	}
	return nil, at, err
}

// join joins a group from an address of the device, to send to it, or to hear it too.
func (l *udQP) join(ctx context.Context, at, group netip.Addr, member bool) (ibv.UDParam, error) {
	if g := l.groups[group]; g != nil {
		if g.member || !member {
			return g.to, nil
		}
		if err := l.leave(group); err != nil {
			return g.to, err
		}
	}
	if !l.roomForGroup() {
		return ibv.UDParam{}, fmt.Errorf("%d groups: %w", len(l.groups), errno.ENOBUFS)
	}
	id, err := l.p.ud.provider.BindUD(ctx, netip.AddrPortFrom(at, 0))
	if err != nil {
		return ibv.UDParam{}, err
	}
	g := &udGroup{id: id, member: member}
	if err := l.enter(ctx, g, group); err != nil {
		return ibv.UDParam{}, errors.Join(err, id.Close())
	}
	if l.groups == nil {
		l.groups = make(map[netip.Addr]*udGroup)
	}
	l.groups[group] = g
	l.p.rmu.Lock()
	defer l.p.rmu.Unlock()
	if l.hears == nil {
		l.hears, l.own = make(map[netip.Addr]bool), make(map[netip.Addr]bool)
	}
	l.own[at.WithZone("")] = true
	l.hears[group] = member
	return g.to, nil
}

func (l *udQP) enter(ctx context.Context, g *udGroup, group netip.Addr) (err error) {
	if g.id.Device() != l.id.Device() || g.id.Port() != l.id.Port() {
		return fmt.Errorf("the address has moved to %s: %w", g.id.Device().Name(), errno.EADDRNOTAVAIL)
	}
	how := ibv.JoinSendOnly
	if g.member {
		how = ibv.JoinFullMember
	}
	if g.to, err = g.id.JoinMulticast(ctx, group, how); err != nil {
		return err
	}
	if g.member {
		if err := l.qp.AttachMcast(g.to.AH.GID, g.to.AH.DLID); err != nil {
			return err
		}
	}
	g.id.Notify(l.event)
	return nil
}

// leave leaves a group, whose ways must not be used any more.
func (l *udQP) leave(group netip.Addr) (err error) {
	g := l.groups[group]
	if g == nil {
		return nil
	}
	delete(l.groups, group)
	l.p.rmu.Lock()
	delete(l.hears, group)
	l.p.rmu.Unlock()
	if g.member {
		err = l.qp.DetachMcast(g.to.AH.GID, g.to.AH.DLID)
	}
	return errors.Join(err, g.id.Close())
}

// roomForGroup gives up one that is only sent to, if there are too many.
func (l *udQP) roomForGroup() bool {
	if len(l.groups) < 2*maxGroups {
		return true
	}
	for group, g := range l.groups {
		if !g.member {
			l.p.ud.forgetGroups(l, group)
			l.leave(group)
			return true
		}
	}
	return false
}

// leaveGroup ends a queue pair's membership. One that sends to the group joins it anew.
func (u *udSide) leaveGroup(l *udQP, group netip.Addr) error {
	u.forgetGroups(l, group)
	return l.leave(group)
}

// forgetGroups has the ways to groups looked for anew: all, or one queue pair's to a group.
func (u *udSide) forgetGroups(l *udQP, group netip.Addr) {
	u.p.wmu.Lock()
	defer u.p.wmu.Unlock()
	u.peers.mu.RLock()
	defer u.peers.mu.RUnlock()
	for _, pe := range u.peers.m {
		if pe.way != nil && pe.way.group != 0 && (l == nil || pe.way.link == l && pe.addr.Addr().WithZone("") == group) {
			u.leave(pe)
		}
	}
}

// errLowPort is told to senders whose immediate data would pass for another's.
var errLowPort = fmt.Errorf("datagrams to groups from a port below %d: %w", minGroupPort, errors.ErrUnsupported)

// groupWay finds the way to a port of a group: nobody needs to be asked.
func (u *udSide) groupWay(ctx context.Context, to netip.AddrPort) (*way, error) {
	p := u.p
	p.joining.Lock()
	defer p.joining.Unlock()
	switch {
	case p.closed.Load():
		return nil, net.ErrClosed
	case p.local.Port() < minGroupPort:
		return nil, errLowPort
	}
	ctx, cancel := context.WithTimeout(ctx, joinPatience)
	defer cancel()
	ifi := p.out
	if zone := to.Addr().Zone(); zone != "" {
		var err error
		if ifi, err = net.InterfaceByName(zone); err != nil {
			return nil, err
		}
	}
	l, at, err := u.toward(ctx, ifi, to.Addr())
	if err != nil {
		return nil, err
	}
	param, err := l.join(ctx, at, to.Addr().WithZone(""), false)
	if err != nil {
		return nil, err
	}
	return &way{link: l, to: param, group: to.Port()}, nil
}

// fromGroup finds the address that a datagram to a group is from: of one that is heard, at
// our port. Those that we have sent are dropped here if they are not wanted. The caller
// holds rmu.
func (l *udQP) fromGroup(host, group netip.Addr, wc *ibv.WC) (from netip.AddrPort, own, ok bool) {
	src, dst, ok := groupPorts(wc.Imm)
	if !ok || wc.Flags&ibv.WCWithImm == 0 || dst != l.p.local.Port() || !l.hears[group] {
		return from, false, false
	}
	own = wc.SrcQP == l.qp.QPN() && l.own[host.WithZone("")]
	return l.p.ud.peers.from(host, src, wc.SrcQP), own, true
}

// rejoin becomes a member again, by another queue pair, of what one was that has been
// dropped.
func (u *udSide) rejoin(lost *udQP) {
	p := u.p
	for pause := rejoinPause; u.rejoinOnce(lost) > 0; pause = min(2*pause, maxRejoinWait) {
		select {
		case <-time.After(pause):
		case <-p.ctx.Done():
			return
		}
	}
}

// rejoinOnce returns how many groups are left to join.
func (u *udSide) rejoinOnce(lost *udQP) (left int) {
	p := u.p
	p.joining.Lock()
	defer p.joining.Unlock()
	for key, m := range p.members {
		if m.link != lost {
			continue
		}
		if p.closed.Load() {
			return 0
		}
		l, err := u.join(m.ifi, key.group)
		if err != nil {
			p.log.Debug("rdmanet: group", "group", key.group, "local", p.laddr, "err", err)
			left++
			continue
		}
		m.link = l
	}
	return left
}
