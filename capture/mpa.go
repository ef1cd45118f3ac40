package capture

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file handles MPA (RFC 5044): the start frames, and the FPDUs of a TCP stream behind
// them.

// phase is the kind of the next bytes of a stream.
type phase uint8

const (
	phaseStart phase = iota // phaseStart: a start frame, because the stream begins here.
	phaseGuess              // phaseGuess: a start frame or an FPDU, perhaps the middle of one.
	phaseFPDU               // phaseFPDU: an FPDU.
	phaseLost               // phaseLost: unknown, because bytes are missing.
)

// mpaStream is the state of the FPDUs in a tcpDir.
type mpaStream struct {
	phase    phase
	buf      []byte // buf has the FPDU or start frame that is not complete yet.
	bufOff   uint64 // bufOff is the place of buf in the stream.
	skipped  uint64 // skipped is how many bytes are to be ignored: the rest of an FPDU with a hole.
	base     uint64 // base is the beginning of the first FPDU. Markers count from there.
	start    *iwarpwire.Start
	unmarked []byte   // unmarked is memory for an FPDU without its markers.
	starts   []uint64 // starts has the beginnings of segments in buf, while an FPDU is looked for.
	searched uint64   // searched is how many bytes that search has ignored.
	kept     int      // kept is how many bytes are accounted for buf, unmarked and starts.
	zeroCRC  bool     // zeroCRC is set if all CRC fields so far were zero.
	anyFPDU  bool
}

const (
	markerInterval = 512
	markerLen      = 4
	maxSearch      = 256 << 10 // maxSearch is how many bytes are searched for an FPDU at a time.

	minULPDU = iwarpwire.TaggedLen
)

// ready tells whether bytes can be fed. The start frame of the other side must be known,
// because it says whether there are markers.
func (d *tcpDir) ready() bool {
	if d.phase != phaseFPDU || d.t.assumed {
		return true
	}
	o := d.t.dirs[d.side.Other()]
	return o.start != nil || o.phase != phaseStart
}

// feed handles the next bytes of the stream.
func (d *tcpDir) feed(b []byte, when time.Time) {
	if d.t.foreign {
		return
	}
	if d.phase == phaseLost || d.phase == phaseGuess {
		d.search(b, when)
		return
	}
	for len(b) > 0 && !d.t.foreign {
		if n := min(d.skipped, uint64(len(b))); n > 0 {
			d.skipped -= n
			d.off += n
			b = b[n:]
			continue
		}
		if len(d.buf) == 0 {
			if n := d.whole(b); n > 0 && n <= len(b) && (d.phase == phaseStart || d.ready()) {
				d.bufOff = d.off
				d.off += uint64(n)
				d.unit(b[:n], when)
				b = b[n:]
				if d.phase == phaseLost {
					d.search(b, when)
					return
				}
				continue
			}
			d.bufOff = d.off
		}
		// It takes as many bytes as are known to be needed.
		want := d.whole(d.buf)
		if want < 0 { // what began as the start frame of one side is sent by the other
			d.buf = d.buf[:0]
			d.t.giveUp()
			return
		}
		if want == 0 {
			want = len(d.buf) + 1
		}
		n := min(want-len(d.buf), len(b))
		d.buf = append(d.buf, b[:n]...)
		d.off += uint64(n)
		b = b[n:]
		if !d.account() {
			return
		}
		if want = d.whole(d.buf); want > 0 && len(d.buf) >= want {
			d.unit(d.buf, when)
			d.buf = d.buf[:0]
			if d.phase == phaseLost {
				d.search(b, when)
				return
			}
		} else if want < 0 {
			d.buf = d.buf[:0]
			d.t.giveUp()
		}
	}
}

// whole returns the length of the frame that b begins with. It returns 0 if b is too short
// for that, and -1 if b is no frame.
func (d *tcpDir) whole(b []byte) int {
	if d.phase == phaseStart {
		return startLen(b, d.side == Responder)
	}
	return d.fpduLen(b, d.position(len(d.buf) == 0))
}

// position returns the beginning of the next FPDU, counted from the first FPDU.
func (d *tcpDir) position(fresh bool) uint64 {
	if fresh {
		return d.off - d.base
	}
	return d.bufOff - d.base
}

