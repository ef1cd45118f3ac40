package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
)

// This file parses the network names and addresses that Dial and Listen are given, and
// looks them up. dial.go and listener.go use the results, and provider.go chooses the
// devices.

// network is a parsed network name: the port space, "tcp" or "udp", and the address
// families that it allows.
type network struct {
	ports string
	ip4   bool
	ip6   bool
}

// parseNetwork parses the name of a network for connections.
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

// parsePacketNetwork parses the name of a network for datagrams. Dial calls it only for
// names that begin with "udp", because the others are for connections there.
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

// allows reports whether the network has the address family of a, which is not an
// IPv4-mapped IPv6 address. The zero Addr belongs to both families.
func (n network) allows(a netip.Addr) bool { return (n.ip4 || a.Is6()) && (n.ip6 || a.Is4()) }

// addr returns a in the form that package net has for the network.
func (n network) addr(a netip.AddrPort) net.Addr {
	if n.ports == "udp" {
		return udpAddr(a)
	}
	return tcpAddr(a)
}

func udpAddr(a netip.AddrPort) *net.UDPAddr { return net.UDPAddrFromAddrPort(a) }

// isPort reports whether n is a port number. A conversion to uint16 would make one of any
// number.
func isPort(n int) bool { return n >= 0 && n <= math.MaxUint16 }

// given returns a, or nil if a is a nil pointer in an interface.
func given(a net.Addr) net.Addr {
	switch a := a.(type) {
	case *net.TCPAddr:
		if a == nil {
			return nil
		}
	case *net.UDPAddr:
		if a == nil {
			return nil
		}
	}
	return a
}

// local returns the address of Dialer.LocalAddr, or the zero AddrPort if there is none.
func (n network) local(a net.Addr) (netip.AddrPort, error) {
	if given(a) == nil {
		return netip.AddrPort{}, nil
	}
	var ap netip.AddrPort
	var port int
	tcp, _ := a.(*net.TCPAddr)
	udp, _ := a.(*net.UDPAddr)
	switch {
	case n.ports == "tcp" && tcp != nil:
		ap, port = tcp.AddrPort(), tcp.Port
	case n.ports == "udp" && udp != nil:
		ap, port = udp.AddrPort(), udp.Port
	default:
		return ap, &net.AddrError{Err: fmt.Sprintf("Dialer.LocalAddr must be a %T", n.addr(ap)), Addr: a.String()}
	}
	if !isPort(port) {
		return ap, &net.AddrError{Err: "Dialer.LocalAddr has no port number", Addr: a.String()}
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

// lookup returns the network name for the resolver.
func (n network) lookup() string {
	switch {
	case !n.ip6:
		return "ip4"
	case !n.ip4:
		return "ip6"
	}
	return "ip"
}

var (
	loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	loopback6 = netip.IPv6Loopback()
)

// unspecified returns the addresses that an unspecified host stands for. host is 0.0.0.0,
// ::, or the zero Addr for an empty host.
//
// For a listener these are every address: the zero Addr if the network allows both
// families. Otherwise they are this machine's loopback addresses. As in package net, :: may
// stand for IPv4 too.
func (n network) unspecified(host netip.Addr, listening bool) []netip.Addr {
	if listening && n.ip4 && n.ip6 {
		return []netip.Addr{{}}
	}
	v4, v6 := loopback4, loopback6
	if listening {
		v4, v6 = netip.IPv4Unspecified(), netip.IPv6Unspecified()
	}
	switch {
	case host.Is6():
		return []netip.Addr{v6, v4}
	case host.Is4():
		return []netip.Addr{v4}
	}
	return []netip.Addr{v4, v6}
}

// addrs returns the addresses of host, of any family.
func (n network) addrs(ctx context.Context, r *net.Resolver, host string, listening bool) ([]netip.Addr, error) {
	a, err := netip.ParseAddr(host)
	a = a.Unmap()
	switch {
	case host == "", a.IsUnspecified():
		return n.unspecified(a, listening), nil
	case err == nil:
		return []netip.Addr{a}, nil
	}
	return r.LookupNetIP(ctx, n.lookup(), host)
}

var errNoAddress = errors.New("missing address")

// resolve returns the addresses of host:port, as package net does. The port may be the name
// of a service. For a listener an empty address means every address and a free port.
func resolve(ctx context.Context, r *net.Resolver, n network, address string, listening bool) ([]netip.AddrPort, error) {
	if address == "" {
		if !listening {
			return nil, errNoAddress
		}
		address = ":0"
	}
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := r.LookupPort(ctx, n.ports, service)
	if err != nil {
		return nil, err
	}
	addrs, err := n.addrs(ctx, r, host, listening)
	if err != nil {
		return nil, err
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		if a = a.Unmap(); n.allows(a) {
			out = append(out, netip.AddrPortFrom(a, uint16(port)))
		}
	}
	if len(out) == 0 {
		return nil, &net.AddrError{Err: "no suitable address found", Addr: host}
	}
	return out, nil
}
