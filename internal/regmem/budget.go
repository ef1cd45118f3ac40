package regmem

import (
	"sync"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
)

// A Budget counts the bytes of receives that all users of a device have charged. Each user
// charges by a [Share] what it has beyond the receives that it keeps when it is idle. The
// Shares bound the sum, because a peer may keep its credits, and so the receives behind
// them, for any time, and there may be any number of peers.
type Budget struct {
	used    atomic.Int64 // used is in bytes.
	domains int          // domains counts the domains that have acquired the Budget; budgets.mu guards it.
}

var budgets = struct {
	mu      sync.Mutex
	devices map[ibv.Device]*Budget
}{devices: make(map[ibv.Device]*Budget)}

// acquireBudget returns the budget of the device, to be released once.
func acquireBudget(dev ibv.Device) *Budget {
	budgets.mu.Lock()
	defer budgets.mu.Unlock()
	b := budgets.devices[dev]
	if b == nil {
		b = new(Budget)
		budgets.devices[dev] = b
	}
	b.domains++
	return b
}

func (b *Budget) release(dev ibv.Device) {
	budgets.mu.Lock()
	defer budgets.mu.Unlock()
	if b.domains--; b.domains == 0 {
		delete(budgets.devices, dev)
	}
}

// Used returns how many bytes are charged.
func (b *Budget) Used() int64 { return b.used.Load() }

// Share returns a share of one user, which has receives of size bytes. Its charges end
// where those of all users together have reached bound bytes.
func (b *Budget) Share(bound, size int64) Share {
	return Share{budget: b, bound: bound, size: size}
}

// A Share is what one user of a device charges to its [Budget]. The zero value has no
// budget, and so no bound. A Share is for one goroutine at a time; those of other users
// may be used meanwhile.
type Share struct {
	budget *Budget
	bound  int64 // bound is in bytes, for the charges of all users.
	size   int64 // size is the length of a receive in bytes.
	n      int   // n is how many receives are charged.
}

// SetBound changes the bound.
func (s *Share) SetBound(bound int64) { s.bound = bound }

// Charged returns how many receives are charged.
func (s *Share) Charged() int { return s.n }

// Raise charges for up to n receives as far as the bound allows, and returns how many are
// charged then. Without a budget it returns n.
func (s *Share) Raise(n int) int {
	if s.budget == nil {
		return n
	}
	for s.n < n {
		used := s.budget.used.Load()
		more := min(int64(n-s.n), (s.bound-used)/s.size)
		if more <= 0 {
			break
		}
		if s.budget.used.CompareAndSwap(used, used+more*s.size) {
			s.n += int(more)
		}
	}
	return s.n
}

// Lower ends the charges for more than n receives. A negative n counts as 0.
func (s *Share) Lower(n int) {
	if n = max(n, 0); s.budget != nil && s.n > n {
		s.budget.used.Add(-int64(s.n-n) * s.size)
		s.n = n
	}
}
