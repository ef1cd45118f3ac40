package rdmanet

import (
	"errors"
	"fmt"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// The way out.
//
//  1. Write acquires the send queue (sendqueue.go). Then it waits until it may send: for
//     credits from the peer, and for room in the queue pair (waitToSend).
//  2. It cuts what may go now into segments, queues them as one batch, and returns when the
//     device has taken the last batch (post). Each batch of a stream is a message of its own,
//     so no message of a stream straddles a wait; the message of WriteMsg may.
//  3. Payload goes inline where the device takes that much, else through registered
//     buffers. Either way the caller's memory is free on return.
//  4. Only some sends are signaled. A completion stands for all sends before it (sent).
//
// control.go has the messages without payload, and lane.go the batches that wait for the
// device.

// sending is the state of the outgoing stream. Conn.mu guards it.
type sending struct {
	wantsCredit bool // a writer waits for credits

	data uint64 // number of the last send with something of the program's

	responseDue bool // the peer has asked for a message
	probeDue    bool // this side is to ask the peer for one
	finSent     bool
	midMessage  bool   // a message has begun and not ended
	truncated   bool   // it never will: a deadline has passed
	barrier     bool   // the request of postBarrier is under way
	probeSeq    uint64 // number of the send whose completion answers a keep-alive probe, or 0
	idle        bool   // nothing was sent for a while
}

// batchBudget bounds the bytes that are in flight in the device, about.
const batchBudget = 256 << 10

// sendBatch is what one batch sends: the segments of one message.
type sendBatch struct {
	p     []byte
	segs  int             // segments that p makes
	rest  int             // bytes of the message that follow later
	all   uint16          // flags for each segment
	flags uint16          // further flags for the last segment
	token uint32          // the key that the first segment invalidates, if not 0
	bufs  regmem.Buffers  // for the segments that do not go inline
	head  *transferHeader // for the only segment
	grant *grant          // answered by an RDMA Write in front of the message

	control bool // nothing in it is the program's
}

// lost reports whether the device did not carry out a send with something of the
// program's. A failed send is noticed even if no completion of its own tells of it, and all
// sends behind it fail too.
func (c *conn) sendsLost() bool {
	return c.lane.failed != 0 && c.lane.failed <= c.send.data
}

// sent handles the completion of a work request of the send queue.
func (c *conn) sent(wc *ibv.WC) {
	s, ok, op := &c.send, wc.Status == ibv.WCSuccess, ibv.WCSend
	switch wc.ID {
	case fetchID:
		c.fetched(wc)
		return
	case barrierID:
		op, s.barrier = ibv.WCRead, false
		if ok {
			c.probing = false
			if c.lastReceived.Before(c.probedAt) {
				c.lastReceived = c.probedAt // nobody has waited for the answer: it may be old
			}
		}
	default:
		c.lane.completed(wc.ID&^sendID, ok)
		if s.probeSeq != 0 && c.lane.done >= s.probeSeq {
			s.probeSeq, c.probing = 0, false
		}
	}
	for {
		m, found := c.lane.nextSignaled()
		if !found {
			break
		}
		if m.transfer != nil && ok {
			c.wrote(m.transfer, m.written)
		}
	}
	if !ok {
		c.status(wc, op)
	}
	if c.wantsSendCompletion {
		c.wantsSendCompletion = false
		c.writers.WakeAll()
		c.wait.Interrupt()
	}
}

// freeSlots is the room in the queue pair's send queue. One that was flushed has none: the
// end of the connection is on its way.
func (c *conn) freeSlots() int {
	if c.hasFailed() {
		return 0
	}
	return c.lane.freeSlots()
}

// canSend reports whether one more message, empty or not, may be posted now.
func (c *conn) canSend() bool {
	return c.credits.maySendControl() && c.freeSlots() > 0
}

// waitToSend waits for what keeps canSend, or a batch with payload, from going.
func (c *conn) waitToSend() {
	s := &c.send
	switch {
	case c.credits.spendable() == 0:
		s.wantsCredit = true
		c.replenish() // for a grant that the last credit may go with
		if c.credits.spendable() > 0 {
			s.wantsCredit = false
			return
		}
		c.stats.CreditStalls++
	default:
		if c.poll() > 0 {
			return
		}
		c.stats.QueueStalls++
		c.wantsSendCompletion = true
	}
	c.await(&c.writers)
	s.wantsCredit = false
}

// write sends p when it is its turn.
func (c *conn) write(p []byte, m sendOptions) (n int, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, err
	}
	defer buf.Return(nil)
	c.mu.Lock()
	defer c.unlock()
	kind := m.flags.kind()
	if m.flags&NonBlocking != 0 && !c.queue.available(kind) {
		if err := c.writeErr(); err != nil {
			return 0, err
		}
		return c.wouldBlock(0, shortage{kind: kind, segments: 1})
	}
	if err := c.acquireQueue(kind); err != nil {
		return 0, err
	}
	n, err = c.writeInTurn(p, m)
	c.releaseQueue()
	return n, err
}

