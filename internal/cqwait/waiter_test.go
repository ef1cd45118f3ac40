package cqwait

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// queue is a completion queue to which a test adds completions that have no content.
type queue struct {
	mu          sync.Mutex
	n           int   // completions
	armed       bool  // the next completion raises an event
	narrow      bool  // only a solicited one does
	armErr      error // of the next Arm
	behindArm   int   // completions that a look behind the next Arm finds, as they were there before
	waitErr     error // of the next Wait
	arms, waits atomic.Int64
	event       chan error
}

func newQueue() *queue { return &queue{event: make(chan error, 1)} }

func (q *queue) Depth() int                 { return 1 << 20 }
func (q *queue) Close() error               { return nil }
func (q *queue) Poll([]ibv.WC) (int, error) { panic("the owner polls by take") }

func (q *queue) Arm(solicited bool) error {
	q.arms.Add(1)
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.armErr; err != nil {
		q.armErr = nil
		return err
	}
	q.armed, q.narrow = true, solicited
	q.n, q.behindArm = q.n+q.behindArm, 0
	return nil
}

func (q *queue) Wait(time.Time) error {
	q.waits.Add(1)
	err := <-q.event
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.waitErr != nil {
		err, q.waitErr = q.waitErr, nil
	}
	return err
}

func (q *queue) Interrupt() { q.raise(ibv.ErrInterrupted) }

func (q *queue) raise(err error) {
	select {
	case q.event <- err:
	default:
	}
}

func (q *queue) add(solicited bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.n++
	if q.armed && (solicited || !q.narrow) {
		q.armed = false
		q.raise(nil)
	}
}

func (q *queue) take() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := q.n
	q.n = 0
	return n
}

// owner counts completions, each of which is one item for a reader.
type owner struct {
	sync.Mutex
	q       *queue
	w       Waiter
	readers Group
	others  Group

	items      int
	stopped    bool // Stopped
	over       bool
	solicited  bool
	background int // calls
	failures   []error
}

func newOwner(t testing.TB, cfg Config) *owner {
	o := &owner{q: newQueue()}
	o.readers.Init(o, true)
	o.others.Init(o, false)
	cfg.Owner, cfg.CQ, cfg.Lock, cfg.Groups = o, o.q, o, []*Group{&o.readers, &o.others}
	o.w.Init(cfg)
	t.Cleanup(func() {
		o.Lock()
		defer o.Unlock()
		o.over = true
		o.w.Stop()
		o.readers.WakeAll()
		o.others.WakeAll()
	})
	return o
}

func (o *owner) Poll() int {
	n := o.q.take()
	o.items += n
	for range n {
		o.readers.Wake()
	}
	return n
}

func (o *owner) Arrived() bool     { return o.items > 0 }
func (o *owner) Stopped(bool) bool { return o.stopped || o.over }
func (o *owner) Over() bool        { return o.over }
func (o *owner) Silent() bool      { return o.over }
func (o *owner) Solicited() bool   { return o.solicited }
func (o *owner) Failed(err error)  { o.failures = append(o.failures, err) }

func (o *owner) Background() bool {
	o.background++
	return !o.over
}

// read takes one item, and reports false if there is a reason to stop waiting.
func (o *owner) read(answer bool) bool {
	o.Lock()
	defer o.Unlock()
	for o.items == 0 {
		if o.stopped || o.over {
			return false
		}
		o.w.Await(&o.readers, answer)
	}
	o.items--
	return true
}

func (o *owner) reading(answer bool) chan bool {
	ch := make(chan bool, 1)
	go func() { ch <- o.read(answer) }()
	return ch
}

// set changes the owner with the lock held.
func (o *owner) set(f func()) {
	o.Lock()
	defer o.Unlock()
	f()
}

// until waits until f, called with the lock held, reports true.
func (o *owner) until(t testing.TB, f func() bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		o.Lock()
		defer o.Unlock()
		return f()
	}, time.Minute, 100*time.Microsecond)
}

func (o *owner) sleeps() bool { return o.w.Leading() && o.w.Sleeping() }

