package udconn

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

const (
	// SendSlots is how many sends a queue pair has, unless the device has shorter queues.
	SendSlots = 128

	// ChainLength is how many sends are posted at a time.
	ChainLength = 32
)

// sendQueue is the send half of a queue pair.
//
//  1. stage makes a send of a datagram. The datagram goes inline where the device can, else
//     it is copied to the buffer of a slot. The slots are used in turn.
//  2. flush posts what is staged, as one chain. The caller's memory is the caller's again.
//  3. Every send has a completion, so that Close knows which sends are not done yet. The
//     completions are polled for when the queue is full.
//
// sender.mu guards it. All methods but start, stop, drain and closeHandles are called with it
// held.
type sendQueue struct {
	*shared
	by         *sender
	failedWith func(error) // failedWith has the queue pair dropped.
	device     string
	sent       *atomic.Bool // sent is that of the receive half.

	qp     ibv.QP
	pd     ibv.PD
	cq     ibv.CQ
	mem    *regmem.Buffer
	inline int    // inline is how many bytes a send may have without a buffer.
	room   uint64 // room is how many sends may be posted at a time.

	wait         cqwait.Waiter
	posted, done uint64
	staged       int
	wrs          [ChainLength]ibv.SendWR
	sges         [ChainLength]ibv.SGE
	wcs          [32]ibv.WC
	retired      []retiredAH
	creating     int // creating counts the address handles that are being created.
	failed       error
}

// destination is what a send names.
type destination struct {
	ah    ibv.AH
	to    ibv.UDParam
	plain bool   // plain is set for a peer that is not rdmanet.
	group uint16 // group is the port that a datagram to a multicast group is for, else 0.
}

// retiredAH is an address handle that no later send names. It is closed once so many sends
// have completed.
type retiredAH struct {
	ah    ibv.AH
	after uint64
}

// start readies the wait for completions.
func (q *sendQueue) start() {
	q.wait.Init(cqwait.Config{Owner: (*sendOwner)(q), CQ: q.cq, Lock: &q.by.mu, Groups: []*cqwait.Group{&q.by.writers}, BusyPoll: -1})
}

// post sends one datagram.
func (q *sendQueue) post(b []byte, to *destination) error {
	err := q.stage(b, to)
	if err == nil {
		_, err = q.flush()
	}
	return err
}

// stage makes a send of a datagram. b must not change before flush, and sender.mu must be
// held until then.
func (q *sendQueue) stage(b []byte, to *destination) error {
	next := q.posted + uint64(q.staged)
	full := q.staged == len(q.wrs) || next-q.done == q.room && q.reap() == 0
	switch {
	case q.failed != nil:
		return q.failed
	case full:
		return errNoRoom
	}
	sge, wr := q.sges[q.staged:q.staged+1], &q.wrs[q.staged]
	*wr = ibv.SendWR{ID: next, Op: ibv.OpSendImm, Flags: ibv.SendSignaled, Imm: Immediate(q.local.Port()),
		AH: to.ah, RemoteQPN: to.to.QPN, RemoteQKey: to.to.QKey}
	switch {
	case to.plain:
		wr.Imm = q.qp.QPN()
	case to.group != 0:
		wr.Imm = GroupImmediate(q.local.Port(), to.group)
	}
	switch {
	case len(b) == 0:
	case len(b) <= q.inline:
		if fault.Readable(b) < len(b) {
			return errno.EFAULT
		}
		sge[0].Buf = b
		wr.Flags |= ibv.SendInline
		wr.SGL = sge
	default:
		slot := q.mem.B[int(next%q.room)*SlotSize:]
		n, err := fault.Copy(slot[:SlotSize], b)
		if err != nil {
			return err
		}
		sge[0] = ibv.SGE{Buf: slot[:n], LKey: q.mem.LKey}
		wr.SGL = sge
	}
	q.staged++
	return nil
}

// flush posts what is staged, and returns how many sends, the last ones, were not posted.
func (q *sendQueue) flush() (unsent int, err error) {
	k := q.staged
	q.sent.Store(true)
	n, err := q.qp.PostSend(q.wrs[:k])
	clear(q.sges[:k])
	clear(q.wrs[:k])
	q.staged = 0
	q.posted += uint64(n)
	switch {
	case errors.Is(err, ibv.ErrQueueFull):
		err = errNoRoom
	case errors.Is(err, ibv.ErrLimit): // The MTU of the port has become less.
		err = fmt.Errorf("%w: %w", errno.EMSGSIZE, err)
	}
	return k - n, err
}

