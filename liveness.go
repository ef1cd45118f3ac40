package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// liveness is what keep-alive knows of the peer; see keepalive.go. Conn.mu guards it.
type liveness struct {
	timer   *time.Timer
	onTimer func()    // onTimer is called by the timer.
	timerAt time.Time // timerAt is when the timer fires next, if it is set.

	received     bool      // something has arrived, and lastReceived does not count it yet
	lastReceived time.Time // lastReceived is when something arrived last, as far as it was noticed.
	probing      bool      // probing is set while a keep-alive probe is unanswered, or host owes an answer.
	probedAt     time.Time // probedAt is when the last probe was sent, or since when host owes an answer.
	oneWay       oneWay

	// idle is how long nothing arrives until the peer or its host is asked, and patience how
	// long it may take to answer. They are those of the settings, or what the device can do.
	idle, patience time.Duration

	host ibv.HostProber // host asks the peer's host. It is nil if this side sends probes.

	// answersReads is set if the peer's device can be asked by an RDMA Read. target is the
	// memory that such a Read reads; nil means a Read of no bytes. See probe.go.
	answersReads bool
	target       *probeTarget
	memory       probeMemory
}

// oneWay is what has arrived since this side last sent something.
type oneWay struct {
	posts uint64    // posts is the last value of Stats.Posts.
	since time.Time // since is when Stats.Posts was found to have changed.
	bytes uint64    // bytes was Stats.BytesReceived at that time.
}

const (
	// confirmEvery is a quarter of the shortest KeepAlive that is of use.
	confirmEvery = 250 * time.Millisecond

	// confirmFrom is how many bytes can keep a probe from its answer. A peer that sends less
	// than that from time to time gets no confirmations.
	confirmFrom = 64 << 10
)

// idleState is what a connection gives back when it is idle; see keepalive.go. Conn.mu
// guards it.
type idleState struct {
	trimmable bool // trimmable is set if there is something to give back when the connection is idle.
	trimmed   bool // trimmed is set if it was given back, and nothing has arrived since that needs it again.
	pending   bool // pending is set if trimMemory must be called once more.

	// pagesTouched is set if buffers may have more than their first page in memory.
	pagesTouched bool

	checkedAt time.Time // checkedAt is when moved was last compared.
	moved     uint64    // moved was Stats.moved at that time.
	movedAt   time.Time // movedAt is when moved was found to have grown.

	lateReturns    int  // lateReturns is how many credits for large receives may be given back until the timer looks again.
	returnsCredits bool // returnsCredits is set if returnCredits continues when sends complete.
	compactions    int  // compactions is how many answers may still be requested to bring receives together.
}

// setTimer sets the connection's timer, which calls tick.
func (l *liveness) setTimer(d time.Duration) {
	l.timerAt = time.Now().Add(d)
	if l.timer == nil {
		l.timer = time.AfterFunc(d, l.onTimer)
	} else {
		l.timer.Reset(d)
	}
}
