package iwarp

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// qp implements ibv.QP. It has the two queues and the rules for the work in them. The
// stream carries the work to the peer.
//
//	INIT --start--> RTS --fail--> ERR
//	  \______________________________/ SetError before the connection is up
//
// Lock order: sq.mu, rq.mu, pd.gate, cq.mu.
type qp struct {
	dev    *device
	pd     *pd
	num    uint32
	cap    ibv.QPCap
	all    bool        // all is set if every send is signaled.
	holds  atomic.Bool // a Send that finds no receive waits for one
	sendCQ *cq
	recvCQ *cq

	state  atomic.Uint32 // state is an ibv.QPState.
	closed atomic.Bool
	stream atomic.Pointer[stream] // stream is set once, before the state becomes RTS.

	sq sendQueue
	rq recvQueue
}

// sendQueue is the send queue. The oldest requests, sent of them, are with the stream, and
// complete in order. The others wait for the stream.
type sendQueue struct {
	mu   sync.Mutex
	reqs ring.Ring[sendReq]
	sent int
}

// sendReq is a work request in the send queue.
type sendReq struct {
	id     uint64
	op     ibv.Opcode
	flags  ibv.SendFlags
	done   bool // done is set if the request completes when all before it have.
	status ibv.WCStatus
	size   int    // size is in bytes.
	end    uint64 // end is the position in the stream's bytes at which this request ends.
	invKey uint32
	rkey   uint32
	raddr  uint64
	sgl    []segment
	copied *[]byte // copied is the memory of sgl if the device had to copy the data.
	lent   bool    // the post's caller waits until the link has the data
}

// segment is an SGE with its region. Inline data has no region.
type segment struct {
	buf []byte
	mr  *mr
}

// recvQueue is the receive queue.
type recvQueue struct {
	mu   sync.Mutex
	reqs ring.Ring[recvReq]
}

// recvReq is a work request in the receive queue. Most have one element, which needs no
// memory of its own.
type recvReq struct {
	id   uint64
	size int
	one  [1]segment
	more []segment // more is used in place of one if there are several.
}

func (r *recvReq) sgl() []segment {
	if r.more != nil {
		return r.more
	}
	return r.one[:]
}

func newQP(d *device, p *pd, init *ibv.QPInit) (*qp, error) {
	c := init.Cap
	switch {
	case c.MaxSendWR < 0 || c.MaxRecvWR < 0 || c.MaxSendSGE < 0 || c.MaxRecvSGE < 0 || c.MaxInline < 0:
		return nil, fmt.Errorf("%s: create queue pair: negative capacity: %w", Name, syscall.EINVAL)
	case c.MaxSendWR > maxQPWR || c.MaxRecvWR > maxQPWR:
		return nil, fmt.Errorf("%s: create queue pair: %d sends and %d receives (limit %d each): %w",
			Name, c.MaxSendWR, c.MaxRecvWR, maxQPWR, ibv.ErrLimit)
	case c.MaxSendSGE > maxSGE || c.MaxRecvSGE > maxSGE:
		return nil, fmt.Errorf("%s: create queue pair: %d and %d elements a request (limit %d): %w",
			Name, c.MaxSendSGE, c.MaxRecvSGE, maxSGE, ibv.ErrLimit)
	case c.MaxInline > maxInline:
		return nil, fmt.Errorf("%s: create queue pair: %d inline bytes (limit %d): %w",
			Name, c.MaxInline, maxInline, ibv.ErrLimit)
	}
	sendCQ, ok1 := init.SendCQ.(*cq)
	recvCQ, ok2 := init.RecvCQ.(*cq)
	if !ok1 || !ok2 {
		return nil, fmt.Errorf("%s: create queue pair: completion queues of another device: %w", Name, syscall.EINVAL)
	}
	c.MaxInline = max(c.MaxInline, maxInline)
	c.MaxSendSGE = max(c.MaxSendSGE, 1)
	c.MaxRecvSGE = max(c.MaxRecvSGE, 1)
	q := &qp{dev: d, pd: p, num: d.qpn.Add(1), cap: c, all: init.SignalAll, sendCQ: sendCQ, recvCQ: recvCQ}
	q.holds.Store(init.HoldSends)
	q.state.Store(uint32(ibv.QPSInit))
	if err := p.addQP(); err != nil {
		return nil, fmt.Errorf("%s: create queue pair: %w", Name, err)
	}
	if err := sendCQ.attach(q); err != nil {
		p.removeQP()
		return nil, fmt.Errorf("%s: create queue pair: send completion queue: %w", Name, err)
	}
	if err := recvCQ.attach(q); err != nil {
		sendCQ.detach(q)
		p.removeQP()
		return nil, fmt.Errorf("%s: create queue pair: receive completion queue: %w", Name, err)
	}
	return q, nil
}