// reap handles the completions that are there and returns how many.
func (q *sendQueue) reap() (total int) {
	for {
		n, err := q.cq.Poll(q.wcs[:])
		if err != nil {
			q.fail(err)
			return total
		}
		for i := range q.wcs[:n] {
			wc := &q.wcs[i]
			if wc.Status != ibv.WCSuccess {
				q.fail(&ibv.WCError{Status: wc.Status, Op: ibv.WCSend, ID: wc.ID, VendorErr: wc.VendorErr, Device: q.device})
			}
		}
		q.done += uint64(n)
		total += n
		if n < len(q.wcs) {
			break
		}
	}
	for len(q.retired) > 0 && q.retired[0].after <= q.done {
		q.retired[0].ah.Close()
		q.retired = q.retired[1:]
	}
	return total
}

// fail has the queue pair dropped, once.
func (q *sendQueue) fail(err error) {
	if q.failed == nil {
		q.failed = err
		q.failedWith(err)
	}
}

// awaitRoom waits for room in the queue, until something may have changed.
func (q *sendQueue) awaitRoom() {
	q.stalls.Add(1)
	q.wait.Await(&q.by.writers, false)
}

// createAH has the address handle of a destination created. create may take a while, so
// sender.mu is not held meanwhile.
func (q *sendQueue) createAH(to *destination, create func(ibv.PD) (ibv.AH, error)) (err error) {
	if q.failed != nil {
		return q.failed
	}
	q.creating++
	q.by.mu.Unlock()
	to.ah, err = create(q.pd)
	q.by.mu.Lock()
	q.creating--
	q.by.writers.WakeAll()
	return err
}

// retire closes an address handle as soon as no send names it any more.
func (q *sendQueue) retire(ah ibv.AH) {
	if q.posted != q.done {
		q.reap() // Handles would pile up where peers come and go and little is sent.
	}
	if q.posted == q.done && q.staged == 0 {
		ah.Close()
		return
	}
	q.retired = append(q.retired, retiredAH{ah, q.posted + uint64(q.staged)})
}

// stop ends the wait for completions, and waits for the address handles that are being
// created.
func (q *sendQueue) stop() {
	q.by.mu.Lock()
	defer q.by.mu.Unlock()
	q.wait.Stop()
	for q.creating > 0 {
		q.by.writers.Wait()
	}
}

// drain waits for what was posted to be sent. The Conn is closed and has no goroutines any
// more.
func (q *sendQueue) drain(until time.Time) {
	for q.posted != q.done && q.failed == nil {
		if n, err := q.cq.Poll(q.wcs[:]); err != nil {
			return
		} else if n > 0 {
			q.done += uint64(n)
			continue
		}
		if err := q.cq.Arm(false); err != nil {
			return
		}
		n, err := q.cq.Poll(q.wcs[:])
		if q.done += uint64(n); err != nil || n > 0 {
			continue
		}
		if err := q.cq.Wait(until); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
			return
		}
	}
}

// closeHandles closes the address handles that sends may still name. The queue pair has been
// closed.
func (q *sendQueue) closeHandles() (err error) {
	for _, r := range q.retired {
		err = errors.Join(err, r.ah.Close())
	}
	q.retired = nil
	return err
}

// sendOwner is a sendQueue as package cqwait uses it.
type sendOwner sendQueue

func (o *sendOwner) Poll() int         { return (*sendQueue)(o).reap() }
func (o *sendOwner) Arrived() bool     { return false }
func (o *sendOwner) Stopped(bool) bool { return o.failed != nil }
func (o *sendOwner) Over() bool        { return o.failed != nil }
func (o *sendOwner) Silent() bool      { return o.failed != nil }
func (o *sendOwner) Solicited() bool   { return false }
func (o *sendOwner) Background() bool  { return false }
func (o *sendOwner) Failed(err error)  { (*sendQueue)(o).fail(err) }