func startLen(b []byte, reply bool) int {
	key := "MPA ID Req Frame"
	if reply {
		key = "MPA ID Rep Frame"
	}
	if n := min(len(b), len(key)); string(b[:n]) != key[:n] {
		return -1
	}
	if len(b) < iwarpwire.StartLen {
		return 0
	}
	n, err := iwarpwire.ParseStartHeader(b, reply)
	if err != nil {
		return -1
	}
	return iwarpwire.StartLen + n
}

// fpduLen returns how many bytes of the stream the FPDU at the beginning of b has, at that
// position and with markers. It returns 0 if b is too short for that.
func (d *tcpDir) fpduLen(b []byte, pos uint64) int {
	marked := d.t.conn.Markers[d.side]
	at := 0
	if marked && pos%markerInterval == 0 {
		at = markerLen
	}
	if len(b) < at+iwarpwire.LengthLen {
		return 0
	}
	n := iwarpwire.FPDULen(int(binary.BigEndian.Uint16(b[at:])))
	if marked {
		n = withMarkers(n, pos)
	}
	return n
}

// withMarkers returns the length of n bytes at a position together with their markers.
// There is a marker every 512 bytes of the stream, the first in front of the first FPDU
// (RFC 5044).
func withMarkers(n int, pos uint64) int {
	total := 0
	for n > 0 {
		if pos%markerInterval == 0 {
			total += markerLen
			pos += markerLen
		}
		part := min(n, int(markerInterval-pos%markerInterval))
		total += part
		pos += uint64(part)
		n -= part
	}
	return total
}

// withoutMarkers returns b without its markers. b is at that position.
func (d *tcpDir) withoutMarkers(b []byte, pos uint64) []byte {
	out := d.unmarked[:0]
	for len(b) > 0 {
		if pos%markerInterval == 0 {
			n := min(markerLen, len(b))
			b = b[n:]
			pos += uint64(n)
			continue
		}
		n := min(len(b), int(markerInterval-pos%markerInterval))
		out = append(out, b[:n]...)
		b = b[n:]
		pos += uint64(n)
	}
	d.unmarked = out
	return out
}

// unit handles a whole start frame or FPDU, which begins at bufOff.
func (d *tcpDir) unit(b []byte, when time.Time) {
	if d.phase == phaseStart {
		d.startFrame(b, when)
		return
	}
	r, c := d.t.r, d.t.conn
	content := b
	if c.Markers[d.side] {
		content = d.withoutMarkers(b, d.bufOff-d.base)
	}
	ulpdu := content[iwarpwire.LengthLen:][:binary.BigEndian.Uint16(content)]
	switch field := iwarpwire.GetCRC(b[len(b)-iwarpwire.CRCLen:]); {
	case !c.CRC && (field == 0 || d.start != nil):
		r.stats.NoCRC++
	case field == iwarpwire.CRC(0, b[:len(b)-iwarpwire.CRCLen]):
		r.stats.GoodCRC++
		c.CRC = true
	case !c.CRC: // The set-up was not captured, so checksums are unknown.
		r.stats.NoCRC++
	default:
		r.stats.BadCRC++
		if !r.cfg.IgnoreChecksums {
			d.damaged()
			return
		}
	}
	d.zeroCRC = (d.zeroCRC || !d.anyFPDU) && iwarpwire.GetCRC(b[len(b)-iwarpwire.CRCLen:]) == 0
	d.anyFPDU = true
	var h iwarpwire.Header
	n, refused := h.Parse(ulpdu)
	if refused != nil {
		r.stats.BadHeader++
		d.damaged()
		d.lostStep()
		return
	}
	d.ddp(&h, ulpdu[n:], len(ulpdu)-n, when)
}

// lostStep makes the stream search for its next FPDU, because what it took for one was
// none.
func (d *tcpDir) lostStep() {
	d.interrupted()
	d.phase = phaseLost
	d.starts = d.starts[:0]
}

// startFrame handles the first frame of a side.
func (d *tcpDir) startFrame(b []byte, when time.Time) {
	t, c := d.t, d.t.conn
	s, err := iwarpwire.ParseStart(b, d.side == Responder)
	if err != nil {
		t.giveUp()
		return
	}
	s.Private = slices.Clone(s.Private)
	d.start = &s
	d.phase = phaseFPDU
	d.headless, d.uncounted, d.unsure, d.earlyGap, d.synced = false, false, false, false, true
	d.base = d.off
	c.Ends[d.side].Private = s.Private
	c.Markers[d.side.Other()] = s.Markers
	c.CRC = c.CRC || s.CRC // One side is enough (RFC 5044).
	o := t.dirs[d.side.Other()]
	c.SetUp = o.start != nil
	kind := StartRequest
	if s.Reply {
		kind = StartReply
		c.Closed = c.Closed || s.Reject
	}
	m := t.r.newMessage(c, d.side, kind)
	m.Time, m.End, m.Size, m.Packets = when, when, uint64(len(b)), 1
	t.r.finish(m, b)
	if o.started {
		o.drain()
	}
}

