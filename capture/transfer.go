package capture

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// This file follows rdmanet's large transfers (docs/protocol.md, section 6). A Send
// announces a transfer, and RDMA Reads or Writes move its data. A transfer has its place
// among the messages of its side, so messages that were sent behind it wait for it.
//
// By RDMA Read the memory is the sender's. The Reads of the offered key and address make up
// the transfer, in whatever order they come. The same memory may be offered again as soon
// as the reader has sent done. A Read belongs to an offer by its place among the messages
// of the reader (Message.nth).
//
// By RDMA Write the order of the sender's messages decides. Each Write is followed by the
// Send that reports it, and the Writes of a transfer come one after the other. So the
// grants are not needed to put it together.

// TransferOp is the operation of a Send of rdmanet about a large transfer.
type TransferOp uint8

// These are the operations. Their numbers are those on the wire.
const (
	Offer    TransferOp = iota + 1 // Offer: the sender's memory may be read.
	Request                        // Request: data waits to be written.
	Grant                          // Grant: the receiver's memory may be written.
	Written                        // Written: data was written to the memory of the oldest Grant.
	Done                           // Done: the receiver ends the transfer, and all before it.
	Withdraw                       // Withdraw: the sender ends the transfer where it is.
)

var transferOpNames = [...]string{"", "offer", "request", "grant", "written", "done", "withdraw"}

// String returns the name in the words of docs/protocol.md.
func (o TransferOp) String() string {
	if o > 0 && int(o) < len(transferOpNames) {
		return transferOpNames[o]
	}
	return fmt.Sprintf("TransferOp(%d)", uint8(o))
}

const (
	smbdTransfer  = 0x4000 // smbdTransfer is the flag for a transfer header.
	transferStart = 24     // transferStart is the offset of the transfer header.
	transferEnd   = 56     // transferEnd is the offset behind it.

	flagEnd = 1 // flagEnd of written: nothing follows what was written before.
	flagCut = 2 // flagCut of withdraw and written: the message has no end.

	maxTransferLen = 1 << 30

	// partLen is how much of a transfer is handed out at a time, and maxAhead how
	// far its data may come in front of some that is missing.
	partLen  = 16 << 20
	maxAhead = 8 * partLen

	// maxLive is how many transfers of a side are followed, four times as many as
	// the protocol allows, and how many earlier uses of memory are remembered.
	maxLive = 64

	// liveAtOnce is how many transfers of a side may be under way. When one more begins,
	// the oldest ones are over.
	liveAtOnce = 16
)

// transferHeader is the header behind that of a Data Transfer message.
type transferHeader struct {
	op     TransferOp
	flags  uint8
	id     uint32
	memory ChunkSegment // memory has the length of the operation too.
	rest   uint64
}

// parse reads the transfer header of a Send that begins with b and has h; false
// if there cannot be one.
func (t *transferHeader) parse(b []byte, h *smbdHeader) bool {
	if len(b) < transferEnd || h.remaining != 0 || h.length > 0 && h.offset < transferEnd {
		return false
	}
	le := binary.LittleEndian
	b = b[transferStart:transferEnd]
	*t = transferHeader{
		op: TransferOp(b[0]), flags: b[1], id: le.Uint32(b[4:]), rest: le.Uint64(b[24:]),
		memory: ChunkSegment{Offset: le.Uint64(b[8:]), Handle: le.Uint32(b[16:]), Length: le.Uint32(b[20:])},
	}
	switch t.op {
	case Offer, Request:
		return t.memory.Length <= maxTransferLen && t.rest <= math.MaxInt64-2*maxTransferLen && (t.memory.Length > 0 || h.length > 0)
	case Grant, Written, Done, Withdraw:
		return h.length == 0
	}
	return false
}

