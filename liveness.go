package rdmanet

import "time"

// liveness is what keep-alive knows of the peer; see keepalive.go. Conn.mu guards it.
type liveness struct {
	timer   *time.Timer
	onTimer func()    // what the timer calls
	timerAt time.Time // when the timer fires next, if it is set

	received     bool      // something has arrived, and lastReceived does not count it yet
	lastReceived time.Time // when something arrived last, as far as it was noticed
	probing      bool      // a keep-alive probe is unanswered
	probedAt     time.Time // when the last probe was sent
	oneWay       oneWay

	// answersReads is set if the peer's device can be asked by an RDMA Read. target is the
	// memory that such a Read reads; nil means a Read of no bytes. See probe.go.
	answersReads bool
	target       *probeTarget
	memory       probeMemory
}

// oneWay is what has arrived since this side last sent something.
type oneWay struct {
	posts uint64    // Stats.Posts when it was last looked at
	since time.Time // when Stats.Posts was found to have changed
	bytes uint64    // Stats.BytesReceived then
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
	trimmable bool // there is something to give back when the connection is idle
	trimmed   bool // it was given back, and nothing has arrived since that calls for it again
	pending   bool // trimMemory is to be called once more

	// pagesTouched is set if buffers may have more than their first page in memory.
	pagesTouched bool

	checkedAt time.Time // when moved was last compared
	moved     uint64    // Stats.moved then
	movedAt   time.Time // when moved was found to have grown

	returnsCredits bool // returnCredits goes on when sends complete
	compactions    int  // answers that may still be asked for to bring receives together
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