func TestOneLeaderServesAll(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1})
	var reads []chan bool
	for range 3 {
		reads = append(reads, o.reading(false))
	}
	o.until(t, func() bool { return o.sleeps() && o.readers.Waiting() == 2 })
	require.EqualValues(t, 1, o.q.waits.Load(), "one goroutine waits for the completion queue")
	for range reads {
		o.q.add(true)
	}
	for _, read := range reads {
		require.True(t, <-read)
	}
}

// A leader that leaves without an item for others has one of these take its place.
func TestNextLeader(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1})
	first := o.reading(false)
	o.until(t, o.sleeps)
	second := o.reading(false)
	o.until(t, func() bool { return o.readers.Waiting() == 1 })
	o.q.add(true)
	select {
	case <-first:
	case <-second:
		second = first
	}
	o.until(t, func() bool { return o.sleeps() && o.readers.Waiting() == 0 })
	o.q.add(true)
	require.True(t, <-second)
}

// What was there before an Arm takes no event. So the completion queue is armed still.
func TestFoundBehindArm(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1})
	o.q.behindArm = 1
	require.True(t, o.read(false))
	read := o.reading(false)
	o.until(t, o.sleeps)
	require.EqualValues(t, 1, o.q.arms.Load())
	o.q.add(false)
	require.True(t, <-read)

	// An event ends that, and so does an owner that needs more events.
	o.set(func() { o.solicited = true })
	o.q.behindArm = 1
	require.True(t, o.read(false))
	require.EqualValues(t, 2, o.q.arms.Load())
	o.set(func() { o.solicited = false })
	read = o.reading(false)
	o.until(t, o.sleeps)
	require.EqualValues(t, 3, o.q.arms.Load())
	o.q.add(false)
	require.True(t, <-read)
}

func TestBackgroundLeader(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1, Background: WhenVacant})
	o.set(o.w.Start)
	o.until(t, func() bool { return o.sleeps() && o.w.InBackground() })
	o.q.add(true)
	o.until(t, func() bool { return o.items == 1 && o.sleeps() })
	require.True(t, o.read(false))

	// It leaves to a goroutine that waits beside it, and comes back behind that.
	read := o.reading(false)
	o.until(t, func() bool { return o.readers.Waiting() == 1 })
	o.set(o.w.Interrupt)
	o.until(t, func() bool { return o.sleeps() && !o.w.InBackground() })
	o.q.add(true)
	require.True(t, <-read)
	o.until(t, func() bool { return o.sleeps() && o.w.InBackground() })
}

func TestBackgroundNever(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1})
	other := newOwner(t, Config{BusyPoll: -1, Background: WhenVacant})
	o.set(o.w.Start)
	other.set(other.w.Start)
	other.until(t, other.sleeps) // by then the other one would have been found too
	o.set(func() { require.Zero(t, o.background) })
}

func TestBackgroundAlways(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1, Background: Always})
	var done sync.WaitGroup
	done.Go(o.w.Run)
	o.until(t, o.sleeps)
	read := o.reading(false)
	o.until(t, func() bool { return o.readers.Waiting() == 1 })
	for range 10 {
		o.q.add(true)
		require.True(t, <-read)
		read = o.reading(false)
	}
	o.until(t, func() bool { return o.w.InBackground() && o.sleeps() && o.readers.Waiting() == 1 })
	o.set(func() {
		o.over = true
		o.w.Stop()
		o.readers.WakeAll()
	})
	done.Wait()
	require.False(t, <-read)
}

// An interrupted leader looks again, and returns if it has a reason to.
func TestInterrupt(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1})
	o.set(o.w.Interrupt) // of no effect without a leader
	read := o.reading(false)
	o.until(t, o.sleeps)
	o.set(func() {
		o.stopped = true
		o.w.Interrupt()
		require.False(t, o.w.Sleeping())
	})
	require.False(t, <-read)
}

