package fabric

import (
	"fmt"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// sendQueue is the send queue of a connection. A request is in it while it is executed. It
// stays there while it waits for a receive of the peer, for a peer that does not answer, or
// for the requests before it.
type sendQueue struct {
	mu    sync.Mutex
	reqs  ring.Ring[sendReq]
	reads bool        // the two ends have agreed on RDMA Reads
	retry *time.Timer // set while the peer does not answer the oldest request
}

// sendReq is a work request in a send queue.
type sendReq struct {
	id     uint64
	op     ibv.Opcode
	flags  ibv.SendFlags
	size   int // bytes
	imm    uint32
	invKey uint32
	rkey   uint32
	raddr  uint64
	sgl    []ibv.SGE
	copied []byte // memory for inline data of a request that waits
}

// drop removes the request, which is the oldest one. A later request uses its memory again.
func (r *sendReq) drop(reqs *ring.Ring[sendReq]) {
	clear(r.sgl)
	reqs.Drop()
}

// retryTime is how long a request goes unanswered before it fails. A queue pair that is
// closed or in the error state answers nothing.
const retryTime = time.Second

// PostSend executes the requests that need not wait.
func (q *rcQP) PostSend(wrs []ibv.SendWR) (int, error) {
	n, failure, err := q.send(wrs)
	q.settle(failure)
	if err != nil {
		return n, fmt.Errorf("%s: post send: %w", deviceName, err)
	}
	return n, nil
}

// send is PostSend up to a failure, which it returns for settle.
func (q *rcQP) send(wrs []ibv.SendWR) (n int, failure ibv.WCStatus, err error) {
	s := &q.sq
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case q.closed:
		return 0, failure, fmt.Errorf("queue pair closed: %w", ibv.ErrState)
	case q.State() == ibv.QPSInit:
		return 0, failure, fmt.Errorf("no connection yet: %w", ibv.ErrState)
	}
	for ; n < len(wrs); n++ {
		if q.State() == ibv.QPSError {
			q.endSend(wrs[n].ID, wrs[n].Op, ibv.WCFlushErr)
			continue
		}
		if err := q.push(&wrs[n]); err != nil {
			return n, failure, err
		}
		failure = q.run()
		if s.reqs.Len() > 0 {
			s.reqs.At(s.reqs.Len() - 1).own()
		}
	}
	return n, failure, nil
}

// push checks a request and appends it. The caller holds sq.mu.
func (q *rcQP) push(wr *ibv.SendWR) error {
	switch wr.Op {
	case ibv.OpSend, ibv.OpSendImm, ibv.OpSendInv, ibv.OpWrite, ibv.OpRead:
	default:
		return ibv.Unsupported(deviceName, wr.Op.String())
	}
	flags := wr.Flags
	if q.all {
		flags |= ibv.SendSignaled
	}
	if wr.Op == ibv.OpRead {
		flags &^= ibv.SendInline
	}
	size, fits := sizeOf(wr.SGL, maxMessage)
	switch {
	case q.sq.reqs.Len() >= q.cap.MaxSendWR:
		return ibv.ErrQueueFull
	case wr.Op == ibv.OpRead && !q.sq.reads:
		return fmt.Errorf("the two ends have agreed on no %s: %w", wr.Op, ibv.ErrLimit)
	case len(wr.SGL) > q.cap.MaxSendSGE || !fits:
		return fmt.Errorf("%s of %d elements: %w", wr.Op, len(wr.SGL), ibv.ErrLimit)
	case flags&ibv.SendInline != 0 && size > q.cap.MaxInline:
		return fmt.Errorf("inline %s of %d bytes: %w", wr.Op, size, ibv.ErrLimit)
	}
	r := q.sq.reqs.Next()
	*r = sendReq{id: wr.ID, op: wr.Op, flags: flags, size: size, imm: wr.Imm, invKey: wr.InvKey, rkey: wr.RKey,
		raddr: wr.RemoteAddr, sgl: append(r.sgl[:0], wr.SGL...), copied: r.copied}
	return nil
}

// own copies the inline data of a request that waits: the caller of PostSend may change it.
func (r *sendReq) own() {
	if r.flags&ibv.SendInline == 0 || r.size == 0 {
		return
	}
	r.copied = r.copied[:0]
	for i := range r.sgl {
		r.copied = append(r.copied, r.sgl[i].Buf...)
	}
	clear(r.sgl)
	r.sgl = append(r.sgl[:0], ibv.SGE{Buf: r.copied})
}