func (q *qp) QPN() uint32        { return q.num }
func (q *qp) Cap() ibv.QPCap     { return q.cap }
func (q *qp) State() ibv.QPState { return ibv.QPState(q.state.Load()) }

// PostSend queues the requests, and lets the stream take what it can before it returns.
// Then it copies the inline data that is left.
func (q *qp) PostSend(wrs []ibv.SendWR) (n int, err error) {
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	if n, err = q.queueSends(wrs, false); n > 0 && q.State() == ibv.QPSRTS {
		st := q.stream.Load()
		if !st.tx.flushing {
			st.push(false)
			st.ownOut()
		}
		q.own(q.sq.reqs.Len() - n)
		if st.tx.unreadable {
			// A message has begun and cannot be sent to its end.
			err = cmp.Or(err, fault.ErrMidway)
		}
	}
	return n, err
}

// queueSends appends requests to the queue, and returns how many. In the error state it
// flushes them. With inPlace their inline data is lent by the caller. The caller holds sq.mu.
func (q *qp) queueSends(wrs []ibv.SendWR, inPlace bool) (n int, err error) {
	if q.closed.Load() {
		return 0, fmt.Errorf("%s: post send: queue pair closed: %w", Name, ibv.ErrState)
	}
	st := q.stream.Load()
	switch q.State() {
	case ibv.QPSError:
		for i := range wrs {
			q.flushSend(wrs[i].ID, wrs[i].Op)
		}
		return len(wrs), nil
	case ibv.QPSRTS:
	default:
		return 0, fmt.Errorf("%s: post send in state %s: %w", Name, q.State(), ibv.ErrState)
	}
	if st.tx.draining {
		return 0, fmt.Errorf("%s: post send after disconnect: %w", Name, ibv.ErrState)
	}
	for i := range wrs {
		if err = q.pushSend(&wrs[i]); err != nil {
			return i, err
		}
		if r := q.sq.at(q.sq.reqs.Len() - 1); inPlace && r.flags&ibv.SendInline != 0 && r.size > 0 {
			r.lent = true
			st.tx.inPlace.n++
		}
	}
	return len(wrs), nil
}

