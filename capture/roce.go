package capture

import (
	"encoding/binary"
	"time"
)

// This file handles RoCEv2. The packets from one host to one QP of another are a flow. A
// flow has requests, numbered by the sender's own PSNs, and answers, which have the numbers
// of the requests that they belong to.
//
//  1. addUDP decodes a packet, checks its ICRC and finds its flow.
//  2. request puts requests in order. A request that comes too early waits, and one that
//     comes again is dropped. One that does not come within the window leaves a gap.
//  3. accept takes requests in order and makes messages of them.
//  4. response brings answers to the requests of the opposite flow, the peer. An answer to
//     a request that was not accepted yet waits.

type flowKey struct {
	src, dst addr
	qp       uint32
}

type hostPair struct {
	src, dst addr
}

const (
	// startHold is how many requests must wait until the first PSN is decided, if it is
	// not known.
	startHold = 64

	// jump is the greatest distance of PSNs in one connection. No adapter has so many
	// outstanding.
	jump = 1 << 16

	maxReads = 4096 // maxReads is how many Reads may be open at a time in one flow.
)

// roceFlow is one direction of a connection.
type roceFlow struct {
	r    *Reassembler
	key  flowKey
	conn *Conn
	side Side      // side is the side that sends.
	peer *roceFlow // peer is the other direction, nil while it is not known.

	seen    uint64 // seen counts packets.
	started bool
	next    uint32   // next is the PSN of the next request.
	due     uint32   // due is the PSN of the next request to be answered.
	unsure  *Message // unsure is a Read whose number of PSNs is not known, so next is not known either.
	held    packetQueue
	early   packetQueue // early has answers that came before their request was accepted.

	cur      *Message   // cur is the Send or Write that is being received.
	reads    []*Message // reads has the Reads and atomic operations without an answer, in order.
	lost     int        // lost is how many PSNs were lost since the last Send.
	gaps     [8]psnRange
	gapCount int

	retries bool // retries is set while early is being searched.

	// These fields are used while there is no peer.
	listed   bool      // listed is set while the flow is in the list of flows without a peer.
	born     int       // born is how many flows there were before.
	asked    psnSpan   // asked has the PSNs of requests.
	perhaps  psnSpan   // perhaps has these PSNs, with Reads as long as they can be.
	formerly psnSpan   // formerly is the perhaps of an earlier connection of the QP.
	answered psnSpan   // answered has the PSNs of answers.
	asker    *roceFlow // asker has sent a request that an answer belongs to.
	mixed    bool      // mixed is set if answers belong to two connections.
	answers  int

	marks             [64]mark // marks has requests that wait for an acknowledgement, in a ring.
	markHead, markLen int
}

type psnRange struct {
	first uint32
	count int
}

func (g psnRange) contains(psn uint32) bool {
	return int((psn-g.first)&psnMask) < g.count
}

type mark struct {
	psn  uint32
	when time.Time
}

// addUDP handles a UDP datagram.
func (r *Reassembler) addUDP(d *datagram) {
	const udpLen = 8
	b := d.payload
	if len(b) < udpLen || d.size < udpLen {
		r.stats.Broken++
		return
	}
	if binary.BigEndian.Uint16(b[2:]) != rocePort {
		return
	}
	size := int(binary.BigEndian.Uint16(b[4:]))
	if size == 0 {
		size = d.size
	}
	if size < udpLen || size > d.size {
		r.stats.Broken++
		return
	}
	b = b[:min(size, len(b))]

	r.stats.RoCE++
	pk := &r.pk
	if len(b) > udpLen {
		r.stats.Opcodes[b[udpLen]]++
	}
	if err := pk.Parse(b[udpLen:], size-udpLen); err != nil {
		r.stats.BadHeader++
		return
	}
	switch {
	case !pk.Whole:
		r.stats.NoICRC++
	case r.scratch.sum(d.header, d.v6, b[:size-icrcLen]) == pk.ICRC:
		r.stats.GoodICRC++
	default:
		r.stats.BadICRC++
		if !r.cfg.IgnoreChecksums {
			return
		}
	}
	if pk.Opcode == opcodeCNP {
		return
	}
	if pk.Opcode.transport() == transportUD && pk.DestQP == 1 {
		var m CM
		if m.parse(pk.Payload) {
			r.addCM(d.src, d.dst, &m, len(d.header)+size)
			return
		}
	}
	f := r.flow(flowKey{d.src, d.dst, pk.DestQP})
	f.seen++
	r.touch(f.conn, f.side, len(d.header)+size)
	if pk.FECN {
		f.conn.Sent[f.side].Marked++
	}
	switch op := &opcodes[pk.Opcode]; {
	case op.flags&opDETH != 0:
		f.datagram(pk)
	case op.class == classReadResponse || op.class == classAck || op.class == classAtomicAck:
		f.response(pk, op, r.now)
	default:
		f.request(pk, op, r.now)
	}
}