// agreed tells whether both ends of c have offered large transfers, and whether
// that is known.
func agreed(c *Conn) (yes, known bool) {
	const feature = 1 << 3
	n := 0
	for _, e := range c.Ends {
		if b := e.Private; len(b) >= 20 && string(b[8:12]) == "RDNT" && b[12] == 1 && binary.BigEndian.Uint16(b[14:])&feature != 0 {
			n++
		}
	}
	return n == 2, c.SetUp
}

// session follows the large transfers of a connection.
type session struct {
	*memories
	active bool           // there are some, or may be
	known  bool           // whether that was agreed
	sides  [2]sessionSide // by who sends the data
}

// sessionSide is what one side sends by transfers.
type sessionSide struct {
	last   uint32           // ID of the latest
	live   []*largeTransfer // oldest first: those that are not over, or wait for data
	past   []pastUse        // of memory, latest last
	queue  []queued         // what is to be handed out, oldest first
	writes []piece          // since the last one that was said to be written
	dones  []done           // the receiver's latest, oldest first
	old    done             // the latest that was in front of these

	// Of offers up to hole it is not known what memory they were of. They were over
	// by the receiver's message floor; never if it has not said so yet.
	hole  uint32
	floor uint64

	gaps []gapBehind // in what the receiver has sent, oldest first
}

// gapBehind notes that packets of one side are missing behind one message, or behind
// several. The numbers are those of Message.nth.
type gapBehind struct {
	first, last uint64
}

// done is a message of the receiver: a transfer is over, and all before it. It may overtake
// the offer.
type done struct {
	id, length uint32
	nth        uint64 // Message.nth
}

// queued is something that waits for a transfer in front of it, or is one.
type queued struct {
	u    *UpperMessage
	t    *largeTransfer
	held int // bytes accounted for
}

// pastUse notes until when memory was used for a transfer.
type pastUse struct {
	memory ChunkSegment
	until  uint64 // until is a Message.nth of the reader.
}

// largeTransfer is one large transfer, while its data is put together and handed out.
type largeTransfer struct {
	u       UpperMessage // u is what is handed out, part by part.
	op      TransferOp   // op is Offer or Request.
	id      uint32
	memory  ChunkSegment
	initial uint64 // initial is how many bytes came as payload.
	size    uint64 // size is initial and the length of the transfer together.
	rest    uint64 // rest is how many bytes of the message follow.
	base    uint64 // base is how many bytes were handed out.
	buf     buffer // buf has the data from base on.

	moved uint64 // moved is how many bytes the Writes of a Request have moved.

	// from, until and doubt say which Reads belong to an Offer, by Message.nth. Reads up
	// to from belong to an earlier use of the memory, and Reads behind until to a later
	// one. Where packets are missing, Reads behind doubt may belong to either. They wait
	// in doubtful, and are used if the reader sends done for this transfer.
	from, until, doubt uint64
	doubtful           []piece

	over      bool   // over is set if no more data will be moved.
	withdrawn bool   // withdrawn is set if the sender has withdrawn the transfer.
	short     bool   // short is set if the receiver has confirmed the withdrawal.
	denied    bool   // denied is set if the receiver reports less than it has read.
	out       bool   // out is set if everything was handed out.
	deadline  uint64 // deadline is the value of Conn.packets at which it is handed out as it is, 0 for never.
}

const never = math.MaxUint64 // as Message.nth

// overlaps tells whether some of g is in h.
func (g *ChunkSegment) overlaps(h *ChunkSegment) bool {
	return g.Handle == h.Handle && (g.Offset-h.Offset < uint64(h.Length) || h.Offset-g.Offset < uint64(g.Length))
}

// contains tells whether size bytes at an address are in g.
func (g *ChunkSegment) contains(key uint32, addr, size uint64) bool {
	off := addr - g.Offset
	return key == g.Handle && off <= uint64(g.Length) && size <= uint64(g.Length)-off
}

