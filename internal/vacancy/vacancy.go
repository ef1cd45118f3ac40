// Package vacancy finds seats that nobody has sat in for a while.
//
// A connection's events must be looked after by somebody. The cheapest
// somebody is the goroutine that waits for them anyway (a blocked Read), since
// then no second goroutine must be woken; but it comes and goes. A Seat is
// marked Taken and Vacant as such goroutines sit down and leave, which costs
// them an atomic store, and a Sweeper calls the seat's fill function once it
// has stood empty for a whole period, so that a goroutine of its own is
// started only for connections that need one.
package vacancy

import (
	"sync"
	"sync/atomic"
	"time"
)

// A Sweeper watches seats. It runs a goroutine only while some seat that was
// left recently is listed. A timer that fires every millisecond would cost a
// busy process more than all else here, so the time between two looks starts at
// Min and doubles up to Max as long as there is something to look at. The zero
// value is ready once Min and Max are set.
type Sweeper struct {
	// Min and Max bound the time between two looks. A seat is filled between
	// one and two such times after it fell vacant.
	Min, Max time.Duration

	mu      sync.Mutex
	seats   []*Seat
	running bool
}

// A Seat is taken by at most one goroutine at a time; whoever calls Taken and
// Vacant holds the lock that ensures it.
type Seat struct {
	sweeper *Sweeper
	fill    func()
	state   atomic.Uint64 // number of vacancies so far, times 2, plus 1 if vacant
	listed  atomic.Bool
	seen    uint64 // state at the sweeper's last look; its own
}

// Init makes the seat known: fill is called, from the sweeper's goroutine,
// when the seat stands empty. It must
// not block and not call Vacant.
func (s *Seat) Init(sw *Sweeper, fill func()) {
	s.sweeper, s.fill = sw, fill
}

// Taken marks the seat as occupied.
func (s *Seat) Taken() {
	s.state.Store(s.state.Load() &^ 1)
}

// Vacant marks the seat as empty from now on.
func (s *Seat) Vacant() {
	s.state.Store(s.state.Load()&^1 + 3)
	if !s.listed.Load() {
		s.sweeper.list(s)
	}
}

func (w *Sweeper) list(s *Seat) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.listed.Swap(true) {
		return
	}
	w.seats = append(w.seats, s)
	if !w.running {
		w.running = true
		go w.run()
	}
}

func (w *Sweeper) run() {
	period := w.Min
	t := time.NewTimer(period)
	defer t.Stop()
	for range t.C {
		if !w.sweep() {
			return
		}
		period = min(2*period, w.Max)
		t.Reset(period)
	}
}

// sweep looks at every listed seat once and reports whether any is left.
func (w *Sweeper) sweep() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	keep := w.seats[:0]
	for _, s := range w.seats {
		v := s.state.Load()
		switch {
		case v != s.seen: // in use
			s.seen = v
			keep = append(keep, s)
		case v&1 == 1:
			s.listed.Store(false)
			s.fill()
		default:
			// Occupied for the whole time: the next Vacant lists it again. That
			// may have come between the two looks here, when the seat still
			// counted as listed.
			s.listed.Store(false)
			if s.state.Load() != v && !s.listed.Swap(true) {
				keep = append(keep, s)
			}
		}
	}
	clear(w.seats[len(keep):])
	w.seats = keep
	w.running = len(keep) > 0
	return w.running
}
