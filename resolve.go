package rdmanet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
)

// network is a parsed network name: the port space, "tcp" or "udp", and the address
// families it allows.
type network struct {
	ports string
	ip4   bool
	ip6   bool
}

func parseNetwork(name string) (network, error) {
	switch name {
	case "rdma", "tcp":
		return network{"tcp", true, true}, nil
	case "rdma4", "tcp4":
		return network{"tcp", true, false}, nil
	case "rdma6", "tcp6":
		return network{"tcp", false, true}, nil
	}
	return network{}, net.UnknownNetworkError(name)
}

// parsePacketNetwork is parseNetwork for datagrams. Where a connection could be meant
// as well, in Dial, those that begin with "udp" are left for this.
func parsePacketNetwork(name string) (network, error) {
	switch name {
	case "rdma", "udp":
		return network{"udp", true, true}, nil
	case "rdma4", "udp4":
		return network{"udp", true, false}, nil
	case "rdma6", "udp6":
		return network{"udp", false, true}, nil
	}
	return network{}, net.UnknownNetworkError(name)
}

func (n network) allows(a netip.Addr) bool { return a.Is4() && n.ip4 || a.Is6() && n.ip6 }

// addr is a as net has it for the network.
func (n network) addr(a netip.AddrPort) net.Addr {
	if n.ports == "udp" {
		return udpAddr(a)
	}
	return tcpAddr(a)
}

// local is the address that Dialer.LocalAddr names, if any.
func (n network) local(a net.Addr) (netip.AddrPort, error) {
	if a == nil {
		return netip.AddrPort{}, nil
	}
	var ap netip.AddrPort
	tcp, _ := a.(*net.TCPAddr)
	udp, _ := a.(*net.UDPAddr)
	switch {
	case n.ports == "tcp" && tcp != nil:
		ap = tcp.AddrPort()
	case n.ports == "udp" && udp != nil:
		ap = udp.AddrPort()
	default:
		return ap, &net.AddrError{Err: fmt.Sprintf("Dialer.LocalAddr must be a %T", n.addr(ap)), Addr: a.String()}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

// lookup is what the resolver is asked for.
func (n network) lookup() string {
	switch {
	case !n.ip6:
		return "ip4"
	case !n.ip4:
		return "ip6"
	}
	return "ip"
}

// resolve turns host:port into addresses as net does: the port may be a
// service's name, an empty host is this machine (listening: every address, the
// zero netip.Addr, or 0.0.0.0 or :: where the network allows one family).
func resolve(ctx context.Context, r *net.Resolver, n network, address string, listening bool) ([]netip.AddrPort, error) {
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := r.LookupPort(ctx, n.ports, service)
	if err != nil {
		return nil, err
	}
	at := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, uint16(port)) }
	if host == "" {
		switch {
		case listening && n.ip4 && n.ip6:
			return []netip.AddrPort{at(netip.Addr{})}, nil
		case listening && n.ip4:
			return []netip.AddrPort{at(netip.IPv4Unspecified())}, nil
		case listening:
			return []netip.AddrPort{at(netip.IPv6Unspecified())}, nil
		case n.ip4 && n.ip6:
			return []netip.AddrPort{at(netip.AddrFrom4([4]byte{127, 0, 0, 1})), at(netip.IPv6Loopback())}, nil
		case n.ip4:
			return []netip.AddrPort{at(netip.AddrFrom4([4]byte{127, 0, 0, 1}))}, nil
		}
		return []netip.AddrPort{at(netip.IPv6Loopback())}, nil
	}
	var addrs []netip.Addr
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = []netip.Addr{a}
	} else if addrs, err = r.LookupNetIP(ctx, n.lookup(), host); err != nil {
		return nil, err
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		if a = a.Unmap(); n.allows(a) {
			out = append(out, at(a))
		}
	}
	if len(out) == 0 {
		return nil, &net.AddrError{Err: "no suitable address found", Addr: host}
	}
	return out, nil
}
