package rdmanet

import (
	"net"
	"time"
)

// phase is how far a connection has come. Only conn's methods named here move it:
//
//	phaseActive ── status ──► phaseFailing
//	     │                         │
//	     └───────────┬─────────────┘
//	                 ├── endStream ──────────────────────► phaseDraining
//	                 ├── peerEnded ──────────────────────► phasePeerClosed
//	                 └── fail, teardown,
//	                     peerEnded if there is an error ─► phaseBroken
//
// Work requests are made in phaseActive only. Those that were queued before the queue pair
// failed are still posted in phaseFailing, where the device flushes them. Nothing is posted
// in the last three phases, which are final.
type phase uint8

const (
	// phaseActive: the queue pair carries data.
	phaseActive phase = iota

	// phaseFailing: the queue pair has failed, and the device has not told why yet.
	phaseFailing

	// phaseDraining: this side has disconnected after Close. The peer's device still reads
	// what is on its way, and may still send.
	phaseDraining

	// phasePeerClosed: the peer has ended the connection in an orderly way.
	phasePeerClosed

	// phaseBroken: an error has ended the connection, or it was given up after Close.
	phaseBroken
)

// life is how far a connection has come, and why it is over. Conn.mu guards it.
type life struct {
	phase    phase
	closed   bool      // closed is set when Close was called. The program's calls fail then.
	cause    error     // cause is why the connection is over, nil in the first two phases.
	failedAt time.Time // failedAt is when the queue pair was seen to have failed.
}

// posts reports whether work requests may be posted.
func (l *life) posts() bool { return l.phase == phaseActive }

// failing reports whether the queue pair has failed for a reason that is not known yet.
func (l *life) failing() bool { return l.phase == phaseFailing }

// over reports whether the connection is over: cause says why.
func (l *life) over() bool { return l.phase > phaseFailing }

// draining reports whether this side has disconnected.
func (l *life) draining() bool { return l.phase == phaseDraining }

// peerClosed reports whether the peer has ended the connection in an orderly way.
func (l *life) peerClosed() bool { return l.phase == phasePeerClosed }

// end moves to one of the final phases, and reports whether the connection was not over yet.
func (l *life) end(to phase, cause error) bool {
	if l.over() {
		return false
	}
	l.phase, l.cause = to, cause
	return true
}

// fail ends the connection because of err.
func (l *life) fail(err error) bool { return l.end(phaseBroken, err) }

// peerEnded notes that the peer has ended the connection in an orderly way.
func (l *life) peerEnded() bool { return l.end(phasePeerClosed, errPeerClosed) }

// drain notes that this side has disconnected.
func (l *life) drain() bool { return l.end(phaseDraining, net.ErrClosed) }

// giveUp ends a connection that was closed and has not drained.
func (l *life) giveUp() bool { return l.end(phaseBroken, net.ErrClosed) }

// queuePairFailed notes that the queue pair has failed for a reason that is not known yet.
func (l *life) queuePairFailed(now time.Time) {
	if l.phase == phaseActive {
		l.phase, l.failedAt = phaseFailing, now
	}
}