// begin takes an offer or request. u is what there is of it up to now, and payload
// the data that came along.
func (x *session) begin(u *UpperMessage, h *transferHeader, payload []byte) {
	s := &x.sides[u.From]
	if h.id != s.last+1 {
		s.lose(h.id - 1)
	}
	if s.last = h.id; len(s.live) >= maxLive {
		x.abandon(u.From, s.live[0])
	}
	if !x.r.mem.take(waitCost) {
		x.r.lose(Loss{Conn: x.c, From: u.From, What: MemoryShort, Count: u.Size + uint64(h.memory.Length)})
		u.Size += uint64(h.memory.Length)
		u.Missing = append(u.Missing, Range{u.Got, u.Size})
		x.handOut(u)
		return
	}
	t := &largeTransfer{u: *u, op: h.op, id: h.id, memory: h.memory, rest: h.rest, initial: u.Size, until: never, doubt: never}
	t.u.Data, t.u.Missing = nil, nil
	t.size = t.initial + uint64(h.memory.Length)
	keep := uint64(0)
	if x.r.cfg.Data {
		keep = t.size
	}
	t.buf.reset(keep, &x.r.mem)
	t.buf.expect = t.size
	x.put(t, 0, u.Got, payload)
	t.moved = t.initial
	e := s.over(t.id)
	t.until = e.nth
	if h.op == Offer {
		x.claim(t)
	}
	s.live = append(s.live, t)
	s.queue = append(s.queue, queued{t: t, held: waitCost})
	if e.nth < never {
		x.end(t, e)
	}
	x.pump(u.From)
}

// over returns the first word that the transfer with that ID is over.
func (s *sessionSide) over(id uint32) done {
	for _, e := range s.dones {
		if int32(e.id-id) >= 0 {
			return e
		}
	}
	return done{nth: never}
}

// lose notes that nothing is known of transfers up to id.
func (s *sessionSide) lose(id uint32) {
	s.hole, s.floor = id, s.over(id).nth
}

// claim settles which Reads belong to t, and takes those that are there already:
// the offer may have been overtaken.
func (x *session) claim(t *largeTransfer) {
	owner := t.u.From
	s := &x.sides[owner]
	if t.from = s.floor; int32(s.old.id-t.id) >= 0 {
		t.from = never // when it was over is forgotten
	}
	begun := uint64(0)
	for _, e := range s.dones {
		if int32(t.id-e.id) >= liveAtOnce {
			begun = e.nth // all transfers from now on began behind that
		}
	}
	t.from = max(t.from, begun)
	s.gaps = slices.DeleteFunc(s.gaps, func(g gapBehind) bool { return g.last < begun })
	for _, p := range s.past {
		if p.memory.overlaps(&t.memory) {
			t.from = max(t.from, p.until)
		}
	}
	for _, o := range s.live {
		if o.op == Offer && o.until < never && o.memory.overlaps(&t.memory) {
			t.from = max(t.from, o.until)
		}
	}
	t.doubt = s.gapSince(t.from)
	for i := 0; i < len(x.pieces[owner]); i++ {
		p := &x.pieces[owner][i]
		if p.nth > t.until || !t.memory.contains(p.key, p.addr, p.size) {
			continue
		}
		switch {
		case p.nth <= t.from:
			x.dropPiece(owner, i)
		case p.nth <= t.doubt:
			x.place(t, t.initial+p.addr-t.memory.Offset, p)
			x.dropPiece(owner, i)
		default:
			t.doubtful = append(t.doubtful, *p)
			x.pieces[owner] = slices.Delete(x.pieces[owner], i, i+1)
		}
		i--
	}
}

// settle decides about what was in doubt.
func (x *session) settle(t *largeTransfer, belongs bool) {
	for i := range t.doubtful {
		p := &t.doubtful[i]
		if belongs {
			x.place(t, t.initial+p.addr-t.memory.Offset, p)
		}
		x.r.mem.give(p.held())
	}
	t.doubtful = nil
	if belongs {
		t.doubt = never
	}
}

