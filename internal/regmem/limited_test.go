package regmem

import (
	"context"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// limited is a provider whose devices cannot do all that those of another one can.
type limited struct {
	ibv.Provider
	pins      bool // pins says that memory is pinned.
	apart     bool // apart has no regions of one queue pair, so each user has a private domain.
	unchecked bool // unchecked says that peers may read all that is registered.
}

// Devices returns the devices with their limits.
func (l *limited) Devices() ([]ibv.Device, error) {
	devs, err := l.Provider.Devices()
	for i, d := range devs {
		devs[i] = limitedDevice{d, l}
	}
	return devs, err
}

func (l *limited) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	id, err := l.Provider.Resolve(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return &limitedID{id, l}, nil
}

func (l *limited) Listen(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	ln, err := l.Provider.Listen(ctx, local, backlog)
	if err != nil {
		return nil, err
	}
	return &limitedListener{ln, l}, nil
}

type limitedListener struct {
	ibv.Listener
	l *limited
}

func (ln *limitedListener) Accept(ctx context.Context) (ibv.ID, error) {
	id, err := ln.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &limitedID{id, ln.l}, nil
}

// limitedDevice is equal to another one of the same device.
type limitedDevice struct {
	ibv.Device
	l *limited
}

func (d limitedDevice) Attr() ibv.DeviceAttr {
	a := d.Device.Attr()
	if d.l.pins {
		a.Caps &^= ibv.CapOnDemandPaging
	}
	a.Quirks.ReadsUnchecked = a.Quirks.ReadsUnchecked || d.l.unchecked
	if d.l.apart {
		a.Caps &^= ibv.CapQPRegion
	}
	return a
}

type limitedID struct {
	ibv.ID
	l *limited
}

func (i *limitedID) Device() ibv.Device { return limitedDevice{i.ID.Device(), i.l} }

func (i *limitedID) CreateQP(pd ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	qp, err := i.ID.CreateQP(pd, init)
	if err != nil {
		return nil, err
	}
	return &limitedQP{qp, i.l}, nil
}

type limitedQP struct {
	ibv.QP
	l *limited
}

func (q *limitedQP) RegMR(b []byte, access ibv.Access) (ibv.MR, error) {
	if q.l.apart {
		return nil, ibv.Unsupported("limited", "memory regions of one queue pair")
	}
	return q.QP.RegMR(b, access)
}
