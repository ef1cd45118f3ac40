package cqwait

import (
	"runtime"
	"sync/atomic"
	"time"
)

// This file decides when a wait polls before it sleeps.
//
// To sleep and be woken by a device takes longer than most answers. So a goroutine that
// waits for an RDMA device polls first, if that is likely to pay:
//
//  1. It polls a few times as long as the answers took that came in time.
//  2. It sleeps at once if the last polls of such waits found no answer, or were hardly
//     shorter than waits that slept. After each miss, more waits sleep at once. Waits after
//     a short wait and waits after a long one are counted separately, because calls
//     alternate: a request, its answer, a pause.
//  3. One goroutine of the process polls at a time, and only while the connections that are
//     being served are fewer than half as many as the processors.
//
// A device whose wait receives by itself (ibv.CapWaitReceives) is not polled.

// poller has the measurements by which one Waiter decides whether to poll. The Waiter's
// lock guards it.
type poller struct {
	processors int32         // processors is their number in the process, 0 if the Waiter never polls.
	served     bool          // served is set while the connection is counted in polling.served.
	began      time.Time     // began is the start of the wait for an answer, zero for none.
	usual      time.Duration // usual is the average time of polls that paid.
	tried      bool          // tried is set when this wait has polled.
	kind       int           // kind is the kind of this wait. It depends on how long the wait before took.
	sleeps     [2]sleepRun   // sleeps is by kind of wait.
}

// sleepRun counts the waits of one kind that sleep without polling.
type sleepRun struct {
	left, next int           // left is how many waits sleep from now on, and next how many sleep after the next miss.
	polls      int           // polls is how many waits were to poll.
	slept      time.Duration // slept is the average time of waits that slept, 0 if it is not known.
}

// These are the kinds of waits: those after a short wait, and those after a long one.
const (
	short = iota
	long
)

const (
	usualPoll = 25 * time.Microsecond // usualPoll is the usual of a new poller.
	pollTimes = 8                     // pollTimes is how many times the usual a poll may take.
	maxRun    = 63                    // maxRun is the longest run of waits that sleep.

	// A poll that takes no longer than paysWithin pays in any case. Of the others one in
	// compareEvery sleeps, to be compared with.
	paysWithin   = 50 * time.Microsecond
	compareEvery = 32
)

// minPoll and maxPoll bound how long one poll may take. They are variables for tests.
var minPoll, maxPoll = 50 * time.Microsecond, time.Millisecond

// polling is the state of the whole process.
var polling struct {
	taken  atomic.Bool  // taken is set while a goroutine polls.
	served atomic.Int32 // served is about how many connections have received something and have no goroutine that waits.
}

// Polling reports whether a goroutine of the process polls at this moment, and how many
// connections count as being served.
func Polling() (polls bool, served int) { return polling.taken.Load(), int(polling.served.Load()) }

// SetWindow makes every poll take d, for tests. The function that it returns undoes it.
// Nothing may poll at either time.
func SetWindow(d time.Duration) (undo func()) {
	least, most := minPoll, maxPoll
	minPoll, maxPoll = d, d
	return func() { minPoll, maxPoll = least, most }
}

// newPoller returns a poller that polls if useful says so and there is a second processor.
func newPoller(useful bool) poller {
	n := runtime.GOMAXPROCS(0)
	if !useful || n == 1 {
		n = 0
	}
	return poller{processors: int32(n), usual: usualPoll}
}

// able reports whether the poller ever polls.
func (p *poller) able() bool { return p.processors > 0 }

// wouldPoll reports whether a wait for an answer that begins now would poll. A wait that
// would not is counted as one that sleeps.
func (p *poller) wouldPoll() bool {
	r := &p.sleeps[p.kind]
	switch {
	case !p.able() || !p.began.IsZero() || !p.roomFor(polling.served.Load()-1): // the connection of a goroutine that waits is not served
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

// begin begins a wait, or continues it, and returns how long to poll, 0 for not at all.
// answer says that the wait is for the answer to something that was sent. After a poll
// polled must be called, and end in any case.
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

// window returns how long a poll may take.
func (p *poller) window() time.Duration { return min(max(pollTimes*p.usual, minPoll), maxPoll) }

// room reports whether processors are to spare. The other half of them is left to the rest
// of the program and to the driver of the device.
func (p *poller) room() bool { return p.roomFor(polling.served.Load()) }

func (p *poller) roomFor(served int32) bool { return 2*served < p.processors }

// polled ends a poll. came means that the answer has arrived, and expired that the wait
// ends without one. With neither the poll has given way to other goroutines.
func (p *poller) polled(came, expired bool) {
	polling.taken.Store(false)
	r, d := &p.sleeps[p.kind], time.Since(p.began)
	switch {
	case came && (d <= paysWithin || r.slept == 0 || 10*d <= 9*r.slept):
		p.usual += (d - p.usual) / 8
		r.next = 0
	case came, expired, d >= p.window():
		r.left, r.next = r.next, min(2*r.next+1, maxRun)
	}
}

// end ends a wait. came means that the answer has arrived, and gone that no other wait will
// follow.
func (p *poller) end(came, gone bool) {
	if !p.able() {
		return
	}
	if came && !p.began.IsZero() {
		d, r := time.Since(p.began), &p.sleeps[p.kind]
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

// notServed marks the connection as no longer served. asked means that a goroutine begins
// to wait here for an answer. Then one connection less counts as served, even if this one
// was not: a goroutine may ask several peers in turn, and has left another connection.
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
