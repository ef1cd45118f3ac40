// Package cqwait decides which goroutine waits for the completions of a completion
// queue, and what wakes it: for connections and for datagrams alike.
//
// At any time at most one goroutine, the leader, waits for a completion queue. The leader
// handles every completion that arrives and wakes the goroutines that these concern.
//
//  1. A goroutine that must wait becomes the leader if there is none. So an answer wakes
//     one goroutine only, the one that needs it. With a leader present the goroutine waits
//     in its [Group].
//  2. A leader that leaves wakes the others, and one of them takes its place.
//  3. When nobody has led for a while, a goroutine of the Waiter's leads in the background:
//     credits, keep-alive and the peer's end need answers while the program is busy
//     elsewhere. It leaves as soon as another goroutine waits.
//
// A leader polls first where that is likely to pay, and sleeps otherwise.
package cqwait

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// sweeper finds the completion queues that nobody has led for a while.
var sweeper = vacancy.Sweeper{Min: time.Millisecond, Max: 50 * time.Millisecond}

// Owner is what a Waiter serves: a connection, or a queue pair for datagrams. All methods
// are called with the Waiter's lock held.
type Owner interface {
	// Poll handles the completions that have arrived and returns how many these are. One
	// more counts when Poll finds the end of the connection.
	Poll() int

	// Arrived reports whether a goroutine that waits for an answer has got it, or never will.
	Arrived() bool

	// Stopped reports whether a goroutine has a reason, other than a completion, to stop
	// waiting. With answer set, only reasons of goroutines that wait for an answer count.
	Stopped(answer bool) bool

	// Over reports whether the owner is closed or broken.
	Over() bool

	// Silent reports whether no event of the completion queue is to be expected any more,
	// so that a leader must not sleep.
	Silent() bool

	// Solicited reports whether completions of receives that the peer has marked as solicited
	// are all that a leader must be woken for.
	Solicited() bool

	// Background reports whether a leader in the background is of use. It sends what has
	// become due, as nobody else may do so soon, and may let go of the lock for that.
	Background() bool

	// Failed tells that the completion queue has failed, the first time only.
	Failed(err error)
}

// Waiter is the wait for one completion queue. The lock that Init was given guards it and
// must be held for all methods but Init. The zero value is not ready for use.
type Waiter struct {
	owner  Owner
	cq     ibv.CQ
	lock   sync.Locker
	groups []*Group
	poller poller
	busy   time.Duration // how long each wait polls; 0 leaves it to poller
	seat   vacancy.Seat

	leading   bool
	inBack    bool // the leader is the goroutine in the background
	mode      Background
	sleeping  bool      // the leader has let go of the lock to wait, and nothing has interrupted it
	armed     bool      // no event was taken since the completion queue was armed
	solicited bool      // it was armed for solicited completions only
	failed    bool      // the completion queue has failed: its events are not waited for
	stopped   bool      // nobody may lead any more
	left      sync.Cond // signals that the leader has left, for Stop
}

// Config is what a Waiter is made of.
type Config struct {
	Owner Owner
	CQ    ibv.CQ

	// Lock guards the owner and the Waiter.
	Lock sync.Locker

	// Groups are the groups whose goroutines may lead. When the leader leaves, a goroutine
	// of the first group that is not empty is woken.
	Groups []*Group

	// BusyPoll is how long each wait polls before it sleeps. With 0 the poller decides, and
	// with a negative value no wait polls.
	BusyPoll time.Duration

	// Polls says that polling is of use: the device takes longer to wake a goroutine than
	// most answers take.
	Polls bool

	// Pays, if it is not nil, reports whether polling pays at this moment, for a queue pair
	// that knows. Then any wait may poll, and not only one for an answer. Polls must be set.
	Pays func() bool

	// Background says when a goroutine leads in the background.
	Background Background
}

// Background is when a goroutine leads in the background.
type Background uint8