// pushSend checks a request and appends it. The caller holds sq.mu.
func (q *qp) pushSend(wr *ibv.SendWR) error {
	s := &q.sq
	if s.reqs.Len() == q.cap.MaxSendWR {
		return fmt.Errorf("%s: post send: %w", Name, ibv.ErrQueueFull)
	}
	switch wr.Op {
	case ibv.OpSend, ibv.OpSendInv, ibv.OpWrite, ibv.OpRead, ibv.OpLocalInv:
	default:
		return ibv.Unsupported(Name, wr.Op.String())
	}
	if wr.Op == ibv.OpRead && q.stream.Load().ord == 0 {
		return fmt.Errorf("%s: post %s: the peers agreed on none at set-up: %w", Name, wr.Op, ibv.ErrLimit)
	}
	if len(wr.SGL) > q.cap.MaxSendSGE || wr.Op == ibv.OpRead && len(wr.SGL) > 1 {
		return fmt.Errorf("%s: post %s of %d elements: %w", Name, wr.Op, len(wr.SGL), ibv.ErrLimit)
	}
	r := s.reqs.Next()
	sgl := r.sgl[:0]
	*r = sendReq{id: wr.ID, op: wr.Op, flags: wr.Flags, invKey: wr.InvKey, rkey: wr.RKey, raddr: wr.RemoteAddr}
	if q.all {
		r.flags |= ibv.SendSignaled
	}
	if wr.Op == ibv.OpRead || wr.Op == ibv.OpLocalInv {
		r.flags &^= ibv.SendInline
	}
	for i := range wr.SGL {
		sgl = append(sgl, segment{buf: wr.SGL[i].Buf})
		if len(wr.SGL[i].Buf) > maxMsgSize-r.size { // the sum may be more than an int holds
			s.reqs.Undo()
			return fmt.Errorf("%s: post %s of more than %d bytes: %w", Name, wr.Op, maxMsgSize, ibv.ErrLimit)
		}
		r.size += len(wr.SGL[i].Buf)
	}
	r.sgl = sgl
	if r.flags&ibv.SendInline != 0 {
		if r.size > q.cap.MaxInline {
			s.reqs.Undo()
			return fmt.Errorf("%s: post inline %s of %d bytes: %w", Name, wr.Op, r.size, ibv.ErrLimit)
		}
	} else if len(wr.SGL) > 0 {
		q.pd.gate.RLock()
		for i := range wr.SGL {
			m, status := q.pd.local(&wr.SGL[i], wr.Op == ibv.OpRead)
			if status != ibv.WCSuccess {
				r.status = status
				break
			}
			r.sgl[i].mr = m
		}
		q.pd.gate.RUnlock()
	}
	return nil
}

// at returns the i-th request, counted from the oldest.
func (s *sendQueue) at(i int) *sendReq { return s.reqs.At(i) }

// own copies the inline data of requests that the stream has not taken, from the i-th on. The
// stream copies what it has taken (ownOut). The caller holds sq.mu.
func (q *qp) own(i int) {
	s, t := &q.sq, &q.stream.Load().tx
	next := s.sent
	if t.msg.active && !t.msg.resp {
		next++ // The stream has a part of it, and copies all of it.
	}
	for i = max(i, next); i < s.reqs.Len(); i++ {
		r := s.at(i)
		if r.flags&ibv.SendInline == 0 || r.size == 0 || r.copied != nil {
			continue
		}
		r.copied = getBlock(r.size)
		b := (*r.copied)[:0]
		for _, seg := range r.sgl {
			b = t.appendOut(b, seg.buf)
		}
		clear(r.sgl)
		r.sgl = append(r.sgl[:0], segment{buf: b})
	}
}

// reap completes what is done at the head of the send queue. The caller holds
// sq.mu.
func (q *qp) reap(from *stream) {
	s := &q.sq
	ok := true
	for s.sent > 0 && s.at(0).done {
		ok = q.completeSend(s.at(0), from) && ok
		s.sent--
		s.drop()
	}
	if !ok {
		q.overrun()
	}
}

// drop removes the oldest request. The caller holds sq.mu.
func (s *sendQueue) drop() {
	r := s.at(0)
	putBlock(r.copied)
	clear(r.sgl)
	*r = sendReq{sgl: r.sgl[:0]}
	s.reqs.Drop()
}

func (q *qp) completeSend(r *sendReq, from *stream) bool {
	if r.status == ibv.WCSuccess && r.flags&ibv.SendSignaled == 0 {
		return true
	}
	wc := ibv.WC{ID: r.id, Status: r.status, Op: wcOp(r.op), QPN: q.num}
	if r.op == ibv.OpRead {
		wc.ByteLen = uint32(r.size)
	}
	return q.complete(q.sendCQ, &wc, false, from)
}

func (q *qp) flushSend(id uint64, op ibv.Opcode) {
	q.complete(q.sendCQ, &ibv.WC{ID: id, Status: ibv.WCFlushErr, Op: wcOp(op), QPN: q.num}, false, nil)
}

func (q *qp) flushRecv(id uint64, from *stream) {
	q.complete(q.recvCQ, &ibv.WC{ID: id, Status: ibv.WCFlushErr, Op: ibv.WCRecv, QPN: q.num}, false, from)
}

