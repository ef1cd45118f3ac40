// Package vacancy finds roles that no goroutine has had for a while. Such a role, a Seat,
// is for instance that of the goroutine that waits for the events of a connection.
//
// The events of a connection need a goroutine that waits for them. The cheapest one is a
// goroutine that needs an event anyway, such as a blocked Read, because no second goroutine
// must be woken then. Such goroutines begin and end their wait at any time. They mark the
// Seat as Taken and Vacant, which costs an atomic store. A Sweeper calls the fill function
// of a Seat that was vacant for a whole period. So only connections that need one get a
// goroutine of their own.
package vacancy

import (
	"sync"
	"sync/atomic"
	"time"
)

// A Sweeper looks for vacant seats. It runs a goroutine only while a seat that was left
// recently is in its list. A timer that fires every millisecond would cost a busy process
// more than everything else here. So the time between two looks begins at Min, and doubles
// up to Max while the list is not empty. The zero value is ready for use once Min and Max
// are set.
type Sweeper struct {
	// Min and Max bound the time between two looks. A vacant seat is filled after one to
	// two such times.
	Min, Max time.Duration

	mu      sync.Mutex
	seats   []*Seat
	running bool
}

// A Seat is a role that one goroutine at a time may have. The caller of Taken and Vacant
// holds the lock that ensures that.
type Seat struct {
	sweeper *Sweeper
	fill    func()
	state   atomic.Uint64 // state is twice the number of vacancies so far, plus 1 while the seat is vacant.
	listed  atomic.Bool
	seen    uint64 // seen is state at the sweeper's last look. Only the sweeper uses it.
}

// Init connects the seat with a Sweeper. The sweeper's goroutine calls fill when the seat
// was vacant for a period. fill must not block, and must not call Vacant.
func (s *Seat) Init(sw *Sweeper, fill func()) {
	s.sweeper, s.fill = sw, fill
}

// Taken notes that a goroutine has the role.
func (s *Seat) Taken() {
	s.state.Store(s.state.Load() &^ 1)
}

// Vacant notes that no goroutine has the role from now on.
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

// sweep looks at every seat in the list once, and reports whether any is left in it.
func (w *Sweeper) sweep() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	keep := w.seats[:0]
	for _, s := range w.seats {
		v := s.state.Load()
		switch {
		case v != s.seen: // The seat was left since the last look.
			s.seen = v
			keep = append(keep, s)
		case v&1 == 1:
			s.listed.Store(false)
			s.fill()
		default:
			// A goroutine had the role for the whole time. The next Vacant puts the seat
			// in the list again. Vacant may have been called just now, when the seat was
			// still listed.
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
