package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/neterr"
)

// ListenMulticast opens a connection that hears an IP multicast group at the port of
// gaddr, as net.ListenMulticastUDP does. network is as in ListenPacket; ifi says by which
// interface, nil leaves it to the system's routes, which is not recommended.
//
// It listens on every address, and several may listen on the same port so. What is
// sent to that port of one address, an answer for instance, reaches one of them: over
// UDP the one that was opened last, over RDMA devices the first. It sends to groups by
// ifi, and does not hear what it sends itself, until SetMulticastLoopback says so. More
// groups are for [PacketConn.JoinGroup].
func ListenMulticast(network string, ifi *net.Interface, gaddr *net.UDPAddr) (*PacketConn, error) {
	return new(ListenConfig).ListenMulticast(context.Background(), network, ifi, gaddr)
}

// ListenMulticast opens a connection that hears a group; see the function
// ListenMulticast. ctx concerns opening only. Backlog does not apply.
func (lc *ListenConfig) ListenMulticast(ctx context.Context, network string, ifi *net.Interface, gaddr *net.UDPAddr) (*PacketConn, error) {
	p, err := lc.listenMulticast(ctx, network, ifi, gaddr)
	if err != nil {
		var addr net.Addr
		if gaddr != nil {
			addr = gaddr
		}
		return nil, opError("listen", nil, addr, dialError(err))
	}
	return newPacketHandle(p), nil
}

func (lc *ListenConfig) listenMulticast(ctx context.Context, network string, ifi *net.Interface, gaddr *net.UDPAddr) (*packetConn, error) {
	n, err := parsePacketNetwork(network)
	if err != nil {
		return nil, err
	}
	group, err := groupOf(gaddr)
	if err == nil && !isPort(gaddr.Port) {
		err = syscall.EINVAL
	}
	if err != nil {
		return nil, err
	}
	if !n.allows(group) {
		return nil, &net.AddrError{Err: "group of another family than the network's", Addr: gaddr.String()}
	}
	if err := lc.check(); err != nil {
		return nil, err
	}
	providers, err := lc.providers()
	if err != nil {
		return nil, err
	}
	if ifi, err = interfaceOf(ifi, group); err != nil {
		return nil, err
	}
	all := netip.IPv6Unspecified()
	if group.Is4() {
		all = netip.IPv4Unspecified()
	}
	p, err := bindPacket(ctx, &lc.Config, providers, netip.AddrPortFrom(all, uint16(gaddr.Port)), group)
	if err != nil {
		return nil, err
	}
	p.joining.Lock()
	err = p.hearOnly(ifi, group)
	p.joining.Unlock()
	if err != nil {
		return nil, errors.Join(err, p.abandon())
	}
	return p, nil
}

// hearOnly makes a PacketConn what ListenMulticast promises. The caller holds joining.
func (p *packetConn) hearOnly(ifi *net.Interface, group netip.Addr) error {
	if ifi != nil {
		if err := p.sendBy(ifi); err != nil {
			return err
		}
	}
	if err := p.hearItself(false); err != nil {
		return err
	}
	return p.join(ifi, group)
}

// membership is what a PacketConn has joined: a group, by an interface, 0 for the one
// that the system chooses.
type membership struct {
	ifi   int
	group netip.Addr
}

// member is how.
type member struct {
	ifi  *net.Interface
	soft bool  // by the software device
	link *udQP // and by an RDMA device, nil if it is not
}

// Bounds of groups. They are variables for tests.
var (
	maxGroups     = 64 // that one PacketConn is a member of; and may send to, a queue pair
	joinPatience  = 5 * time.Second
	rejoinPause   = 100 * time.Millisecond
	maxRejoinWait = 10 * time.Second
)

// JoinGroup implements [PacketConn.JoinGroup].
func (p *packetConn) JoinGroup(ifi *net.Interface, group net.Addr) error {
	return p.changeGroups("join", ifi, group, p.join)
}

// LeaveGroup implements [PacketConn.LeaveGroup].
func (p *packetConn) LeaveGroup(ifi *net.Interface, group net.Addr) error {
	return p.changeGroups("leave", ifi, group, p.leave)
}

func (p *packetConn) changeGroups(op string, ifi *net.Interface, group net.Addr, change func(*net.Interface, netip.Addr) error) error {
	addr, err := groupOf(group)
	if err == nil {
		ifi, err = interfaceOf(ifi, addr)
	}
	if err != nil {
		return opError(op, p.laddr, nil, err)
	}
	p.joining.Lock()
	defer p.joining.Unlock()
	if err := change(ifi, addr.WithZone("")); err != nil {
		return opError(op, p.laddr, group, dialError(err))
	}
	return nil
}

// SetMulticastLoopback implements [PacketConn.SetMulticastLoopback].
func (p *packetConn) SetMulticastLoopback(on bool) error {
	p.joining.Lock()
	defer p.joining.Unlock()
	if err := p.hearItself(on); err != nil {
		return p.opError("set", err)
	}
	return nil
}

// SetMulticastInterface implements [PacketConn.SetMulticastInterface].
func (p *packetConn) SetMulticastInterface(ifi *net.Interface) error {
	p.joining.Lock()
	defer p.joining.Unlock()
	if err := p.sendBy(ifi); err != nil {
		return p.opError("set", err)
	}
	return nil
}

