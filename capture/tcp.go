package capture

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file handles TCP. It puts the segments of one direction in order, and feeds the
// layer above: bytes, and holes where bytes will never come.

type streamKey struct {
	src, dst     addr
	sport, dport uint16
}

// tcpConn is a TCP connection. Its protocol may be unknown yet.
type tcpConn struct {
	r       *Reassembler
	conn    *Conn
	dirs    [2]*tcpDir // dirs has the directions by the side that sends.
	foreign bool       // foreign is set if the connection is not iWARP.
	assumed bool       // assumed is set when one start frame was given up.
}

// tcpDir is one direction of a TCP connection.
type tcpDir struct {
	t    *tcpConn
	side Side
	key  streamKey

	synced  bool   // synced is set if next is known from a SYN.
	started bool   // started is set when next is the number of the byte that is fed next.
	next    uint32 // next is a TCP sequence number.
	off     uint64 // off is how many bytes of the stream are before next, from the first one that was captured.
	origin  uint32 // origin is the number of the byte at offset 0.
	held    []tcpSegment
	bytes   int          // bytes counts the bytes in held.
	far     []tcpSegment // far has the latest segments, if they are all out of place; see stranger.

	mpaStream
	ddpStream
}

type tcpSegment struct {
	seq  uint32
	ack  uint32 // ack is what its sender had received of the other direction.
	data []byte // data was captured.
	size int    // size is the length on the wire.
	when time.Time
}

const (
	tcpFIN = 0x01
	tcpSYN = 0x02
	tcpRST = 0x04
	tcpACK = 0x10

	maxHeldTCP = 8 << 20 // maxHeldTCP is how many bytes may wait in one direction.
	maxWindow  = 1 << 30 // maxWindow is how many bytes can be under way (RFC 7323).
	maxFar     = 3       // maxFar is how many segments out of place begin another connection.
)

// addTCP handles a TCP segment.
func (r *Reassembler) addTCP(ip *datagram) {
	b := ip.payload
	if len(b) < 20 {
		r.stats.Broken++
		return
	}
	head := int(b[12]>>4) * 4
	if head < 20 || head > ip.size {
		r.stats.Broken++
		return
	}
	be := binary.BigEndian
	key := streamKey{ip.src, ip.dst, be.Uint16(b), be.Uint16(b[2:])}
	seq, ack, flags := be.Uint32(b[4:]), be.Uint32(b[8:]), b[13]
	data, size := b[min(head, len(b)):], ip.size-head

	d := r.streams[key]
	if d == nil {
		if flags&tcpSYN == 0 && size == 0 {
			return
		}
		d = r.newStream(key, flags)
	}
	t := d.t
	if flags&tcpSYN != 0 && d.outlived(seq+1) {
		// The ports are used again.
		r.flushConn(t.conn)
		r.drop(t.conn)
		d = r.newStream(key, flags)
		t = d.t
	}
	r.touch(t.conn, d.side, len(ip.header)+ip.size)
	if t.foreign {
		return
	}
	if flags&tcpSYN != 0 {
		if (flags&tcpACK != 0) != (d.side == Responder) && !d.started {
			t.swap()
		}
		d.begin(seq + 1)
		if flags&tcpACK != 0 {
			t.dirs[d.side.Other()].begin(ack)
		}
		seq++
	}
	if size > 0 {
		s := tcpSegment{seq, ack, data, size, r.now}
		if !d.stranger(&s) {
			d.dropFar()
			d.segment(s)
		} else if d.keepFar(s); len(d.far) == maxFar {
			t = d.succeed().t
		}
	}
	if flags&(tcpFIN|tcpRST) != 0 {
		t.conn.Closed = true
	}
}

// outlived tells whether a SYN begins another connection than that of the segments that
// were captured so far. The bytes behind the SYN count from first on. If the SYN of those
// segments was not captured, they may have overtaken this one, if they lie close behind it.
func (d *tcpDir) outlived(first uint32) bool {
	switch {
	case d.started:
		return first != d.next-uint32(d.off)
	case len(d.held) > 0:
		return d.held[0].seq-first > maxHeldTCP
	}
	return false
}

// stranger tells whether s can be neither a repeat nor a later segment of this stream. One
// such segment may be damaged. Several that follow each other are of another connection,
// whose beginning was not captured.
func (d *tcpDir) stranger(s *tcpSegment) bool {
	next, off := d.next, d.off
	if !d.started {
		if len(d.held) == 0 {
			return false
		}
		last := d.held[len(d.held)-1]
		next = last.seq + uint32(last.size)
		off = uint64(next - d.held[0].seq)
	}
	if ahead := s.seq - next; int32(ahead) >= 0 {
		return ahead > maxWindow || d.t.conn.Closed && ahead > maxHeldTCP
	}
	slack := uint64(maxHeldTCP) // slack is for bytes that were overtaken before the beginning was known.
	if d.synced {
		slack = 1 // It is one byte for a keep-alive probe.
	}
	behind := next - s.seq
	return behind > maxWindow || uint64(behind) > off+slack // It is from before the first byte.
}

