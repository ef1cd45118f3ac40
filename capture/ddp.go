package capture

import (
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file handles DDP and RDMAP (RFC 5041, RFC 5040): the content of the FPDUs of one
// direction of a connection. FPDUs come in order, and it is known where some are missing.

// ddpStream is the state of the messages in a tcpDir.
type ddpStream struct {
	msn   [3]uint32 // msn is the last message on each queue, 0 if there was none.
	send  *Message  // send is the Send that is being received.
	write *Message  // write is the Write that is being received.

	// Segments are missing, perhaps the beginning of the next Write.
	headless bool

	reads  []*Message // reads has the Reads that this side has requested, in order.
	sink   sink       // sink is that of the last Read.
	unsure bool       // unsure is set if another Read may be missing behind it.
	ack    uint32     // ack is that of the last TCP segment.

	// Read Responses come in the order of the requests, so they can be counted. That
	// matters if a sink is used again and again.
	resp        *Message // resp is the Read of the other side that is being answered.
	answered    uint32   // answered is the MSN of the last Read that was answered.
	uncounted   bool     // uncounted is set if answered may be too low.
	everCounted bool     // everCounted is set if answered was right at some time.
	unknownResp bool     // unknownResp is set within a response of an unknown Read.
	early       []earlyResponse
	earlyGap    bool // earlyGap is set if segments are missing behind early.
}

type sink struct {
	stag uint32
	to   uint64
	msn  uint32
}

// earlyResponse is a segment of a Read Response whose request was not captured yet.
type earlyResponse struct {
	h    iwarpwire.Header
	data []byte
	size int
	ack  uint32
	when time.Time
	gap  bool // gap is set if segments are missing in front of it.
}

// ddp handles a DDP segment with size payload bytes, of which data was captured.
func (d *tcpDir) ddp(h *iwarpwire.Header, data []byte, size int, when time.Time) {
	r := d.t.r
	r.stats.FPDUs[h.Op&0x0f]++
	switch h.Op {
	case iwarpwire.Write:
		d.acceptWrite(h, data, size, when)
	case iwarpwire.ReadRequest:
		d.acceptRead(h, data, when)
	case iwarpwire.ReadResponse:
		if len(d.early) == 0 && d.respond(h, data, size, d.ack, when) {
			return
		}
		d.wait(h, data, size, when)
	case iwarpwire.Terminate:
		m := d.message(iwarpwire.QNTerminate, Terminate, h.MSN, when)
		m.Size = uint64(size)
		if t, err := iwarpwire.ParseTerminate(data); err == nil {
			m.Reason = t.Err
		}
		r.finish(m, whole(data))
	default:
		d.acceptSend(h, data, size, when)
	}
}

func whole(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// message begins a message on an untagged queue.
func (d *tcpDir) message(qn uint32, kind Kind, msn uint32, when time.Time) *Message {
	m := d.t.r.newMessage(d.t.conn, d.side, kind)
	m.Time, m.End, m.msn, m.Packets = when, when, msn, 1
	if last := d.msn[qn]; last != 0 || d.synced {
		m.lost = int(msn - last - 1)
	} else {
		m.lost = 1 // The beginning of the stream was not captured.
	}
	d.msn[qn] = msn
	return m
}

func (d *tcpDir) acceptSend(h *iwarpwire.Header, data []byte, size int, when time.Time) {
	m := d.send
	if m != nil && m.msn != h.MSN {
		m.TailLost = true
		d.t.r.finish(m, nil)
		m = nil
	}
	if m == nil {
		m = d.message(iwarpwire.QNSend, Send, h.MSN, when)
	} else {
		m.Packets++
		m.End = when
	}
	d.send = m
	if h.Op.Invalidates() {
		m.Invalidate, m.HasInvalidate = h.InvSTag, true
	}
	m.Solicited = h.Op == iwarpwire.SendSE || h.Op == iwarpwire.SendSEInv
	if h.Last && h.MO == 0 && len(m.buf.have) == 0 {
		d.send = nil
		m.Size = uint64(size)
		d.t.r.finish(m, whole(data))
		return
	}
	m.buf.put(uint64(h.MO), data)
	m.Size = max(m.Size, uint64(h.MO)+uint64(size))
	if h.Last {
		d.send = nil
		d.t.r.finish(m, nil)
	}
}

func (d *tcpDir) acceptWrite(h *iwarpwire.Header, data []byte, size int, when time.Time) {
	m := d.write
	if m != nil && (m.Key != h.STag || h.TO != m.Addr+m.Size) {
		m.TailLost = true // A message continues where it has stopped (RFC 5041).
		d.t.r.finish(m, nil)
		m, d.headless = nil, true
	}
	if m == nil {
		m = d.t.r.newMessage(d.t.conn, d.side, Write)
		m.Time, m.Key, m.Addr, m.HeadLost = when, h.STag, h.TO, d.headless
	}
	m.End = when
	m.Packets++
	if h.Last && m.Size == 0 {
		d.write, d.headless = nil, false
		m.Size = uint64(size)
		d.t.r.finish(m, whole(data))
		return
	}
	m.buf.put(m.Size, data)
	m.Size += uint64(size)
	d.write = m
	if h.Last {
		d.write, d.headless = nil, false
		d.t.r.finish(m, nil)
	}
}

func (d *tcpDir) acceptRead(h *iwarpwire.Header, data []byte, when time.Time) {
	var q iwarpwire.ReadReq
	if refused := q.Parse(data); refused != nil {
		d.t.r.stats.BadHeader++
		d.msn[iwarpwire.QNReadRequest] = h.MSN // It will be answered anyway.
		return
	}
	m := d.message(iwarpwire.QNReadRequest, Read, h.MSN, when)
	m.Key, m.Addr, m.SinkKey, m.SinkAddr, m.Size = q.SrcSTag, q.SrcTO, q.SinkSTag, q.SinkTO, uint64(q.Size)
	m.buf.expect, m.seq = m.Size, d.origin+uint32(d.bufOff)
	// If the sink is not that of the Read before, the answers of the two are
	// distinguished.
	m.distinct = d.sink.msn != 0 && d.sink.msn == h.MSN-1 && (d.sink.stag != q.SinkSTag || d.sink.to != q.SinkTO)
	d.sink = sink{q.SinkSTag, q.SinkTO, h.MSN}
	if len(d.reads) >= maxReads {
		d.finishRead()
	}
	d.reads = append(d.reads, m)
	d.unsure = false
	d.t.dirs[d.side.Other()].retryEarly()
}

// wait keeps a Read Response until its request is captured.
func (d *tcpDir) wait(h *iwarpwire.Header, data []byte, size int, when time.Time) {
	r := d.t.r
	kept, ok := r.hold(data)
	if !ok {
		d.dropEarly()
		d.pass(h, size)
		return
	}
	d.early = append(d.early, earlyResponse{*h, kept, size, d.ack, when, d.earlyGap})
	d.earlyGap = false
	if len(d.early) > r.window {
		d.dropEarly()
	}
}

// miscount notes that segments are missing in front of the next response.
func (d *tcpDir) miscount() {
	d.uncounted, d.resp, d.unknownResp = true, nil, false
}

// caughtUp notes that no response waits any more.
func (d *tcpDir) caughtUp() {
	if len(d.early) == 0 && d.earlyGap {
		d.earlyGap = false
		d.miscount()
	}
}

// dropEarly gives up all Read Responses whose request was not captured.
func (d *tcpDir) dropEarly() {
	for _, e := range d.early {
		if e.gap {
			d.miscount()
		}
		d.pass(&e.h, e.size)
		d.t.r.letGo(e.data)
	}
	clear(d.early)
	d.early = d.early[:0]
	d.caughtUp()
}

// pass counts a segment of a Read Response that is not used.
func (d *tcpDir) pass(h *iwarpwire.Header, size int) {
	d.stray(h, size)
	if d.unknownResp = !h.Last; h.Last && !d.uncounted {
		d.answered++
	}
}

func (d *tcpDir) stray(h *iwarpwire.Header, size int) {
	d.t.r.lose(Loss{Conn: d.t.conn, From: d.side, What: ResponsesLost, First: h.TO, Count: uint64(size)})
}

// retryEarly tries the Read Responses that wait again.
func (d *tcpDir) retryEarly() {
	for len(d.early) > 0 {
		if d.early[0].gap {
			d.early[0].gap = false
			d.miscount()
		}
		e := d.early[0]
		if !d.respond(&e.h, e.data, e.size, e.ack, e.when) {
			return
		}
		d.t.r.letGo(e.data)
		d.early = d.early[:copy(d.early, d.early[1:])]
	}
	d.caughtUp()
}

// respond handles a segment of a Read Response. It returns false if the request may still
// come.
func (d *tcpDir) respond(h *iwarpwire.Header, data []byte, size int, ack uint32, when time.Time) bool {
	o := d.t.dirs[d.side.Other()]
	if d.resp == nil && !d.unknownResp {
		m, wait := d.asked(o, h, ack)
		if wait {
			return false
		}
		d.resp, d.unknownResp = m, m == nil
	}
	m := d.resp
	if m != nil {
		q := ReadRequest{SinkSTag: m.SinkKey, SinkOffset: m.SinkAddr, Length: uint32(m.Size)}
		off := h.TO - m.SinkAddr
		switch {
		case h.STag != m.SinkKey, size > 0 && !q.Contains(h.TO), off > m.Size, uint64(size) > m.Size-off:
			// As in the capture siw-terminate, bytes beyond the request are not placed.
			d.t.r.stats.BadHeader++
		default:
			m.buf.put(off, data)
			m.answered = true
			m.Packets++
			m.End = when
		}
	} else {
		d.pass(h, size)
	}
	if h.Last {
		if m != nil {
			d.answered, d.uncounted, d.everCounted = m.msn, false, true
		}
		d.resp, d.unknownResp = nil, false
		o.finishReads(d)
	}
	return true
}

// asked finds the Read of o that a Read Response belongs to, at its beginning or, after a
// gap, in its middle. ack is what the sender of the response had received by then.
func (d *tcpDir) asked(o *tcpDir, h *iwarpwire.Header, ack uint32) (m *Message, wait bool) {
	last := o.msn[iwarpwire.QNReadRequest]
	floor := d.synced || d.everCounted // answered is a lower bound then.
	if !d.uncounted && floor {
		want := d.answered + 1
		for _, m := range o.reads {
			if m.msn == want {
				return m, false
			}
		}
		return nil, int32(last-want) < 0
	}
	// Every request that the sender had received must be known, up to the last.
	if o.started && int32(ack-o.next) > 0 {
		return nil, true
	}
	if o.unsure || !o.started || len(o.reads) == 0 {
		return nil, false
	}
	for _, c := range o.reads {
		if int32(c.seq-ack) >= 0 { // That one came later.
			last = c.msn - 1
			break
		}
	}
	low := d.answered
	if !floor {
		low = o.reads[0].msn - 1
	}
	if depth := o.depth(); depth > 0 && (int32(last-depth-low) > 0 || !floor) {
		low, floor = last-depth, true // No more than that may be open at a time.
	}
	open, match := uint32(0), 0
	for _, c := range o.reads {
		if int32(c.msn-low) <= 0 || int32(c.msn-last) > 0 {
			continue
		}
		if n := len(c.buf.have); n > 0 && c.buf.have[n-1].To > h.TO-c.SinkAddr && h.STag == c.SinkKey {
			low, open, match = c.msn, 0, 0 // The answers have come further already.
			continue
		}
		open++
		q := ReadRequest{SinkSTag: c.SinkKey, SinkOffset: c.SinkAddr, Length: uint32(c.Size)}
		if h.STag == c.SinkKey && (q.Contains(h.TO) || h.TO == c.SinkAddr) {
			m = c
			match++
		}
	}
	if open != last-low || match != 1 || !floor && !m.distinct {
		return nil, false // It may belong to an unknown Read.
	}
	return m, false
}

// depth returns how many Reads d's side may have open at a time, 0 if that was not
// negotiated (RFC 6581).
func (d *tcpDir) depth() uint32 {
	s, o := d.start, d.t.dirs[d.side.Other()].start
	if s == nil || o == nil || !s.Enhanced || !o.Enhanced ||
		s.ORD == iwarpwire.DepthNotNegotiated || o.IRD == iwarpwire.DepthNotNegotiated {
		return 0
	}
	return uint32(max(s.ORD, o.IRD)) // The larger one is used, because the two ends may disagree.
}

// finishReads hands out the Reads that by has answered, or has left out.
func (d *tcpDir) finishReads(by *tcpDir) {
	for len(d.reads) > 0 {
		m := d.reads[0]
		if !by.uncounted && int32(m.msn-by.answered) > 0 {
			return
		}
		if by.uncounted && !m.buf.have.covers(0, m.Size) {
			return
		}
		if m.answered && m.buf.have.covers(0, m.Size) {
			d.t.conn.Sent[d.side].Latency.add(m.End.Sub(m.Time))
		}
		d.finishRead()
	}
}

func (d *tcpDir) finishRead() {
	m := d.reads[0]
	d.reads = d.reads[:copy(d.reads, d.reads[1:])]
	if o := d.t.dirs[d.side.Other()]; o.resp == m {
		o.resp, o.unknownResp = nil, true
	}
	m.TailLost = !m.answered && m.Size == 0
	d.t.r.finish(m, nil)
}

// interrupted notes that FPDUs are missing before the next one.
func (d *tcpDir) interrupted() {
	if m := d.write; m != nil {
		d.write = nil
		m.TailLost = true
		d.t.r.finish(m, nil)
	}
	d.headless, d.unsure = true, true
	d.earlyGap = true
	d.caughtUp()
	if c := d.t.conn; c.upper != nil {
		c.upper.gap(d.side)
	}
}

// endMessages hands out incomplete messages at the end of the stream.
func (d *tcpDir) endMessages() {
	for _, m := range []*Message{d.send, d.write} {
		if m != nil {
			m.TailLost = true
			d.t.r.finish(m, nil)
		}
	}
	d.send, d.write = nil, nil
}

// flushReads ends the wait for answers.
func (d *tcpDir) flushReads() {
	o := d.t.dirs[d.side.Other()]
	o.retryEarly()
	if len(o.early) > 0 {
		o.dropEarly()
	}
	for len(d.reads) > 0 {
		d.finishRead()
	}
}

// FPDUName returns the name of the RDMAP message with an opcode, an index of
// Stats.FPDUs.
func FPDUName(opcode int) string { return iwarpwire.Opcode(opcode).String() }