// writeInTurn sends p. The caller has the turn.
func (c *conn) writeInTurn(p []byte, m sendOptions) (n int, err error) {
	if m.token == 0 && m.flags&NonBlocking == 0 && c.large(p, m.message) {
		c.unlocked(func() { n, err = c.writeLarge(p, m) })
		return n, err
	}
	return c.writeSegments(p, m)
}

// writeSegments is writeInTurn for what is not large.
func (c *conn) writeSegments(p []byte, m sendOptions) (n int, err error) {
	// What may end in the middle goes in pieces, each a message for SMB Direct.
	wait := m.flags&NonBlocking == 0
	pieces := !m.message || !wait && c.messages
	if !pieces {
		if err := checkMessageLength(len(p), c.agreed.maxFragmentedSend); err != nil {
			return 0, err
		}
		if !wait && len(p) > batchSegments*segmentData(len(p), int(c.agreed.maxSend)) {
			return 0, errTooLongNow
		}
	}
	for {
		if err := c.writeErr(); err != nil {
			c.send.truncated = c.send.truncated || c.send.midMessage
			return n, err
		}
		if len(p) == 0 {
			if m.message && m.flags&Partial == 0 {
				return 0, c.sendEmpty(m)
			}
			return 0, nil
		}
		if c.queue.mustYield() && !c.send.midMessage {
			if !wait {
				return c.wouldBlock(n, shortage{kind: c.queue.kind, segments: 1})
			}
			c.yieldQueue()
			continue
		}
		segs, size := c.sendable(len(p))
		room := size
		var bufs regmem.Buffers
		if segs > 0 {
			segs, size, bufs = c.sendBuffers(segs, size)
		}
		switch {
		case !wait && !pieces && (segs == 0 || size < len(p)): // all or nothing
			c.lane.putBuffers(bufs)
			full := segmentData(len(p), int(c.agreed.maxSend))
			return c.wouldBlock(n, shortage{kind: c.queue.kind, segments: (len(p) + full - 1) / full, bytes: len(p), buffer: size < room})
		case !wait && segs == 0:
			return c.wouldBlock(n, shortage{kind: c.queue.kind, segments: 1, buffer: size < room})
		case segs == 0:
			c.waitToSend()
			continue
		}
		o := sendBatch{p: p[:size], segs: segs, token: m.token, bufs: bufs}
		if c.messages {
			o.all = m.wire()
		}
		switch left := len(p) - size; {
		case !pieces:
			o.rest = left
		case left > 0 && (m.message || c.queue.partial):
			o.all |= flagPartial
		}
		c.send.idle, c.send.midMessage = false, o.rest > 0
		if o.rest == 0 {
			c.queue.partial, c.queue.partialKind = o.all&flagPartial != 0, c.queue.kind
		}
		if err := c.post(o); err != nil {
			return n, err
		}
		m.token = 0 // [MS-SMBD] 3.1.5.4: exactly one segment carries it
		n += size
		if p = p[size:]; len(p) == 0 {
			return n, nil // whatever has happened meanwhile
		}
	}
}

