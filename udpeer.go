package rdmanet

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// udPeer is an address that datagrams are sent to. Its fields are guarded by the
// PacketConn's wmu.
type udPeer struct {
	addr netip.AddrPort
	used time.Duration // when it was last written to

	way  *way
	soft bool          // it is reached by the software device
	err  error         // why there is no way
	next time.Duration // with soft or err: when it is worth asking again

	resolving bool
	waiting   [][]byte // datagrams, for the way to be known
	asked     time.Duration
	patience  time.Duration // with a peer that is silent

	doubts    bool          // it was asked for because of suspect, and may be where it was
	suspected time.Duration // when that was

	// What receiving learns.
	qpn     atomic.Uint32
	heard   atomic.Int64 // time.Duration: when it last sent something from there
	suspect atomic.Bool  // it sent something from elsewhere
}

// way is how a peer is reached: by which queue pair of ours, to which of its own.
type way struct {
	link   *udQP
	ah     ibv.AH
	to     ibv.UDParam
	plain  bool   // the peer is not rdmanet
	learnt bool   // from a datagram: the peer cannot be asked
	group  uint16 // the port, if the peer is a multicast group
}

// Bounds of what is kept of peers. They are variables for tests.
var (
	maxPeers   = 1024
	maxWaiting = 16 // datagrams for an address that is being resolved
	maxHeard   = 4096
	maxAsked   = 256
	resolvers  = 32 // at a time

	// A peer that is silent for minPatience is asked for again, for it may have
	// been started anew; one that answers as before, but says nothing else, less
	// and less often.
	minPatience = 2 * time.Second
	maxPatience = 16 * time.Second

	// suspicionPause is how often a datagram from another queue pair, or a question
	// that tells of one, makes a peer be asked for that has not moved: either may be forged.
	suspicionPause = time.Second

	// failurePause is how long an address is not asked for again that nobody
	// serves; softPause how long the software device is kept to.
	failurePause = time.Second
	softPause    = 30 * time.Second

	// questionTimes is how long each question waits for its answer. Where the
	// software device gets its turn then, as for connections, they add up to
	// rdmaPatience.
	questionTimes       = []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}
	questionTimesBeside = []time.Duration{rdmaPatience / 2, rdmaPatience / 2}
)

// stale reports whether the peer may be somewhere else by now.
func (pe *udPeer) stale(now time.Duration) bool {
	return !pe.way.learnt && pe.way.group == 0 && now-max(time.Duration(pe.heard.Load()), pe.asked) > pe.patience
}

// from hears that the peer has sent a datagram from a queue pair, if it was the peer.
func (pe *udPeer) from(qpn uint32, now time.Duration) {
	if pe.qpn.Load() == qpn {
		pe.heard.Store(int64(now))
	} else {
		pe.moved(qpn)
	}
}

// doubted reports whether the peer is to be asked for because it may have moved, which
// it then is, or is being asked for. The caller holds wmu.
func (pe *udPeer) doubted(now time.Duration) bool {
	switch {
	case !pe.suspect.Load():
		return false
	case pe.doubts && now-pe.suspected <= suspicionPause:
		return pe.resolving
	}
	pe.doubts, pe.suspected = true, now
	return true
}

// moved hears that the peer may send from another queue pair now.
func (pe *udPeer) moved(qpn uint32) {
	if known := pe.qpn.Load(); known != 0 && known != qpn && !pe.suspect.Load() {
		pe.suspect.Store(true)
	}
}

// udPeers is what is known of others.
type udPeers struct {
	now atomic.Int64 // time.Duration: a recent moment

	mu    sync.RWMutex // goes behind rmu and wmu
	m     map[netip.AddrPort]*udPeer
	heard map[netip.AddrPort]time.Duration // by the software device, where both serve

	// Of peers that are not rdmanet: which address a queue pair is, and who asked
	// for us from a host and has not sent anything yet.
	plain map[plainSender]netip.AddrPort
	asked map[netip.Addr]uint16
}

type plainSender struct {
	host netip.Addr
	qpn  uint32
}

func newUDPeers() *udPeers {
	return &udPeers{m: make(map[netip.AddrPort]*udPeer), heard: make(map[netip.AddrPort]time.Duration),
		plain: make(map[plainSender]netip.AddrPort), asked: make(map[netip.Addr]uint16)}
}

