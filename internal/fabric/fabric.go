package fabric

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Fabric is a provider with one device, by which everybody who uses it reaches
// everybody else. Use [New]. All methods may be called by several goroutines at once.
type Fabric struct {
	dev   device
	addrs []netip.Addr

	split bool
	pins  bool

	mu       sync.Mutex
	mtu      int
	qps      map[uint32]*qp
	lastQPN  uint32
	bound    map[netip.AddrPort]*listener // nil for a bound ID
	lastPort uint16
	asked    int
	lost     int
	mute     bool
	deaf     bool
	stalled  bool
	active   bool
}

// New returns a fabric whose device has the addresses.
func New(mtu int, addrs ...netip.Addr) *Fabric {
	f := &Fabric{mtu: mtu, addrs: addrs, qps: make(map[uint32]*qp), lastQPN: 16, bound: make(map[netip.AddrPort]*listener),
		lastPort: 40000, active: true}
	f.dev.f = f
	return f
}

// Split gives each address a port of the device to itself. It is for a fabric that nobody
// uses yet.
func (f *Fabric) Split() { f.split = true }

// PinMemory has the device say that registered memory stays resident, and that waiters are
// woken by events, as RDMA devices do. It is for a fabric that nobody uses yet.
func (f *Fabric) PinMemory() { f.pins = true }

func (f *Fabric) ports() int {
	if f.split {
		return len(f.addrs)
	}
	return 1
}

// portOf is the port that has an address.
func (f *Fabric) portOf(a netip.Addr) int {
	if f.split {
		return 1 + slices.Index(f.addrs, a)
	}
	return 1
}

// Mute makes questions which queue pair serves an address go unanswered, as long as
// they are asked meanwhile.
func (f *Fabric) Mute(on bool) { f.set(&f.mute, on) }

// Deaf makes all datagrams get lost.
func (f *Fabric) Deaf(on bool) { f.set(&f.deaf, on) }

// Stall makes sends stay in their queues until it is over.
func (f *Fabric) Stall(on bool) {
	f.set(&f.stalled, on)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.qps {
		q.run()
	}
}

func (f *Fabric) set(what *bool, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	*what = on
}

// SetMTU changes the port's MTU, in bytes.
func (f *Fabric) SetMTU(mtu int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mtu = mtu
}

// Asked is how often somebody asked for an address.
func (f *Fabric) Asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked
}

// Lost is how many datagrams found no queue pair, no receive, or another key.
func (f *Fabric) Lost() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost
}

// QPNs returns the numbers of the queue pairs that exist.
func (f *Fabric) QPNs() (qpns []uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n := range f.qps {
		qpns = append(qpns, n)
	}
	return qpns
}

// Remove tells all who are on the device that it is gone.
func (f *Fabric) Remove() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active = false
	for _, l := range f.bound {
		if l != nil {
			l.remove()
		}
	}
	for _, q := range f.qps {
		if q.id.notify != nil {
			go q.id.notify(ibv.Event{Kind: ibv.EventDeviceRemoval, Err: errno.ENODEV})
		}
	}
}

// A Packet is a datagram as it is on the wire.
type Packet struct {
	From, To       netip.Addr
	SrcQPN, DstQPN uint32
	QKey           uint32
	Imm            uint32
	HasImm         bool
	NoGRH          bool
	Payload        []byte
}

// Inject delivers a datagram that nobody has sent.
func (f *Fabric) Inject(p *Packet) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deliver(p)
}

// Members returns how many queue pairs are attached to a group.
func (f *Fabric) Members(group netip.Addr) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, q := range f.qps {
		if q.hears(group) {
			n++
		}
	}
	return n
}

// deliver takes a datagram to its queue pair, or to all of its group. Called with mu
// held.
func (f *Fabric) deliver(p *Packet) {
	if p.DstQPN != ibv.MulticastQPN {
		f.deliverTo(f.qps[p.DstQPN], p)
		return
	}
	for _, q := range f.qps {
		if q.hears(p.To) {
			f.deliverTo(q, p)
		}
	}
}

func (f *Fabric) deliverTo(q *qp, p *Packet) {
	if f.deaf || q == nil || p.QKey != ibv.QKeyUDP || q.state != ibv.QPSRTS || q.recvs.Len() == 0 {
		f.lost++
		return
	}
	q.receive(p)
}

// Name returns "fabric".
func (f *Fabric) Name() string { return "fabric" }