// flow returns the flow with that key, and makes it if there is none.
func (r *Reassembler) flow(key flowKey) *roceFlow {
	slot := &r.recent[(key.qp^uint32(key.dst[15])<<3)%uint32(len(r.recent))]
	if f := *slot; f != nil && f.key == key {
		return f
	}
	f := r.flows[key]
	if f == nil {
		c := r.newConn(RoCE2)
		f = &roceFlow{r: r, key: key, born: r.born, listed: true}
		r.born++
		f.join(c, Initiator)
		r.flows[key] = f
		hosts := hostPair{key.src, key.dst}
		r.pairs[hosts] = append(r.pairs[hosts], f)
	}
	*slot = f
	return f
}

// join makes f the flow of one side of c.
func (f *roceFlow) join(c *Conn, side Side) {
	f.conn, f.side = c, side
	c.roce[side] = f
	from, to := &c.Ends[side], &c.Ends[side.Other()]
	if !from.Addr.IsValid() {
		from.Addr = addrPort(f.key.src, 0)
	}
	if !to.Addr.IsValid() {
		to.Addr = addrPort(f.key.dst, 0)
	}
	to.QP = f.key.qp
}

// forget removes f, which must have been flushed.
func (f *roceFlow) forget() {
	r := f.r
	if r.flows[f.key] == f {
		delete(r.flows, f.key)
	}
	f.giveUp()
	for i := range r.recent {
		if r.recent[i] == f {
			r.recent[i] = nil
		}
	}
	f.held.clear(r)
	f.early.clear(r)
}

func (f *roceFlow) datagram(pk *RoCE) {
	m := f.r.newMessage(f.conn, f.side, Datagram)
	m.psn, m.Size, m.Packets, m.SrcQP, m.QKey = pk.PSN, uint64(pk.Size), 1, pk.SrcQP, pk.QKey
	f.conn.Ends[f.side].QP = pk.SrcQP
	f.trailer(m, pk, &opcodes[pk.Opcode])
	f.r.finish(m, payload(pk))
}

// payload returns the payload for finish, for which nil has another meaning.
func payload(pk *RoCE) []byte {
	if pk.Payload == nil {
		return []byte{}
	}
	return pk.Payload
}

// request handles a request that has arrived.
func (f *roceFlow) request(pk *RoCE, op *opInfo, when time.Time) {
	if f.peer == nil {
		f.widen(pk)
		f.conn.Unpaired = true
	}
	if !f.started {
		f.wait(pk, when)
		if f.held.len() >= startHold {
			f.startAnywhere(f.held.first().pk.PSN)
		}
		return
	}
	if f.unsure == nil {
		switch d := psnDiff(pk.PSN, f.next); {
		case d == 0:
			f.accept(pk, op, when)
			f.drain()
			return
		case d < -jump || d > jump:
			f.restart(pk, when)
			return
		case d < 0:
			f.repeat()
			return
		}
	} else if psnDiff(pk.PSN, f.unsure.psn) <= 0 {
		f.repeat()
		return
	}
	f.conn.Sent[f.side].Reordered++
	f.r.stats.Reordered++
	f.wait(pk, when)
	if f.held.len() > f.r.window {
		f.skip()
	}
}

func (f *roceFlow) repeat() {
	f.conn.Sent[f.side].Repeats++
	f.r.stats.Repeats++
}

// wait keeps a request for later.
func (f *roceFlow) wait(pk *RoCE, when time.Time) {
	added, room := f.held.add(f.r, pk, when)
	if added {
		return
	}
	if room {
		f.repeat()
		return
	}
	// There is no memory, so the gaps that the others wait for are given up.
	f.r.lose(Loss{Conn: f.conn, From: f.side, What: MemoryShort, Count: uint64(pk.Size)})
	f.release()
	if !f.started {
		f.startAnywhere(pk.PSN)
	}
	if d := psnDiff(pk.PSN, f.next); f.unsure == nil && d >= 0 {
		f.gap(d, pk)
		f.accept(pk, &opcodes[pk.Opcode], when)
	}
}

