package rdmanet

import (
	"runtime"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// Polling before sleeping, where Config.BusyPoll leaves it to rdmanet.
//
// To sleep and be woken by a device takes longer than most answers do. So who waits for
// an RDMA device polls first, where that is likely to pay:
//
//  1. For a few times as long as what came in time took to come.
//  2. Not after waits like the one before were polled for in vain: ever more of them
//     sleep at once. Those that follow a short wait and those that follow a long one
//     are told apart, as calls come in turns: a request, its answer, a pause.
//  3. One goroutine of the process at a time, and only while the connections that are
//     being served leave it a processor.
//
// The software device sleeps in the socket's read, and is not polled.

// poller is the habit of one connection, or of one queue pair for datagrams. Its lock is
// that of whoever has it.
type poller struct {
	processors int32 // 0: it never polls
	served     bool  // counted in polling.served
	began      time.Time
	usual      time.Duration // that polls take which find something
	kind       int           // of the wait: what the one before was, short or long
	rests      [2]rest       // by kind
}

// rest is how often to sleep without polling.
type rest struct{ left, next int }

const (
	short = iota
	long
)

const (
	usualPoll = 25 * time.Microsecond // to begin with
	pollTimes = 8                     // the usual
	minPoll   = 50 * time.Microsecond
	maxRest   = 63
)

var maxPoll = time.Millisecond

// polling is of the whole process.
var polling struct {
	taken  atomic.Bool  // somebody polls
	served atomic.Int32 // connections that got something, and nobody waits for more
}

func newPoller(dev ibv.Device, busyPoll time.Duration) poller {
	n := runtime.GOMAXPROCS(0)
	if busyPoll != 0 || n == 1 || !dev.Attr().PinsMemory {
		n = 0
	}
	return poller{processors: int32(n), usual: usualPoll}
}

// able reports whether there is ever to be polled.
func (p *poller) able() bool { return p.processors > 0 }

// begin begins a wait, or goes on with it, and returns how long to poll, 0 for not at
// all. answer says that an answer to what was sent is waited for. If it is polled, polled
// is to be called, and end in any case.
func (p *poller) begin(answer bool) time.Duration {
	if !p.able() {
		return 0
	}
	p.rise(false)
	if !answer || !p.began.IsZero() {
		return 0
	}
	p.began = time.Now()
	r := &p.rests[p.kind]
	switch {
	case !p.room():
		return 0
	case r.left > 0:
		r.left--
		return 0
	case !polling.taken.CompareAndSwap(false, true):
		return 0
	}
	return p.window()
}

// window is how long a poll takes at most.
func (p *poller) window() time.Duration { return min(max(pollTimes*p.usual, minPoll), maxPoll) }

// room reports whether there is a processor to poll with.
func (p *poller) room() bool { return polling.served.Load() < p.processors }

// polled ends a poll: the answer has come, or the time is over. Neither says nothing.
func (p *poller) polled(came, over bool) {
	polling.taken.Store(false)
	r := &p.rests[p.kind]
	switch {
	case came:
		p.usual += (time.Since(p.began) - p.usual) / 8
		r.next = 0
	case over:
		r.left, r.next = r.next, min(2*r.next+1, maxRest)
	}
}

// end says whether the answer has come, and that there will be no other wait.
func (p *poller) end(came, gone bool) {
	if !p.able() {
		return
	}
	if came && !p.began.IsZero() {
		p.kind = short
		if time.Since(p.began) > p.window() {
			p.kind = long
		}
		p.began = time.Time{}
	}
	p.rise(!gone)
}

// rise says whether what waited is being served now.
func (p *poller) rise(served bool) {
	if p.served != served {
		p.served = served
		if served {
			polling.served.Add(1)
		} else {
			polling.served.Add(-1)
		}
	}
}