const (
	Never      Background = iota // only goroutines that call Await lead
	WhenVacant                   // when nobody has led for a while
	Always                       // all the time: Run is to be called
)

// Init readies the Waiter. Nobody leads in the background before Start.
func (w *Waiter) Init(cfg Config) {
	w.owner, w.cq, w.lock, w.groups, w.mode = cfg.Owner, cfg.CQ, cfg.Lock, cfg.Groups, cfg.Background
	w.busy = max(cfg.BusyPoll, 0)
	w.poller = newPoller(cfg.Polls && cfg.BusyPoll == 0)
	w.poller.pays = cfg.Pays
	w.seat.Init(&sweeper, func() { go w.Run() })
	w.left.L = cfg.Lock
}

// Start has a goroutine lead in the background once nobody has led for a while.
func (w *Waiter) Start() {
	if w.mode == WhenVacant && !w.stopped {
		w.seat.Vacant()
	}
}

// Await waits until something may have changed, as a goroutine of g. It lets go of the
// lock meanwhile. answer says that the goroutine waits for the answer to something that
// was sent, for which polling is likely to pay.
func (w *Waiter) Await(g *Group, answer bool) {
	if !w.leading && !w.stopped {
		w.lead(answer)
		w.handOver()
		return
	}
	if w.sleeping && w.solicited && !w.owner.Solicited() && !w.failed {
		if !w.arm() || w.owner.Poll() > 0 {
			return
		}
	}
	if w.inBack && w.sleeping && (answer || w.poller.pays != nil) && w.poller.wouldPoll() {
		w.Interrupt() // a goroutine in the background does not poll
	}
	g.Wait()
}

// Interrupt has the leader look again if it waits. A leader that does not wait looks again
// in any case.
func (w *Waiter) Interrupt() {
	if w.sleeping {
		w.sleeping = false
		w.cq.Interrupt()
	}
}

// Poll has the owner handle the completions that have arrived, as Owner.Poll does.
func (w *Waiter) Poll() int { return w.owner.Poll() }

// Leading reports whether there is a leader.
func (w *Waiter) Leading() bool { return w.leading }

// Sleeping reports whether the leader waits and will not look again before it is interrupted
// or a completion arrives.
func (w *Waiter) Sleeping() bool { return w.sleeping }

// InBackground reports whether the leader is the goroutine in the background.
func (w *Waiter) InBackground() bool { return w.inBack }

// Polls reports whether the waits for answers ever poll of their own accord.
func (w *Waiter) Polls() bool { return w.poller.able() }

// Fail notes that the completion queue has failed, and tells the owner.
func (w *Waiter) Fail(err error) {
	if !w.failed {
		w.failed = true
		w.owner.Failed(err)
	}
}

// HasFailed reports whether the completion queue has failed.
func (w *Waiter) HasFailed() bool { return w.failed }

// Stop has nobody lead any more, and returns when the last leader has left. It lets go of
// the lock meanwhile. The queue pair is closed, or its owner is Over.
func (w *Waiter) Stop() {
	w.stopped = true
	w.seat.Taken()
	for w.leading {
		w.cq.Interrupt()
		w.left.Wait()
	}
	w.Forget()
}

// Forget takes the connection off those that are being served, as polling counts them.
func (w *Waiter) Forget() { w.poller.notServed(false) }

// lead waits for completions once and handles them.
func (w *Waiter) lead(answer bool) {
	w.leading = true
	w.seat.Taken()
	if !w.polls(answer) {
		w.sleep()
	}
	switch {
	case !w.poller.able():
	case w.poller.pays == nil:
		w.poller.end(w.owner.Arrived(), w.owner.Over())
	case !w.poller.began.IsZero():
		w.poller.end(true, w.owner.Over()) // Any completion ends a wait.
	}
	w.leading = false
	if w.stopped {
		w.left.Broadcast()
	}
	w.Start()
}

// handOver wakes the goroutines that may lead next.
func (w *Waiter) handOver() {
	for _, g := range w.groups {
		g.handOver()
	}
}

