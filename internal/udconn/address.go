package udconn

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/rdmanet/rdmanet/internal/neterr"
)

// broadcast4 is the limited broadcast address of IPv4.
var broadcast4 = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// IsGroup reports whether an address stands for several hosts. The broadcast address of a
// network does not show that; see isNetBroadcast.
func IsGroup(a netip.Addr) bool { return a.IsMulticast() || a == broadcast4 }

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

// Normal returns an address in the form that received ones have. An IPv4 address has four
// bytes. A zone is the name of an interface, and is left out where the address needs none.
func Normal(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(normalZone(a.Addr().Unmap()), a.Port())
}

func normalZone(a netip.Addr) netip.Addr {
	switch zone := a.Zone(); {
	case zone == "":
	case !a.IsLinkLocalUnicast() && !a.IsMulticast():
		return a.WithZone("")
	case zone[0] >= '0' && zone[0] <= '9': // Atoi allocates an error for a name.
		if n, err := strconv.Atoi(zone); err == nil {
			if ifi, err := net.InterfaceByIndex(n); err == nil {
				return a.WithZone(ifi.Name)
			}
		}
	}
	return a
}

// sourceFor returns the local address from which the system's routes lead to a group.
func sourceFor(group netip.Addr) (netip.Addr, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(group, 9))) // The port is that of discard. Nothing is sent.
	if err != nil {
		return netip.Addr{}, fmt.Errorf("which interface leads to %v (SetMulticastInterface says): %w", group, neterr.Inner(err))
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// hasAddr reports whether an interface has an address.
func hasAddr(ifi *net.Interface, addr netip.Addr) bool {
	addrs, err := ifi.Addrs()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		// The loopback interface has all addresses of its network, such as 127.0.0.0/8.
		ip, ok := netip.AddrFromSlice(n.IP)
		if ok && (ip.Unmap() == addr.WithZone("") || ip.IsLoopback() && n.Contains(addr.AsSlice())) {
			return true
		}
	}
	return false
}

// indexOf returns the index of an interface, 0 for nil.
func indexOf(ifi *net.Interface) int {
	if ifi == nil {
		return 0
	}
	return ifi.Index
}
