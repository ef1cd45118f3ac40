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

func (lc *ListenConfig) listenPacket(ctx context.Context, network, address string) (*packetConn, net.Addr, error) {
	n, err := parsePacketNetwork(network)
	if err != nil {
		return nil, nil, err
	}
	providers, local, err := lc.place(ctx, n, address)
	if err != nil {
		return nil, nil, err
	}
	if isGroup(local.Addr()) {
		return nil, udpAddr(local), errListenGroup
	}
	p, err := bindPacket(ctx, &lc.Config, providers, local, netip.Addr{})
	return p, udpAddr(local), err
}

// bindPacket opens a PacketConn on every provider, on the same port. One that does not
// have the address, or no datagrams, is left out, if another has. A valid group is that of
// ListenMulticast: the port may be shared.
func bindPacket(ctx context.Context, cfg *Config, providers []ibv.Provider, local netip.AddrPort, group netip.Addr) (p *packetConn, err error) {
	err = onFreePort(local, func() error {
		p, err = bindPacketOnce(ctx, cfg, providers, local, group)
		return err
	})
	return p, err
}

func bindPacketOnce(ctx context.Context, cfg *Config, providers []ibv.Provider, local netip.AddrPort, group netip.Addr) (*packetConn, error) {
	p := newPacketConn(cfg)
	p.group, p.bound = group, local.Addr()
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
func (p *packetConn) begin() {
	p.limit = math.MaxInt
	if p.soft != nil {
		p.limit = p.soft.limit
		p.wg.Go(p.soft.receive)
	}
	if p.ud != nil {
		p.limit = min(p.limit, p.ud.limit)
		if p.ud.listener != nil {
			p.wg.Go(p.ud.serve)
		}
	}
}

// abandon gives up what was opened so far.
func (p *packetConn) abandon() error {
	p.shut()
	return p.release()
}

// tryPacket is a tryFunc of datagrams.
func (d *Dialer) tryPacket(ctx context.Context, provider ibv.Provider, local, remote netip.AddrPort) (net.Conn, error) {
	if isGroup(remote.Addr()) && !isSoftware(provider) {
		providers, err := d.providers()
		switch {
		case err != nil:
			return nil, err
		case len(providers) > 1:
			return nil, errGroupsBySoft
		case !remote.Addr().IsMulticast():
			return nil, errNoBroadcast
		}
	}
	p := newPacketConn(&d.Config)
	p.toward(netip.AddrPortFrom(plainZone(remote.Addr()), remote.Port()))
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
	return newPacketHandle(p), nil
}

// toward sets the peer of a connected one.
func (p *packetConn) toward(remote netip.AddrPort) {
	p.remote, p.raddr = remote, udpAddr(remote)
}

// connectUD binds the address that leads to the peer, and finds the peer.
func (p *packetConn) connectUD(ctx context.Context, provider ibv.Provider, local netip.AddrPort) error {
	at, err := p.localToward(ctx, provider, local.Addr())
	if err != nil {
		return err
	}
	if err := p.openUD(ctx, provider, netip.AddrPortFrom(at, local.Port())); err != nil {
		return err
	}
	p.begin()
	p.wmu.Lock()
	pe := p.ud.peer(p.remote)
	pe.resolving = true
	p.wmu.Unlock()
	return p.ud.resolve(ctx, pe)
}

// localToward finds the address that leads to the peer, or to the group that is in its
// place.
func (p *packetConn) localToward(ctx context.Context, provider ibv.Provider, local netip.Addr) (netip.Addr, error) {
	if to := p.remote.Addr(); to.IsMulticast() {
		if local.IsValid() && !local.IsUnspecified() {
			return local, nil
		}
		return sourceFor(to)
	}
	id, err := provider.ResolveUD(ctx, netip.AddrPortFrom(local, 0), p.remote)
	if err != nil {
		return local, err
	}
	return id.LocalAddr().Addr(), id.Close()
}