// hole handles n bytes that are missing from the stream.
func (d *tcpDir) hole(n int, when time.Time) {
	at := d.off
	d.off += uint64(n)
	switch d.phase {
	case phaseStart:
		// The frame is lost. The other side's frame decides about checksums too.
		d.phase, d.buf = phaseLost, d.buf[:0]
		d.interrupted()
	case phaseGuess, phaseLost:
		d.searched += uint64(len(d.buf))
		d.buf, d.starts = d.buf[:0], d.starts[:0]
		d.interrupted()
	case phaseFPDU:
		if past := min(d.skipped, uint64(n)); past > 0 {
			d.skipped -= past
			n -= int(past)
			at += past
		}
		if n == 0 {
			return
		}
		if total := d.whole(d.buf); len(d.buf) > 0 && total > 0 {
			known := d.partial(total, when)
			rest := total - len(d.buf) - n
			d.buf = d.buf[:0]
			if rest >= 0 {
				d.skipped = uint64(rest)
				if !known {
					d.interrupted()
				}
				return
			}
		}
		d.buf = d.buf[:0]
		d.lostStep()
	}
}

// partial handles the beginning of an FPDU with a hole, if it is long enough for that.
// total is the length of the FPDU. With checksums such an FPDU is not used.
func (d *tcpDir) partial(total int, when time.Time) bool {
	if d.t.conn.CRC || d.t.conn.Markers[d.side] {
		return false
	}
	size := int(binary.BigEndian.Uint16(d.buf))
	ulpdu := d.buf[iwarpwire.LengthLen:]
	ulpdu = ulpdu[:min(len(ulpdu), size)]
	var h iwarpwire.Header
	n, refused := h.Parse(ulpdu)
	if refused != nil {
		return false
	}
	d.t.r.stats.NoCRC++
	d.ddp(&h, ulpdu[n:], size-n, when)
	return true
}

// search looks for an FPDU among bytes that may begin in the middle of one. It looks at the
// beginnings of TCP segments, where most FPDUs begin.
func (d *tcpDir) search(b []byte, when time.Time) {
	if len(b) == 0 {
		return
	}
	if len(d.buf) == 0 {
		d.bufOff = d.off
	}
	d.starts = append(d.starts, d.off)
	d.buf = append(d.buf, b...)
	d.off += uint64(len(b))
	if d.account() {
		d.resume(when, false)
	}
}

// account counts the memory of buffers. If there is no memory left, it gives up the
// connection and returns false.
func (d *tcpDir) account() bool {
	const free = 4 << 10
	more := cap(d.buf) + cap(d.unmarked) + 8*cap(d.starts) - free - d.kept
	if more <= 0 {
		return true
	}
	if !d.t.r.mem.take(more) {
		d.t.r.lose(Loss{Conn: d.t.conn, From: d.side, What: MemoryShort, Count: uint64(len(d.buf))})
		d.t.giveUp()
		return false
	}
	d.kept += more
	return true
}

// resume continues the search. final means that nothing more will come.
func (d *tcpDir) resume(when time.Time, final bool) {
	if d.phase == phaseGuess && d.guessStart() {
		return
	}
	for len(d.starts) > 0 {
		at := d.starts[0]
		v := d.plausible(d.buf[at-d.bufOff:], at, final)
		if v == unknownYet && len(d.buf) < maxSearch {
			return
		}
		if v == likely {
			if n := d.searched + at - d.bufOff; n > 0 && d.phase == phaseLost {
				d.t.r.lose(Loss{Conn: d.t.conn, From: d.side, What: BytesLost, First: at - n, Count: n})
				d.t.conn.Sent[d.side].Lost += n
			}
			if d.phase == phaseGuess {
				d.base = at
			}
			rest := slices.Clone(d.buf[at-d.bufOff:])
			d.off = at
			d.phase, d.buf, d.starts, d.searched = phaseFPDU, d.buf[:0], d.starts[:0], 0
			d.feed(rest, when)
			return
		}
		d.starts = d.starts[1:]
	}
	d.searched += uint64(len(d.buf))
	d.buf, d.starts = d.buf[:0], nil
	if d.phase == phaseGuess && d.searched > maxSearch && d.t.conn.ID == 0 {
		d.t.giveUp() // Nothing here can be iWARP.
	}
}