// Devices returns the one device.
func (f *Fabric) Devices() ([]ibv.Device, error) { return []ibv.Device{&f.dev}, nil }

var errNoConnections = ibv.Unsupported("fabric0", "connections")

// Resolve returns an error that matches errors.ErrUnsupported.
func (f *Fabric) Resolve(context.Context, netip.AddrPort, netip.AddrPort) (ibv.ID, error) {
	return nil, errNoConnections
}

// Listen returns an error that matches errors.ErrUnsupported.
func (f *Fabric) Listen(context.Context, netip.AddrPort, int) (ibv.Listener, error) {
	return nil, errNoConnections
}

// has reports whether the device has the address.
func (f *Fabric) has(a netip.Addr) bool {
	for _, own := range f.addrs {
		if own == a {
			return true
		}
	}
	return false
}

// bind takes a port of an address, any for 0. Called with mu held.
func (f *Fabric) bind(local netip.AddrPort, l *listener) (netip.AddrPort, error) {
	if !f.active {
		return local, errno.ENODEV
	}
	for local.Port() == 0 {
		f.lastPort++
		if try := netip.AddrPortFrom(local.Addr(), f.lastPort); f.lastPort != 0 && !f.taken(try) {
			local = try
		}
	}
	if f.taken(local) {
		return local, errno.EADDRINUSE
	}
	f.bound[local] = l
	return local, nil
}

func (f *Fabric) taken(a netip.AddrPort) bool {
	for b := range f.bound {
		if a.Port() == b.Port() && (a.Addr() == b.Addr() || wide(a.Addr()) || wide(b.Addr())) {
			return true
		}
	}
	return false
}

func wide(a netip.Addr) bool { return !a.IsValid() || a.IsUnspecified() }

// BindUD takes a port of one of the device's addresses.
func (f *Fabric) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(local.Addr()) {
		return nil, fmt.Errorf("fabric: bind %v: %w", local, errno.EADDRNOTAVAIL)
	}
	local, err := f.bind(local, nil)
	if err != nil {
		return nil, fmt.Errorf("fabric: bind %v: %w", local, err)
	}
	return &id{f: f, local: local, bound: true}, nil
}

// ResolveUD takes a port for the way to remote.
func (f *Fabric) ResolveUD(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(remote.Addr()) {
		return nil, fmt.Errorf("fabric: resolve %v: %w", remote, errno.EHOSTUNREACH)
	}
	if wide(local.Addr()) {
		for _, a := range f.addrs {
			if a.Is4() == remote.Addr().Is4() {
				local = netip.AddrPortFrom(a, local.Port())
				break
			}
		}
	}
	local, err := f.bind(local, nil)
	if err != nil {
		return nil, fmt.Errorf("fabric: resolve %v: %w", remote, err)
	}
	return &id{f: f, local: local, remote: remote, bound: true}, nil
}

// ListenUD takes a port for questions.
func (f *Fabric) ListenUD(_ context.Context, local netip.AddrPort, _ int) (ibv.Listener, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !wide(local.Addr()) && !f.has(local.Addr()) {
		return nil, fmt.Errorf("fabric: listen on %v: %w", local, errno.EADDRNOTAVAIL)
	}
	l := &listener{f: f, ready: make(chan *id, 1024), done: make(chan struct{}), gone: make(chan struct{})}
	local, err := f.bind(local, l)
	if err != nil {
		return nil, fmt.Errorf("fabric: listen on %v: %w", local, err)
	}
	l.key, l.addr = local, local
	if !local.Addr().IsValid() {
		l.addr = netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
	}
	return l, nil
}

// listening finds who answers for an address. Called with mu held.
func (f *Fabric) listening(a netip.AddrPort) *listener {
	for b, l := range f.bound {
		if l != nil && b.Port() == a.Port() && (b.Addr() == a.Addr() || wide(b.Addr())) {
			return l
		}
	}
	return nil
}

type listener struct {
	f         *Fabric
	key, addr netip.AddrPort
	ready     chan *id
	done      chan struct{}
	gone      chan struct{}
	removed   sync.Once
	closed    bool // under f.mu
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

func (l *listener) Close() error {
	l.f.mu.Lock()
	if l.closed {
		l.f.mu.Unlock()
		return net.ErrClosed
	}
	l.closed = true
	delete(l.f.bound, l.key)
	l.f.mu.Unlock()
	close(l.done)
	for {
		select {
		case i := <-l.ready:
			i.Reject(nil)
			i.Close()
			continue
		default:
		}
		return nil
	}
}
