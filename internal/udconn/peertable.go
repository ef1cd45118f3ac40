package udconn

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// peerTable is what a Conn knows of others. Its own lock guards it, and is taken after all
// other locks.
type peerTable struct {
	*shared
	clock atomic.Int64 // clock is a recent time.Duration since the Conn was opened.

	mu    sync.RWMutex
	peers map[netip.AddrPort]*peer

	// udpSenders is when an address last sent something by UDP, where RDMA devices serve
	// too.
	udpSenders map[netip.AddrPort]time.Duration

	// plain is the address of each queue pair of peers that are not rdmanet. requesters is the
	// port from which such a peer has requested this Conn's queue pair, by host. The peer has
	// sent nothing since.
	plain      map[plainSender]netip.AddrPort
	requesters map[netip.Addr]uint16
}

// plainSender is the sender of a datagram of a peer that is not rdmanet.
type plainSender struct {
	host netip.Addr
	qpn  uint32
}

func newPeerTable(s *shared) *peerTable {
	return &peerTable{shared: s, peers: make(map[netip.AddrPort]*peer), udpSenders: make(map[netip.AddrPort]time.Duration),
		plain: make(map[plainSender]netip.AddrPort), requesters: make(map[netip.Addr]uint16)}
}

// tick sets the clock.
func (t *peerTable) tick() { t.clock.Store(int64(t.now())) }

func (t *peerTable) get(addr netip.AddrPort) *peer {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.peers[addr]
}

func (t *peerTable) count() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.peers)
}

// add enters a peer. If there are too many, the one goes that was not written to for longest,
// and is returned. Peers that can be reached go only while they are more than half: otherwise
// a program that answers forged senders would lose its peers. pe is nil if none can go. The
// caller holds sender.mu.
func (t *peerTable) add(addr netip.AddrPort) (pe, evicted *peer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.peers) >= t.Bounds.Peers {
		var reached *peer
		n := 0
		for _, c := range t.peers {
			oldest := &evicted
			if c.path != nil || c.viaUDP {
				n++
				oldest = &reached
			}
			if !c.resolving && (*oldest == nil || c.used < (*oldest).used) {
				*oldest = c
			}
		}
		if evicted == nil && n > t.Bounds.Peers/2 {
			evicted = reached
		}
		if evicted == nil {
			return nil, nil
		}
		t.remove(evicted)
	}
	pe = &peer{shared: t.shared, addr: addr, staleAfter: t.Bounds.MinSilence}
	t.peers[addr] = pe
	return pe, evicted
}

// remove forgets a peer. The caller holds mu.
func (t *peerTable) remove(pe *peer) {
	delete(t.peers, pe.addr)
	if pe.path != nil && pe.path.plain {
		delete(t.plain, plainSender{pe.addr.Addr(), pe.path.to.QPN})
	}
}

// dropPaths drops the path of each peer for which gone holds. The caller holds sender.mu.
func (t *peerTable) dropPaths(gone func(*peer) bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, pe := range t.peers {
		if pe.path != nil && gone(pe) {
			pe.dropPath()
		}
	}
}

// close drops all paths, and all datagrams that wait for one. The Conn is closed and has no
// goroutines any more.
func (t *peerTable) close() {
	for _, pe := range t.peers {
		pe.dropPath()
		pe.discardWaiting()
	}
}

// sender returns the address of a sender that is rdmanet and sends its port.
func (t *peerTable) sender(host netip.Addr, port uint16, qpn uint32) netip.AddrPort {
	addr := netip.AddrPortFrom(host, port)
	if pe := t.get(addr); pe != nil {
		pe.received(qpn, time.Duration(t.clock.Load()))
	}
	return addr
}

// plainSender returns the address of a sender that is not rdmanet. first is set if the sender
// has requested this Conn's queue pair, and this is its first datagram since.
func (t *peerTable) plainSender(host netip.Addr, qpn uint32) (addr netip.AddrPort, first, ok bool) {
	key := plainSender{host, qpn}
	t.mu.RLock()
	addr, ok = t.plain[key]
	port, requested := t.requesters[host]
	pe := t.peers[addr]
	t.mu.RUnlock()
	switch {
	case requested && (!ok || addr.Port() == port):
		return netip.AddrPortFrom(host, port), true, true
	case ok:
		if pe != nil {
			pe.received(qpn, time.Duration(t.clock.Load()))
		}
		return addr, false, true
	}
	return netip.AddrPort{}, false, false
}

// addPlain notes the queue pair of a peer that is not rdmanet. It reports false if there is no
// room, even after the queue pairs have gone that no peer is reached by any more.
func (t *peerTable) addPlain(addr netip.AddrPort, qpn uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.plain) >= 2*t.Bounds.Peers {
		for k, a := range t.plain {
			if pe := t.peers[a]; pe == nil || pe.qpn.Load() != k.qpn {
				delete(t.plain, k)
			}
		}
	}
	if len(t.plain) >= 2*t.Bounds.Peers {
		return false
	}
	t.plain[plainSender{addr.Addr(), qpn}] = addr
	return true
}

// addRequester notes that a peer that is not rdmanet has requested this Conn's queue pair.
func (t *peerTable) addRequester(addr netip.AddrPort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	makeRoom(t.requesters, t.Bounds.Requesters)
	t.requesters[addr.Addr()] = addr.Port()
}

// removeRequester notes that the queue pair of a requester is known.
func (t *peerTable) removeRequester(host netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.requesters, host)
}

// receivedByUDP notes that an address has sent something by UDP.
func (t *peerTable) receivedByUDP(addr netip.AddrPort, now time.Duration) {
	t.mu.RLock()
	last, ok := t.udpSenders[addr]
	t.mu.RUnlock()
	if ok && now-last < t.Bounds.UDPPause/2 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	makeRoom(t.udpSenders, t.Bounds.UDPSenders)
	t.udpSenders[addr] = now
}

// sendsByUDP reports whether an address has sent something by UDP of late. It is answered by
// UDP then.
func (t *peerTable) sendsByUDP(addr netip.AddrPort, now time.Duration) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	last, ok := t.udpSenders[addr]
	return ok && now-last < t.Bounds.UDPPause
}

// makeRoom removes entries, whichever they are, until one fits below the limit.
func makeRoom[K comparable, V any](m map[K]V, limit int) {
	for k := range m {
		if len(m) < limit {
			return
		}
		delete(m, k)
	}
}