// release accepts all requests that wait, although some between them are missing.
func (f *roceFlow) release() {
	if !f.started && f.held.len() > 0 {
		f.startAnywhere(f.held.first().pk.PSN)
	}
	for f.held.len() > 0 {
		f.skip()
	}
}

// start makes the request with that PSN the first one.
func (f *roceFlow) start(psn uint32) {
	f.started, f.next, f.due = true, psn, psn
	f.drain()
}

// startAnywhere does the same if there may have been earlier requests.
func (f *roceFlow) startAnywhere(psn uint32) {
	f.lost++
	f.start(psn)
}

// restart starts the flow anew if PSNs do not fit those before.
func (f *roceFlow) restart(pk *RoCE, when time.Time) {
	f.flushRequests()
	if d := psnDiff(pk.PSN, f.next); f.unsure == nil && d >= 0 && d <= jump {
		f.request(pk, &opcodes[pk.Opcode], when) // It was the first one that was expected.
		return
	}
	f.r.lose(Loss{Conn: f.conn, From: f.side, What: Restarted, First: uint64(f.next), Count: uint64(pk.PSN)})
	f.flushReads()
	if u := f.conn.upper; u != nil {
		u.gap(f.side)
	}
	f.bygone().asked.add(f.open())
	f.started, f.markLen = false, 0
	f.lost = jump
	f.wait(pk, when)
}

// drain accepts requests whose turn has come.
func (f *roceFlow) drain() {
	for f.held.len() > 0 && f.settle() {
		d := psnDiff(f.held.first().pk.PSN, f.next)
		if d > 0 {
			break
		}
		w := f.held.pop()
		if d == 0 {
			f.accept(&w.pk, &opcodes[w.pk.Opcode], w.when)
		} else {
			f.repeat()
		}
		f.r.letGo(w.pk.Payload)
	}
	f.retryEarly()
}

// skip gives up the gap in front of the requests that wait.
func (f *roceFlow) skip() {
	first := &f.held.first().pk
	if f.unsure != nil && !f.settle() {
		f.guess(psnDiff(first.PSN, f.unsure.psn))
	}
	if k := psnDiff(first.PSN, f.next); k > 0 {
		f.gap(k, first)
		f.next = first.PSN
	}
	f.drain()
}

// gap notes that k requests are missing in front of next. It decides whether next belongs
// to the message that was being received.
func (f *roceFlow) gap(k int, next *RoCE) {
	if k == 0 {
		return
	}
	r, c := f.r, f.conn
	if k > jump {
		r.lose(Loss{Conn: c, From: f.side, What: Restarted, First: uint64(f.next), Count: uint64(next.PSN)})
	} else {
		c.Sent[f.side].Lost += uint64(k)
		r.lose(Loss{Conn: c, From: f.side, What: PacketsLost, First: uint64(f.next), Count: uint64(k)})
	}
	f.gaps[f.gapCount%len(f.gaps)] = psnRange{f.next, k}
	f.gapCount++
	if c.upper != nil {
		c.upper.gap(f.side)
	}

	op := &opcodes[next.Opcode]
	goesOn := op.flags&opFirst == 0
	whole := f.cur == nil // whole is set if nothing of the message before is missing.
	if m := f.cur; m != nil {
		same := false
		if goesOn && op.class == m.class() {
			// One packet between a First and a Middle or Last can only be a Middle. More
			// packets may include a Last and a First, except in a Write of known length.
			same = k == 1
			if m.Kind == Write && !m.HeadLost {
				same = psnDiff(next.PSN, m.psn) < packets(uint32(m.Size), m.mtu)
			}
		}
		if same {
			return
		}
		f.abandon()
	}
	if whole && k == 1 && goesOn && op.class == classWrite {
		return // Only the First can be missing, and it is no Send.
	}
	f.lost += k
	if k == 1 && goesOn && op.class == classSend && c.MTU > 0 {
		// It can here too, but its place is known.
		m := r.newMessage(c, f.side, Send)
		m.psn, m.mtu = f.next, c.MTU
		f.cur, f.lost = m, f.lost-1
		m.lost, f.lost = f.lost, 0
	}
}

