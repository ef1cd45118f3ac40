package verbstest

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
)

// Kind is a kind of call that a [Switch] counts and can fail.
type Kind uint8

// These are the kinds of calls. A name is that of the method. If several objects have the
// method, the name of the object is in it.
const (
	Devices Kind = iota
	Resolve
	Listen
	BindUD
	ResolveUD
	ListenUD
	ListenerAccept
	QueryPort // Device.Port
	AllocPD
	CreateCQ
	RegMR    // PD.RegMR and QP.RegMR
	CreateAH // CreateAH also counts PD.CreateAHFromWC.
	CreateQP
	Connect
	Accept
	Reject
	Disconnect
	JoinMulticast
	LeaveMulticast
	PostSend
	PostRecv
	SetError
	Poll
	Arm
	Wait
	CloseListener
	CloseID
	CloseQP
	CloseCQ
	CloseMR
	CloseAH
	ClosePD
	numKinds
)

var kindNames = [numKinds]string{
	"Devices", "Resolve", "Listen", "BindUD", "ResolveUD", "ListenUD", "ListenerAccept", "QueryPort", "AllocPD", "CreateCQ",
	"RegMR", "CreateAH", "CreateQP", "Connect", "Accept", "Reject", "Disconnect", "JoinMulticast", "LeaveMulticast", "PostSend", "PostRecv", "SetError", "Poll",
	"Arm", "Wait", "CloseListener", "CloseID", "CloseQP", "CloseCQ", "CloseMR", "CloseAH", "ClosePD",
}

// String returns the name of the constant.
func (k Kind) String() string {
	if k < numKinds {
		return kindNames[k]
	}
	return "unknown"
}

// closes reports whether the call releases an object.
func (k Kind) closes() bool { return k >= CloseListener }

// Switch is a provider that passes every call on to another one. It counts the calls and
// the live objects, and breaks what a test has asked for. Every object that it returns is
// wrapped. So an object must not be shared with code that uses the inner provider directly.
// All methods may be called by several goroutines at once. No lock is held while a call is
// passed on. The Close of a queue pair waits until an injected failure of the queue pair is
// done.
type Switch struct {
	inner ibv.Provider

	calls      [numKinds]atomic.Int64
	moved      [numMoved]atomic.Int64
	live       [numObjects]atomic.Int64
	registered atomic.Int64
	limit      atomic.Int64 // limit is the limit of registered, 0 for none.

	armed atomic.Int32 // armed counts the faults on calls that have not fired.
	spoil atomic.Bool  // spoil is set when a fault on completions was set.

	mu      sync.Mutex
	faults  []*Fault
	devices map[ibv.Device]*switchDevice // devices has the wrappers by inner device.
	qps     map[qpKey]*switchQP
}

var _ ibv.Provider = (*Switch)(nil)

// qpKey names a queue pair among all of the provider.
type qpKey struct {
	dev *switchDevice
	qpn uint32
}

// NewSwitch returns a switch in front of p that breaks nothing yet.
func NewSwitch(p ibv.Provider) *Switch {
	return &Switch{
		inner:   p,
		devices: make(map[ibv.Device]*switchDevice),
		qps:     make(map[qpKey]*switchQP),
	}
}

// Calls returns how many calls of kind k were made, the failed ones included.
func (s *Switch) Calls(k Kind) int64 { return s.calls[k].Load() }

// These are what a Switch counts besides calls.
const (
	movedSends = iota
	movedRecvs
	movedCompletions
	numMoved
)

// Counts has how often the verbs were used that every message takes.
type Counts struct {
	SendWRs, RecvWRs     int64 // SendWRs and RecvWRs are the work requests that the device has taken.
	SendPosts, RecvPosts int64 // SendPosts and RecvPosts are calls. An adapter may ring a doorbell for each.
	Completions          int64 // Completions are those that Poll has returned.
	Arms                 int64 // Arms are calls. An adapter may raise an interrupt for each.
	Waits                int64 // Waits are calls. Each may be a system call and a switch to another goroutine.
	Polls                int64 // Polls are calls.
}

// Counts returns what was counted so far.
func (s *Switch) Counts() Counts {
	return Counts{
		SendWRs:     s.moved[movedSends].Load(),
		RecvWRs:     s.moved[movedRecvs].Load(),
		SendPosts:   s.Calls(PostSend),
		RecvPosts:   s.Calls(PostRecv),
		Completions: s.moved[movedCompletions].Load(),
		Arms:        s.Calls(Arm),
		Waits:       s.Calls(Wait),
		Polls:       s.Calls(Poll),
	}
}

// Sub returns the difference to an earlier count.
func (c Counts) Sub(before Counts) Counts {
	return Counts{
		SendWRs:     c.SendWRs - before.SendWRs,
		RecvWRs:     c.RecvWRs - before.RecvWRs,
		SendPosts:   c.SendPosts - before.SendPosts,
		RecvPosts:   c.RecvPosts - before.RecvPosts,
		Completions: c.Completions - before.Completions,
		Arms:        c.Arms - before.Arms,
		Waits:       c.Waits - before.Waits,
		Polls:       c.Polls - before.Polls,
	}
}

// Live returns how many objects of each type were created and not closed: "Listener", "ID",
// "QP", "CQ", "MR", "AH" and "PD". A type without live objects is left out. So the map is
// empty when nothing leaked.
func (s *Switch) Live() map[string]int {
	m := make(map[string]int)
	for o := range numObjects {
		if n := s.live[o].Load(); n != 0 {
			m[objectNames[o]] = int(n)
		}
	}
	return m
}

// RegisteredBytes returns how many bytes are in live regions.
func (s *Switch) RegisteredBytes() int64 { return s.registered.Load() }

// LimitMemory makes a registration fail with ENOMEM if it would bring RegisteredBytes above
// n, as a limit on locked memory does (ulimit -l). 0 removes the limit. Regions that exist
// already stay.
func (s *Switch) LimitMemory(n int64) { s.limit.Store(n) }

// Name returns the inner provider's name.
func (s *Switch) Name() string { return s.inner.Name() }

// Attr returns the attributes of the inner provider.
func (s *Switch) Attr() ibv.ProviderAttr { return s.inner.Attr() }

// Devices lists the inner provider's devices.
func (s *Switch) Devices() ([]ibv.Device, error) {
	if f := s.enter(Devices); f != nil {
		return nil, f.err
	}
	inner, err := s.inner.Devices()
	if err != nil {
		return nil, err
	}
	devs := make([]ibv.Device, len(inner))
	for i, d := range inner {
		devs[i] = s.device(d)
	}
	return devs, nil
}

// Resolve passes the call on and wraps the ID.
func (s *Switch) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	if f := s.enter(Resolve); f != nil {
		return nil, f.err
	}
	id, err := s.inner.Resolve(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return s.id(id), nil
}

// Listen passes the call on and wraps the listener.
func (s *Switch) Listen(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	if f := s.enter(Listen); f != nil {
		return nil, f.err
	}
	l, err := s.inner.Listen(ctx, local, backlog)
	if err != nil {
		return nil, err
	}
	return &switchListener{Listener: l, object: s.opened(objListener)}, nil
}

// enter counts a call. It returns the fault for the call, if there is one.
func (s *Switch) enter(k Kind) *Fault {
	s.calls[k].Add(1)
	if s.armed.Load() == 0 {
		return nil
	}
	return s.meet(k)
}

// device returns the wrapper of d, always the same one.
func (s *Switch) device(d ibv.Device) *switchDevice {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.devices[d]
	if w == nil {
		w = &switchDevice{Device: d, s: s}
		s.devices[d] = w
	}
	return w
}