// guessStart handles a start frame at the beginning of the capture, although the beginning
// of the stream was not captured.
func (d *tcpDir) guessStart() bool {
	n := startLen(d.buf, false)
	if n < 0 {
		n = startLen(d.buf, true)
	}
	if n < 0 {
		return false
	}
	d.sideBy(d.buf)
	if n == 0 || len(d.buf) < n {
		return true // It waits for more bytes.
	}
	rest := slices.Clone(d.buf)
	d.off = d.bufOff
	d.phase, d.buf, d.starts = phaseStart, d.buf[:0], nil
	d.feed(rest, d.t.r.now)
	return true
}

// verdict is the result of plausible.
type verdict uint8

const (
	unlikely verdict = iota
	unknownYet
	likely
)

// plausible tells whether b begins with an FPDU. b is at an offset of the stream. If there
// are checksums, these decide. Otherwise everything that is known about an FPDU must fit,
// and another FPDU must follow, or nothing.
func (d *tcpDir) plausible(b []byte, off uint64, final bool) verdict {
	c := d.t.conn
	pos := off - d.base
	if d.phase == phaseGuess {
		pos = 1 // It is not known whether there are markers.
	}
	total := d.fpduLen(b, pos)
	if total == 0 {
		return unknownYet
	}
	content := b[:min(total, len(b))]
	if c.Markers[d.side] {
		content = d.withoutMarkers(content, pos)
	}
	if v := d.plausibleHeader(content); v != likely {
		return v
	}
	if len(b) < total {
		return unknownYet
	}
	field := iwarpwire.GetCRC(b[total-iwarpwire.CRCLen:])
	if good := iwarpwire.CRC(0, b[:total-iwarpwire.CRCLen]) == field; good {
		return likely
	} else if c.CRC || field != 0 && (d.zeroCRC || !d.anyFPDU) {
		return unlikely
	}
	if len(b) == total || c.Markers[d.side] {
		return likely
	}
	v := d.plausibleHeader(b[total:])
	if v == unknownYet && final {
		return likely
	}
	return v
}

// plausibleHeader tells whether b can be the beginning of an FPDU.
func (d *tcpDir) plausibleHeader(b []byte) verdict {
	if len(b) < iwarpwire.LengthLen+iwarpwire.UntaggedLen {
		return unknownYet
	}
	n := int(binary.BigEndian.Uint16(b))
	ulpdu := b[iwarpwire.LengthLen:]
	if n < minULPDU || ulpdu[0]&0x3c != 0 || ulpdu[1]&0x30 != 0 { // The reserved bits must be zero.
		return unlikely
	}
	var h iwarpwire.Header
	if _, refused := h.Parse(ulpdu[:min(n, len(ulpdu))]); refused != nil {
		return unlikely
	}
	switch h.Op {
	case iwarpwire.ReadRequest:
		if n != iwarpwire.ReadRequestLen || !h.Last || h.MO != 0 {
			return unlikely
		}
	case iwarpwire.Terminate:
		if h.MSN != 1 {
			return unlikely
		}
	}
	if !h.Tagged {
		if last := d.msn[h.QN]; h.MSN == 0 || last != 0 && h.MSN-last > 1<<16 {
			return unlikely
		}
	}
	return likely
}

// damaged notes that an FPDU cannot be used.
func (d *tcpDir) damaged() {
	d.t.r.lose(Loss{Conn: d.t.conn, From: d.side, What: BytesLost, First: d.bufOff, Count: d.off - d.bufOff})
	d.interrupted()
}

// end is called when nothing more will come.
func (d *tcpDir) end() {
	if d.t.foreign {
		return
	}
	if d.phase == phaseLost || d.phase == phaseGuess {
		d.resume(d.t.r.now, true)
		if d.phase == phaseLost && d.searched+uint64(len(d.buf)) > 0 {
			d.t.r.lose(Loss{Conn: d.t.conn, From: d.side, What: StreamLost})
		}
	} else if d.phase == phaseFPDU && len(d.buf) > 0 {
		if total := d.whole(d.buf); total > 0 {
			d.partial(total, d.t.r.now)
			d.interrupted()
		}
	}
	d.buf = nil
	d.endMessages()
}
