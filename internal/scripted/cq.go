package scripted

import (
	"bytes"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// cq is a completion queue that can hold completions back. It belongs to the endpoint of
// the queue pair that was created with it last.
type cq struct {
	ibv.CQ
	p     *Provider
	asked int // asked is the depth that was asked for.

	poll sync.Mutex // poll is held for the whole of Poll, so that completions keep their order.

	mu          sync.Mutex
	end         *Endpoint
	kept        []ibv.WC
	armed, all  bool // armed is set while the queue is armed, and all if it is for all completions.
	waiting     []uint64
	most        int // most is how many goroutines were in Wait at a time at most.
	interrupted bool
	poller      uint64
}

// holds reports whether a completion is held back.
func (q *cq) holds(e *Endpoint, wc *ibv.WC) bool {
	if e == nil {
		return false
	}
	if f := e.script().hold; f != nil && f(wc) {
		return true
	}
	q.p.mu.Lock()
	f := q.p.hold
	q.p.mu.Unlock()
	return f != nil && f(e, wc)
}

func (q *cq) endpoint() *Endpoint {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.end
}

func (q *cq) Poll(wcs []ibv.WC) (n int, err error) {
	q.poll.Lock()
	defer q.poll.Unlock()
	e, g := q.endpoint(), Goroutine()
	q.mu.Lock()
	q.poller = g
	kept := q.kept
	q.mu.Unlock()
	if e == nil {
		return q.CQ.Poll(wcs)
	}
	for i := 0; i < len(kept) && n < len(wcs); {
		if q.holds(e, &kept[i]) && !e.passes() {
			i++
			continue
		}
		wcs[n] = kept[i]
		n++
		kept = slices.Delete(slices.Clone(kept), i, i+1)
	}
	for n < len(wcs) {
		k, err := q.CQ.Poll(wcs[n : n+1])
		if err != nil {
			return n, err
		}
		if k == 0 {
			break
		}
		if q.holds(e, &wcs[n]) && !e.passes() {
			kept = append(slices.Clone(kept), wcs[n])
		} else {
			n++
		}
	}
	q.mu.Lock()
	q.kept = kept
	q.mu.Unlock()
	if len(kept) > 0 {
		q.changed() // What is held may have changed since Poll asked.
	}
	for i := range wcs[:n] {
		if e.IsSend(&wcs[i]) {
			e.forget(&wcs[i])
		}
	}
	if f := e.script().polled; n > 0 && f != nil {
		f(wcs[:n])
	}
	return n, nil
}

func (q *cq) Arm(solicitedOnly bool) error {
	if e := q.endpoint(); e != nil {
		if f := e.script().arm; f != nil {
			if err := f(solicitedOnly); err != nil {
				return err
			}
		}
	}
	q.mu.Lock()
	q.armed, q.all = true, q.all || !solicitedOnly
	q.mu.Unlock()
	return q.CQ.Arm(solicitedOnly)
}

func (q *cq) Wait(deadline time.Time) error {
	g := Goroutine()
	q.mu.Lock()
	q.waiting = append(q.waiting, g)
	q.most = max(q.most, len(q.waiting))
	q.mu.Unlock()
	err := q.CQ.Wait(deadline)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = slices.Delete(q.waiting, slices.Index(q.waiting, g), slices.Index(q.waiting, g)+1)
	q.armed, q.all, q.interrupted = false, false, false
	return err
}

func (q *cq) Interrupt() {
	q.mu.Lock()
	q.interrupted = true
	q.mu.Unlock()
	q.CQ.Interrupt()
}

// changed wakes the goroutine that waits, if a completion need not be held back any more
// and the queue is armed for it.
func (q *cq) changed() {
	q.mu.Lock()
	e, kept := q.end, q.kept
	armed, all := q.armed, q.all
	q.mu.Unlock()
	for i := range kept {
		if (all || armed && !e.IsSend(&kept[i])) && (!q.holds(e, &kept[i]) || e.script().pass > 0) {
			q.Interrupt()
			return
		}
	}
}

// Goroutine returns the number of the calling goroutine, as stack traces show it.
func Goroutine() uint64 {
	var b [64]byte
	head := bytes.TrimPrefix(b[:runtime.Stack(b[:], false)], []byte("goroutine "))
	n, _ := strconv.ParseUint(string(head[:max(0, bytes.IndexByte(head, ' '))]), 10, 64)
	return n
}
