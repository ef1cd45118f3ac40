package udconn

import (
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/deadline"
)

// sender is the send side of a Conn: the goroutines that wait for room in a send queue, or
// for the path to a group.
type sender struct {
	mu      sync.Mutex
	writers cqwait.Group
	due     deadline.Deadline
	waiters []*cqwait.Waiter // waiters has the wait of each send queue.
}

func (s *sender) init() {
	s.writers.Init(&s.mu, false)
	s.due.Init(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.due.Check() {
			s.wakeAll()
		}
	})
}

// add takes a send queue into use. The caller holds mu.
func (s *sender) add(w *cqwait.Waiter) { s.waiters = append(s.waiters, w) }

// remove ends the use of a send queue, and wakes all that wait for it. The caller holds mu.
func (s *sender) remove(w *cqwait.Waiter) {
	if i := slices.Index(s.waiters, w); i >= 0 {
		s.waiters = slices.Delete(s.waiters, i, i+1)
	}
	w.Interrupt()
	s.writers.WakeAll()
}

// wakeAll wakes all writers, and all goroutines that lead. The caller holds mu.
func (s *sender) wakeAll() {
	s.writers.WakeAll()
	for _, w := range s.waiters {
		w.Interrupt()
	}
}
