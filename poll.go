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
//  2. Not after waits like the one before were polled for in vain, or hardly shorter than
//     those that slept: ever more of them sleep at once. Those that follow a short wait
//     and those that follow a long one are told apart, as calls come in turns: a request,
//     its answer, a pause.
//  3. One goroutine of the process at a time, and only while the connections that are
//     being served are fewer than half as many as the processors.
//
// The software device sleeps in the socket's read, and is not polled.

// poller is the habit of one connection, or of one queue pair for datagrams. Its lock is
// that of whoever has it.
type poller struct {
	processors int32 // 0: it never polls
	served     bool  // counted in polling.served
	began      time.Time
	usual      time.Duration // that polls take which pay
	tried      bool          // this wait was polled for
	kind       int           // of the wait: what the one before was, short or long
	rests      [2]sleepRun   // by kind
}

// sleepRun is how often to sleep without polling.
type sleepRun struct {
	left, next int
	polls      int
	slept      time.Duration // what waits take that sleep, 0 if that is not known
}

const (
	short = iota
	long
)

const (
	usualPoll = 25 * time.Microsecond // to begin with
	pollTimes = 8                     // the usual
	minPoll   = 50 * time.Microsecond
	maxRest   = 63

	// Polls that take less pay in any case. Of the others one in compareEvery sleeps, to
	// be compared with.
	paysWithin   = 50 * time.Microsecond
	compareEvery = 32
)

var maxPoll = time.Millisecond

// polling is of the whole process.
var polling struct {
	taken  atomic.Bool  // somebody polls
	served atomic.Int32 // connections that got something, and nobody waits for more: about
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

// wouldPoll reports whether a wait for an answer would be polled. If not, that was one.
func (p *poller) wouldPoll() bool {
	r := &p.rests[p.kind]
	switch {
	case !p.able() || !p.began.IsZero() || !p.roomFor(polling.served.Load()-1): // who waits is not served
		return false
	case r.left > 0:
		r.left--
		return false
	case p.usual > paysWithin:
		if r.polls++; r.polls%compareEvery == 0 {
			return false
		}
	}
	return !polling.taken.Load()
}

// begin begins a wait, or goes on with it, and returns how long to poll, 0 for not at
// all. answer says that an answer to what was sent is waited for. If it is polled, polled
// is to be called, and end in any case.
func (p *poller) begin(answer bool) time.Duration {
	if !p.able() {
		return 0
	}
	fresh := answer && p.began.IsZero()
	polls := fresh && p.wouldPoll() && polling.taken.CompareAndSwap(false, true)
	if fresh {
		p.began = time.Now()
	}
	p.notServed(fresh)
	if !polls {
		return 0
	}
	p.tried = true
	return p.window()
}

// window is how long a poll takes at most.
func (p *poller) window() time.Duration { return min(max(pollTimes*p.usual, minPoll), maxPoll) }

// room reports whether there are processors to spare: somebody else, the device's driver
// among them, may want what the process leaves.
func (p *poller) room() bool { return p.roomFor(polling.served.Load()) }

func (p *poller) roomFor(served int32) bool { return 2*served < p.processors }

// polled ends a poll: the answer has come, or will not be waited for any more because of a
// deadline, or neither, as when the poll gives way to others.
func (p *poller) polled(came, expired bool) {
	polling.taken.Store(false)
	r, d := &p.rests[p.kind], time.Since(p.began)
	switch {
	case came && (d <= paysWithin || r.slept == 0 || 10*d <= 9*r.slept):
		p.usual += (d - p.usual) / 8
		r.next = 0
	case came, expired, d >= p.window():
		r.left, r.next = r.next, min(2*r.next+1, maxRest)
	}
}

// end says whether the answer has come, and that there will be no other wait.
func (p *poller) end(came, gone bool) {
	if !p.able() {
		return
	}
	if came && !p.began.IsZero() {
		d, r := time.Since(p.began), &p.rests[p.kind]
		switch {
		case p.tried:
		case r.slept == 0:
			r.slept = d
		default:
			r.slept += (d - r.slept) / 4
		}
		p.kind = short
		if d > p.window() {
			p.kind = long
		}
		p.began, p.tried = time.Time{}, false
	}
	switch {
	case gone:
		p.notServed(false)
	case came && !p.served:
		p.served = true
		polling.served.Add(1)
	}
}

// notServed says that what was being served, if it was, is so no more. asked says that
// somebody begins to wait here for an answer. Who does so after something has come
// elsewhere has gone on from there: a goroutine may ask several peers in turn.
func (p *poller) notServed(asked bool) {
	if !p.served && !asked {
		return
	}
	p.served = false
	for {
		n := polling.served.Load()
		if n == 0 || polling.served.CompareAndSwap(n, n-1) {
			return
		}
	}
}
