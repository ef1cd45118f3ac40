package verbstest

import (
	"errors"
	"slices"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
)

// ErrInjected is the error of a failed call if the test gave no other.
var ErrInjected = errors.New("verbstest: injected fault")

// A Fault makes a [Switch] break one thing, once, or all of a kind ([Switch.FailAll]). If two
// faults fit one call, both are used up, and the one that was set first decides.
type Fault struct {
	s     *Switch
	match func(Kind) bool // match is set for faults on calls.
	err   error
	taken int

	completion bool // completion is set for faults on completions.
	status     ibv.WCStatus
	ops        []ibv.WCOpcode

	all   bool // whether it stays when it has fired
	left  int  // left is how many calls or completions are left until it fires. s.mu guards it.
	fired atomic.Bool
}

// Fired reports whether the fault has fired. A test that fails the first call, then the
// second and so on is done when its fault has not fired.
func (f *Fault) Fired() bool { return f.fired.Load() }

// Cancel removes a fault that has not fired, or one of FailAll.
func (f *Fault) Cancel() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	if i := slices.Index(f.s.faults, f); i >= 0 {
		f.s.remove(i)
	}
}

// FailNth fails the n-th call from now, counted from 1 over all calls of the given kinds.
// Without a kind all calls count, except those that close an object, which must be named.
// The failed call has no effect. It returns err, or [ErrInjected] if err is nil.
func (s *Switch) FailNth(n int, err error, kinds ...Kind) *Fault {
	return s.set(&Fault{match: matching(kinds), err: err, left: n})
}

// FailAll fails every call that FailNth would count, until the fault is canceled.
func (s *Switch) FailAll(err error, kinds ...Kind) *Fault {
	return s.set(&Fault{match: matching(kinds), err: err, left: 1, all: true})
}

// matching returns whether a call is of one of the kinds, or counts where no kind is given.
func matching(kinds []Kind) func(Kind) bool {
	if len(kinds) == 0 {
		return func(k Kind) bool { return !k.closes() }
	}
	kinds = slices.Clone(kinds)
	return func(k Kind) bool { return slices.Contains(kinds, k) }
}

// FailPost shortens the n-th call from now of kind, [PostSend] or [PostRecv]. The first
// taken work requests are posted. The next one fails with err, or with [ErrInjected] if err
// is nil. In a shorter chain the last request fails.
func (s *Switch) FailPost(n int, kind Kind, taken int, err error) *Fault {
	if kind != PostSend && kind != PostRecv || taken < 0 {
		panic("verbstest: FailPost needs PostSend or PostRecv and a count")
	}
	return s.set(&Fault{match: func(k Kind) bool { return k == kind }, err: err, taken: taken, left: n})
}

// FailCompletion sets the status of the n-th completion from now. It counts the successful
// completions that are polled, from 1, or only those of the given operations. The queue
// pair is moved to the error state before Poll returns. Later completions of the same work
// queue are flushed, because a work queue has no successes after a failure.
func (s *Switch) FailCompletion(n int, status ibv.WCStatus, ops ...ibv.WCOpcode) *Fault {
	if status == ibv.WCSuccess {
		panic("verbstest: FailCompletion needs a status that failed")
	}
	return s.set(&Fault{completion: true, status: status, ops: slices.Clone(ops), left: n})
}

func (s *Switch) set(f *Fault) *Fault {
	if f.left < 1 {
		panic("verbstest: faults count from 1")
	}
	if f.err == nil {
		f.err = ErrInjected
	}
	f.s = s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, f)
	if f.completion {
		s.spoil.Store(true)
	} else {
		s.armed.Add(1)
	}
	return f
}

// remove removes the i-th fault. The caller holds s.mu.
func (s *Switch) remove(i int) {
	if !s.faults[i].completion {
		s.armed.Add(-1)
	}
	s.faults = slices.Delete(s.faults, i, i+1)
}

// meet counts a call for the faults on calls and returns the one that fires.
func (s *Switch) meet(k Kind) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count(func(f *Fault) bool { return !f.completion && f.match(k) })
}

// count counts down every fault that matches, removes those that fire once, and returns the
// first that fires. The caller holds s.mu.
func (s *Switch) count(match func(*Fault) bool) *Fault {
	var first *Fault
	for i := 0; i < len(s.faults); {
		f := s.faults[i]
		if match(f) {
			f.left--
		}
		if f.left > 0 {
			i++
			continue
		}
		if f.all {
			f.left = 1
			i++
		} else {
			s.remove(i)
		}
		f.fired.Store(true)
		if first == nil {
			first = f
		}
	}
	return first
}

// spoilCompletions applies the faults on completions to what was polled.
func (s *Switch) spoilCompletions(dev *switchDevice, wcs []ibv.WC) {
	var failed []*switchQP
	s.mu.Lock()
	for i := range wcs {
		wc := &wcs[i]
		if wc.Status != ibv.WCSuccess {
			continue
		}
		qp := s.qps[qpKey{dev, wc.QPN}]
		if qp != nil && qp.spoilt[queueOf(wc.Op)] {
			fail(wc, ibv.WCFlushErr)
			continue
		}
		f := s.count(func(f *Fault) bool {
			return f.completion && (len(f.ops) == 0 || slices.Contains(f.ops, wc.Op))
		})
		if f == nil {
			continue
		}
		if qp != nil {
			qp.spoilt[queueOf(wc.Op)] = true
			failed = append(failed, qp)
		}
		fail(wc, f.status)
	}
	s.mu.Unlock()
	for _, qp := range failed {
		qp.breakDown()
	}
}

// queueOf returns 1 for the receive queue and 0 for the send queue.
func queueOf(op ibv.WCOpcode) int {
	if op.IsRecv() {
		return 1
	}
	return 0
}

// fail clears the fields of wc that are not valid in a failed completion.
func fail(wc *ibv.WC, status ibv.WCStatus) {
	*wc = ibv.WC{ID: wc.ID, Status: status, QPN: wc.QPN}
}
