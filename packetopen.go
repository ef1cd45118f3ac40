package rdmanet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/udconn"
)

// This file opens PacketConns. It chooses the devices and the port.

// packetBounds bound what PacketConns keep for their peers. It is a variable for tests.
var packetBounds = udconn.DefaultBounds(rdmaPatience)

// packetSettings returns the settings of a PacketConn.
func (c *Config) packetSettings() udconn.Settings {
	s := udconn.Settings{Log: c.Logger, BusyPoll: c.BusyPoll, Linger: cmp.Or(c.LingerTimeout, defaultLinger),
		Lasting: c.Provider == nil, Advice: memoryAdvice, Software: software.Name(), Bounds: packetBounds}
	if s.Log == nil {
		s.Log = discardLogger
	}
	return s
}

// packetDevices returns the devices that a PacketConn is opened on.
func packetDevices(providers ...ibv.Provider) (d udconn.Devices) {
	for _, p := range providers {
		if p.Attr().UDPSockets {
			d.UDP = true
		} else {
			d.RDMA = p
		}
	}
	return d
}

func (lc *ListenConfig) listenPacket(ctx context.Context, network, address string) (*udconn.Conn, net.Addr, error) {
	n, err := parsePacketNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	providers, local, err := lc.place(ctx, n, address)
	if err != nil {
		return nil, nil, err
	}
	c, err := bindPacket(ctx, &lc.Config, providers, local, netip.Addr{})
	return c, udpAddr(local), err
}

// bindPacket opens a PacketConn on every provider, on the same port. A valid group is that of
// ListenMulticast.
func bindPacket(ctx context.Context, cfg *Config, providers []ibv.Provider, local netip.AddrPort, group netip.Addr) (c *udconn.Conn, err error) {
	err = onFreePort(local, func() error {
		c, err = udconn.Listen(ctx, cfg.packetSettings(), packetDevices(providers...), local, group)
		return err
	})
	return c, err
}

func (lc *ListenConfig) listenMulticast(ctx context.Context, network string, ifi *net.Interface, gaddr *net.UDPAddr) (*udconn.Conn, error) {
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
	c, err := bindPacket(ctx, &lc.Config, providers, netip.AddrPortFrom(all, uint16(gaddr.Port)), group)
	if err != nil {
		return nil, err
	}
	if err := c.ListenOnly(ifi, group); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// errGroupsBySoftware is the reason why an RDMA device is not used for a group.
var errGroupsBySoftware = errors.New("datagrams to groups go by the software device where there are both")

// connectPacket opens a PacketConn on one provider, connected to an address.
func connectPacket(ctx context.Context, cfg *Config, provider ibv.Provider, local, remote netip.AddrPort) (*udconn.Conn, error) {
	if udconn.IsGroup(remote.Addr()) && !provider.Attr().UDPSockets {
		providers, err := cfg.providers()
		switch {
		case err != nil:
			return nil, err
		case len(providers) > 1:
			return nil, errGroupsBySoftware
		}
	}
	return udconn.Dial(ctx, cfg.packetSettings(), packetDevices(provider), local, remote)
}

// groupOf returns the group that an address names.
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

// interfaceOf returns the interface to join a group by: the one that is given, or that the
// group's zone names.
func interfaceOf(ifi *net.Interface, group netip.Addr) (*net.Interface, error) {
	if ifi != nil || group.Zone() == "" {
		return ifi, nil
	}
	return net.InterfaceByName(group.Zone())
}