// groupOf is the group that an address names.
func groupOf(a net.Addr) (netip.Addr, error) {
	var ip netip.Addr
	switch a := a.(type) {
	case *net.UDPAddr:
		if a != nil {
			ip = a.AddrPort().Addr()
		}
	case *net.IPAddr:
		if a != nil {
			ip, _ = netip.AddrFromSlice(a.IP)
			ip = ip.WithZone(a.Zone)
		}
	}
	ip = ip.Unmap()
	if !ip.IsMulticast() {
		return ip, fmt.Errorf("no address of a multicast group: %w", syscall.EINVAL)
	}
	return ip, nil
}

// interfaceOf is the interface to take: the one that is given, or that the group's zone
// names.
func interfaceOf(ifi *net.Interface, group netip.Addr) (*net.Interface, error) {
	if ifi != nil || group.Zone() == "" {
		return ifi, nil
	}
	return net.InterfaceByName(group.Zone())
}

func indexOf(ifi *net.Interface) int {
	if ifi == nil {
		return 0
	}
	return ifi.Index
}

// join becomes a member. By the software device all is done or nothing; an RDMA device
// beside it may lack the group, as datagrams of PacketConns that have both go by UDP. The
// caller holds joining.
func (p *packetConn) join(ifi *net.Interface, group netip.Addr) error {
	group = group.WithZone("")
	key := membership{indexOf(ifi), group}
	switch {
	case p.closed.Load():
		return net.ErrClosed
	case p.remote.IsValid():
		return fmt.Errorf("a connected one hears its peer only: %w", errno.EISCONN)
	case p.bound.IsValid() && p.bound.Is4() != group.Is4():
		return syscall.EAFNOSUPPORT
	case p.members[key] != nil:
		return errno.EADDRINUSE
	case len(p.members) >= maxGroups:
		return fmt.Errorf("member of %d groups: %w", maxGroups, errno.ENOBUFS)
	}
	m := &member{ifi: ifi}
	if p.soft != nil {
		if err := p.soft.join(ifi, group); err != nil {
			return err
		}
		m.soft = true
	}
	if p.ud != nil {
		var err error
		m.link, err = p.ud.join(ifi, group)
		switch {
		case err == nil:
		case p.soft == nil:
			return err
		default:
			p.cfg.log("does not hear the group by an RDMA device", udpAddr(netip.AddrPortFrom(group, p.local.Port())), err)
		}
	}
	if p.members == nil {
		p.members = make(map[membership]*member)
	}
	p.members[key] = m
	return nil
}

// leave ends a membership. The caller holds joining.
func (p *packetConn) leave(ifi *net.Interface, group netip.Addr) (err error) {
	key := membership{indexOf(ifi), group}
	m := p.members[key]
	switch {
	case p.closed.Load():
		return net.ErrClosed
	case m == nil:
		return errno.EADDRNOTAVAIL
	}
	delete(p.members, key)
	if m.soft {
		err = p.soft.leave(ifi, group)
	}
	if m.link != nil {
		err = errors.Join(err, p.ud.leaveGroup(m.link, group))
	}
	return err
}

// hearItself is SetMulticastLoopback. The caller holds joining.
func (p *packetConn) hearItself(on bool) error {
	if p.closed.Load() {
		return net.ErrClosed
	}
	if p.soft != nil {
		if err := p.soft.setLoopback(on); err != nil {
			return err
		}
	}
	p.deaf.Store(!on)
	return nil
}

// sendBy is SetMulticastInterface. The caller holds joining.
func (p *packetConn) sendBy(ifi *net.Interface) error {
	if p.closed.Load() {
		return net.ErrClosed
	}
	if p.soft != nil {
		if err := p.soft.setInterface(ifi); err != nil {
			return err
		}
	}
	p.out = ifi
	if p.ud != nil {
		p.ud.forgetGroups(nil, netip.Addr{})
	}
	return nil
}

// Addresses that stand for several hosts.

// errListenGroup refuses to bind the address of a group, of which net makes something that
// is neither a member nor bound to it.
var errListenGroup = fmt.Errorf("to hear a group take ListenMulticast, to hear broadcasts listen on every address: %w", errors.ErrUnsupported)

// errNoBroadcast says what there is instead.
var errNoBroadcast = fmt.Errorf("RDMA devices have no broadcast: send to a multicast group, or by the software device, Config.Device %q: %w",
	softwareName, errors.ErrUnsupported)

// errGroupsBySoft is why an RDMA device is passed over.
var errGroupsBySoft = errors.New("datagrams to groups go by the software device where there are both")

// isGroup reports whether an address stands for several hosts. The broadcast address of
// a network does not show it; see isNetBroadcast.
func isGroup(a netip.Addr) bool { return a.IsMulticast() || a == broadcast4 }

// isNetBroadcast reports whether an address is the broadcast address of one of this host's
// networks.
func isNetBroadcast(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil || !a.Is4() {
		return false
	}
	for _, ia := range addrs {
		n, ok := ia.(*net.IPNet)
		if !ok || n.IP.To4() == nil {
			continue
		}
		ip, mask, last := n.IP.To4(), net.IP(n.Mask).To4(), [4]byte{}
		ones, _ := n.Mask.Size()
		if mask == nil || ones > 30 {
			continue
		}
		for i := range last {
			last[i] = ip[i] | ^mask[i]
		}
		if a == netip.AddrFrom4(last) {
			return true
		}
	}
	return false
}

// sourceFor is the local address from which the system's routes lead to a group.
func sourceFor(group netip.Addr) (netip.Addr, error) {
	c, err := net.DialUDP("udp", nil, udpAddr(netip.AddrPortFrom(group, 9))) // nothing is sent
	if err != nil {
		return netip.Addr{}, fmt.Errorf("which interface leads to %v (SetMulticastInterface says): %w", group, neterr.Inner(err))
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}
