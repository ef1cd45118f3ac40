package rdmanet

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Dial connects to address over RDMA. network is "rdma", "rdma4" (IPv4 only) or "rdma6"
// (IPv6 only). "tcp", "tcp4" and "tcp6" mean the same, so that Dial and DialContext can be
// given to code that names the network itself. address is host:port as for net.Dial. The
// connection is a *Conn, and errors are *net.OpError.
//
// If a name has several addresses, each is tried in order. If IPv4 and IPv6 addresses are
// among them, the other family is tried as well after Dialer.FallbackDelay.
//
// With "udp", "udp4" and "udp6" the connection is a *PacketConn that sends to address and
// receives from there only. If it uses an RDMA device, Dial resolves the address at once,
// and fails if nobody serves it. Over UDP Dial does not wait for the peer.
func Dial(network, address string) (net.Conn, error) {
	return DialContext(context.Background(), network, address)
}

// DialTimeout is Dial with a timeout for all of it: the resolution of the name, all
// addresses, and the set-up.
func DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	return (&Dialer{Timeout: timeout}).Dial(network, address)
}

// DialContext is Dial with a context. The context bounds the dialling only, and does not
// affect the connection that is returned.
func DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return new(Dialer).DialContext(ctx, network, address)
}

// Dialer holds options for dialling. The zero value is what Dial uses. It may
// be used by several goroutines at once.
type Dialer struct {
	Config

	// Timeout bounds a whole dial, and Deadline is the time at which it ends. The earliest
	// of these and of the context's deadline counts. Zero means none. A negative Timeout
	// has passed already, as in package net.
	Timeout  time.Duration
	Deadline time.Time

	// FallbackDelay is for names that have addresses of both families, and for connections
	// only. It is how long Dial waits for the addresses of one family before it also tries
	// those of the other. 0 means 300 ms. If it is negative, Dial tries all addresses in
	// order.
	FallbackDelay time.Duration

	// LocalAddr is the *net.TCPAddr to dial from, for datagrams the *net.UDPAddr,
	// nil for any. Without an IP, or with an unspecified one, only its port counts.
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
	if d.Timeout != 0 {
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
		return nil, opError("dial", given(d.LocalAddr), addr, dialError(err))
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
		return d.dialEach(ctx, n, address, tryPacket(&d.Config))
	}
	n, err := parseNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	return d.dialEach(ctx, n, address, d.try)
}

// tryFunc makes one attempt to reach an address by a provider. If it returns an error, its
// other results are not used.
type tryFunc func(ctx context.Context, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error)

// within is try with its share of the time that is left for tries, and at most patience
// if others are to come.
func (try tryFunc) within(ctx context.Context, tries int, patience time.Duration, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error) {
	ctx, cancel := share(ctx, tries)
	defer cancel()
	if tries > 1 && patience > 0 {
		ctx, cancel = context.WithTimeout(ctx, patience)
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
	dial := func(ctx context.Context, remotes []netip.AddrPort) outcome {
		return d.inOrder(ctx, n, providers, local, remotes, try)
	}
	var r outcome
	if first, second := families(remotes, remotes[0].Addr()); len(second) > 0 && n.ports == "tcp" && d.FallbackDelay >= 0 {
		r = race(ctx, cmp.Or(d.FallbackDelay, fallbackDelay), dial, first, second)
	} else {
		r = dial(ctx, remotes)
	}
	return r.c, r.addr, r.err
}

// outcome is what came of a dial; addr is what an error is about.
type outcome struct {
	c    net.Conn
	addr net.Addr
	err  error
}

// inOrder tries remotes one after another.
func (d *Dialer) inOrder(ctx context.Context, n network, providers []ibv.Provider, local netip.AddrPort, remotes []netip.AddrPort, try tryFunc) outcome {
	var errs []error
	var addr net.Addr
	tries := len(remotes) * len(providers)
	for _, remote := range remotes {
		for _, p := range providers {
			traced := traceConnect(ctx, p, n, remote)
			c, err := try.within(ctx, tries, n.patience(p), p, from(local, remote), remote)
			traced(err)
			if err == nil {
				return outcome{c: c}
			}
			tries--
			addr = n.addr(remote)
			d.log("dial failed", addr, err)
			errs = append(errs, err)
			if ctx.Err() != nil {
				return outcome{nil, addr, join(errs)}
			}
		}
	}
	return outcome{nil, addr, join(errs)}
}

const fallbackDelay = 300 * time.Millisecond // net's, from RFC 6555

// race dials the addresses of the first family. If that fails, or takes longer than delay,
// it also dials those of the second family. So a family without a route does not delay the
// dial until its timeout. The connection that comes second is closed.
func race(ctx context.Context, delay time.Duration, dial func(context.Context, []netip.AddrPort) outcome, remotes ...[]netip.AddrPort) outcome {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	defer close(over)
	type result struct {
		outcome
		family int
	}
	results := make(chan result)
	start := func(family int) {
		go func() {
			r := dial(ctx, remotes[family])
			select {
			case results <- result{r, family}:
			case <-over:
				if r.err == nil {
					r.c.Close()
				}
			}
		}()
	}
	start(0)
	second := time.NewTimer(delay)
	defer second.Stop()
	var failed [2]*outcome
	for {
		select {
		case <-second.C:
			start(1)
		case r := <-results:
			failed[r.family] = &r.outcome
			switch {
			case r.err == nil:
				return r.outcome
			case failed[0] != nil && failed[1] != nil:
				return outcome{nil, failed[0].addr, errors.Join(failed[0].err, failed[1].err)}
			case ctx.Err() != nil:
				return r.outcome
			case r.family == 0 && second.Stop():
				second.Reset(0)
			}
		}
	}
}

// from is what local means for a dial to remote: without an address of its own it
// is the port on any address of remote's family, or nothing.
func from(local, remote netip.AddrPort) netip.AddrPort {
	switch {
	case local.Addr().IsValid() && !local.Addr().IsUnspecified():
		return local
	case local.Port() == 0:
		return netip.AddrPort{}
	case remote.Addr().Is4():
		return netip.AddrPortFrom(netip.IPv4Unspecified(), local.Port())
	}
	return netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
}

// remotes are the addresses to dial that can be reached from local.
func (d *Dialer) remotes(ctx context.Context, n network, local netip.AddrPort, address string) ([]netip.AddrPort, error) {
	remotes, err := resolve(traceLookup(ctx), d.resolver(), n, address, false)
	if err != nil {
		return nil, err
	}
	if local.Addr().IsValid() && !local.Addr().IsUnspecified() {
		remotes, _ = families(remotes, local.Addr())
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
			if err != nil {
				return nil, err
			}
			return newHandle(c), nil
		}
	}
}

// portTaken reports whether the port that was chosen for this end cannot be had:
// rdma_cm chooses from ports of its own, and Soft-iWARP connects by TCP, where
// the port may be in use.
func portTaken(err error) bool {
	return inUse(err) || errors.Is(err, errno.EADDRNOTAVAIL)
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

// families separates the addresses of the first address's family from the others.
func families(in []netip.AddrPort, as netip.Addr) (same, other []netip.AddrPort) {
	for _, a := range in {
		if a.Addr().Is4() == as.Is4() {
			same = append(same, a)
		} else {
			other = append(other, a)
		}
	}
	return same, other
}

func (d *Dialer) resolver() *net.Resolver {
	if d.Resolver != nil {
		return d.Resolver
	}
	return net.DefaultResolver
}