// complete adds a completion, unless the queue pair was closed. Close drops the work that
// is left.
func (q *qp) complete(c *cq, wc *ibv.WC, solicited bool, from *stream) bool {
	return q.closed.Load() || c.add(wc, solicited, from)
}

func wcOp(op ibv.Opcode) ibv.WCOpcode {
	switch op {
	case ibv.OpWrite, ibv.OpWriteImm:
		return ibv.WCWrite
	case ibv.OpRead:
		return ibv.WCRead
	case ibv.OpLocalInv:
		return ibv.WCLocalInv
	}
	return ibv.WCSend
}

func (q *qp) PostRecv(wrs []ibv.RecvWR) (int, error) {
	if q.closed.Load() {
		return 0, fmt.Errorf("%s: post receive: queue pair closed: %w", Name, ibv.ErrState)
	}
	n, err := q.queueRecvs(wrs)
	if st := q.stream.Load(); n > 0 && st != nil && st.holding.Load() {
		st.resume()
	}
	return n, err
}

// queueRecvs appends requests to the queue, and returns how many.
func (q *qp) queueRecvs(wrs []ibv.RecvWR) (n int, err error) {
	q.rq.mu.Lock()
	defer q.rq.mu.Unlock()
	for i := range wrs {
		if q.State() == ibv.QPSError {
			q.flushRecv(wrs[i].ID, nil)
			continue
		}
		if err := q.pushRecv(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *qp) pushRecv(wr *ibv.RecvWR) error {
	s := &q.rq
	if s.reqs.Len() == q.cap.MaxRecvWR {
		return fmt.Errorf("%s: post receive: %w", Name, ibv.ErrQueueFull)
	}
	if len(wr.SGL) > q.cap.MaxRecvSGE {
		return fmt.Errorf("%s: post receive of %d elements: %w", Name, len(wr.SGL), ibv.ErrLimit)
	}
	r := s.reqs.Next()
	*r = recvReq{id: wr.ID}
	sgl := r.one[:0]
	if len(wr.SGL) > 1 {
		r.more = make([]segment, 0, len(wr.SGL))
		sgl = r.more
	}
	q.pd.gate.RLock()
	defer q.pd.gate.RUnlock()
	for i := range wr.SGL {
		m, status := q.pd.local(&wr.SGL[i], true)
		if status != ibv.WCSuccess {
			// ibv_post_recv(3) allows this check now, or when the receive is used. Now
			// the error shows where the mistake is.
			s.reqs.Undo()
			return fmt.Errorf("%s: post receive, element %d: %w", Name, i, status)
		}
		sgl = append(sgl, segment{wr.SGL[i].Buf, m})
		r.size += len(wr.SGL[i].Buf)
	}
	if r.more != nil {
		r.more = sgl
	}
	return nil
}

// Idle implements ibv.IdleQP. The receives in the queue are unused: a receive leaves the
// queue before its first byte is put into its memory.
func (q *qp) Idle(unused func(buf []byte)) {
	if q.closed.Load() {
		return
	}
	q.rq.mu.Lock()
	for i := range q.rq.reqs.Len() {
		for _, s := range q.rq.reqs.At(i).sgl() {
			unused(s.buf)
		}
	}
	q.rq.reqs.Trim()
	q.rq.mu.Unlock()
	q.sq.mu.Lock()
	q.sq.reqs.Trim()
	if st := q.stream.Load(); st != nil {
		st.tx.trim()
		if t, ok := st.link.(interface{ trim() }); ok {
			t.trim()
		}
	}
	q.sq.mu.Unlock()
	q.sendCQ.trim()
	q.recvCQ.trim()
}

// StopHolding implements ibv.HoldingQP.
func (q *qp) StopHolding() {
	q.rq.mu.Lock()
	q.holds.Store(false)
	q.rq.mu.Unlock()
	if st := q.stream.Load(); st != nil {
		st.resume()
		st.endWithPeer()
	}
}

// CloseSends implements ibv.HoldingQP.
func (q *qp) CloseSends() error {
	st := q.stream.Load()
	if st == nil {
		return fmt.Errorf("%s: close sends: %w", Name, ibv.ErrState)
	}
	if err := st.closeSends(); err != nil {
		return fmt.Errorf("%s: close sends: %w", Name, err)
	}
	return nil
}

// SendsHaveRoom implements ibv.HoldingQP. A ring is smaller than the buffers of sockets.
func (q *qp) SendsHaveRoom() bool {
	st := q.stream.Load()
	if st == nil {
		return true
	}
	l, ok := st.link.(interface{ mayShare() bool })
	return !ok || !l.mayShare()
}

// PeerCloses implements ibv.HoldingQP.
func (q *qp) PeerCloses() {
	if st := q.stream.Load(); st != nil {
		st.endWithPeer()
	}
}

// PeerHolds implements ibv.HoldingQP. The peer is no device that overlooks what is sent. Its
// process may end without a word, and the socket of such a process is reset by whatever comes.
func (q *qp) PeerHolds() {
	if st := q.stream.Load(); st != nil {
		q.sq.mu.Lock()
		st.tx.expectNoMore()
		q.sq.mu.Unlock()
	}
}

// PollPays implements ibv.PollPayer. It is false for connections over TCP: the system's
// calls take longer than a wait for the socket.
func (q *qp) PollPays() bool {
	st := q.stream.Load()
	if st == nil {
		return false
	}
	l, ok := st.link.(interface{ pollPays() bool })
	return ok && l.pollPays()
}

// popRecv removes and returns the oldest posted receive. If there is none, and Sends are to
// wait for receives, it notes that one does, and waits is set. A receive may have been posted
// since when popRecv returns.
func (q *qp) popRecv() (r recvReq, ok, waits bool) {
	s := &q.rq
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reqs.Len() == 0 {
		waits = q.holds.Load()
		q.stream.Load().holding.Store(waits)
		return recvReq{}, false, waits
	}
	return s.reqs.Pop(), true, false
}

// fail moves the queue pair to the error state and flushes both queues. culprit is the
// status for the oldest request that the stream has, or WCFlushErr if none is the cause.
// from is as in cq.add. The stream does not use the buffers any more, but the caller may be
// the receiving goroutine.
func (q *qp) fail(culprit ibv.WCStatus, from *stream) {
	// A post sees the new state only when all requests before it are flushed.
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	q.rq.mu.Lock()
	defer q.rq.mu.Unlock()
	q.state.Store(uint32(ibv.QPSError))
	for s := &q.sq; s.reqs.Len() > 0; {
		// A request that is done and still here waits for an RDMA Read, which now fails.
		// So it fails too: no request succeeds behind one that did not.
		r := s.at(0)
		if r.status == ibv.WCSuccess {
			r.status = ibv.WCFlushErr
			if s.sent > 0 {
				r.status, culprit = culprit, ibv.WCFlushErr
			}
		}
		q.completeSend(r, from)
		s.sent = max(s.sent-1, 0)
		s.drop()
	}
	for q.rq.reqs.Len() > 0 {
		q.flushRecv(q.rq.reqs.Pop().id, from)
	}
}

// overrun ends the connection because a completion was lost. The caller holds locks of
// queues, so another goroutine does the work.
func (q *qp) overrun() {
	if st := q.stream.Load(); st != nil {
		go st.abort(fmt.Errorf("%s: %w", Name, ibv.ErrCQOverrun), true)
	}
}

func (q *qp) SetError() error {
	if q.closed.Load() {
		return fmt.Errorf("%s: queue pair closed: %w", Name, ibv.ErrState)
	}
	if q.stream.Load() == nil {
		q.fail(ibv.WCFlushErr, nil)
	}
	if st := q.stream.Load(); st != nil { // The stream may have started before the state changed.
		st.abort(errAborted, false)
	}
	return nil
}

func (q *qp) Close() error {
	if q.closed.Swap(true) {
		return fmt.Errorf("%s: queue pair closed twice: %w", Name, ibv.ErrState)
	}
	if st := q.stream.Load(); st != nil {
		st.abort(errAborted, false)
	}
	q.sendCQ.detach(q)
	q.recvCQ.detach(q)
	q.pd.removeQP()
	return nil
}
