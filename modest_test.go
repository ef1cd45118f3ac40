package rdmanet

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/scripted"
)

// modest is the device with the limits of some adapters: few bytes or
// none go inline, queues are short, memory is pinned. What is beyond its limits
// it refuses.
type modest struct {
	ibv.Provider
	inline int        // bytes
	wrs    int        // work requests a queue
	pins   bool       // and waiters are woken by events
	shy    bool       // its passive side may not send first
	buffer bool       // sends complete before the peer has them
	apart  bool       // no regions of one queue pair, so no shared domain
	lax    bool       // says that peers may read all that is registered
	mute   bool       // nobody hears of the end of a connection
	garble bool       // says that it fails at Reads of no bytes
	others *bool      // says whether other devices answer them, nil for what the device says
	host   *askedHost // answers for the peer, whatever the peer does, nil if the device cannot ask it
	stuck  bool       // the first RDMA Read never ends, and no other can be posted
	rounds bool       // queues get twice the length that is asked for, completion queues get just that
	cqe    int        // completions a queue, if not 0
	reads  atomic.Int64
	empty  atomic.Int64       // of these, those of no bytes
	script *scripted.Provider // steers the device, unless a test has put another one in its place

	mu   sync.Mutex
	devs map[ibv.Device]*modestDevice
}

func newModest(t testing.TB, inline, wrs int, pins bool) *modest {
	return newModestOn(newProvider(t), inline, wrs, pins)
}

// withCredits has a connection go with credits, as it does over adapters, also over the software
// device.
func withCredits(t testing.TB, cfg Config) Config {
	if !onRDMA {
		cfg.Provider = newModest(t, math.MaxInt, math.MaxInt, false)
	}
	return cfg
}

// newModestOn is newModest on a device of choice.
func newModestOn(p ibv.Provider, inline, wrs int, pins bool) *modest {
	script := scripted.New(p)
	return &modest{Provider: script, script: script, inline: inline, wrs: wrs, pins: pins,
		devs: make(map[ibv.Device]*modestDevice)}
}

func (m *modest) device(d ibv.Device) *modestDevice {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.devs[d]
	if w == nil {
		w = &modestDevice{d, m}
		m.devs[d] = w
	}
	return w
}

func (m *modest) Devices() ([]ibv.Device, error) {
	devs, err := m.Provider.Devices()
	for i, d := range devs {
		devs[i] = m.device(d)
	}
	return devs, err
}

func (m *modest) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	id, err := m.Provider.Resolve(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return &modestID{id, m}, nil
}

func (m *modest) Listen(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	l, err := m.Provider.Listen(ctx, local, backlog)
	if err != nil {
		return nil, err
	}
	return &modestListener{l, m}, nil
}

type modestListener struct {
	ibv.Listener
	m *modest
}

func (l *modestListener) Accept(ctx context.Context) (ibv.ID, error) {
	id, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &modestID{id, l.m}, nil
}

type modestDevice struct {
	ibv.Device
	m *modest
}

func (d *modestDevice) Attr() ibv.DeviceAttr {
	a := d.Device.Attr()
	a.MaxInline, a.MaxQPWR, a.MaxSGE = min(a.MaxInline, d.m.inline), min(a.MaxQPWR, d.m.wrs), 2
	if a.Caps |= ibv.CapOnDemandPaging | ibv.CapWaitReceives; d.m.pins {
		a.Caps &^= ibv.CapOnDemandPaging | ibv.CapWaitReceives
	}
	a.Caps &^= ibv.CapHoldSends
	if d.m.cqe != 0 {
		a.MaxCQE = min(a.MaxCQE, d.m.cqe)
	}
	a.Quirks.SendsBuffered = a.Quirks.SendsBuffered || d.m.buffer
	a.Quirks.ReadsUnchecked = a.Quirks.ReadsUnchecked || d.m.lax
	a.Quirks.EmptyReadsGarbled = a.Quirks.EmptyReadsGarbled || d.m.garble
	if d.m.apart {
		a.Caps &^= ibv.CapQPRegion
	}
	if others := d.m.others; others != nil {
		if a.Caps &^= ibv.CapEmptyReads; *others {
			a.Caps |= ibv.CapEmptyReads
		}
	}
	return a
}

// end is the verbs of a connection over this device.
func (m *modest) end(c *Conn) *scripted.Endpoint { return m.script.Endpoint(c.Info().QPN) }

// setSlow keeps the completions of all sends back, or lets those go that were.
func (m *modest) setSlow(slow bool) { m.script.HoldSends(slow) }

type modestID struct {
	ibv.ID
	m *modest
}

func (i *modestID) Notify(f func(ibv.Event)) {
	if !i.m.mute {
		i.ID.Notify(f)
	}
}

func (i *modestID) ProbeHost(idle, patience time.Duration) bool {
	return i.m.host != nil && i.m.host.probe(idle, patience)
}

func (i *modestID) HostHeard() (ago time.Duration, owes bool) { return i.m.host.heard() }

func (i *modestID) MaySendFirst() bool { return !i.m.shy && i.ID.MaySendFirst() }

func (i *modestID) Device() ibv.Device { return i.m.device(i.ID.Device()) }

func (i *modestID) CreateQP(pd ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	c := init.Cap
	if c.MaxInline > i.m.inline || c.MaxSendWR > i.m.wrs || c.MaxRecvWR > i.m.wrs {
		return nil, fmt.Errorf("create queue pair with %+v: %w", c, ibv.ErrLimit)
	}
	if i.m.rounds {
		c.MaxSendWR, c.MaxRecvWR = 2*c.MaxSendWR, 2*c.MaxRecvWR
		init.Cap = c
	}
	qp, err := i.ID.CreateQP(pd, init)
	if err != nil {
		return nil, err
	}
	return &modestQP{QP: qp, cap: c, m: i.m}, nil
}

type modestQP struct {
	ibv.QP
	cap ibv.QPCap
	m   *modest
}

func (q *modestQP) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	if q.m.apart {
		return nil, ibv.Unsupported("modest", "memory regions of one queue pair")
	}
	return q.QP.RegMR(buf, access)
}

func (q *modestQP) Idle(unused func(buf []byte)) {
	if idle, ok := q.QP.(ibv.IdleQP); ok && !q.m.pins {
		idle.Idle(unused)
	}
}

func (q *modestQP) Cap() ibv.QPCap { return q.cap }

func (q *modestQP) PostSend(wrs []ibv.SendWR) (int, error) {
	for i, wr := range wrs {
		if wr.Op == ibv.OpRead {
			if len(wr.SGL) == 0 {
				q.m.empty.Add(1)
			}
			first := q.m.reads.Add(1) == 1
			switch {
			case q.m.stuck && first:
				return len(wrs), nil
			case q.m.stuck:
				return i, ibv.ErrState
			}
		}
		n := 0
		for _, e := range wr.SGL {
			n += len(e.Buf)
		}
		if wr.Flags&ibv.SendInline != 0 && n > q.cap.MaxInline {
			return i, fmt.Errorf("post %d bytes inline: %w", n, ibv.ErrLimit)
		}
	}
	return q.QP.PostSend(wrs)
}