// polls polls instead of sleeping, and reports whether there is no need to sleep. A
// goroutine that waits although it has a reason to stop waits for the device or the peer
// to let go of memory. That may take long, and polling would keep others from the lock.
func (w *Waiter) polls(answer bool) (done bool) {
	if w.busy > 0 {
		return !w.inBack && !w.owner.Stopped(false) && w.spin(w.busy, false)
	}
	if w.poller.pays != nil {
		// A connection for which polling never pays is not measured.
		if w.inBack || !w.poller.served && !w.poller.pays() || w.owner.Stopped(false) {
			return false
		}
		if d := w.poller.begin(true); d > 0 {
			done = w.spin(d, false)
			w.poller.polled(done, false)
		}
		return done
	}
	if d := w.poller.begin(answer); d > 0 {
		done = w.spin(d, true)
		w.poller.polled(w.owner.Arrived(), w.owner.Stopped(true))
	}
	return done
}

// spin polls for d. answer says that only an answer ends it, and that it goes on only while
// processors are to spare.
func (w *Waiter) spin(d time.Duration, answer bool) (done bool) {
	for start, on := time.Now(), true; on; {
		done = w.owner.Poll() > 0 || done
		if w.stopped || w.owner.Stopped(answer) || answer && w.owner.Arrived() || !answer && done {
			return true
		}
		w.sleeping = true
		w.lock.Unlock() // others get the lock
		on = (w.busy > 0 || w.poller.room()) && time.Since(start) < d
		w.lock.Lock()
		if !w.sleeping {
			return true // it was interrupted
		}
		w.sleeping = false
	}
	return done
}

// sleep waits for the next event: it arms the completion queue, looks once more, and waits.
func (w *Waiter) sleep() {
	if w.failed { // there are no events, but perhaps completions
		w.lock.Unlock()
		time.Sleep(time.Millisecond)
		w.lock.Lock()
		w.owner.Poll()
		return
	}
	if !w.arm() || w.owner.Poll() > 0 || w.owner.Silent() || w.stopped {
		return
	}
	w.sleeping = true
	w.lock.Unlock()
	err := w.cq.Wait(time.Time{})
	w.lock.Lock()
	w.sleeping, w.armed = false, false
	if err != nil && !errors.Is(err, ibv.ErrInterrupted) && !errors.Is(err, net.ErrClosed) {
		w.Fail(err)
	}
	w.owner.Poll()
}

// arm arms the completion queue, unless it still is from before and for no less than the
// owner needs. It reports whether the leader may look once more and wait. What a look finds
// behind an Arm was often there before it, as completions of sends come soon after the
// sends. Then the event is yet to come, and another Arm would be a call for nothing.
func (w *Waiter) arm() bool {
	solicited := w.owner.Solicited()
	if w.armed && (solicited || !w.solicited) {
		return true
	}
	if err := w.cq.Arm(solicited); err != nil {
		w.Fail(err)
		return false
	}
	w.armed, w.solicited = true, solicited
	return true
}

// Run leads in the background: while no other goroutine waits, or with Always until Stop or
// until that is of no use any more. It takes the lock.
func (w *Waiter) Run() {
	w.lock.Lock()
	defer w.lock.Unlock()
	for !w.leading && !w.stopped {
		if w.mode != Always && w.waiting() {
			if !w.owner.Over() {
				w.Start() // they may have got what they wait for, and leave without having led
			}
			break
		}
		if !w.owner.Background() {
			break
		}
		if w.leading || w.stopped { // Background may have let go of the lock
			break
		}
		w.inBack = true
		w.lead(false)
		w.inBack = false
	}
	if w.owner.Over() && !w.leading {
		w.Forget() // perhaps nobody waits for it again
	}
	w.handOver()
}

// waiting reports whether goroutines wait that would lead.
func (w *Waiter) waiting() bool {
	for _, g := range w.groups {
		if g.n > 0 {
			return true
		}
	}
	return false
}