// A leader that polls notices without being interrupted what it waits for, and what makes
// it stop.
func TestSpinNotices(t *testing.T) {
	for _, tt := range []struct {
		name   string
		cfg    Config
		answer bool
	}{
		{"for a set time", Config{BusyPoll: time.Hour}, false},
		{"for an answer", Config{Polls: true}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
			defer SetWindow(time.Hour)()
			for _, stop := range []bool{false, true} {
				o := newOwner(t, tt.cfg)
				read := o.reading(tt.answer)
				o.until(t, o.w.Leading)
				if stop {
					o.set(func() { o.stopped = true })
				} else {
					o.q.add(false)
				}
				require.Equal(t, !stop, <-read)
				require.Zero(t, o.q.waits.Load(), "it did not sleep")
				polls, _ := Polling()
				require.False(t, polls)
			}
		})
	}
}

// What another goroutine has polled is not lost to a leader that polls.
func TestSpinSeesOthersPoll(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: time.Hour})
	read := o.reading(false)
	o.until(t, o.w.Leading)
	o.set(func() {
		o.q.add(false)
		o.Poll()
		o.w.Interrupt()
	})
	require.True(t, <-read)
}

// A leader in the background does not poll, and makes room for a goroutine that does.
func TestBackgroundMakesRoomForPoll(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	defer SetWindow(time.Hour)()
	o := newOwner(t, Config{Polls: true, Background: WhenVacant})
	o.set(o.w.Start)
	o.until(t, func() bool { return o.sleeps() && o.w.InBackground() })
	polls, _ := Polling()
	require.False(t, polls)
	read := o.reading(true)
	require.Eventually(t, func() bool { polls, _ := Polling(); return polls }, time.Minute, 100*time.Microsecond)
	o.q.add(false)
	require.True(t, <-read)
}

// A poll ends when processors are needed, and none begins beside another.
func TestPollsWhereThereIsRoom(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	defer SetWindow(time.Hour)()
	o := newOwner(t, Config{Polls: true})
	answer := func(read chan bool) {
		o.q.add(false)
		require.True(t, <-read)
	}

	polling.served.Add(2)
	read := o.reading(true)
	require.Eventually(t, func() bool { return waited(o) == 1 }, time.Minute, 100*time.Microsecond)
	answer(read)
	polling.served.Store(0)

	polling.taken.Store(true)
	read = o.reading(true)
	require.Eventually(t, func() bool { return waited(o) == 2 }, time.Minute, 100*time.Microsecond)
	answer(read)
	polling.taken.Store(false)

	read = o.reading(true)
	require.Eventually(t, polling.taken.Load, time.Minute, 100*time.Microsecond)
	polling.served.Add(2)
	require.Eventually(t, func() bool { return waited(o) == 3 && !polling.taken.Load() }, time.Minute, 100*time.Microsecond)
	polling.served.Store(0)
	answer(read)
	o.set(func() {
		require.Zero(t, o.w.poller.sleeps[short].next+o.w.poller.sleeps[long].next, "none of these polls was a miss")
	})
}

// waited returns how many times a goroutine has gone to sleep.
func waited(o *owner) int64 { return o.q.waits.Load() }

// A leader that sleeps for solicited completions hears of others when a goroutine beside
// it waits for these.
func TestRearm(t *testing.T) {
	o := newOwner(t, Config{BusyPoll: -1})
	o.set(func() { o.solicited = true })
	first := o.reading(false)
	o.until(t, o.sleeps)
	o.q.add(false)
	o.set(func() { require.True(t, o.w.Sleeping()) })
	o.q.take()

	o.set(func() { o.solicited = false })
	second := o.reading(false)
	o.until(t, func() bool { return o.readers.Waiting() == 1 })
	require.EqualValues(t, 2, o.q.arms.Load())
	third := o.reading(false)
	o.until(t, func() bool { return o.readers.Waiting() == 2 })
	require.EqualValues(t, 2, o.q.arms.Load(), "once is enough")
	for range 3 {
		o.q.add(false)
	}
	for _, read := range []chan bool{first, second, third} {
		require.True(t, <-read)
	}
}

