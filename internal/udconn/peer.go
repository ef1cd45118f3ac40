package udconn

import (
	"net/netip"
	"sync/atomic"
	"time"
)

// peer is an address that datagrams are sent to. sender.mu guards its fields, except those
// that receiving changes.
//
// Nothing tells a UD queue pair that its peer has gone. So the address is resolved again after
// silence, after a datagram in the peer's name from another queue pair, and after a request
// that names another queue pair. Only the reply of the peer's host changes the path, so a
// forged datagram does not lead answers astray.
type peer struct {
	*shared
	addr netip.AddrPort
	used time.Duration // used is when the peer was last written to.

	path   *path
	viaUDP bool          // viaUDP is set if the peer is reached by UDP.
	err    error         // err is why there is no path.
	next   time.Duration // next is when the peer may be resolved again, with viaUDP or err.

	resolving  bool
	waiting    [][]byte      // waiting has the datagrams that wait for the path.
	resolved   time.Duration // resolved is when the last resolution ended.
	staleAfter time.Duration // staleAfter is how long the peer may be silent.

	suspected   bool          // suspected is set after a resolution because of maybeMoved.
	suspectedAt time.Duration // suspectedAt is when that resolution began.

	// Receiving changes these fields.
	qpn        atomic.Uint32 // qpn is the queue pair of path, 0 for none.
	receivedAt atomic.Int64  // receivedAt is the time.Duration when qpn last sent something.
	maybeMoved atomic.Bool   // maybeMoved is set if another queue pair sent something in the peer's name.
}

// path is how a peer is reached.
type path struct {
	qp *queuePair
	destination
	learnt bool // learnt is set if the path was taken from a datagram: the peer replies to no requests.
}

// leadsTo reports whether two paths differ at most in their address handles.
func (p *path) leadsTo(other *path) bool {
	return p.qp == other.qp && p.to == other.to && p.plain == other.plain
}

// setPath replaces the path.
func (p *peer) setPath(w *path) {
	p.dropPath()
	p.path = w
	p.qpn.Store(w.to.QPN)
}

// dropPath gives up the path, if there is one.
func (p *peer) dropPath() {
	if p.path != nil {
		p.path.qp.send.retire(p.path.ah)
		p.path = nil
		p.qpn.Store(0)
	}
}

// discardWaiting drops the datagrams that wait for the path.
func (p *peer) discardWaiting() {
	p.unsent.Add(uint64(len(p.waiting)))
	p.waiting = nil
}

// stale reports whether the peer was silent for so long that it may be elsewhere by now.
func (p *peer) stale(now time.Duration) bool {
	return !p.path.learnt && p.path.group == 0 && now-max(time.Duration(p.receivedAt.Load()), p.resolved) > p.staleAfter
}

// answeredAsBefore notes that a resolution has confirmed the path, or has failed without a
// refusal.
func (p *peer) answeredAsBefore() { p.staleAfter = min(2*p.staleAfter, p.Bounds.MaxSilence) }

// received notes a datagram in the peer's name from a queue pair.
func (p *peer) received(qpn uint32, now time.Duration) {
	if p.qpn.Load() == qpn {
		p.receivedAt.Store(int64(now))
	} else {
		p.seenAt(qpn)
	}
}

// seenAt notes that the peer may send from a queue pair now.
func (p *peer) seenAt(qpn uint32) {
	if known := p.qpn.Load(); known != 0 && known != qpn && !p.maybeMoved.Load() {
		p.maybeMoved.Store(true)
	}
}

// mustConfirm reports whether the path must not be used before a resolution has confirmed it,
// because the peer may have moved. The caller starts the resolution.
func (p *peer) mustConfirm(now time.Duration) bool {
	switch {
	case !p.maybeMoved.Load():
		return false
	case p.suspected && now-p.suspectedAt <= p.Bounds.SuspicionPause:
		return p.resolving
	}
	p.suspected, p.suspectedAt = true, now
	return true
}
