package udconn

import (
	"context"
	"errors"
	"math"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Devices are what a Conn is opened on.
type Devices struct {
	RDMA ibv.Provider // RDMA is the provider of the RDMA devices, nil for none.
	UDP  bool         // UDP says that the UDP socket is opened.
}

// Listen opens a Conn on all devices, at the same port. A device that does not have the
// address, or has no datagrams, is left out if another one serves. With a valid group the
// Conn is to be a member of that group only; see ListenOnly. The port may be shared then.
func Listen(ctx context.Context, s Settings, devices Devices, local netip.AddrPort, group netip.Addr) (*Conn, error) {
	if IsGroup(local.Addr()) {
		return nil, errListenGroup
	}
	c := newConn(s)
	c.bound = local.Addr()
	var steps []func(local netip.AddrPort) error
	if devices.RDMA != nil {
		steps = append(steps, func(local netip.AddrPort) error { return c.openRDMA(ctx, devices.RDMA, local, group.IsValid()) })
	}
	if devices.UDP {
		steps = append(steps, func(local netip.AddrPort) error {
			return c.openUDP(func() (*udpSocket, error) { return listenUDP(ctx, &c.shared, local, group) })
		})
	}
	var errs []error
	for _, open := range steps {
		err := open(local)
		if errors.Is(err, errno.EADDRINUSE) {
			return nil, errors.Join(err, c.Close())
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		local = netip.AddrPortFrom(local.Addr(), c.local.Port())
	}
	if c.udp == nil && c.rdma == nil {
		return nil, errors.Join(append(errs, c.Close())...)
	}
	for _, err := range errs {
		s.Log.Debug("rdmanet: does not receive datagrams", "remote", c.laddr, "err", err)
	}
	c.begin()
	return c, nil
}

// Dial opens a Conn on one device, and connects it to a peer. Over an RDMA device it finds the
// peer's queue pair, or joins the group that is in the peer's place.
func Dial(ctx context.Context, s Settings, device Devices, local, remote netip.AddrPort) (*Conn, error) {
	if device.RDMA != nil && IsGroup(remote.Addr()) && !remote.Addr().IsMulticast() {
		return nil, errNoBroadcast(s.Software)
	}
	c := newConn(s)
	c.connect(Normal(remote))
	var err error
	if device.RDMA != nil {
		err = c.dialRDMA(ctx, device.RDMA, local)
	} else if err = c.openUDP(func() (*udpSocket, error) { return dialUDP(ctx, &c.shared, local, remote) }); err == nil {
		c.connect(c.udp.peer()) // Datagrams will be from that address.
		c.begin()
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func newConn(s Settings) *Conn {
	c := &Conn{}
	c.Settings = s
	c.lifetime.begin()
	c.recv.init(&c.shared)
	c.send.init()
	c.groups.shared, c.groups.recv = &c.shared, &c.recv
	return c
}

// openRDMA binds a local address on RDMA devices. shared says that another Conn may have the
// address: that one serves requests, and groups are everybody's.
func (c *Conn) openRDMA(ctx context.Context, provider ibv.Provider, local netip.AddrPort, shared bool) error {
	side := newRDMASide(&c.shared, &c.recv, &c.send, &c.groups, provider)
	ln, err := provider.ListenUD(ctx, local, 0)
	switch {
	case err == nil:
		side.listen(ln)
		c.bind(ln.Addr())
	case shared && errors.Is(err, errno.EADDRINUSE):
		c.bind(local)
	default:
		return err
	}
	c.groups.rdma = &rdmaGroups{shared: &c.shared, qps: &side.qps, peers: side.peers, send: &c.send}
	if err := side.open(ctx, local.Addr()); err != nil {
		c.groups.rdma = nil
		c.local, c.laddr = netip.AddrPort{}, nil
		return errors.Join(err, side.closeListener())
	}
	c.rdma, c.overRDMA = side, true
	return nil
}

// openUDP opens the UDP socket.
func (c *Conn) openUDP(open func() (*udpSocket, error)) error {
	u, err := open()
	if err != nil {
		return err
	}
	c.recv.mu.Lock() // A queue pair may be open and receive.
	defer c.recv.mu.Unlock()
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	c.bind(u.at)
	c.udp, c.groups.udp, c.overUDP = u, u, true
	if c.rdma != nil {
		c.rdma.resolver.udp = u
	}
	return nil
}

// dialRDMA binds the address that leads to the peer, and finds the peer.
func (c *Conn) dialRDMA(ctx context.Context, provider ibv.Provider, local netip.AddrPort) error {
	at, err := c.localToward(ctx, provider, local.Addr())
	if err != nil {
		return err
	}
	if err := c.openRDMA(ctx, provider, netip.AddrPortFrom(at, local.Port()), false); err != nil {
		return err
	}
	c.begin()
	return c.rdma.connect(ctx)
}

// localToward returns the address that leads to the peer, or to the group that is in its
// place.
func (c *Conn) localToward(ctx context.Context, provider ibv.Provider, local netip.Addr) (netip.Addr, error) {
	if to := c.remote.Addr(); to.IsMulticast() {
		if local.IsValid() && !local.IsUnspecified() {
			return local, nil
		}
		return sourceFor(to)
	}
	id, err := provider.ResolveUD(ctx, netip.AddrPortFrom(local, 0), c.remote)
	if err != nil {
		return local, err
	}
	return id.LocalAddr().Addr(), id.Close()
}

// begin starts to receive.
func (c *Conn) begin() {
	limit := math.MaxInt
	if c.udp != nil {
		limit = c.udp.limit
	}
	if c.rdma != nil {
		limit = min(limit, c.rdma.qps.limit)
	}
	c.limit = limit
	received := func(netip.AddrPort) {}
	if c.rdma != nil {
		received = func(from netip.AddrPort) { c.rdma.peers.receivedByUDP(from, c.now()) }
		c.rdma.begin()
	}
	if c.udp != nil {
		c.wg.Go(func() { c.udp.receive(&c.recv, received) })
	}
}