// access takes a Write or Read, in the order of its side.
func (x *session) access(m *Message) {
	switch {
	case m.Size == 0: // asks whether the peer is alive
	case m.Kind == Write:
		s := &x.sides[m.From]
		if len(s.writes) >= maxPieces {
			x.dropWrites(s)
		}
		if p, ok := x.piece(m); ok {
			s.writes = append(s.writes, p)
		}
	default:
		x.read(m)
	}
}

func (x *session) read(m *Message) {
	owner := m.From.Other()
	for _, t := range x.sides[owner].live {
		switch {
		case t.op != Offer || !t.memory.contains(m.Key, m.Addr, m.Size):
		case m.nth > t.until || m.nth <= t.from:
		case m.nth > t.doubt:
			if len(t.doubtful) >= maxPieces {
				x.settle(t, false)
			}
			if p, ok := x.piece(m); ok && !t.out {
				t.doubtful = append(t.doubtful, p)
			} else if ok {
				x.r.mem.give(p.held())
			}
			t.deadline = x.c.packets + 2*uint64(x.r.window)
			return
		default:
			if !m.Overflow {
				t.u.End = m.End
				p := piece{size: m.Size, missing: m.Missing, data: m.Data}
				x.place(t, t.initial+m.Addr-t.memory.Offset, &p)
			}
			x.pump(owner)
			return
		}
	}
	x.wait(m)
	x.pump(owner)
}

// place puts what there is of p at an offset of t.
func (x *session) place(t *largeTransfer, at uint64, p *piece) {
	present(p.missing, p.size, func(from, to uint64) {
		x.put(t, at+from, at+to, p.data[min(from, uint64(len(p.data))):])
	})
}

// put says that [from, to) of t is there, with Config.Data as far as data goes.
func (x *session) put(t *largeTransfer, from, to uint64, data []byte) {
	if x.r.cfg.Data {
		to = min(to, from+uint64(len(data)))
		data = data[:to-from]
	}
	if from < t.base {
		skip := min(t.base, to) - from
		from, data = from+skip, data[min(skip, uint64(len(data))):]
	}
	if from >= to {
		return
	}
	from, to = from-t.base, to-t.base
	if !x.r.cfg.Data {
		t.buf.note(from, to)
		return
	}
	if t.buf.put(from, data); t.buf.full {
		t.buf.full = false
		t.buf.have.remove(from, to)
		x.r.lose(Loss{Conn: x.c, From: t.u.From, What: MemoryShort, Count: to - from})
	}
}

// control takes a Send that says something about a transfer which has begun.
func (x *session) control(m *Message, h *transferHeader) {
	switch h.op {
	case Done:
		x.done(m, h)
	case Written:
		x.written(m, h)
	case Withdraw:
		if t := x.sides[m.From].find(h.id); t != nil && t.op == Offer && (!t.over || t.short) {
			t.withdrawn, t.u.Cut = true, h.flags&flagCut != 0
			x.pump(m.From)
		}
	}
}

func (s *sessionSide) find(id uint32) *largeTransfer {
	for _, t := range s.live {
		if t.id == id {
			return t
		}
	}
	return nil
}

// done takes the receiver's word that a transfer is over, and those before it.
func (x *session) done(m *Message, h *transferHeader) {
	from := m.From.Other()
	s := &x.sides[from]
	e := done{h.id, h.memory.Length, m.nth}
	if s.dones = append(s.dones, e); len(s.dones) > maxLive {
		s.old = s.dones[0]
		s.dones = slices.Delete(s.dones, 0, 1)
	}
	if s.floor == never && int32(h.id-s.hole) >= 0 {
		s.floor = m.nth
		for _, t := range s.live {
			if t.from == never {
				t.from, t.doubt = s.floor, s.gapSince(s.floor)
			}
		}
	}
	for _, t := range slices.Clone(s.live) {
		if int32(t.id-h.id) <= 0 && !t.over {
			x.end(t, e)
		}
	}
	x.pump(from)
}

