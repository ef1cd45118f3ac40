package rdmanet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// Dial connects to address over RDMA. network is "rdma", "rdma4" (IPv4 only),
// "rdma6" (IPv6 only), or "tcp", "tcp4", "tcp6", which mean the same: so Dial
// and DialContext can be given to code that names the network itself. address
// is host:port as for net.Dial. The connection returned is a *Conn; errors are
// *net.OpError.
//
// With "udp", "udp4" and "udp6" it is a *PacketConn that sends to address and
// receives from there only. Other than over UDP the address is asked for at once
// where an RDMA device is to be used, so that Dial fails if nobody serves it.
func Dial(network, address string) (net.Conn, error) {
	return DialContext(context.Background(), network, address)
}

// DialTimeout is Dial with a bound on the whole: name resolution, all
// addresses, set-up.
func DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	return (&Dialer{Timeout: timeout}).Dial(network, address)
}

// DialContext is Dial with a context, which concerns the dialling only: once
// connected the connection goes on without it.
func DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return new(Dialer).DialContext(ctx, network, address)
}

// Dialer holds options for dialling. The zero value is what Dial uses. It may
// be used by several goroutines at once.
type Dialer struct {
	Config

	// Timeout bounds a dial as a whole; Deadline does so as a point in time.
	// The earlier of them and of the context's counts; zero is none.
	Timeout  time.Duration
	Deadline time.Time

	// LocalAddr is the *net.TCPAddr to dial from, for datagrams the *net.UDPAddr,
	// nil for any.
	LocalAddr net.Addr

	// Resolver looks names up; nil is net.DefaultResolver.
	Resolver *net.Resolver
}

// Dial connects to address; see the function Dial.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to address; see the function DialContext.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if ctx == nil {
		panic("nil context")
	}
	if d.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d.Timeout)
		defer cancel()
	}
	if !d.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, d.Deadline)
		defer cancel()
	}
	c, addr, err := d.dial(ctx, network, address)
	if err != nil {
		return nil, opError("dial", d.LocalAddr, addr, dialError(err))
	}
	return c, nil
}

// dial also returns the address that an error is about, nil when none was
// reached.
func (d *Dialer) dial(ctx context.Context, network, address string) (net.Conn, net.Addr, error) {
	if strings.HasPrefix(network, "udp") {
		n, err := parsePacketNetwork(network)
		if err != nil {
			return nil, nil, err
		}
		return d.dialEach(ctx, n, address, d.tryPacket)
	}
	n, err := parseNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	return d.dialEach(ctx, n, address, d.try)
}

// tryFunc makes one attempt to reach an address by a provider. What it returns
// besides an error does not count.
type tryFunc func(ctx context.Context, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error)

// within is try with its share of the time that is left for tries.
func (try tryFunc) within(ctx context.Context, tries int, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error) {
	ctx, cancel := share(ctx, tries)
	defer cancel()
	if tries > 1 && !isSoftware(p) {
		ctx, cancel = context.WithTimeout(ctx, rdmaPatience)
		defer cancel()
	}
	return try(ctx, p, local, remote)
}

// dialEach tries every address on every provider.
func (d *Dialer) dialEach(ctx context.Context, n network, address string, try tryFunc) (net.Conn, net.Addr, error) {
	if err := d.check(); err != nil {
		return nil, nil, err
	}
	providers, err := d.providers()
	if err != nil {
		return nil, nil, err
	}
	local, err := n.local(d.LocalAddr)
	if err != nil {
		return nil, nil, err
	}
	remotes, err := d.remotes(ctx, n, local, address)
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	var addr net.Addr
	tries := len(remotes) * len(providers)
	for _, remote := range remotes {
		for _, p := range providers {
			c, err := try.within(ctx, tries, p, local, remote)
			if err == nil {
				return c, nil, nil
			}
			tries--
			addr = n.addr(remote)
			d.log("dial failed", addr, err)
			errs = append(errs, err)
			if ctx.Err() != nil {
				return nil, addr, errors.Join(errs...)
			}
		}
	}
	return nil, addr, errors.Join(errs...)
}

// remotes are the addresses to dial that can be reached from local.
func (d *Dialer) remotes(ctx context.Context, n network, local netip.AddrPort, address string) ([]netip.AddrPort, error) {
	remotes, err := resolve(ctx, d.resolver(), n, address, false)
	if err != nil {
		return nil, err
	}
	if local.Addr().IsValid() && !local.Addr().IsUnspecified() {
		remotes = sameFamily(remotes, local.Addr())
		if len(remotes) == 0 {
			return nil, &net.AddrError{Err: "no address of the same family as Dialer.LocalAddr", Addr: address}
		}
	}
	return remotes, nil
}

// try is a tryFunc of connections.
func (d *Dialer) try(ctx context.Context, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error) {
	for attempt := 1; ; attempt++ {
		id, err := p.Resolve(ctx, local, remote)
		if err != nil {
			return nil, err
		}
		c, err := connect(ctx, &d.Config, id)
		if err == nil || local.Port() != 0 || !portTaken(err) || attempt == portTries {
			return c, err
		}
	}
}

// portTaken reports whether the port that was chosen for this end cannot be had:
// rdma_cm chooses from ports of its own, and Soft-iWARP connects by TCP, where
// the port may be in use.
func portTaken(err error) bool {
	return inUse(err) || errors.Is(err, syscall.EADDRNOTAVAIL)
}

// minShare is what a try gets at least, so that many addresses do not leave
// each without a chance.
const minShare = 2 * time.Second

// share divides the time until ctx's deadline among the tries to come.
func share(ctx context.Context, tries int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok || tries <= 1 {
		return ctx, func() {}
	}
	left := time.Until(deadline)
	return context.WithTimeout(ctx, min(left, max(left/time.Duration(tries), minShare)))
}

func sameFamily(in []netip.AddrPort, as netip.Addr) (out []netip.AddrPort) {
	for _, a := range in {
		if a.Addr().Is4() == as.Is4() {
			out = append(out, a)
		}
	}
	return out
}

func (d *Dialer) resolver() *net.Resolver {
	if d.Resolver != nil {
		return d.Resolver
	}
	return net.DefaultResolver
}

func (c *Config) log(msg string, addr net.Addr, err error) {
	if c.Logger != nil {
		c.Logger.Debug("rdmanet: "+msg, "remote", addr, "err", err)
	}
}