// tick says what time it is.
func (t *udPeers) tick(now time.Duration) { t.now.Store(int64(now)) }

func (t *udPeers) get(addr netip.AddrPort) *udPeer {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.m[addr]
}

// add enters a peer, if there are too many in place of the one that was not written to
// for longest, which is returned. One that can be reached goes only if that is more than
// half of them, so that who answers forged senders keeps the ways to others. It returns
// nil for the peer when none can go. The caller holds wmu.
func (t *udPeers) add(addr netip.AddrPort) (pe, evicted *udPeer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.m) >= maxPeers {
		var reached *udPeer
		n := 0
		for _, c := range t.m {
			oldest := &evicted
			if c.way != nil || c.soft {
				n++
				oldest = &reached
			}
			if !c.resolving && (*oldest == nil || c.used < (*oldest).used) {
				*oldest = c
			}
		}
		if evicted == nil && n > maxPeers/2 {
			evicted = reached
		}
		if evicted == nil {
			return nil, nil
		}
		t.remove(evicted)
	}
	pe = &udPeer{addr: addr, patience: minPatience}
	t.m[addr] = pe
	return pe, evicted
}

// remove forgets a peer. The caller holds mu.
func (t *udPeers) remove(pe *udPeer) {
	delete(t.m, pe.addr)
	if pe.way != nil && pe.way.plain {
		delete(t.plain, plainSender{pe.addr.Addr(), pe.way.to.QPN})
	}
}

// from finds the address of a sender that is rdmanet and says its port.
func (t *udPeers) from(host netip.Addr, port uint16, qpn uint32) netip.AddrPort {
	addr := netip.AddrPortFrom(host, port)
	if pe := t.get(addr); pe != nil {
		pe.from(qpn, time.Duration(t.now.Load()))
	}
	return addr
}

// fromPlain finds the address of a sender that is not. first is set when it has asked
// for us, and this is the first that it sends since.
func (t *udPeers) fromPlain(host netip.Addr, qpn uint32) (addr netip.AddrPort, first, ok bool) {
	key := plainSender{host, qpn}
	t.mu.RLock()
	addr, ok = t.plain[key]
	port, asked := t.asked[host]
	pe := t.m[addr]
	t.mu.RUnlock()
	switch {
	case asked && (!ok || addr.Port() == port):
		return netip.AddrPortFrom(host, port), true, true
	case ok:
		if pe != nil {
			pe.from(qpn, time.Duration(t.now.Load()))
		}
		return addr, false, true
	}
	return netip.AddrPort{}, false, false
}

// know notes which queue pair of a peer that is not rdmanet serves an address, if there
// is room: that of those that no peer is reached by any more can be had.
func (t *udPeers) know(addr netip.AddrPort, qpn uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.plain) >= 2*maxPeers {
		for k, a := range t.plain {
			if pe := t.m[a]; pe == nil || pe.qpn.Load() != k.qpn {
				delete(t.plain, k)
			}
		}
	}
	if len(t.plain) >= 2*maxPeers {
		return false
	}
	t.plain[plainSender{addr.Addr(), qpn}] = addr
	return true
}

// heed notes that who asked for us from a host is known now.
func (t *udPeers) heed(host netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.asked, host)
}

// ask notes that a peer that is not rdmanet has asked for us.
func (t *udPeers) ask(addr netip.AddrPort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	makeRoom(t.asked, maxAsked)
	t.asked[addr.Addr()] = addr.Port()
}

// heardSoft notes that an address has sent something by the software device.
func (t *udPeers) heardSoft(addr netip.AddrPort, now time.Duration) {
	t.mu.RLock()
	last, ok := t.heard[addr]
	t.mu.RUnlock()
	if ok && now-last < softPause/2 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	makeRoom(t.heard, maxHeard)
	t.heard[addr] = now
}

// viaSoft reports whether an address has sent something by the software device of
// late, which is then how it is answered.
func (t *udPeers) viaSoft(addr netip.AddrPort, now time.Duration) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	last, ok := t.heard[addr]
	return ok && now-last < softPause
}

// makeRoom lets any entry go where there are too many.
func makeRoom[K comparable, V any](m map[K]V, limit int) {
	for k := range m {
		if len(m) < limit {
			return
		}
		delete(m, k)
	}
}