// abandon ends a Send or Write whose end has not come.
func (f *roceFlow) abandon() {
	m := f.cur
	f.cur = nil
	if m.Kind == Send || m.HeadLost {
		m.TailLost = true
	}
	f.r.finish(m, nil)
}

func (m *Message) class() class {
	if m.Kind == Write {
		return classWrite
	}
	return classSend
}

// accept takes the request with PSN next.
func (f *roceFlow) accept(pk *RoCE, op *opInfo, when time.Time) {
	f.next = (pk.PSN + 1) & psnMask
	switch op.class {
	case classSend, classWrite:
		f.acceptData(pk, op, when)
	case classReadRequest:
		m := f.begin(Read, pk, when)
		m.Key, m.Addr, m.Size, m.Packets = pk.RKey, pk.Addr, uint64(pk.Length), 1
		m.buf.expect = m.Size
		switch {
		case pk.Length <= 256: // the least path MTU
			m.count = 1
		case f.conn.MTU > 0:
			m.count, m.mtu = packets(pk.Length, f.conn.MTU), f.conn.MTU
		default:
			f.unsure = m
		}
		f.next = (pk.PSN + uint32(max(m.count, 1))) & psnMask
		f.expect(m)
	case classAtomic:
		kind := CompareSwap
		if pk.Opcode&0x1f == 0x14 {
			kind = FetchAdd
		}
		m := f.begin(kind, pk, when)
		m.Key, m.Addr, m.Size, m.Packets, m.count = pk.RKey, pk.Addr, 8, 1, 1
		m.Operand, m.Compare = pk.Swap, pk.Compare
		f.expect(m)
	}
}

func (f *roceFlow) begin(kind Kind, pk *RoCE, when time.Time) *Message {
	if f.cur != nil {
		f.abandon() // Nothing may come between the packets of a message.
	}
	m := f.r.newMessage(f.conn, f.side, kind)
	m.psn, m.Time, m.End = pk.PSN, when, when
	return m
}

func (f *roceFlow) expect(m *Message) {
	if len(f.reads) >= maxReads {
		f.finishRead(false)
	}
	f.reads = append(f.reads, m)
}

// acceptData handles a packet of a Send or Write.
func (f *roceFlow) acceptData(pk *RoCE, op *opInfo, when time.Time) {
	kind := Send
	if op.class == classWrite {
		kind = Write
	}
	first, last := op.flags&opFirst != 0, op.flags&opLast != 0
	if first != last || !last {
		f.learn(pk, op)
	}
	m := f.cur
	if first || m == nil || m.Kind != kind {
		m = f.begin(kind, pk, when)
		m.HeadLost = !first
		if m.mtu = pk.Size; last && !first {
			m.mtu = max(f.conn.MTU, 1)
		}
		if kind == Send {
			m.lost, f.lost = f.lost, 0
		}
		if op.flags&opRETH != 0 {
			m.Key, m.Addr, m.Size = pk.RKey, pk.Addr, uint64(pk.Length)
			m.buf.expect = m.Size
		}
	}
	m.Packets++
	m.End = when
	f.trailer(m, pk, op)
	if first && last {
		if kind == Send {
			m.Size = uint64(pk.Size)
		}
		m.TailLost = m.Size != uint64(pk.Size)
		f.mark(pk.PSN, when)
		f.r.finish(m, payload(pk))
		return
	}

	off := uint64(psnDiff(pk.PSN, m.psn)) * uint64(m.mtu)
	end := off + uint64(pk.Size)
	switch {
	case kind == Send || m.HeadLost:
		m.Size = end
	case end > m.Size || last && end != m.Size:
		m.TailLost = true // The length is not the one that the RETH announced.
	}
	if !last && pk.Size != m.mtu || pk.Size > m.mtu {
		m.TailLost = true
	}
	if kind == Send || end <= m.Size {
		m.buf.put(off, pk.Payload)
	}
	f.cur = m
	if last {
		f.cur = nil
		f.mark(pk.PSN, m.Time)
		f.r.finish(m, nil)
	}
}

// trailer handles the extra headers of a message's last packet.
func (f *roceFlow) trailer(m *Message, pk *RoCE, op *opInfo) {
	if op.flags&opImm != 0 {
		m.Imm, m.HasImm = pk.Imm, true
	}
	if op.flags&opIETH != 0 {
		m.Invalidate, m.HasInvalidate = pk.Invalidate, true
	}
	m.Solicited = m.Solicited || pk.Solicited
}