// run executes the requests in order until one has to wait or fails. It returns the status of
// the one that failed, or success. The caller holds sq.mu.
func (q *rcQP) run() ibv.WCStatus {
	for q.sq.reqs.Len() > 0 {
		r := q.sq.reqs.At(0)
		status, done := q.execute(r)
		if !done {
			break
		}
		if status == ibv.WCSuccess && !q.complete(r) {
			status = ibv.WCFlushErr // the completion is lost
		}
		if status != ibv.WCSuccess {
			q.fail(status)
			return status
		}
		r.drop(&q.sq.reqs)
	}
	return ibv.WCSuccess
}

// execute executes a request and returns the status with which it ends. done is false if it
// has to wait. An RDMA Read is complete on return, so a fence has nothing to wait for. The
// caller holds sq.mu.
func (q *rcQP) execute(r *sendReq) (status ibv.WCStatus, done bool) {
	if r.op == ibv.OpSendInv { // no copy may be under way by a key that is taken back
		q.f.gate.Lock()
		defer q.f.gate.Unlock()
	} else {
		q.f.gate.RLock()
		defer q.f.gate.RUnlock()
	}
	peer := q.peer.Load()
	switch {
	case r.flags&ibv.SendInline == 0 && !q.pd.mayUse(r.sgl, r.op == ibv.OpRead):
		return ibv.WCLocProtErr, true
	case peer.State() != ibv.QPSRTS:
		q.startRetry()
		return ibv.WCSuccess, false
	case r.op == ibv.OpWrite || r.op == ibv.OpRead:
		return peer.access(r), true
	}
	return peer.receive(r)
}

// complete adds the completion of a request that succeeded, if it is to have one. It reports
// whether the completion queue had room.
func (q *rcQP) complete(r *sendReq) bool {
	if r.flags&ibv.SendSignaled == 0 {
		return true
	}
	wc := ibv.WC{ID: r.id, Op: wcOp(r.op), QPN: q.num}
	if r.op == ibv.OpRead {
		wc.ByteLen = uint32(r.size)
	}
	return q.sendCQ.add(&wc, false)
}

// endSend adds the completion of a request that did not succeed.
func (q *rcQP) endSend(id uint64, op ibv.Opcode, status ibv.WCStatus) {
	q.sendCQ.add(&ibv.WC{ID: id, Status: status, Op: wcOp(op), QPN: q.num}, false)
}

func wcOp(op ibv.Opcode) ibv.WCOpcode {
	switch op {
	case ibv.OpWrite:
		return ibv.WCWrite
	case ibv.OpRead:
		return ibv.WCRead
	}
	return ibv.WCSend
}

// settle brings a failure of the send queue to the peer. The peer's queue pair fails too if
// it has refused the request. Else its own requests may wait for a receive that does not
// come any more. The caller holds no lock.
func (q *rcQP) settle(failure ibv.WCStatus) {
	switch failure {
	case ibv.WCSuccess:
	case ibv.WCRemInvReqErr, ibv.WCRemAccessErr, ibv.WCRemOpErr:
		q.peer.Load().refuse(failure)
	default:
		q.peer.Load().resume()
	}
}

// resume executes the requests that have waited for the peer. The caller holds no lock.
func (q *rcQP) resume() {
	q.sq.mu.Lock()
	failure := q.run()
	q.sq.mu.Unlock()
	q.settle(failure)
}

// startRetry has the oldest request fail in a while, as the peer does not answer it. The
// caller holds sq.mu.
func (q *rcQP) startRetry() {
	if q.sq.retry == nil {
		q.sq.retry = time.AfterFunc(retryTime, q.retriesExceeded)
	}
}

// retriesExceeded fails the oldest request. The peer has not answered since: its queue pair
// does not leave the error state.
func (q *rcQP) retriesExceeded() {
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	if q.sq.retry != nil {
		q.fail(ibv.WCRetryExcErr)
	}
}

// stopRetry stops the timer of startRetry. The caller holds mu.
func (s *sendQueue) stopRetry() {
	if s.retry != nil {
		s.retry.Stop()
		s.retry = nil
	}
}
