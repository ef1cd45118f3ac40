package fabric

import (
	"fmt"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// rcQP implements ibv.QP: one end of a connection.
//
//	INIT --establish--> RTS --fail--> ERR
//	  \______________________________/ SetError before the connection is up
//
// state changes while sq.mu and Fabric.gate are held, so a goroutine that holds either can
// rely on it. rq.mu is held as well for the change to ERR, and when closed is set.
type rcQP struct {
	qpBase
	id   *rcID
	all  bool                 // every send is signalled
	peer atomic.Pointer[rcQP] // set once, on the way to RTS

	state  atomic.Uint32 // an ibv.QPState
	closed bool

	sq sendQueue
	rq recvQueue
}

func (i *rcID) CreateQP(p ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if i.closed || i.qp != nil {
		return nil, fmt.Errorf("%s: create queue pair: %w", deviceName, ibv.ErrState)
	}
	base, err := i.f.newBase(p, &init, maxInline)
	if err != nil {
		return nil, fmt.Errorf("%s: create queue pair: %w", deviceName, err)
	}
	q := &rcQP{qpBase: base, id: i, all: init.SignalAll}
	q.state.Store(uint32(ibv.QPSInit))
	i.qp = q
	i.f.rcQPs[q] = struct{}{}
	return q, nil
}

func (q *rcQP) State() ibv.QPState { return ibv.QPState(q.state.Load()) }

// establish connects two queue pairs, with the number of RDMA Reads that each may have
// outstanding. It reports whether both were in the state for that.
func establish(a, b *rcQP, readsOfA, readsOfB int) bool {
	first, second := a, b
	if first.num > second.num {
		first, second = second, first
	}
	first.sq.mu.Lock()
	defer first.sq.mu.Unlock()
	second.sq.mu.Lock()
	defer second.sq.mu.Unlock()
	a.f.gate.Lock()
	defer a.f.gate.Unlock()
	if a.State() != ibv.QPSInit || b.State() != ibv.QPSInit {
		return false
	}
	a.sq.reads, b.sq.reads = readsOfA > 0, readsOfB > 0
	a.peer.Store(b)
	b.peer.Store(a)
	a.state.Store(uint32(ibv.QPSRTS))
	b.state.Store(uint32(ibv.QPSRTS))
	return true
}

func (q *rcQP) PostRecv(wrs []ibv.RecvWR) (int, error) {
	n, wanted, err := q.pushRecvs(wrs)
	if wanted {
		q.peer.Load().resume()
	}
	if err != nil {
		return n, fmt.Errorf("%s: post receive: %w", deviceName, err)
	}
	return n, nil
}

// pushRecvs appends receives. wanted reports whether a request of the peer has waited for
// one.
func (q *rcQP) pushRecvs(wrs []ibv.RecvWR) (n int, wanted bool, err error) {
	s := &q.rq
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.closed {
		return 0, false, fmt.Errorf("queue pair closed: %w", ibv.ErrState)
	}
	for ; n < len(wrs); n++ {
		if q.State() == ibv.QPSError {
			q.flushRecv(wrs[n].ID)
		} else if err = pushRecv(&s.reqs, &wrs[n], &q.cap); err != nil {
			break
		}
	}
	if s.reqs.Len() > 0 {
		wanted, s.wanted = s.wanted, false
	}
	return n, wanted, err
}

// receive puts a message of the peer into the oldest receive and returns the status with
// which the peer's request ends. done is false if there is no receive. The caller holds the
// peer's sq.mu, and Fabric.gate: for writing if the message takes a key back.
func (q *rcQP) receive(m *sendReq) (status ibv.WCStatus, done bool) {
	r, ok := q.rq.take()
	if !ok {
		return ibv.WCSuccess, false
	}
	wc := ibv.WC{ID: r.id, Op: ibv.WCRecv, QPN: q.num, ByteLen: uint32(m.size)}
	switch {
	case m.size > r.size:
		wc.Status, status = ibv.WCLocLenErr, ibv.WCRemInvReqErr
	case !q.pd.mayUse(r.sgl, true):
		wc.Status, status = ibv.WCLocProtErr, ibv.WCRemOpErr
	case m.op == ibv.OpSendInv && !q.invalidate(m.invKey):
		wc.Status, status = ibv.WCFlushErr, ibv.WCRemAccessErr
	default:
		move(r.sgl, m.sgl)
	}
	switch m.op {
	case ibv.OpSendImm:
		wc.Flags, wc.Imm = ibv.WCWithImm, m.imm
	case ibv.OpSendInv:
		wc.Flags, wc.InvKey = ibv.WCWithInv, m.invKey
	}
	if !q.recvCQ.add(&wc, m.flags&ibv.SendSolicited != 0) && status == ibv.WCSuccess {
		status = ibv.WCRemOpErr // the completion is lost
	}
	return status, true
}

// access executes an RDMA Write or Read of the peer and returns the status with which it
// ends. The caller holds the peer's sq.mu, and Fabric.gate.
func (q *rcQP) access(r *sendReq) ibv.WCStatus {
	if r.size == 0 {
		return ibv.WCSuccess // without bytes the key is not looked at
	}
	right := ibv.AccessRemoteWrite
	if r.op == ibv.OpRead {
		right = ibv.AccessRemoteRead
	}
	b, ok := q.window(r.rkey, r.raddr, r.size, right)
	if !ok {
		return ibv.WCRemAccessErr
	}
	window := []ibv.SGE{{Buf: b}}
	if r.op == ibv.OpRead {
		move(r.sgl, window)
	} else {
		move(window, r.sgl)
	}
	return ibv.WCSuccess
}

func (q *rcQP) flushRecv(id uint64) {
	q.recvCQ.add(&ibv.WC{ID: id, Status: ibv.WCFlushErr, Op: ibv.WCRecv, QPN: q.num}, false)
}

// fail moves the queue pair to the error state and flushes both queues. The oldest request
// of the send queue ends with status. The caller holds sq.mu.
func (q *rcQP) fail(status ibv.WCStatus) {
	q.f.gate.Lock()
	defer q.f.gate.Unlock()
	q.rq.mu.Lock()
	defer q.rq.mu.Unlock()
	q.state.Store(uint32(ibv.QPSError))
	q.sq.stopRetry()
	for q.sq.reqs.Len() > 0 {
		r := q.sq.reqs.At(0)
		q.endSend(r.id, r.op, status)
		status = ibv.WCFlushErr
		r.drop(&q.sq.reqs)
	}
	for q.rq.reqs.Len() > 0 {
		r := q.rq.reqs.At(0)
		q.flushRecv(r.id)
		r.drop(&q.rq.reqs)
	}
}

// end moves the queue pair to the error state and reports whether it was in another one
// before.
func (q *rcQP) end() bool {
	q.sq.mu.Lock()
	alive := !q.closed && q.State() != ibv.QPSError
	if alive {
		q.fail(ibv.WCFlushErr)
	}
	q.sq.mu.Unlock()
	if peer := q.peer.Load(); peer != nil && alive {
		peer.resume() // its requests may wait for a receive
	}
	return alive
}

// refuse ends the queue pair because a request of the peer, which ended with status, was not
// allowed.
func (q *rcQP) refuse(status ibv.WCStatus) {
	if q.end() {
		q.id.raise(ibv.Event{Kind: ibv.EventQPFatal,
			Err: fmt.Errorf("%s: a request of the peer was refused: %w", deviceName, status)})
	}
}

func (q *rcQP) SetError() error {
	if q.isClosed() {
		return fmt.Errorf("%s: queue pair closed: %w", deviceName, ibv.ErrState)
	}
	q.end()
	return nil
}

func (q *rcQP) isClosed() bool {
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	return q.closed
}

func (q *rcQP) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	if q.isClosed() {
		return nil, fmt.Errorf("%s: register memory: queue pair closed: %w", deviceName, ibv.ErrState)
	}
	m, err := q.pd.register(q, buf, access)
	if err != nil {
		return nil, fmt.Errorf("%s: register memory: %w", deviceName, err)
	}
	return m, nil
}