// learn sets the path MTU from a packet that fills it.
func (f *roceFlow) learn(pk *RoCE, op *opInfo) {
	if op.flags&opLast != 0 || pk.Size == f.conn.MTU {
		return
	}
	if n := pk.Size; n >= 256 && n <= 4096 && n&(n-1) == 0 {
		f.conn.MTU = n
	}
}

// settle computes next behind a Read, if the number of the Read's PSNs is known by now. It
// returns false if it is not.
func (f *roceFlow) settle() bool {
	m := f.unsure
	if m == nil {
		return true
	}
	if m.count == 0 {
		if f.conn.MTU == 0 {
			return false
		}
		m.count, m.mtu = packets(uint32(m.Size), f.conn.MTU), f.conn.MTU
	}
	f.next = (m.psn + uint32(m.count)) & psnMask
	f.unsure = nil
	return true
}

// guess does the same in another way, when a request has waited for too long. The request's
// PSN is n ahead of the Read's.
func (f *roceFlow) guess(n int) {
	m := f.unsure
	m.count = 1
	for mtu := 256; mtu <= 4096; mtu *= 2 {
		if p := packets(uint32(m.Size), mtu); p <= n {
			m.count = p
			if p == n {
				m.mtu = mtu
			}
			break
		}
	}
	f.settle()
}

// response handles an answer that has arrived.
func (f *roceFlow) response(pk *RoCE, op *opInfo, when time.Time) {
	if op.class == classReadResponse {
		f.learn(pk, op)
	}
	if op.class == classAck && pk.Syndrome>>5 != 0 {
		if pk.Syndrome>>5 == 1 {
			f.conn.Sent[f.side].RNRs++
		} else {
			f.conn.Sent[f.side].NAKs++
		}
	}
	if f.peer == nil {
		f.conn.Unpaired = true
		f.witness(pk.PSN)
	}
	if g := f.peer; g != nil && g.answer(pk, op, when) {
		return
	}
	if f.peer != nil && f.peer.started && op.class == classAck {
		return // Only its latency is of use.
	}
	added, room := f.early.add(f.r, pk, when)
	if f.peer == nil && (f.pairDue() || !room) {
		if f.pair(); f.peer != nil {
			f.peer.retryEarly()
			return
		}
	}
	if !added && room && op.class != classAck {
		f.repeat()
	}
	if f.early.len() > f.r.window || !room && f.early.len() > 0 {
		w := f.early.pop()
		f.stray(&w.pk)
		f.r.letGo(w.pk.Payload)
	}
}

// stray notes an answer without a request.
func (f *roceFlow) stray(pk *RoCE) {
	if opcodes[pk.Opcode].class == classReadResponse {
		f.r.lose(Loss{Conn: f.conn, From: f.side, What: ResponsesLost, First: uint64(pk.PSN), Count: uint64(pk.Size)})
	}
}

// retryEarly tries the answers that came too early again.
func (f *roceFlow) retryEarly() {
	p := f.peer
	if p == nil || f.retries || p.early.len() == 0 {
		return
	}
	f.retries = true
	for again := true; again; {
		again = false
		for i := 0; i < p.early.len(); i++ {
			w := p.early.at(i)
			op := &opcodes[w.pk.Opcode]
			if op.class == classReadResponse {
				p.learn(&w.pk, op)
			}
			if f.answer(&w.pk, op, w.when) || op.class == classAck {
				w := p.early.remove(i)
				f.r.letGo(w.pk.Payload)
				again = true
				i--
			}
		}
	}
	f.retries = false
}

// answer handles an answer to one of f's requests. It returns false if that request was not
// accepted yet.
func (f *roceFlow) answer(pk *RoCE, op *opInfo, when time.Time) bool {
	if !f.started {
		return false
	}
	if m := f.unsure; m != nil {
		if op.class == classReadResponse && op.flags&(opFirst|opLast) == opFirst|opLast && pk.PSN == m.psn && uint64(pk.Size) == m.Size {
			m.count = 1
		}
		if !f.settle() {
			return false
		}
		f.drain()
	}
	if psnDiff(pk.PSN, f.next) >= 0 {
		return false
	}
	if op.class == classAck {
		f.acknowledged(pk, when)
		return true
	}
	var m *Message
	for _, c := range f.reads {
		if (psnRange{c.psn, c.count}).contains(pk.PSN) {
			m = c
			break
		}
	}
	f.evidence(pk.PSN)
	switch {
	case m == nil:
		f.unexpected(pk)
	case op.class == classAtomicAck:
		if m.Kind == Read || m.answered {
			break
		}
		m.Original, m.answered, m.End = pk.Original, true, when
		m.Packets++
		m.buf.have.add(0, 8)
	case m.Kind != Read || !m.place(pk):
		f.r.stats.BadHeader++
	default:
		m.End = when
		m.Packets++
		m.answered = true
	}
	f.finishReads()
	return true
}

