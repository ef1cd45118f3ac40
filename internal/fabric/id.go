package fabric

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
)

// id is the part of an ID that does not depend on its kind.
type id struct {
	f             *Fabric
	space         *portSpace
	local, remote netip.AddrPort
	bound         bool // local is taken in space, and given back by Close

	// Below Fabric.mu.
	private []byte
	closed  bool

	events
}

func (i *id) Device() ibv.Device         { return &i.f.dev }
func (i *id) Port() int                  { return i.f.portOf(i.local.Addr()) }
func (i *id) PathMTU() int               { return i.f.pathMTU() }
func (i *id) LocalAddr() netip.AddrPort  { return i.local }
func (i *id) RemoteAddr() netip.AddrPort { return i.remote }
func (i *id) MaySendFirst() bool         { return true }

func (i *id) PrivateData() []byte {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	return i.private
}

// release gives the port back. The caller holds Fabric.mu.
func (i *id) release() {
	i.closed = true
	if i.bound {
		delete(i.space.bound, i.local)
	}
}

// events holds the events of an ID for the program.
type events struct {
	mu      sync.Mutex
	handler func(ibv.Event)
	past    []ibv.Event // at most one of each kind
}

// Notify implements ibv.ID.
func (e *events) Notify(f func(ibv.Event)) {
	e.mu.Lock()
	e.handler = f
	past := e.past
	e.mu.Unlock()
	for _, ev := range past {
		f(ev)
	}
}

// raise hands an event to the program, once for each kind. The caller holds no lock.
func (e *events) raise(ev ibv.Event) {
	e.mu.Lock()
	known := slices.ContainsFunc(e.past, func(p ibv.Event) bool { return p.Kind == ev.Kind })
	if !known {
		e.past = append(e.past, ev)
	}
	f := e.handler
	e.mu.Unlock()
	if f != nil && !known {
		f(ev)
	}
}
