package iwarp

import (
	"context"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// iWARP has connections only, because RFC 5040 has no datagrams.

var (
	errNoDatagrams = ibv.Unsupported(Name, "datagrams: iWARP has none")
	errNoMulticast = ibv.Unsupported(Name, "multicast: iWARP has none")
)

// BindUD returns an error that matches errors.ErrUnsupported.
func (p *Provider) BindUD(context.Context, netip.AddrPort) (ibv.ID, error) {
	return nil, errNoDatagrams
}

// ResolveUD returns an error that matches errors.ErrUnsupported.
func (p *Provider) ResolveUD(context.Context, netip.AddrPort, netip.AddrPort) (ibv.ID, error) {
	return nil, errNoDatagrams
}

// ListenUD returns an error that matches errors.ErrUnsupported.
func (p *Provider) ListenUD(context.Context, netip.AddrPort, int) (ibv.Listener, error) {
	return nil, errNoDatagrams
}

func (p *pd) CreateAH(ibv.AHAttr) (ibv.AH, error) { return nil, errNoDatagrams }

func (p *pd) CreateAHFromWC(int, *ibv.WC, []byte) (ibv.AH, error) { return nil, errNoDatagrams }

// JoinMulticast returns an error that matches errors.ErrUnsupported.
func (i *id) JoinMulticast(context.Context, netip.Addr, ibv.JoinFlags) (ibv.UDParam, error) {
	return ibv.UDParam{}, errNoMulticast
}

func (i *id) LeaveMulticast(netip.Addr) error { return errNoMulticast }

func (q *qp) AttachMcast(ibv.GID, uint16) error { return errNoMulticast }
func (q *qp) DetachMcast(ibv.GID, uint16) error { return errNoMulticast }

func (i *id) UDParam() ibv.UDParam { return ibv.UDParam{} }
func (i *id) PathMTU() int         { return 0 }