// keepFar keeps a stranger for later.
func (d *tcpDir) keepFar(s tcpSegment) {
	if n := len(d.far); n > 0 && d.far[n-1].seq+uint32(d.far[n-1].size) != s.seq {
		d.dropFar()
	}
	var ok bool
	if s.data, ok = d.t.r.hold(s.data); !ok {
		d.t.r.lose(Loss{Conn: d.t.conn, From: d.side, What: MemoryShort, Count: uint64(s.size)})
	}
	d.far = append(d.far, s)
}

// dropFar counts strangers as packets that make no sense.
func (d *tcpDir) dropFar() {
	d.t.r.stats.Broken += uint64(len(d.far))
	for _, s := range d.far {
		d.t.r.letGo(s.data)
	}
	d.far = nil
}

// succeed ends the connection, and begins another one with the strangers to it. It returns
// the same direction of the new connection.
func (d *tcpDir) succeed() *tcpDir {
	t, r := d.t, d.t.r
	if !t.conn.Closed {
		r.lose(Loss{Conn: t.conn, From: d.side, What: StreamLost})
	}
	far := [2][]tcpSegment{d.far, t.dirs[d.side.Other()].far}
	d.far, t.dirs[d.side.Other()].far = nil, nil
	r.flushConn(t.conn)
	r.drop(t.conn)
	n := r.newStream(d.key, 0)
	for i, x := range []*tcpDir{n, n.t.dirs[n.side.Other()]} {
		for _, s := range far[i] {
			r.touch(x.t.conn, x.side, s.size)
			x.segment(s)
			r.letGo(s.data)
		}
	}
	return n
}

// newStream makes a connection whose first segment has that key and those flags.
func (r *Reassembler) newStream(key streamKey, flags byte) *tcpDir {
	c := r.newConn(IWARP)
	t := &tcpConn{r: r, conn: c}
	c.tcp = t
	side := Initiator
	if flags&(tcpSYN|tcpACK) == tcpSYN|tcpACK {
		side = Responder
	}
	back := streamKey{key.dst, key.src, key.dport, key.sport}
	for _, x := range []struct {
		key  streamKey
		side Side
	}{{key, side}, {back, side.Other()}} {
		d := &tcpDir{t: t, side: x.side, key: x.key}
		t.dirs[x.side] = d
		r.streams[x.key] = d
		c.Ends[x.side].Addr = addrPort(x.key.src, x.key.sport)
	}
	return t.dirs[side]
}

// swap exchanges the sides if the side that was captured first is not the initiator.
func (t *tcpConn) swap() {
	c := t.conn
	t.dirs[0], t.dirs[1] = t.dirs[1], t.dirs[0]
	c.Ends[0], c.Ends[1] = c.Ends[1], c.Ends[0]
	c.Sent[0], c.Sent[1] = c.Sent[1], c.Sent[0]
	t.dirs[0].side, t.dirs[1].side = 0, 1
	c.endUpper()
	for _, d := range t.dirs {
		for _, m := range slices.Concat(d.reads, []*Message{d.send, d.write}) {
			if m != nil {
				m.From = d.side
			}
		}
	}
}

// sideBy corrects the sides if b, the beginning of what d has sent, is the start frame of
// the other side.
func (d *tcpDir) sideBy(b []byte) {
	if len(b) >= iwarpwire.StartLen-4 && (startLen(b, false) >= 0 && d.side == Responder || startLen(b, true) >= 0 && d.side == Initiator) {
		d.t.swap()
	}
}

// begin sets the number of the first byte.
func (d *tcpDir) begin(seq uint32) {
	if !d.started {
		d.started, d.synced, d.next = true, true, seq
		d.drain()
	}
}

// segment handles a segment with data.
func (d *tcpDir) segment(s tcpSegment) {
	if !d.started {
		d.hold(s)
		if len(d.held) >= startHold {
			d.beginAnywhere()
		}
		return
	}
	if !d.trim(&s) {
		return
	}
	if s.seq == d.next && len(d.held) == 0 && d.ready() {
		d.consume(s)
		return
	}
	if s.seq != d.next {
		d.t.conn.Sent[d.side].Reordered++
		d.t.r.stats.Reordered++
	}
	d.hold(s)
	d.drain()
	for len(d.held) > d.t.r.window || d.bytes > maxHeldTCP {
		d.skip()
	}
}