// A completion queue that fails is reported once. Its completions are still looked for.
func TestQueueFails(t *testing.T) {
	broken := errors.New("broken")
	for name, fail := range map[string]func(q *queue){
		"arm":  func(q *queue) { q.armErr = broken },
		"wait": func(q *queue) { q.waitErr = broken },
	} {
		t.Run(name, func(t *testing.T) {
			o := newOwner(t, Config{BusyPoll: -1})
			fail(o.q)
			read := o.reading(false)
			if name == "wait" {
				o.until(t, o.sleeps)
				o.q.raise(nil)
			}
			o.until(t, func() bool { return len(o.failures) == 1 })
			o.q.add(false)
			require.True(t, <-read)
			o.set(func() {
				o.w.Fail(broken)
				require.Equal(t, []error{broken}, o.failures)
				require.True(t, o.w.HasFailed())
			})
		})
	}
	t.Run("arm beside the leader", func(t *testing.T) {
		o := newOwner(t, Config{BusyPoll: -1})
		o.set(func() { o.solicited = true })
		read := o.reading(false)
		o.until(t, o.sleeps)
		o.q.mu.Lock()
		o.q.armErr = broken
		o.q.mu.Unlock()
		o.set(func() {
			o.solicited = false
			o.w.Await(&o.others, false)
			require.Equal(t, []error{broken}, o.failures)
			o.w.Interrupt()
		})
		o.q.add(false)
		require.True(t, <-read)
	})
	t.Run("closed", func(t *testing.T) {
		o := newOwner(t, Config{BusyPoll: -1})
		o.q.waitErr = net.ErrClosed
		read := o.reading(false)
		o.until(t, o.sleeps)
		o.set(func() { o.stopped = true })
		o.q.raise(os.ErrClosed)
		require.False(t, <-read)
		o.set(func() { require.Empty(t, o.failures) })
	})
}

// Stop returns when the leader has left, and nobody leads afterwards.
func TestStop(t *testing.T) {
	for name, cfg := range map[string]Config{
		"asleep":     {BusyPoll: -1},
		"polling":    {BusyPoll: time.Hour},
		"background": {BusyPoll: -1, Background: WhenVacant},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOwner(t, cfg)
			read := make(chan bool, 1)
			if cfg.Background == WhenVacant {
				read <- false
				o.set(o.w.Start)
			} else {
				read = o.reading(false)
			}
			o.until(t, o.w.Leading)
			o.set(func() {
				o.over = true
				o.w.Stop()
				require.False(t, o.w.Leading())
			})
			require.False(t, <-read)
			var done sync.WaitGroup
			done.Go(func() { o.set(func() { o.w.Await(&o.others, false) }) })
			o.until(t, func() bool { return o.others.Waiting() == 1 })
			o.set(func() {
				require.False(t, o.w.Leading())
				o.others.WakeAll()
			})
			done.Wait()
			o.w.Run()
			o.set(func() { require.False(t, o.w.Leading()) })
		})
	}
}

// No wake-up is lost: every item is read whatever the order in which readers, completions,
// interrupts and others' polls come.
func TestNothingIsLost(t *testing.T) {
	for name, cfg := range map[string]Config{
		"sleeping": {BusyPoll: -1, Background: WhenVacant},
		"spinning": {BusyPoll: 50 * time.Microsecond},
		"polling":  {Polls: true, Background: WhenVacant},
	} {
		t.Run(name, func(t *testing.T) {
			if cfg.Polls {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
			}
			o := newOwner(t, cfg)
			o.set(o.w.Start)
			const readers, each = 4, 2000
			var done sync.WaitGroup
			for range readers {
				done.Go(func() {
					for range each {
						o.read(true)
					}
				})
			}
			done.Go(func() {
				for range readers * each {
					switch rand.IntN(8) {
					case 0:
						o.set(o.w.Interrupt)
					case 1:
						o.set(func() { o.Poll() })
					case 2:
						o.set(func() { o.solicited = rand.IntN(2) == 0 })
					case 3:
						runtime.Gosched()
					}
					o.q.add(true)
				}
			})
			done.Wait()
			o.set(func() { require.Zero(t, o.items) })
		})
	}
}
