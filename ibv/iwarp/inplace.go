package iwarp

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/fault"
)

// This file implements ibv.InPlaceQP: data is sent from where it lies, and the poster waits
// until the link has it, as the caller of write(2) waits for the socket. So this process keeps
// no copy, which would be lost if it ended.
//
// PostInPlace offers the data to the link. If the link is full, the poster becomes the
// goroutine that writes to it (Flush). If another goroutine does so already, for something
// that was posted before, the poster waits for that one.

// inPlace is the part of transmitter for data that was posted in place. qp.sq.mu guards it.
type inPlace struct {
	n           int       // requests whose data the link has not taken, and that was not copied
	free        sync.Cond // signaled when n becomes 0, and for an interruption
	parked      bool      // the poster is to write to the link, and does not yet
	byCaller    bool      // the poster writes to the link
	interrupted bool
	lost        bool // the link will never take the data
	left        int  // how many requests those are, if lost is set
}

var errCut = fmt.Errorf("%s: the connection ended before everything was sent", Name)

// free1 notes that the memory of one request is free.
func (p *inPlace) free1() {
	if p.n--; p.n == 0 {
		p.free.Broadcast()
	}
}

// stop notes that nothing is sent any more.
func (p *inPlace) stop() {
	if p.n > 0 {
		p.n, p.left, p.lost, p.parked = 0, p.n, true, false
		p.free.Broadcast()
	}
}

// PostInPlace implements ibv.InPlaceQP.
func (q *qp) PostInPlace(wrs []ibv.SendWR) (n int, lent bool, err error) {
	st := q.stream.Load()
	if st == nil || st.direct == nil {
		n, err = q.PostSend(wrs)
		return n, false, err
	}
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	p := &st.tx.inPlace
	late := st.tx.stopped
	p.lost, p.left = late, 0
	if n, err = q.queueSends(wrs, true); n > 0 && q.State() == ibv.QPSRTS {
		st.push(true)
	}
	if st.tx.stopped {
		p.stop()
	}
	if late {
		p.left = n // Some may have been flushed, and none was taken.
	}
	return n, p.n > 0 || p.lost, err
}

// flusherLeaves notes that the poster does not write to the link any more. Others may.
func (st *stream) flusherLeaves() {
	p := &st.tx.inPlace
	if p.byCaller && p.interrupted && !st.tx.stopped {
		st.direct.resumeWrite()
	}
	p.byCaller = false
}

// Flush implements ibv.InPlaceQP.
func (q *qp) Flush() (left int, err error) {
	st := q.stream.Load()
	q.sq.mu.Lock()
	t := &st.tx
	p := &t.inPlace
	for (p.n > 0 || p.lost && !t.announced) && !p.interrupted {
		if !p.parked {
			p.free.Wait()
			continue
		}
		p.parked, p.byCaller = false, true
		q.sq.mu.Unlock()
		err := st.link.write(t.flush)
		q.sq.mu.Lock()
		st.flusherLeaves()
		switch {
		case err == nil || t.stopped:
		case p.interrupted && errors.Is(err, os.ErrDeadlineExceeded):
			p.parked = p.n > 0
		default:
			t.err = err
			st.txFailed()
		}
	}
	p.interrupted = false
	left, lost, announced, err := p.n, p.lost, t.announced, t.err
	if lost {
		left = max(p.left, 1)
	}
	q.sq.mu.Unlock()
	if !lost || !announced {
		return left, nil // Keep tells why if it is lost.
	}
	if err == nil {
		err = errCut
	}
	if !st.holding.Load() {
		st.awaitTold()
	}
	return left, err
}

// awaitTold waits until the end of the stream has been told, which ends with the role.
func (st *stream) awaitTold() {
	st.role.Lock()
	defer st.role.Unlock()
}

// FlushInterrupt implements ibv.InPlaceQP.
func (q *qp) FlushInterrupt() {
	st := q.stream.Load()
	if st == nil || st.direct == nil {
		return
	}
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	p := &st.tx.inPlace
	p.interrupted = true
	p.free.Broadcast()
	if p.byCaller && !st.tx.stopped {
		st.direct.interruptWrite()
	}
}

// Keep implements ibv.InPlaceQP.
func (q *qp) Keep() (left int, err error) {
	st := q.stream.Load()
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	t := &st.tx
	p := &t.inPlace
	p.interrupted = false
	switch {
	case p.lost && t.err != nil:
		return p.left, t.err
	case p.lost:
		return p.left, errCut
	case p.n == 0:
		return 0, nil
	}
	st.ownOut()
	q.own(0)
	for i := range q.sq.reqs.Len() {
		q.sq.at(i).lent = false
	}
	left, p.n = p.n, 0
	if t.unreadable {
		t.err = fault.ErrMidway
		st.txFailed()
		return left, t.err
	}
	if p.parked {
		p.parked = false
		go st.flush()
	}
	return 0, nil
}
