package iwarp

import (
	"fmt"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file has the rules of DDP (RFC 5041) and RDMAP (RFC 5040) on the receiving side:
// where payload is put, and what is done with a complete message.

// aim finds the memory for the payload of the frame whose header was parsed.
func (st *stream) aim() *iwarpwire.TermError {
	rx := &st.rx
	h := &rx.hdr
	rx.target.segs, rx.target.off = nil, 0
	switch h.Op {
	case iwarpwire.Write:
		if rx.left == 0 {
			return nil // An empty message needs no valid STag.
		}
		return st.aimTagged(st.qp.windowFor(h.STag, h.TO, rx.left))
	case iwarpwire.ReadResponse:
		return st.aimReadResponse()
	case iwarpwire.ReadRequest:
		switch {
		case h.MSN != rx.readMSN+1:
			return iwarpwire.ErrMSNRange
		case h.MO != 0 || !h.Last:
			return iwarpwire.ErrBadMO
		case rx.left != iwarpwire.ReadRequestLen-iwarpwire.UntaggedLen:
			return iwarpwire.ErrTooLong
		}
		rx.readMSN++
		return st.aimControl()
	case iwarpwire.Terminate:
		if rx.left > len(rx.ctl) || !h.Last || h.MO != 0 {
			return iwarpwire.ErrTooLong
		}
		return st.aimControl()
	}
	return st.aimSend()
}

func (st *stream) aimTagged(m *mr, b []byte, term *iwarpwire.TermError) *iwarpwire.TermError {
	if term != nil {
		return term
	}
	t := &st.rx.target
	t.one[0] = segment{b, m}
	t.segs = t.one[:]
	return nil
}

func (st *stream) aimControl() *iwarpwire.TermError {
	t := &st.rx.target
	t.one[0] = segment{buf: st.rx.ctl[:st.rx.left]}
	t.segs = t.one[:]
	return nil
}

// windowFor is window for an RDMA Write.
func (q *qp) windowFor(stag uint32, to uint64, n int) (*mr, []byte, *iwarpwire.TermError) {
	q.pd.gate.RLock()
	defer q.pd.gate.RUnlock()
	return q.window(stag, to, uint64(n), true)
}

// errHold is the result of aim for a Send that is to wait for a receive.
var errHold = new(iwarpwire.TermError)

// aimSend checks a segment of a Send against the message in progress and takes
// a receive at the start of one.
func (st *stream) aimSend() *iwarpwire.TermError {
	rx := &st.rx
	h := &rx.hdr
	if !rx.inMsg {
		switch {
		case h.MSN != rx.sendMSN+1:
			return iwarpwire.ErrMSNRange
		case h.MO != 0:
			return iwarpwire.ErrBadMO
		}
		if rx.eatSend {
			if rx.left > 0 || !h.Last {
				return iwarpwire.ErrNoRTR
			}
			rx.sendMSN++
			return nil
		}
		r, ok, waits := st.qp.popRecv()
		switch {
		case ok:
		case !waits:
			return iwarpwire.ErrNoBuffer
		case st.mayWait():
			return errHold
		default:
			st.holding.Store(false)
			rx.dropping = true
		}
		rx.sendMSN++
		rx.cur, rx.inMsg, rx.filled = r, true, 0
	} else {
		switch {
		case h.MSN != rx.sendMSN:
			return iwarpwire.ErrMSNRange
		case h.MO != uint32(rx.filled):
			return iwarpwire.ErrBadMO
		}
	}
	if rx.dropping {
		rx.target.one[0] = segment{buf: make([]byte, rx.left)}
		rx.target.segs = rx.target.one[:]
		return nil
	}
	if rx.left > rx.cur.size-rx.filled {
		return iwarpwire.ErrTooLong
	}
	// This finds the element in which the bytes so far end.
	t := &rx.target
	t.segs, t.off = rx.cur.sgl(), rx.filled
	for len(t.segs) > 1 && t.off >= len(t.segs[0].buf) {
		t.off -= len(t.segs[0].buf)
		t.segs = t.segs[1:]
	}
	return nil
}

// aimReadResponse matches a response against the oldest outstanding read.
func (st *stream) aimReadResponse() *iwarpwire.TermError {
	rx := &st.rx
	h := &rx.hdr
	q := st.qp
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	r := q.sq.oldestRead()
	rtr := rx.eatRead && st.tx.reads > 0
	if r == nil && !rtr {
		return iwarpwire.ErrInvalidSTag
	}
	if rtr || r.size == 0 {
		if rx.left > 0 || !h.Last {
			return iwarpwire.ErrBaseBounds
		}
		return nil
	}
	s := r.sgl[0]
	q.pd.gate.RLock()
	defer q.pd.gate.RUnlock()
	switch {
	case h.STag != s.mr.stag || s.mr.dead:
		return iwarpwire.ErrInvalidSTag
	case h.TO != s.mr.offset(s.buf)+uint64(rx.readDone),
		rx.left > r.size-rx.readDone,
		h.Last != (rx.left == r.size-rx.readDone):
		return iwarpwire.ErrBaseBounds
	}
	return st.aimTagged(s.mr, s.buf[rx.readDone:rx.readDone+rx.left], nil)
}

// oldestRead returns the first request that the stream has sent and that waits for a Read
// Response.
func (s *sendQueue) oldestRead() *sendReq {
	for i := range s.sent {
		if r := s.at(i); r.op == ibv.OpRead && !r.done {
			return r
		}
	}
	return nil
}

// deliver handles a frame that was received in full.
func (st *stream) deliver() bool {
	rx := &st.rx
	h := &rx.hdr
	n := rx.payload()
	switch h.Op {
	case iwarpwire.Write:
		rx.inWrite = !h.Last
		return true // The peer reports it by a later Send.
	case iwarpwire.ReadResponse:
		return st.deliverRead(n)
	case iwarpwire.ReadRequest:
		return st.serveRead()
	case iwarpwire.Terminate:
		return st.terminated(n)
	}
	if rx.eatSend {
		rx.eatSend = false
		return true
	}
	rx.filled += n
	if !h.Last {
		return true
	}
	if rx.dropping {
		rx.inMsg, rx.dropping = false, false
		return true
	}
	wc := ibv.WC{ID: rx.cur.id, Op: ibv.WCRecv, QPN: st.qp.num, ByteLen: uint32(rx.filled)}
	if h.Op.Invalidates() {
		// RFC 5040, section 5.3: the key becomes invalid before the message is delivered.
		if term := st.qp.invalidate(h.InvSTag, true); term != nil {
			st.refuse(term)
			return false
		}
		wc.Flags, wc.InvKey = ibv.WCWithInv, h.InvSTag
	}
	rx.inMsg, rx.cur = false, recvReq{}
	solicited := h.Op == iwarpwire.SendSE || h.Op == iwarpwire.SendSEInv
	if !st.qp.complete(st.qp.recvCQ, &wc, solicited, st) {
		st.end(fmt.Errorf("%s: %w", Name, ibv.ErrCQOverrun), &iwarpwire.TermMsg{Err: *iwarpwire.ErrLocalCatastrophic}, ibv.WCFlushErr)
		return false
	}
	return true
}

// payload returns the payload length of the frame in progress.
func (rx *receiver) payload() int {
	if rx.hdr.Tagged {
		return rx.ulen - iwarpwire.TaggedLen
	}
	return rx.ulen - iwarpwire.UntaggedLen
}

func (st *stream) deliverRead(n int) bool {
	rx := &st.rx
	q := st.qp
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	rx.readDone += n
	if !rx.hdr.Last {
		return true
	}
	rx.readDone = 0
	st.tx.reads--
	if rx.eatRead {
		rx.eatRead = false // RFC 6581: the Read that was this side's RTR came first.
	} else {
		q.sq.oldestRead().done = true
	}
	q.reap(st)
	st.push(false) // A Read or a fenced request may have waited for this Read.
	return true
}

// serveRead queues the Read Response that the peer asked for.
func (st *stream) serveRead() bool {
	rx := &st.rx
	var req iwarpwire.ReadReq
	if term := req.Parse(rx.ctl[:iwarpwire.ReadReqLen]); term != nil {
		st.violation(term, true)
		return false
	}
	resp := response{stag: req.SinkSTag, to: req.SinkTO}
	if req.Size > 0 {
		st.qp.pd.gate.RLock()
		m, b, term := st.qp.window(req.SrcSTag, req.SrcTO, uint64(req.Size), false)
		st.qp.pd.gate.RUnlock()
		if term != nil {
			st.violation(term, true)
			return false
		}
		resp.seg[0] = segment{b, m}
	}
	st.qp.sq.mu.Lock()
	fits := len(st.tx.resp) < max(st.ird, 1) // One Read is always served: it may be the peer's RTR.
	if fits {
		st.tx.resp = append(st.tx.resp, resp)
		st.push(false)
	}
	st.qp.sq.mu.Unlock()
	if !fits {
		st.violation(iwarpwire.ErrCatastrophic, true)
	}
	return fits
}

// refuse is like violation, for an error that may concern a receive in progress.
func (st *stream) refuse(term *iwarpwire.TermError) {
	rx := &st.rx
	if rx.inMsg && !rx.dropping {
		wc := ibv.WC{ID: rx.cur.id, Op: ibv.WCRecv, QPN: st.qp.num, Status: ibv.WCFlushErr}
		if *term == *iwarpwire.ErrTooLong {
			wc.Status = ibv.WCLocLenErr
		}
		rx.inMsg, rx.cur = false, recvReq{}
		st.qp.complete(st.qp.recvCQ, &wc, false, st)
	}
	culprit := ibv.WCFlushErr
	if rx.hdr.Op == iwarpwire.ReadResponse {
		culprit = ibv.WCBadRespErr
	}
	st.end(fmt.Errorf("%s: the peer broke the protocol: %w", Name, term), st.terminate(term, false), culprit)
}

// abandon flushes the receive that was being filled.
func (rx *receiver) abandon(st *stream) {
	if rx.inMsg && !rx.dropping {
		st.qp.flushRecv(rx.cur.id, st)
		rx.inMsg, rx.cur = false, recvReq{}
	}
}

// terminated ends the stream after the peer's Terminate.
func (st *stream) terminated(n int) bool {
	m, err := iwarpwire.ParseTerminate(st.rx.ctl[:n])
	if err != nil {
		st.end(fmt.Errorf("%s: the peer ended the connection without a readable reason: %w", Name, err), nil, ibv.WCFlushErr)
		return false
	}
	culprit := ibv.WCFlushErr
	if len(m.RDMAP) > 0 || m.Err.Layer == 0 && m.Err.Type == 1 {
		// It names a Read Request of this side, the oldest outstanding one.
		culprit = ibv.WCRemAccessErr
	} else if m.Err.Layer == 0 && m.Err.Type == 2 {
		culprit = ibv.WCRemOpErr
	}
	st.end(&RemoteError{Layer: m.Err.Layer, Type: m.Err.Type, Code: m.Err.Code}, nil, culprit)
	return false
}

// RemoteError is the error of a connection that the peer has ended with a Terminate
// message. It has layer, error type and code by RFC 5040, section 4.8.
type RemoteError struct {
	Layer, Type, Code uint8
}

// Error describes the peer's reason.
func (e *RemoteError) Error() string {
	return Name + ": the peer ended the connection: " +
		iwarpwire.TermError{Layer: e.Layer, Type: e.Type, Code: e.Code}.Error()
}
