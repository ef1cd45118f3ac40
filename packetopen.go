package rdmanet

import (
	"context"
	"errors"
	"math"
	"net"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// Opening a PacketConn: on which devices, and at which port.

func (lc *ListenConfig) listenPacket(ctx context.Context, network, address string) (*PacketConn, net.Addr, error) {
	n, err := parsePacketNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	if err := lc.check(); err != nil {
		return nil, nil, err
	}
	providers, err := lc.providers()
	if err != nil {
		return nil, nil, err
	}
	locals, err := resolve(ctx, net.DefaultResolver, n, address, true)
	if err != nil {
		return nil, nil, err
	}
	local := preferred(locals)
	if isGroup(local.Addr()) {
		return nil, udpAddr(local), errNoGroups
	}
	p, err := bindPacket(ctx, &lc.Config, providers, local)
	return p, udpAddr(local), err
}

// bindPacket opens a PacketConn on every provider, on the same port. One that does not
// have the address, or no datagrams, is left out, if another has.
func bindPacket(ctx context.Context, cfg *Config, providers []ibv.Provider, local netip.AddrPort) (*PacketConn, error) {
	for try := 1; ; try++ {
		p, err := bindPacketOnce(ctx, cfg, providers, local)
		if err == nil || local.Port() != 0 || !inUse(err) || try == portTries {
			return p, err
		}
	}
}

func bindPacketOnce(ctx context.Context, cfg *Config, providers []ibv.Provider, local netip.AddrPort) (*PacketConn, error) {
	p := newPacketConn(cfg)
	var errs []error
	for _, provider := range providers {
		var err error
		if isSoftware(provider) {
			err = p.openUDP(ctx, local, netip.AddrPort{})
		} else {
			err = p.openUD(ctx, provider, local)
		}
		if inUse(err) {
			return nil, errors.Join(err, p.abandon())
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		local = netip.AddrPortFrom(local.Addr(), p.local.Port())
	}
	if p.soft == nil && p.ud == nil {
		return nil, errors.Join(append(errs, p.abandon())...)
	}
	for _, err := range errs {
		cfg.log("does not receive datagrams", p.laddr, err)
	}
	p.begin()
	return p, nil
}

// begin starts to receive.
func (p *PacketConn) begin() {
	p.limit = math.MaxInt
	if p.soft != nil {
		p.limit = p.soft.limit
		p.wg.Go(p.soft.receive)
	}
	if p.ud != nil {
		p.limit = min(p.limit, p.ud.limit)
		p.wg.Go(p.ud.serve)
	}
}

// abandon gives up what was opened so far.
func (p *PacketConn) abandon() error {
	p.shut()
	return p.release()
}

// dialPacket tries every address on every provider. addr is the address that an error
// is about, nil when none was reached.
func (d *Dialer) dialPacket(ctx context.Context, network, address string) (p *PacketConn, addr net.Addr, err error) {
	n, err := parsePacketNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	if err := d.check(); err != nil {
		return nil, nil, err
	}
	providers, err := d.providers()
	if err != nil {
		return nil, nil, err
	}
	var local netip.AddrPort
	if d.LocalAddr != nil {
		ua, ok := d.LocalAddr.(*net.UDPAddr)
		if !ok || ua == nil {
			return nil, nil, &net.AddrError{Err: "Dialer.LocalAddr must be a *net.UDPAddr", Addr: d.LocalAddr.String()}
		}
		local = ua.AddrPort()
		local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port())
	}
	remotes, err := d.remotes(ctx, n, local, address)
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	tries := len(remotes) * len(providers)
	for _, remote := range remotes {
		for _, provider := range providers {
			p, err := d.tryPacket(ctx, provider, local, remote, tries)
			if err == nil {
				return p, nil, nil
			}
			tries--
			addr = udpAddr(remote)
			d.log("dial failed", addr, err)
			errs = append(errs, err)
			if ctx.Err() != nil {
				return nil, addr, errors.Join(errs...)
			}
		}
	}
	return nil, addr, errors.Join(errs...)
}

// tryPacket makes one attempt, with its share of the time that is left for tries.
func (d *Dialer) tryPacket(ctx context.Context, provider ibv.Provider, local, remote netip.AddrPort, tries int) (*PacketConn, error) {
	if isGroup(remote.Addr()) {
		return nil, errNoGroups
	}
	ctx, cancel := share(ctx, tries)
	defer cancel()
	if tries > 1 && !isSoftware(provider) {
		ctx, cancel = context.WithTimeout(ctx, rdmaPatience)
		defer cancel()
	}
	p := newPacketConn(&d.Config)
	p.remote, p.raddr = remote, udpAddr(remote)
	var err error
	if isSoftware(provider) {
		if err = p.openUDP(ctx, local, remote); err == nil {
			p.begin()
		}
	} else {
		err = p.connectUD(ctx, provider, local)
	}
	if err != nil {
		return nil, errors.Join(err, p.abandon())
	}
	return p, nil
}

// connectUD binds the address that leads to the peer, and finds the peer.
func (p *PacketConn) connectUD(ctx context.Context, provider ibv.Provider, local netip.AddrPort) error {
	id, err := provider.ResolveUD(ctx, netip.AddrPortFrom(local.Addr(), 0), p.remote)
	if err != nil {
		return err
	}
	at := netip.AddrPortFrom(id.LocalAddr().Addr(), local.Port())
	if err := id.Close(); err != nil {
		return err
	}
	if err := p.openUD(ctx, provider, at); err != nil {
		return err
	}
	p.begin()
	p.wmu.Lock()
	pe := p.ud.peer(p.remote)
	pe.resolving = true
	p.wmu.Unlock()
	return p.ud.resolve(ctx, pe)
}
