package scripted

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
)

// A Provider passes every call on to another one, and keeps the endpoints of all
// connections. It wraps only the objects of connections. Objects for datagrams are those of
// the inner provider.
type Provider struct {
	ibv.Provider

	mu        sync.Mutex
	devices   map[ibv.Device]*device // devices has the wrappers by inner device.
	endpoints []*Endpoint
	hold      func(e *Endpoint, wc *ibv.WC) bool
	prepare   func(e *Endpoint)
}

// New returns a provider before p that changes nothing yet.
func New(p ibv.Provider) *Provider {
	return &Provider{Provider: p, devices: make(map[ibv.Device]*device)}
}

// Endpoint returns the endpoint of the latest queue pair with this number, or nil if there
// is none.
func (p *Provider) Endpoint(qpn uint32) *Endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.endpoints) - 1; i >= 0; i-- {
		if e := p.endpoints[i]; e.qpn == qpn {
			return e
		}
	}
	return nil
}

// Prepare sets a function that is called with each endpoint that is created from now on,
// before the program gets it.
func (p *Provider) Prepare(f func(e *Endpoint)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.prepare = f
}

// Hold is [Endpoint.Hold] for all endpoints, also for later ones. It is used in addition to
// the Hold of an endpoint.
func (p *Provider) Hold(which func(e *Endpoint, wc *ibv.WC) bool) {
	p.mu.Lock()
	p.hold = which
	all := append([]*Endpoint(nil), p.endpoints...)
	p.mu.Unlock()
	for _, e := range all {
		e.changed()
	}
}

// HoldSends holds back the completions of all sends, or lets them pass.
func (p *Provider) HoldSends(on bool) {
	if !on {
		p.Hold(nil)
		return
	}
	p.Hold(func(e *Endpoint, wc *ibv.WC) bool { return e.IsSend(wc) })
}

// Devices lists the inner provider's devices.
func (p *Provider) Devices() ([]ibv.Device, error) {
	inner, err := p.Provider.Devices()
	if err != nil {
		return nil, err
	}
	devs := make([]ibv.Device, len(inner))
	for i, d := range inner {
		devs[i] = p.device(d)
	}
	return devs, nil
}

// Resolve passes the call on and wraps the ID.
func (p *Provider) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	inner, err := p.Provider.Resolve(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return &id{ID: inner, dev: p.device(inner.Device())}, nil
}

// Listen passes the call on and wraps the listener.
func (p *Provider) Listen(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	inner, err := p.Provider.Listen(ctx, local, backlog)
	if err != nil {
		return nil, err
	}
	return &listener{Listener: inner, p: p}, nil
}

func (p *Provider) device(d ibv.Device) *device {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.devices[d]
	if w == nil {
		w = &device{Device: d, p: p}
		p.devices[d] = w
	}
	return w
}

type listener struct {
	ibv.Listener
	p *Provider
}

func (l *listener) Accept(ctx context.Context) (ibv.ID, error) {
	inner, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &id{ID: inner, dev: l.p.device(inner.Device())}, nil
}

type device struct {
	ibv.Device
	p *Provider
}

func (d *device) AllocPD() (ibv.PD, error) {
	inner, err := d.Device.AllocPD()
	if err != nil {
		return nil, err
	}
	return &pd{PD: inner}, nil
}

func (d *device) CreateCQ(depth int) (ibv.CQ, error) {
	inner, err := d.Device.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	return &cq{CQ: inner, p: d.p, asked: depth}, nil
}

// pd passes registrations through the endpoints that use the domain.
type pd struct {
	ibv.PD

	mu    sync.Mutex
	users []*Endpoint
}

func (p *pd) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	p.mu.Lock()
	users := append([]*Endpoint(nil), p.users...)
	p.mu.Unlock()
	return register(p.PD.RegMR, buf, access, users...)
}

// id is one end of a connection. CreateQP makes its endpoint. It is no ibv.HostProber: an end
// that a test stops is to be as silent as one that is gone.
type id struct {
	ibv.ID
	dev *device
	end *Endpoint
}

func (i *id) Device() ibv.Device { return i.dev }

// Unsent implements ibv.Unsender where the device does.
func (i *id) Unsent() int {
	if u, ok := i.ID.(ibv.Unsender); ok {
		return u.Unsent()
	}
	return 0
}

func (i *id) CreateQP(domain ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	e := &Endpoint{p: i.dev.p}
	d, ofOurs := domain.(*pd)
	if ofOurs {
		domain = d.PD
	}
	for _, c := range []*ibv.CQ{&init.SendCQ, &init.RecvCQ} {
		if q, ok := (*c).(*cq); ok {
			if !slices.Contains(e.cqs, q) {
				e.cqs = append(e.cqs, q)
			}
			*c = q.CQ
		}
	}
	inner, err := i.ID.CreateQP(domain, init)
	if err != nil {
		return nil, err
	}
	e.qp, e.id, e.qpn = inner, i.ID, inner.QPN()
	i.end = e
	e.each(func(q *cq) { q.end = e })
	if ofOurs {
		d.mu.Lock()
		d.users = append(d.users, e)
		d.mu.Unlock()
	}
	p := i.dev.p
	p.mu.Lock()
	p.endpoints = append(p.endpoints, e)
	prepare := p.prepare
	p.mu.Unlock()
	if prepare != nil {
		prepare(e)
	}
	return &qp{QP: inner, e: e}, nil
}

func (i *id) Disconnect() error {
	if i.end != nil {
		if hook := i.end.script().disconnect; hook != nil && !hook() {
			return nil
		}
	}
	return i.ID.Disconnect()
}
