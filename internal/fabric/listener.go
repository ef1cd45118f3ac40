package fabric

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

const defaultBacklog = 1024

// listener implements ibv.Listener, for connections and for datagrams.
type listener struct {
	f         *Fabric
	space     *portSpace
	key, addr netip.AddrPort
	ready     chan ibv.ID // requests
	done      chan struct{}
	gone      chan struct{}
	removed   sync.Once
	closed    bool // below Fabric.mu
}

// Listen takes a port for connection requests.
func (f *Fabric) Listen(_ context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	return f.listen(&f.tcp, local, backlog)
}

// ListenUD takes a port for questions which queue pair serves an address.
func (f *Fabric) ListenUD(_ context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	return f.listen(&f.udp, local, backlog)
}

func (f *Fabric) listen(space *portSpace, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if a := local.Addr(); a.IsValid() && !a.IsUnspecified() && !f.has(a) {
		return nil, fmt.Errorf("%s: listen on %v: %w", providerName, local, errno.EADDRNOTAVAIL)
	}
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	l := &listener{f: f, space: space, ready: make(chan ibv.ID, backlog), done: make(chan struct{}), gone: make(chan struct{})}
	local, err := f.bind(space, local, l)
	if err != nil {
		return nil, fmt.Errorf("%s: listen on %v: %w", providerName, local, err)
	}
	l.key, l.addr = local, local
	if !local.Addr().IsValid() {
		l.addr = netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
	}
	return l, nil
}

func (l *listener) remove() { l.removed.Do(func() { close(l.gone) }) }

func (l *listener) Addr() netip.AddrPort { return l.addr }

func (l *listener) Accept(ctx context.Context) (ibv.ID, error) {
	select {
	case i := <-l.ready:
		return i, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-l.gone:
		return nil, errno.ENODEV
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// offer puts a request into the queue and reports whether there was room. The caller holds
// Fabric.mu.
func (l *listener) offer(request ibv.ID) bool {
	select {
	case l.ready <- request:
		return true
	default:
		return false
	}
}

func (l *listener) Close() error {
	l.f.mu.Lock()
	if l.closed {
		l.f.mu.Unlock()
		return net.ErrClosed
	}
	l.closed = true
	delete(l.space.bound, l.key)
	l.f.mu.Unlock()
	close(l.done)
	for {
		select {
		case i := <-l.ready:
			i.Close() // which rejects the request
		default:
			return nil
		}
	}
}