// place puts a Read Response in its place by its PSN, because a Read that was retried is
// answered from its middle. It returns false if the response cannot belong there.
func (m *Message) place(pk *RoCE) bool {
	i := psnDiff(pk.PSN, m.psn)
	off := uint64(i) * uint64(m.mtu)
	want := m.Size - off
	if m.count > 1 {
		if m.mtu == 0 || off > m.Size {
			return false
		}
		want = min(want, uint64(m.mtu))
	}
	if uint64(pk.Size) != want {
		return false
	}
	m.buf.put(off, pk.Payload)
	return true
}

// unexpected counts an answer to a request that is not open.
func (f *roceFlow) unexpected(pk *RoCE) {
	for _, g := range f.gaps[:min(f.gapCount, len(f.gaps))] {
		if g.contains(pk.PSN) {
			f.peer.stray(pk)
			return
		}
	}
	f.peer.repeat()
}

// acknowledged handles an ACK or NAK.
func (f *roceFlow) acknowledged(pk *RoCE, when time.Time) {
	if pk.Syndrome>>5 != 0 {
		return
	}
	f.evidence(pk.PSN)
	for f.markLen > 0 {
		k := &f.marks[f.markHead]
		if psnDiff(k.psn, pk.PSN) > 0 {
			break
		}
		f.conn.Sent[f.side].Latency.add(when.Sub(k.when))
		f.markHead = (f.markHead + 1) % len(f.marks)
		f.markLen--
	}
	f.finishReads()
}

// mark records the time of a request that an ACK will answer.
func (f *roceFlow) mark(psn uint32, when time.Time) {
	if f.markLen == len(f.marks) {
		f.markHead = (f.markHead + 1) % len(f.marks)
		f.markLen--
	}
	f.marks[(f.markHead+f.markLen)%len(f.marks)] = mark{psn, when}
	f.markLen++
}

// evidence notes that the peer has come to psn. Answers come in order, so earlier Reads
// have been answered, and wait for the window at most.
func (f *roceFlow) evidence(psn uint32) {
	if psnDiff(psn, f.due) >= 0 {
		f.due = (psn + 1) & psnMask
	}
	for _, m := range f.reads {
		if psnDiff(psn, m.psn)-m.count < 0 {
			break
		}
		if m.deadline == 0 && f.peer != nil {
			m.deadline = f.peer.seen + uint64(f.r.window)
		}
	}
}

// finishReads hands out the answered Reads, in order.
func (f *roceFlow) finishReads() {
	for len(f.reads) > 0 {
		m := f.reads[0]
		switch {
		case m.answered && m.buf.have.covers(0, m.Size):
			f.conn.Sent[f.side].Latency.add(m.End.Sub(m.Time))
			f.finishRead(true)
		case m.deadline != 0 && f.peer != nil && f.peer.seen > m.deadline:
			f.finishRead(false)
		default:
			return
		}
	}
}

func (f *roceFlow) finishRead(answered bool) {
	m := f.reads[0]
	f.reads = f.reads[:copy(f.reads, f.reads[1:])]
	if m == f.unsure {
		m.count = max(m.count, 1)
		f.settle()
	}
	m.TailLost = !answered && m.Size == 0
	f.r.finish(m, nil)
}

// flushRequests ends the wait for missing requests.
func (f *roceFlow) flushRequests() {
	f.release()
	if f.cur != nil {
		f.abandon()
	}
	f.retryEarly()
}

// flushReads ends the wait for answers.
func (f *roceFlow) flushReads() {
	for len(f.reads) > 0 {
		f.finishRead(false)
	}
}

// flushAnswers gives up the answers whose requests have not come.
func (f *roceFlow) flushAnswers() {
	for f.early.len() > 0 {
		w := f.early.pop()
		f.stray(&w.pk)
		f.r.letGo(w.pk.Payload)
	}
}
