package fabric

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
)

// pd implements ibv.PD.
type pd struct {
	f *Fabric

	// Below Fabric.gate.
	users  int // queue pairs, regions and address handles
	closed bool
}

func (d *device) AllocPD() (ibv.PD, error) { return &pd{f: d.f}, nil }

func (p *pd) Close() error {
	p.f.gate.Lock()
	defer p.f.gate.Unlock()
	switch {
	case p.closed:
		return net.ErrClosed
	case p.users > 0:
		return fmt.Errorf("%s: protection domain with %d users: %w", deviceName, p.users, ibv.ErrBusy)
	}
	p.closed = true
	return nil
}

// use counts an object that belongs to the domain.
func (p *pd) use() error {
	p.f.gate.Lock()
	defer p.f.gate.Unlock()
	if p.closed {
		return fmt.Errorf("protection domain: %w", net.ErrClosed)
	}
	p.users++
	return nil
}

func (p *pd) unuse() {
	p.f.gate.Lock()
	defer p.f.gate.Unlock()
	p.users--
}

// ah implements ibv.AH.
type ah struct {
	pd     *pd
	to     netip.Addr
	closed bool // below Fabric.gate
}

func (p *pd) CreateAH(attr ibv.AHAttr) (ibv.AH, error) {
	return p.newAH(attr.Port, netip.AddrFrom16(attr.GID).Unmap())
}

func (p *pd) CreateAHFromWC(port int, _ *ibv.WC, grh []byte) (ibv.AH, error) {
	src, _, ok := ibv.GRHAddrs(grh)
	if !ok {
		return nil, fmt.Errorf("%s: address handle without a header: %w", deviceName, syscall.EINVAL)
	}
	return p.newAH(port, src)
}

func (p *pd) newAH(port int, to netip.Addr) (ibv.AH, error) {
	if port < 1 || port > p.f.ports() {
		return nil, fmt.Errorf("%s: address handle on port %d: %w", deviceName, port, syscall.EINVAL)
	}
	if err := p.use(); err != nil {
		return nil, fmt.Errorf("%s: address handle: %w", deviceName, err)
	}
	return &ah{pd: p, to: to}, nil
}

func (a *ah) Close() error {
	f := a.pd.f
	f.gate.Lock()
	defer f.gate.Unlock()
	if a.closed {
		return net.ErrClosed
	}
	a.closed = true
	a.pd.users--
	return nil
}