// sendable returns how many segments with how much payload may be posted now,
// of n bytes to be sent.
func (c *conn) sendable(n int) (segs, size int) {
	budget := batchBudget - c.lane.inFlight
	if budget <= 0 && c.poll() > 0 {
		budget = batchBudget - c.lane.inFlight
	}
	segs = min(c.credits.spendable(), c.freeSlots()-reservedSlots, batchSegments)
	if segs <= 0 || budget <= 0 {
		return 0, 0
	}
	full := segmentData(n, int(c.agreed.maxSend))
	size = min(n, segs*full, max(budget, full), int(c.agreed.maxFragmentedSend))
	if size < n && size > full {
		size -= size % full // the rest follows: no short segment before it
	}
	return (size + full - 1) / full, size
}

// sendEmpty sends a message without payload because the caller wants one.
func (c *conn) sendEmpty(m sendOptions) error {
	for {
		if err := c.writeErr(); err != nil {
			return err
		}
		wait := m.flags&NonBlocking == 0
		if wait && c.queue.mustYield() {
			c.yieldQueue()
			continue
		}
		short := shortage{kind: c.queue.kind, segments: 1}
		if c.canSend() && c.credits.spendable() > 0 {
			n, bufs := c.emptyBuffers(1, false)
			if n > 0 {
				o := sendBatch{segs: 1, token: m.token, bufs: bufs}
				if c.messages {
					o.all = m.wire() | flagEmpty
				}
				c.queue.partial = false
				c.stats.MessagesSent++
				return c.post(o)
			}
			short.buffer = true
		}
		if !wait {
			_, err := c.wouldBlock(0, short)
			return err
		}
		c.waitToSend()
	}
}

// transferBuffers is sendBuffers for one message with a transfer header in front
// of n bytes: it returns 0 where there is no buffer for it.
func (c *conn) transferBuffers(n int) (segs int, bufs regmem.Buffers) {
	if transferOffset+n <= c.lane.inline {
		return 1, bufs
	}
	if buf := c.lane.buffer(); buf != nil {
		bufs.Push(buf)
		segs = 1
	}
	return segs, bufs
}

// post queues a batch, and returns when the device has taken it. The caller holds mu and
// has seen that all of it may go. The device takes batches without mu.
func (c *conn) post(o sendBatch) error {
	b, err := c.queueBatch(o)
	if err != nil {
		return err
	}
	b.awaited = true
	c.flush()
	for !b.posted {
		c.lane.posters.Wait()
	}
	if b.failed {
		err = c.dead
	}
	c.lane.free(b)
	return err
}

// queueBatch queues a batch for the device, as the segments of one message.
func (c *conn) queueBatch(o sendBatch) (*postBatch, error) {
	l := &c.lane
	if c.dead != nil {
		l.putBuffers(o.bufs)
		return nil, c.dead
	}
	b := l.newBatch(o.segs)
	if o.grant != nil {
		c.answerGrant(b, o.grant)
	}
	var staged regmem.Buffers
	for p, i := o.p, 0; i < o.segs; i++ {
		n := segmentData(len(p), int(c.agreed.maxSend))
		h := segmentHeader{
			CreditsRequested: c.requested(),
			CreditsGranted:   c.credits.spend(),
			Flags:            o.all,
			Remaining:        uint32(len(p) - n + o.rest),
			DataLength:       uint32(n),
		}
		if n > 0 {
			h.DataOffset = dataOffset
		}
		last := i == o.segs-1
		if last {
			h.Flags |= o.flags | c.answerFlags()
		}
		header := b.hdrs[i][:h.putWith(o.head, b.hdrs[i][:])]
		wr := b.add(ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSolicited | ibv.SendInline}, ibv.SGE{Buf: header}, ibv.SGE{Buf: p[:n]})
		if n == 0 {
			wr.SGL = wr.SGL[:1]
		}
		p = p[n:]
		if o.token != 0 && i == 0 && l.invalidates {
			wr.Op, wr.InvKey = ibv.OpSendInv, o.token
		}
		if len(header)+n > l.inline {
			buf := o.bufs.Pop()
			c.stage(wr, buf)
			staged.Push(buf)
		}
		if l.number(wr, n, o.flags&flagFIN != 0 || !staged.Empty() && (l.signalEach || last)) {
			l.signal(wr, signaledSend{bufs: staged})
			staged = regmem.Buffers{}
			c.stats.Signaled++
		}
		if !o.control {
			c.send.data = l.seq
		}
		c.stats.countSent(n)
	}
	if len(o.p) > 0 && o.rest == 0 && o.head == nil {
		c.stats.MessagesSent++
	}
	c.stats.Posts++
	l.enqueue(b)
	return b, nil
}

