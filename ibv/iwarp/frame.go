package iwarp

import (
	"encoding/binary"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file has stage 2 of transmit.go: requests and Read Responses become DDP segments,
// each in an FPDU. Everything here runs with qp.sq.mu held.

// frame makes the next batch. It reports whether there is one.
func (st *stream) frame() bool {
	t := &st.tx
	if t.awaits {
		return false
	}
	begin := t.framed
	for t.framed-begin < batchBytes && len(t.out)+2 < batchChunks && st.room() {
		if t.rtr != rtrNone {
			st.frameRTR()
			continue
		}
		if !t.msg.active && !st.nextMessage() {
			break
		}
		if t.msg.active {
			st.frameSegment()
		}
	}
	if t.framed == begin {
		st.releaseBatch()
		return false
	}
	return true
}

// room reports whether scratch has room for another frame without its payload.
func (st *stream) room() bool {
	return scratchSize-st.tx.used >= frameOverhead
}

// nextMessage starts the next message, if one may be sent now. It also returns true for
// requests that need no message.
func (st *stream) nextMessage() bool {
	t := &st.tx
	s := &st.qp.sq
	if len(t.resp) > 0 && (t.turn || s.sent == s.reqs.Len()) {
		t.turn = false
		r := &t.resp[0]
		t.msg = outgoing{active: true, resp: true, segs: r.seg[:], left: len(r.seg[0].buf),
			hdr: iwarpwire.Header{Tagged: true, Op: iwarpwire.ReadResponse, STag: r.stag, TO: r.to}}
		return true
	}
	t.turn = true
	if s.sent == s.reqs.Len() {
		return false
	}
	r := s.at(s.sent)
	if r.status != ibv.WCSuccess {
		// A request that was wrong when it was posted fails in its turn.
		if s.sent == 0 && !t.faulted {
			t.faulted = true
			go st.abort(r.status, true)
		}
		return len(t.resp) > 0
	}
	if r.flags&ibv.SendFence != 0 && t.reads > 0 || r.op == ibv.OpRead && t.reads == st.ord {
		return len(t.resp) > 0
	}
	switch r.op {
	case ibv.OpLocalInv:
		if st.qp.invalidate(r.invKey, false) != nil {
			r.status = ibv.WCMWBindErr
			return true
		}
		r.end, r.done = t.framed, t.taken == t.framed
		s.sent++
		st.qp.reap(nil) // The next request may be a wrong one, which waits to be the oldest.
		return true
	case ibv.OpRead:
		st.frameReadRequest(r)
		return true
	}
	h := iwarpwire.Header{}
	if r.op == ibv.OpWrite {
		h = iwarpwire.Header{Tagged: true, Op: iwarpwire.Write, STag: r.rkey, TO: r.raddr}
	} else {
		t.sendMSN++
		h = iwarpwire.Header{Op: sendOpcode(r), QN: iwarpwire.QNSend, MSN: t.sendMSN}
		if r.op == ibv.OpSendInv {
			h.InvSTag = r.invKey
		}
	}
	t.msg = outgoing{active: true, hdr: h, segs: r.sgl, left: r.size, inline: r.flags&ibv.SendInline != 0 && r.copied == nil}
	return true
}

func sendOpcode(r *sendReq) iwarpwire.Opcode {
	se := r.flags&ibv.SendSolicited != 0
	switch {
	case r.op == ibv.OpSendInv && se:
		return iwarpwire.SendSEInv
	case r.op == ibv.OpSendInv:
		return iwarpwire.SendInv
	case se:
		return iwarpwire.SendSE
	}
	return iwarpwire.Send
}

// frameSegment frames the next DDP segment of the message.
func (st *stream) frameSegment() {
	t := &st.tx
	m := &t.msg
	hl := iwarpwire.UntaggedLen
	if m.hdr.Tagged {
		hl = iwarpwire.TaggedLen
	}
	n := st.segmentSize(m.left, st.qp.dev.cfg.MaxFPDU-hl)
	m.left -= n
	m.hdr.Last = m.left == 0
	f := st.beginFrame(hl + n)
	f.header(&m.hdr)
	for rest := n; rest > 0; {
		seg := &m.segs[0]
		k := min(rest, len(seg.buf))
		if k == 0 {
			m.segs = m.segs[1:]
			continue
		}
		f.payload(chunk{b: seg.buf[:k], mr: seg.mr, inline: m.inline, resp: m.resp})
		seg.buf = seg.buf[k:]
		rest -= k
	}
	f.end()
	if m.hdr.Tagged {
		m.hdr.TO += uint64(n)
	} else {
		m.hdr.MO += uint32(n)
	}
	if !m.hdr.Last {
		return
	}
	if m.resp {
		t.resp = t.resp[:copy(t.resp, t.resp[1:])]
	} else {
		s := &st.qp.sq
		s.at(s.sent).end = t.framed
		s.sent++
	}
	t.msg = outgoing{}
}

// segmentSize divides a message that does not fit into one frame into even parts, so that
// no frame is tiny.
func (st *stream) segmentSize(left, limit int) int {
	if left <= limit {
		return left
	}
	frames := (left-1)/limit + 1 // left may be the greatest int.
	return min(limit, ((left-1)/frames+8)&^7)
}

func (st *stream) frameReadRequest(r *sendReq) {
	t := &st.tx
	t.readMSN++
	t.reads++
	req := iwarpwire.ReadReq{Size: uint32(r.size), SrcSTag: r.rkey, SrcTO: r.raddr}
	if r.size > 0 {
		req.SinkSTag, req.SinkTO = r.sgl[0].mr.stag, r.sgl[0].mr.offset(r.sgl[0].buf)
	}
	st.frameRead(&req)
	s := &st.qp.sq
	r.end = t.framed
	s.sent++
}

func (st *stream) frameRead(req *iwarpwire.ReadReq) {
	f := st.beginFrame(iwarpwire.ReadRequestLen)
	f.header(&iwarpwire.Header{Op: iwarpwire.ReadRequest, Last: true, QN: iwarpwire.QNReadRequest, MSN: st.tx.readMSN})
	var b [iwarpwire.ReadRequestLen - iwarpwire.UntaggedLen]byte
	req.Put(b[:])
	f.payload(chunk{b: b[:]})
	f.end()
}

// frameRTR frames the empty message after which the responder may send (RFC 6581). STag 1
// and offset 0 are those of Linux siw. No receiver checks them.
func (st *stream) frameRTR() {
	t := &st.tx
	if t.rtr == rtrRead {
		t.readMSN++
		t.reads++
		st.frameRead(&iwarpwire.ReadReq{SinkSTag: 1, SrcSTag: 1})
	} else {
		f := st.beginFrame(iwarpwire.TaggedLen)
		f.header(&iwarpwire.Header{Tagged: true, Last: true, Op: iwarpwire.Write, STag: 1})
		f.end()
	}
	t.rtr = rtrNone
}

// fpdu is a frame that is being made.
type fpdu struct {
	st   *stream
	ulen int
	crc  uint32
}

func (st *stream) beginFrame(ulen int) fpdu { return fpdu{st: st, ulen: ulen} }

// grow returns n bytes of scratch at the end of the batch. They join the last chunk if that
// is scratch too.
func (f *fpdu) grow(n int) []byte {
	t := &f.st.tx
	if t.mem == nil {
		t.mem = batchPool.Get().(*batchMemory)
	}
	at := t.used
	b := t.mem.scratch[at : at+n]
	t.used += n
	t.framed += uint64(n)
	if k := len(t.out); k > 0 {
		last := &t.out[k-1]
		if end := len(last.b); last.mr == nil && !last.inline && end > 0 && at > 0 &&
			&last.b[end-1] == &t.mem.scratch[at-1] {
			last.b = last.b[:end+n] // The capacity of b is up to the end of scratch.
			return b
		}
	}
	t.out = append(t.out, chunk{b: b})
	return b
}

func (f *fpdu) header(h *iwarpwire.Header) {
	n := iwarpwire.UntaggedLen
	if h.Tagged {
		n = iwarpwire.TaggedLen
	}
	b := f.grow(2 + n)
	binary.BigEndian.PutUint16(b, uint16(f.ulen))
	h.Put(b[2:])
	if f.st.crc {
		f.crc = iwarpwire.CRC(0, b[:2+n])
	}
}

func (f *fpdu) payload(c chunk) {
	t := &f.st.tx
	small := len(c.b) <= smallChunk && f.st.spare(len(c.b))
	if c.mr != nil && (small || f.st.crc) {
		f.st.qp.pd.gate.RLock()
		defer f.st.qp.pd.gate.RUnlock()
		if c.gone() { // gather finds this too, and ends the connection.
			small = false
			c.b = nil
		}
	}
	if f.st.crc && fault.Run(c.b, func() { f.crc = iwarpwire.CRC(f.crc, c.b) }) != nil {
		t.unreadable = true
	}
	if small {
		t.copyOut(f.grow(len(c.b)), c.b)
		return
	}
	t.framed += uint64(len(c.b))
	t.out = append(t.out, c)
}

// spare reports whether scratch has room for n bytes, a trailer and a header.
func (st *stream) spare(n int) bool {
	return scratchSize-st.tx.used >= n+frameOverhead
}

func (f *fpdu) end() {
	pad := iwarpwire.Pad(f.ulen)
	b := f.grow(pad + 4)
	clear(b[:pad+4])
	if f.st.crc {
		iwarpwire.PutCRC(b[pad:], iwarpwire.CRC(f.crc, b[:pad]))
	}
	f.st.tx.ends = append(f.st.tx.ends, f.st.tx.framed)
}