// trim removes bytes that came before. It returns false if nothing is left.
func (d *tcpDir) trim(s *tcpSegment) bool {
	known := -int(int32(s.seq - d.next))
	if known <= 0 {
		return true
	}
	if s.size > 1 || known > 1 { // A single such byte is a keep-alive probe.
		d.t.conn.Sent[d.side].Repeats++
		d.t.r.stats.Repeats++
	}
	if known >= s.size {
		return false
	}
	s.seq += uint32(known)
	s.size -= known
	s.data = s.data[min(known, len(s.data)):]
	return true
}

// beginAnywhere begins with the lowest number, because the SYN was not captured.
func (d *tcpDir) beginAnywhere() {
	// A start frame of either direction shows the sides.
	for _, x := range d.t.dirs {
		if len(x.held) > 0 && d.t.conn.ID == 0 {
			x.sideBy(x.held[0].data)
		}
	}
	d.started, d.next = true, d.held[0].seq
	d.phase = phaseGuess
	d.interrupted()
	d.drain()
}

// hold keeps a segment for later.
func (d *tcpDir) hold(s tcpSegment) {
	r := d.t.r
	i := len(d.held)
	for ; i > 0; i-- {
		h := &d.held[i-1]
		if diff := int32(s.seq - h.seq); diff > 0 || diff == 0 && s.size >= h.size {
			if diff == 0 && s.size == h.size {
				d.t.conn.Sent[d.side].Repeats++
				r.stats.Repeats++
				return
			}
			break
		}
	}
	data, ok := r.hold(s.data)
	if !ok {
		r.lose(Loss{Conn: d.t.conn, From: d.side, What: MemoryShort, Count: uint64(s.size)})
		data = nil // Its place remains as a hole.
	}
	s.data = data
	d.held = slices.Insert(d.held, i, s)
	d.bytes += s.size
}

// drain feeds segments whose turn has come.
func (d *tcpDir) drain() {
	n := 0
	for n < len(d.held) && d.started && d.ready() {
		s := d.held[n]
		if int32(s.seq-d.next) > 0 {
			break
		}
		d.held[n].data = nil
		n++
		d.bytes -= s.size
		kept := s.data
		if d.trim(&s) {
			d.consume(s)
		}
		d.t.r.letGo(kept)
	}
	if n > 0 {
		d.held = slices.Delete(d.held, 0, min(n, len(d.held)))
		if len(d.held) == 0 && cap(d.held) > maxSpare {
			d.held = nil
		}
	}
}

// consume feeds the segment that begins at next.
func (d *tcpDir) consume(s tcpSegment) {
	d.origin = s.seq - uint32(d.off)
	d.next += uint32(s.size)
	d.ack = s.ack
	if len(s.data) > 0 {
		d.feed(s.data, s.when)
	}
	if gone := s.size - len(s.data); gone > 0 {
		d.missing(gone, s.when)
	}
	if o := d.t.dirs[d.side.Other()]; len(o.early) > 0 {
		o.retryEarly()
	}
}

// missing notes that n bytes at off will never come.
func (d *tcpDir) missing(n int, when time.Time) {
	c := d.t.conn
	c.Sent[d.side].Lost += uint64(n)
	if d.phase != phaseGuess || c.ID != 0 {
		d.t.r.lose(Loss{Conn: c, From: d.side, What: BytesLost, First: d.off, Count: uint64(n)})
	}
	d.hole(n, when)
}

// skip gives up the bytes that the held segments wait for.
func (d *tcpDir) skip() {
	if !d.started {
		d.beginAnywhere()
		return
	}
	if !d.ready() {
		d.t.assumed = true
		if d.drain(); len(d.held) == 0 {
			return
		}
	}
	first := &d.held[0]
	if gap := int(int32(first.seq - d.next)); gap > 0 {
		d.next = first.seq
		d.missing(gap, first.when)
	}
	d.drain()
}

// flush hands out all that is open, without waiting.
func (t *tcpConn) flush() {
	if t.foreign {
		return
	}
	for again := true; again; {
		again = false
		for _, d := range t.dirs {
			if len(d.held) > 0 && !t.foreign {
				d.skip()
				again = true
			}
		}
	}
	for _, d := range t.dirs {
		d.end()
	}
	for _, d := range t.dirs {
		d.flushReads()
	}
}

// giveUp ends the decoding of a connection that is not iWARP.
func (t *tcpConn) giveUp() {
	t.foreign = true
	for _, d := range t.dirs {
		d.clear()
	}
}

func (d *tcpDir) clear() {
	d.dropFar()
	for i := range d.held {
		d.t.r.letGo(d.held[i].data)
	}
	d.held, d.bytes = nil, 0
	d.t.r.mem.give(d.kept)
	d.buf, d.starts, d.unmarked, d.kept = nil, nil, nil, 0
}

func (t *tcpConn) forget() {
	for _, d := range t.dirs {
		if t.r.streams[d.key] == d {
			delete(t.r.streams, d.key)
		}
		d.clear()
	}
}
