package shim

import (
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// device4 and device6 are the addresses of the RDMA device. Without such a device they are
// invalid.
var (
	device4 = deviceAddr("RDMANET_VM_ADDR")
	device6 = deviceAddr("RDMANET_VM_ADDR6")
)

// loopback4 and loopback6 are the addresses that the suites get in place of device4 and
// device6.
var (
	loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	loopback6 = netip.IPv6Loopback()
)

func deviceAddr(env string) netip.Addr {
	addr, _ := netip.ParseAddr(os.Getenv(env))
	return addr
}

// overRDMA reports whether network is one that shim handles.
func overRDMA(network string) bool {
	switch network {
	case "tcp", "tcp4", "tcp6":
		return true
	}
	return false
}

// toDevice replaces a loopback host in address by the address of the RDMA device. For a
// dial the unspecified address means the local host, as in package net.
func toDevice(network, address string, dial bool) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil || !device4.IsValid() {
		return address
	}
	if strings.EqualFold(host, "localhost") {
		host = loopback4.String()
		if network == "tcp6" {
			host = loopback6.String()
		}
	}
	if host == "" && dial {
		host = netip.IPv4Unspecified().String()
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return address
	}
	return net.JoinHostPort(deviceFor(addr, dial).String(), port)
}

// deviceFor is like toDevice, for an IP address.
func deviceFor(addr netip.Addr, dial bool) netip.Addr {
	addr = addr.Unmap()
	switch {
	case !addr.IsLoopback() && (!dial || !addr.IsUnspecified()):
		return addr
	case addr == loopback6:
		return device6
	}
	// A listener of rdmanet on the unspecified IPv6 address always has IPv4 as well.
	return device4
}

// fromDevice is the inverse of toDevice, for the addresses of listeners.
func fromDevice(addr net.Addr) net.Addr {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || !device4.IsValid() {
		return addr
	}
	ip := tcp.AddrPort().Addr().Unmap()
	switch ip {
	case device4:
		ip = loopback4
	case device6:
		ip = loopback6
	default:
		return addr
	}
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(ip, uint16(tcp.Port)))
}

// tcpAddress returns the text of an address that ListenTCP or DialTCP was given.
func tcpAddress(addr *net.TCPAddr) string {
	if addr == nil {
		return ":0"
	}
	host := ""
	if len(addr.IP) > 0 {
		host = (&net.IPAddr{IP: addr.IP, Zone: addr.Zone}).String()
	}
	return net.JoinHostPort(host, strconv.Itoa(addr.Port))
}