// shorten ends t at size.
func (t *largeTransfer) shorten(size uint64) {
	t.size, t.short, t.u.Withdrawn = size, true, true
	if size < t.base {
		t.denied, t.size = true, t.base
	}
	t.buf.have.remove(t.size-t.base, math.MaxUint64)
}

// end notes that t is over, as e says. What was sent by then may still come.
func (x *session) end(t *largeTransfer, e done) {
	if size := t.initial + uint64(e.length); t.id == e.id && t.op == Offer && size < t.size {
		t.shorten(size)
	} else {
		t.withdrawn, t.u.Cut = false, false // too late
	}
	t.over, t.until = true, e.nth
	for _, o := range x.sides[t.u.From].live {
		if o.op == Offer && int32(o.id-t.id) > 0 && o.memory.overlaps(&t.memory) {
			o.from = max(o.from, t.until)
		}
	}
	x.settle(t, t.id == e.id)
	if t.deadline == 0 {
		t.deadline = x.c.packets + 2*uint64(x.r.window)
	}
	if t.out {
		x.retire(t)
	}
}

// written takes the sender's word that it has answered a grant.
func (x *session) written(m *Message, h *transferHeader) {
	s := &x.sides[m.From]
	defer x.dropWrites(s)
	t := s.find(h.id)
	if t == nil || t.op != Request || t.over {
		return
	}
	for _, o := range slices.Clone(s.live) {
		if o == t {
			break
		}
		o.over, o.deadline = true, 1 // all of it was written before, or never will be
	}
	n := uint64(h.memory.Length)
	switch {
	case h.flags&flagEnd != 0:
		t.withdrawn, t.u.Cut = true, h.flags&flagCut != 0
		t.shorten(t.moved)
	case n > t.size-t.moved:
		t.over, t.deadline = true, 1
	default:
		if w := s.writes; len(w) > 0 && !w[0].headless {
			for i := range w {
				if off := w[i].addr - w[0].addr; w[i].key == w[0].key && off <= n && w[i].size <= n-off {
					x.place(t, t.moved+off, &w[i])
				}
			}
		}
		t.moved += n
		t.u.End = m.End
	}
	if t.moved == t.size {
		t.over, t.deadline = true, 1
	}
	x.pump(m.From)
}

func (x *session) dropWrites(s *sessionSide) {
	for i := range s.writes {
		x.r.mem.give(s.writes[i].held())
	}
	clear(s.writes)
	s.writes = s.writes[:0]
}

// gap notes that packets of a side are missing. Its Reads may from now on belong
// to a transfer that began when another one was done, which did not show.
func (x *session) gap(from Side) {
	s := &x.sides[from.Other()]
	nth := x.c.Sent[from].begun
	if n := len(s.gaps); n >= maxLive {
		s.gaps[n-1].last = nth
	} else {
		s.gaps = append(s.gaps, gapBehind{nth, nth})
	}
	for _, t := range s.live {
		if t.op == Offer && !t.over {
			t.doubt = min(t.doubt, nth)
			if t.deadline == 0 {
				t.deadline = x.c.packets + 2*uint64(x.r.window)
			}
		}
	}
}

// gapSince returns the receiver's message behind which something is missing for
// the first time since another one; never if nothing is.
func (s *sessionSide) gapSince(nth uint64) uint64 {
	for _, g := range s.gaps {
		if g.last >= nth {
			return max(g.first, nth)
		}
	}
	return never
}

// interrupt notes that Sends of a side are missing, and perhaps Writes.
func (x *session) interrupt(from Side) {
	s := &x.sides[from]
	for _, t := range s.live {
		if t.op == Request {
			t.over, t.deadline = true, 1 // it is not known where the next Write goes
		}
	}
	x.dropWrites(s)
	x.pump(from)
}