func (q *rcQP) Close() error {
	if !q.drop() {
		return fmt.Errorf("%s: queue pair closed twice: %w", deviceName, ibv.ErrState)
	}
	if peer := q.peer.Load(); peer != nil {
		peer.resume() // its requests may wait for a receive
	}
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	delete(q.f.rcQPs, q)
	q.id.qp = nil
	q.release()
	return nil
}

// drop ends the queue pair, without a completion for the requests in its queues. It reports
// whether the queue pair was open.
func (q *rcQP) drop() bool {
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	q.f.gate.Lock() // after the copies that are under way
	defer q.f.gate.Unlock()
	q.rq.mu.Lock()
	defer q.rq.mu.Unlock()
	if q.closed {
		return false
	}
	q.closed = true
	q.state.Store(uint32(ibv.QPSError))
	q.sq.stopRetry()
	q.sq.reqs, q.rq.reqs, q.rq.spare = ring.Ring[sendReq]{}, ring.Ring[recvReq]{}, nil
	return true
}

// AttachMcast is refused: groups are for datagrams.
func (q *rcQP) AttachMcast(ibv.GID, uint16) error { return errConnected }

// DetachMcast is refused: groups are for datagrams.
func (q *rcQP) DetachMcast(ibv.GID, uint16) error { return errConnected }
