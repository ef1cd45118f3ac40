package iwarp

import (
	"context"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// iWARP has connections only: RFC 5040 names no datagrams.

var errNoDatagrams = ibv.Unsupported(Name, "datagrams: iWARP has none")

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

func (i *id) UDParam() ibv.UDParam { return ibv.UDParam{} }
func (i *id) PathMTU() int         { return 0 }