// handOut hands out a message with its place among the transfers of its side.
func (x *session) handOut(u *UpperMessage) {
	s := &x.sides[u.From]
	if len(s.queue) == 0 {
		x.r.emit(u)
		return
	}
	held := waitCost + len(u.Data)
	if !x.r.mem.take(held) {
		x.r.lose(Loss{Conn: x.c, From: u.From, What: MemoryShort, Count: u.Size})
		for len(s.queue) > 0 { // none can wait any more
			x.first(s)
		}
		x.r.emit(u)
		return
	}
	c := u.clone()
	s.queue = append(s.queue, queued{u: &c, held: held})
	if len(s.queue) > maxPending {
		x.first(s)
	}
	x.pump(u.From)
}

// pump hands out what is ready, or has waited for long enough.
func (x *session) pump(from Side) {
	s := &x.sides[from]
	for len(s.queue) > 0 {
		if t := s.queue[0].t; t != nil {
			for t.size-t.base > partLen && (t.buf.have.covers(0, partLen) && !t.withdrawn || t.buf.end() > maxAhead) {
				x.part(t, partLen)
			}
			there := t.buf.have.covers(0, t.size-t.base) && t.withdrawn == t.short
			if !there && (t.deadline == 0 || x.c.packets <= t.deadline) {
				return
			}
		}
		x.first(s)
	}
}

// first hands out the first in the queue.
func (x *session) first(s *sessionSide) {
	q := s.queue[0]
	s.queue = slices.Delete(s.queue, 0, 1)
	if q.t == nil {
		x.r.emit(q.u)
		x.r.mem.give(q.held)
		return
	}
	t := q.t
	for t.size-t.base > partLen {
		x.part(t, partLen)
	}
	x.part(t, t.size-t.base)
	x.settle(t, false)
	t.buf.release()
	t.out = true
	if t.op == Request || t.over {
		x.retire(t)
	}
	x.r.mem.give(q.held)
}

// part hands out the next n bytes of t.
func (x *session) part(t *largeTransfer, n uint64) {
	u := t.u
	u.Offset, u.Size = t.base, n
	u.Got = t.buf.have.total(n)
	u.Missing = t.buf.have.missing(nil, n)
	if u.Rest = t.rest + t.size - t.base - n; t.short && !u.Cut {
		u.Rest = 0
	}
	u.TailLost = t.withdrawn != t.short // a Send is missing: how far it went, or whether the message goes on
	if t.denied {
		u.Kind, u.Complete = Strange, false
	}
	if x.r.cfg.Data {
		u.Data = t.buf.data[:min(n, uint64(len(t.buf.data)))]
	}
	x.r.emit(&u)
	t.base += n
	t.buf.advance(n)
	t.u.Sends, t.u.HeadLost, t.u.Complete = 0, false, true
}

// retire forgets t, but for the use of its memory.
func (x *session) retire(t *largeTransfer) {
	s := &x.sides[t.u.From]
	if i := slices.Index(s.live, t); i >= 0 {
		s.live = slices.Delete(s.live, i, i+1)
	}
	if t.op == Offer && t.until < never {
		if len(s.past) >= maxLive {
			s.past = slices.Delete(s.past, 0, 1)
		}
		s.past = append(s.past, pastUse{t.memory, t.until})
	}
}

// abandon hands out all up to t, as it is, and forgets t.
func (x *session) abandon(from Side, t *largeTransfer) {
	s := &x.sides[from]
	for !t.out && len(s.queue) > 0 {
		x.first(s)
	}
	if s.lose(t.id); t.op == Offer && t.until == never {
		for _, o := range s.live {
			if o.op == Offer && o.memory.overlaps(&t.memory) {
				o.from = s.floor
			}
		}
	}
	x.retire(t)
}

func (x *session) flush() {
	for i := range x.sides {
		for s := &x.sides[i]; len(s.queue) > 0; {
			x.first(s)
		}
	}
}

func (x *session) forget() {
	for i := range x.sides {
		s := &x.sides[i]
		for _, q := range s.queue {
			if x.r.mem.give(q.held); q.t != nil {
				x.settle(q.t, false)
				q.t.buf.release()
			}
		}
		x.dropWrites(s)
		*s = sessionSide{}
	}
}
