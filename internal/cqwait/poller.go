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
//  4. It sleeps at once if more other connections than that have got something during the
//     last wait of its connection. Their goroutines need the processor that a poll would take.
//
// A device whose wait receives by itself (ibv.CapWaitReceives) is polled only on behalf of
// a queue pair that knows when polling pays (ibv.PollPayer). That is so for shared memory: a
// peer that runs on another processor answers sooner than this process could be woken, and
// one that runs on the same processor needs it to answer. Such polls cost little, so any
// wait polls, not only one for an answer.

// poller has the measurements by which one Waiter decides whether to poll. The Waiter's
// lock guards it.
type poller struct {
	pays       func() bool   // pays reports whether a poll pays that begins now, nil if that depends on the measurements only.
	uncounted  bool          // uncounted is set if the waits are not those for a connection's completions.
	processors int32         // processors is their number in the process, 0 if the Waiter never polls.
	served     bool          // served is set while the connection is counted in polling.served.
	began      time.Time     // began is the start of the wait for an answer, zero for none.
	ended      uint32        // ended is polling.ended when the last wait began.
	others     int32         // others is how many waits of other connections ended during the last wait.
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

// minPoll and maxPoll bound how long one poll may take. maxPaidPoll is the upper bound for a
// queue pair that knows when polling pays: its peer takes microseconds to answer, unless it
// sleeps or must run other goroutines first, and then polling makes it later. They are
// variables for tests.
var minPoll, maxPoll, maxPaidPoll = 50 * time.Microsecond, time.Millisecond, 100 * time.Microsecond

// polling is the state of the whole process.
var polling struct {
	taken  atomic.Bool   // taken is set while a goroutine polls.
	served atomic.Int32  // served is about how many connections have received something and have no goroutine that waits.
	ended  atomic.Uint32 // ended counts the waits that have ended because something has come.
}

// Polling reports whether a goroutine of the process polls at this moment, and how many
// connections count as being served.
func Polling() (polls bool, served int) { return polling.taken.Load(), int(polling.served.Load()) }

// SetWindow makes every poll take d, for tests. The function that it returns undoes it.
// Nothing may poll at either time.
func SetWindow(d time.Duration) (undo func()) {
	least, most, paid := minPoll, maxPoll, maxPaidPoll
	minPoll, maxPoll, maxPaidPoll = d, d, d
	return func() { minPoll, maxPoll, maxPaidPoll = least, most, paid }
}

// A Poller decides when a wait polls that is not one for completions, and has no lock to
// let go of. It is for one goroutine at a time.
type Poller struct{ p poller }

// NewPoller returns a Poller that polls while pays returns true and there is a second
// processor.
func NewPoller(pays func() bool) *Poller {
	p := newPoller(true)
	p.pays, p.uncounted = pays, true
	return &Poller{p}
}

// Poll calls ready until it returns true, as long as that is likely to pay, and reports
// whether it has. It may return at once. After a wait without polling Ended must be called.
func (p *Poller) Poll(ready func() bool) (came bool) {
	d := p.p.begin(true)
	if d == 0 {
		return false
	}
	for start := time.Now(); !came && p.p.room() && time.Since(start) < d; {
		for range 16 {
			if came = ready(); came {
				break
			}
		}
	}
	p.p.polled(came, false)
	if came {
		p.p.end(true, false)
	}
	return came
}

// Ended ends a wait for which Poll has returned false.
func (p *Poller) Ended() { p.p.end(true, false) }

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
	case p.crowded(), p.pays != nil && !p.pays():
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
		p.began, p.ended = time.Now(), polling.ended.Load()
	}
	p.notServed(fresh)
	if !polls {
		return 0
	}
	p.tried = true
	return p.window()
}

// window returns how long a poll may take.
func (p *poller) window() time.Duration {
	most := maxPoll
	if p.pays != nil {
		most = maxPaidPoll
	}
	return min(max(pollTimes*p.usual, minPoll), most)
}

// room reports whether processors are to spare. The other half of them is left to the rest
// of the program and to the driver of the device.
func (p *poller) room() bool { return p.roomFor(polling.served.Load()) }

func (p *poller) roomFor(served int32) bool { return 2*served < p.processors }

// crowded reports whether too many other connections get something while this one waits. A
// goroutine that asks many peers in turn is no crowd, as only one wait ends at a time.
func (p *poller) crowded() bool { return 2*p.others > p.processors }

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
		if !p.uncounted {
			p.others = int32(polling.ended.Add(1) - p.ended - 1)
		}
	}
	switch {
	case gone:
		p.notServed(false)
	case came && !p.served && !p.uncounted:
		p.served = true
		polling.served.Add(1)
	}
}

// notServed marks the connection as no longer served. asked means that a goroutine begins
// to wait here for an answer. Then one connection less counts as served, even if this one
// was not: a goroutine may ask several peers in turn, and has left another connection.
func (p *poller) notServed(asked bool) {
	if p.uncounted || !p.served && !asked {
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
