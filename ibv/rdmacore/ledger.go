//go:build linux && cgo

package rdmacore

import (
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
)

// ledger lists the requests that were posted to a work queue of siw and have not completed.
// siw does not flush RDMA Reads behind a failed Read and at an orderly end, nor requests
// that are posted while it flushes. So this package flushes all requests. The ID of a
// request for siw is the number of its entry.
type ledger struct {
	mu         sync.Mutex
	ring       []entry // ring has entry n at n modulo its length.
	head, tail uint64
}

// entry is a posted request.
type entry struct {
	id     uint64
	done   bool
	read   bool
	fenced bool
	sink   uint32 // sink is the key of a Read's destination.
}

func (l *ledger) at(n uint64) *entry { return &l.ring[n%uint64(len(l.ring))] }

// add returns the number of the new entry, unless the ledger is full.
func (l *ledger) add(e entry) (n uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tail-l.head == uint64(len(l.ring)) {
		return 0, false
	}
	n = l.tail
	l.tail++
	*l.at(n) = e
	return n, true
}

// takeBack removes the last n entries, which were not posted, and returns how many it has
// removed. Entries that were flushed meanwhile count as posted.
func (l *ledger) takeBack(n int) int {
	if l.ring == nil {
		return n
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, int(l.tail-l.head))
	l.tail -= uint64(n)
	return n
}

// complete returns the ID of entry n, unless it was flushed before. The requests before it
// are done as well: they may have had no completion of their own. An RDMA Read before it is
// done only if entry n is another Read, or was fenced.
func (l *ledger) complete(n uint64) (id uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n-l.head >= l.tail-l.head || l.at(n).done {
		return 0, false
	}
	e := l.at(n)
	e.done = true
	for i := l.head; i < n; i++ {
		if before := l.at(i); !before.read || e.read || e.fenced {
			before.done = true
		}
	}
	for l.head < l.tail && l.at(l.head).done {
		l.head++
	}
	return e.id, true
}

// flush completes the requests that are left.
func (l *ledger) flush(wcs []ibv.WC, qpn uint32) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for ; l.head < l.tail && n < len(wcs); l.head++ {
		if e := l.at(l.head); !e.done {
			wcs[n] = ibv.WC{ID: e.id, Status: ibv.WCFlushErr, QPN: qpn}
			n++
		}
	}
	return n
}

// untouched reports whether nothing has completed yet.
func (l *ledger) untouched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head == 0
}

// used reports whether anything has been posted.
func (l *ledger) used() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tail > 0
}

func (l *ledger) empty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head == l.tail
}

// readsInto reports whether an RDMA Read fills the region with this key.
func (l *ledger) readsInto(lkey uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for n := l.head; n < l.tail; n++ {
		if e := l.at(n); e.read && !e.done && e.sink == lkey {
			return true
		}
	}
	return false
}

// settle sets the ID in a completion of siw. It returns false if the completion must be
// dropped.
func (q *qp) settle(wc *ibv.WC, recv bool) (ok bool) {
	if wc.Status == ibv.WCFlushErr {
		return false // flush completes it later.
	}
	l := &q.sq.ledger
	if recv {
		l = &q.rq.ledger
	}
	wc.ID, ok = l.complete(wc.ID)
	return ok
}

// flush completes what is left in the ledgers whose queue completes on c.
func (q *qp) flush(c *cq, wcs []ibv.WC) (n int) {
	if c == q.sendCQ {
		n = q.sq.ledger.flush(wcs, q.num)
	}
	if c == q.recvCQ {
		n += q.rq.ledger.flush(wcs[n:], q.num)
	}
	return n
}

func (q *qp) unsettled(c *cq) bool {
	return c == q.sendCQ && !q.sq.ledger.empty() || c == q.recvCQ && !q.rq.ledger.empty()
}
