package verbstest

import (
	"context"
	"net/netip"
	"slices"

	"github.com/rdmanet/rdmanet/ibv"
)

// BindUD passes the call on and wraps the ID.
func (s *Switch) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	if f := s.enter(BindUD); f != nil {
		return nil, f.err
	}
	id, err := s.inner.BindUD(ctx, local)
	if err != nil {
		return nil, err
	}
	return s.id(id), nil
}

// ResolveUD passes the call on and wraps the ID.
func (s *Switch) ResolveUD(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	if f := s.enter(ResolveUD); f != nil {
		return nil, f.err
	}
	id, err := s.inner.ResolveUD(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return s.id(id), nil
}

// ListenUD passes the call on and wraps the listener.
func (s *Switch) ListenUD(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	if f := s.enter(ListenUD); f != nil {
		return nil, f.err
	}
	l, err := s.inner.ListenUD(ctx, local, backlog)
	if err != nil {
		return nil, err
	}
	return &switchListener{Listener: l, object: s.opened(objListener)}, nil
}

func (i *switchID) JoinMulticast(ctx context.Context, group netip.Addr, how ibv.JoinFlags) (ibv.UDParam, error) {
	if f := i.s.enter(JoinMulticast); f != nil {
		return ibv.UDParam{}, f.err
	}
	return i.ID.JoinMulticast(ctx, group, how)
}

func (i *switchID) LeaveMulticast(group netip.Addr) error {
	if f := i.s.enter(LeaveMulticast); f != nil {
		return f.err
	}
	return i.ID.LeaveMulticast(group)
}

type switchAH struct {
	ibv.AH
	*object
}

func (p *switchPD) CreateAH(attr ibv.AHAttr) (ibv.AH, error) {
	return p.ah(func() (ibv.AH, error) { return p.PD.CreateAH(attr) })
}

func (p *switchPD) CreateAHFromWC(port int, wc *ibv.WC, grh []byte) (ibv.AH, error) {
	return p.ah(func() (ibv.AH, error) { return p.PD.CreateAHFromWC(port, wc, grh) })
}

func (p *switchPD) ah(create func() (ibv.AH, error)) (ibv.AH, error) {
	if f := p.s.enter(CreateAH); f != nil {
		return nil, f.err
	}
	inner, err := create()
	if err != nil {
		return nil, err
	}
	return &switchAH{AH: inner, object: p.s.opened(objAH)}, nil
}

func (a *switchAH) Close() error { return a.close(CloseAH, a.AH) }

// innerAHs replaces the handles in work requests by those of the inner device. If there are
// any, it works on a copy.
func innerAHs(wrs []ibv.SendWR) []ibv.SendWR {
	ours := func(wr ibv.SendWR) bool { _, ok := wr.AH.(*switchAH); return ok }
	if !slices.ContainsFunc(wrs, ours) {
		return wrs
	}
	wrs = slices.Clone(wrs)
	for i := range wrs {
		if a, ok := wrs[i].AH.(*switchAH); ok {
			wrs[i].AH = a.AH
		}
	}
	return wrs
}