// answerGrant adds the RDMA Write that goes in front of a message.
func (c *conn) answerGrant(b *postBatch, g *grant) {
	l := &c.lane
	wr := b.add(ibv.SendWR{Op: ibv.OpWrite, RemoteAddr: g.addr, RKey: g.key}, ibv.SGE{Buf: g.o.p[g.at : g.at+g.n], LKey: g.o.source.LKey})
	l.number(wr, 0, true)
	l.signal(wr, signaledSend{transfer: g.o, written: g.n})
	g.o.writing++
	c.tx.writing++
	c.stats.Signaled++
	c.wait.Interrupt() // the leader may sleep for receives only
}

func (s *Stats) countSent(n int) {
	if n == 0 {
		s.EmptySent++
		return
	}
	s.SegmentsSent++
	s.BytesSent += uint64(n)
}

// sendBuffers returns the registered buffers for segs segments with size bytes,
// one for each that is too long to go inline. Where there are not enough it
// makes do with fewer segments: none when the connection's own buffer is in
// use, which the completion of a send brings back.
func (c *conn) sendBuffers(segs, size int) (_, _ int, bufs regmem.Buffers) {
	full := segmentData(size, int(c.agreed.maxSend))
	if headerLen(full)+full <= c.lane.inline {
		return segs, size, bufs
	}
	for i := range segs {
		n := min(full, size-i*full)
		if headerLen(n)+n <= c.lane.inline {
			continue
		}
		buf := c.lane.buffer()
		if buf == nil {
			return i, i * full, bufs
		}
		bufs.Push(buf)
	}
	return segs, size, bufs
}

// headerLen is the length of the header before n bytes of payload.
func headerLen(n int) int {
	if n == 0 {
		return dataHeaderLen
	}
	return dataOffset
}

// stage copies a send that is too long to go inline into a registered buffer.
func (c *conn) stage(wr *ibv.SendWR, buf *regmem.Buffer) {
	n := 0
	for _, e := range wr.SGL {
		n += copy(buf.B[n:], e.Buf)
	}
	c.stats.BytesCopied += uint64(n)
	wr.SGL = append(wr.SGL[:0], buf.SGE(n))
	wr.Flags &^= ibv.SendInline
}

// writingOver reports whether CloseWrite has nothing to do: the end was sent, or the
// peer has closed and nobody is left to hear of it, which TCP does not tell either.
func (c *conn) writingOver() bool {
	return !c.closed && (c.send.finSent || c.dead == errPeerClosed)
}

func (c *conn) closeWrite() error {
	if !c.fin {
		return fmt.Errorf("close the writing side: the peer is not rdmanet: %w", errors.ErrUnsupported)
	}
	c.mu.Lock()
	defer c.unlock()
	if c.writingOver() {
		return nil
	}
	if err := c.acquireQueue(normal); err != nil {
		if c.writingOver() { // meanwhile, by another CloseWrite
			return nil
		}
		return err
	}
	defer c.releaseQueue()
	for {
		if c.writingOver() {
			return nil
		}
		if err := c.writeErr(); err != nil {
			return err
		}
		if c.queue.mustYield() {
			c.yieldQueue()
			continue
		}
		if c.queue.partial {
			return errMessageOpen
		}
		if c.queueFIN() {
			return nil
		}
		c.waitToSend()
	}
}
