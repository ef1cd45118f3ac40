package rdmanet

import (
	"errors"
	"fmt"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// The way out.
//
//  1. Write waits for its turn (sendqueue.go), and until it may send: the peer's
//     credits, room in the send queue, no other post under way (waitToSend).
//  2. It cuts what may go now into segments and posts them in one call (post).
//     Each batch of a stream is a message of its own, so a message never
//     straddles a wait; WriteMsg's message may.
//  3. Payload goes inline where the device takes that much, else through
//     registered buffers; either way the caller's memory is free on return.
//  4. Only some sends are signalled; a completion stands for all before it
//     (sent).
//
// Messages without payload: see control.go. The post itself is made without mu, so
// that reading goes on; sending.posting keeps the order.
type sending struct {
	posting     bool // a batch is being handed to the device
	single      singleMemory
	wantsCredit bool // a writer waits for credits

	seq             uint64 // sends posted
	done            uint64 // sends completed
	data            uint64 // the last send with something of the program's
	failed          uint64 // the first send that the device did not carry out, or 0
	inFlight        int    // bytes posted and not known to be completed
	unsignaledBytes int    // bytes, and
	unsignaledSends int    // sends, since the last signalled one
	signaled        ring.Ring[signaledSend]

	// A buffer of the connection's reserved, where the device does not take all
	// sends inline: receives, or other connections, may have taken the last of
	// the pool, and nobody would give one back if no grants could be sent.
	reserved     *regmem.Buffer
	reservedFree *regmem.Buffer // it, unless it is in use

	responseDue bool // the peer asked for a message
	probeDue    bool // we ask the peer for one
	finSent     bool
	midMessage  bool   // a message has begun and not ended
	truncated   bool   // it never will: a deadline passed
	barrier     bool   // the request of postBarrier is under way
	probeSeq    uint64 // the send that keep-alive waits for, by its seq, or 0
	idle        bool   // nothing was sent for a while
}

// signaledSend is a signalled send and what its completion frees.
type signaledSend struct {
	seq   uint64
	bytes int
	bufs  regmem.Buffers
	o     *sendTransfer // what it is an RDMA Write of,
	n     int           // and of how many bytes
}

const (
	sendID = 1 << 63 // set in the IDs of sends

	batchSegments = 16        // in one post
	batchBudget   = 256 << 10 // bytes in flight in the device, about
	signalBytes   = 64 << 10  // signalled at the latest after so many bytes
	reservedSlots = 4         // of the send queue, for messages without payload
)

// singleMemory is the memory for a post of one segment, the common case.
type singleMemory struct {
	wrs  [2]ibv.SendWR // the second behind an RDMA Write
	sges [2]ibv.SGE
	hdrs [1][transferOffset]byte
}

// batchMemory is the memory for a post of several.
type batchMemory struct {
	wrs  [batchSegments]ibv.SendWR
	sges [2 * batchSegments]ibv.SGE
	hdrs [batchSegments][transferOffset]byte
}

// sendBatch is what one post hands to the device.
type sendBatch struct {
	p     []byte
	segs  int             // segments that it makes
	rest  int             // bytes of the message that follow later
	all   uint16          // flags for each segment
	flags uint16          // and for the last one
	token uint32          // for the first, if not 0
	bufs  regmem.Buffers  // for the segments that do not go inline
	head  *transferHeader // for the only segment
	grant *grant          // answered by an RDMA Write ahead of it

	control bool // nothing of it is the program's
}

var batches = sync.Pool{New: func() any { return new(batchMemory) }}

// lost reports whether the device did not carry out a send with something of the
// program's. A send that fails is told of even if nothing else tells of its completion, and
// all sends behind it fail too.
func (s *sending) lost() bool { return s.failed != 0 && s.failed <= s.data }

// busy reports whether sends are not known to be completed.
func (s *sending) busy() bool { return s.done < s.seq }

// putSendBuffers takes back buffers that no send names any more.
func (c *conn) putSendBuffers(bufs regmem.Buffers) {
	for b := bufs.Pop(); b != nil; b = bufs.Pop() {
		if b == c.send.reserved {
			c.send.reservedFree = b
		} else {
			b.Release()
		}
	}
}

// releaseSends gives back the buffers of sends that will never complete, and
// the connection's own.
func (c *conn) releaseSends() {
	s := &c.send
	for s.signaled.Len() > 0 {
		m := s.signaled.Pop()
		c.putSendBuffers(m.bufs)
		if o := m.o; o != nil && o.done && !o.over && o.detached {
			o.over = true
			o.closeMemory()
		}
	}
	if s.reserved != nil {
		s.reserved.Release()
		s.reserved, s.reservedFree = nil, nil
	}
}

// sent handles the completion of a send.
func (c *conn) sent(wc *ibv.WC) {
	s := &c.send
	op := ibv.WCSend
	if wc.ID == barrierID {
		op, s.barrier = ibv.WCRead, false
		if wc.Status == ibv.WCSuccess {
			c.probing = false
			if c.lastReceived.Before(c.probedAt) {
				c.lastReceived = c.probedAt // nobody has waited for the answer: it may be old
			}
		}
	} else if wc.ID == fetchID {
		c.fetched(wc)
		return
	} else if seq := wc.ID &^ sendID; seq > s.done {
		s.done = seq
		if wc.Status != ibv.WCSuccess && s.failed == 0 {
			s.failed = seq
		}
		if s.probeSeq != 0 && s.done >= s.probeSeq {
			s.probeSeq, c.probing = 0, false
		}
	}
	for s.signaled.Len() > 0 && s.signaled.At(0).seq <= s.done {
		m := s.signaled.Pop()
		s.inFlight -= m.bytes
		c.putSendBuffers(m.bufs)
		if m.o != nil && wc.Status == ibv.WCSuccess {
			c.wrote(m.o, m.n)
		}
	}
	if wc.Status != ibv.WCSuccess {
		c.status(wc, op)
	}
	if c.wantsSendCompletion {
		c.wantsSendCompletion = false
		c.writers.WakeAll()
		c.wait.Interrupt()
	}
}

// freeSlots is the room in the send queue. One that was flushed has none: the end of the
// connection is on its way.
func (c *conn) freeSlots() int {
	if c.hasFailed() {
		return 0
	}
	return c.slots - int(c.send.seq-c.send.done)
}

// canSend reports whether one more message, empty or not, may be posted now.
func (c *conn) canSend() bool {
	return !c.send.posting && c.credits.maySendControl() && c.freeSlots() > 0
}

// waitToSend waits for what keeps canSend, or a batch with payload, from going.
func (c *conn) waitToSend() {
	s := &c.send
	switch {
	case s.posting:
		c.writers.Wait()
		return
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
	if c.writeErr() != nil {
		c.sendControl() // a grant may have been left for us to take along
	}
}

// write sends p when it is its turn.
func (c *conn) write(p []byte, m sendOptions) (n int, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, err
	}
	defer buf.Return(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
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
		c.mu.Unlock()
		defer c.mu.Lock()
		return c.writeLarge(p, m)
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
		case c.send.posting: // a grant goes out, which takes no longer than the device takes to accept it
			c.writers.Wait()
			continue
		case !wait && !pieces && (segs == 0 || size < len(p)): // all or nothing
			c.putSendBuffers(bufs)
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
	if c.send.posting {
		return 0, 0
	}
	budget := batchBudget - c.send.inFlight
	if budget <= 0 && c.poll() > 0 {
		budget = batchBudget - c.send.inFlight
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
		if !wait && !c.send.posting {
			_, err := c.wouldBlock(0, short)
			return err
		}
		c.waitToSend()
	}
}

// transferBuffers is sendBuffers for one message with a transfer header in front
// of n bytes: it returns 0 where there is no buffer for it.
func (c *conn) transferBuffers(n int) (segs int, bufs regmem.Buffers) {
	if transferOffset+n <= c.inline {
		return 1, bufs
	}
	if buf := c.sendBuffer(); buf != nil {
		bufs.Push(buf)
		segs = 1
	}
	return segs, bufs
}

// post hands a parcel to the device as segments of one message. The caller holds
// mu, has seen that all this may go, and finds mu held again.
func (c *conn) post(o sendBatch) error {
	s := &c.send
	if c.dead != nil {
		c.putSendBuffers(o.bufs)
		return c.dead
	}
	p, segs := o.p, o.segs
	wrs, sges, hdrs := s.single.wrs[:1], s.single.sges[:], s.single.hdrs[:]
	if segs > 1 {
		b := batches.Get().(*batchMemory)
		defer batches.Put(b)
		wrs, sges, hdrs = b.wrs[:segs], b.sges[:2*segs], b.hdrs[:segs]
	}
	all := wrs
	if o.grant != nil {
		all = s.single.wrs[:2]
		wrs = all[1:]
		c.answerGrant(&all[0], o.grant)
	}
	var staged regmem.Buffers
	left := len(p)
	for i := range segs {
		n := segmentData(left, int(c.agreed.maxSend))
		h := segmentHeader{
			CreditsRequested: c.requested(),
			CreditsGranted:   c.credits.spend(),
			Flags:            o.all,
			Remaining:        uint32(left - n + o.rest),
			DataLength:       uint32(n),
		}
		if n > 0 {
			h.DataOffset = dataOffset
		}
		if i == segs-1 {
			h.Flags |= o.flags | c.answerFlags()
		}
		sgl := sges[2*i : 2*i : 2*i+2]
		sgl = append(sgl, ibv.SGE{Buf: hdrs[i][:h.putWith(o.head, hdrs[i][:])]})
		if n > 0 {
			sgl = append(sgl, ibv.SGE{Buf: p[len(p)-left : len(p)-left+n]})
		}
		wr := &wrs[i]
		*wr = ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSolicited | ibv.SendInline, SGL: sgl}
		if o.token != 0 && i == 0 && c.invalidates {
			wr.Op, wr.InvKey = ibv.OpSendInv, o.token
		}
		if len(sgl[0].Buf)+n > c.inline {
			buf := o.bufs.Pop()
			c.stage(wr, buf)
			staged.Push(buf)
		}
		left -= n
		s.seq++
		s.unsignaledSends++
		if !o.control {
			s.data = s.seq
		}
		s.unsignaledBytes += n
		s.inFlight += n
		wr.ID = sendID | s.seq
		if s.unsignaledBytes >= signalBytes || s.unsignaledSends >= c.slots/4 || o.flags&flagFIN != 0 || !staged.Empty() && (c.signalEach || i == segs-1) {
			wr.Flags |= ibv.SendSignaled
			s.signaled.Push(signaledSend{seq: s.seq, bytes: s.unsignaledBytes, bufs: staged})
			s.unsignaledBytes, s.unsignaledSends, staged = 0, 0, regmem.Buffers{}
			c.stats.Signaled++
		}
		c.stats.countSent(n)
	}
	if len(p) > 0 && o.rest == 0 && o.head == nil {
		c.stats.MessagesSent++
	}
	c.stats.Posts++
	s.posting = true
	c.mu.Unlock()
	_, err := c.qp.PostSend(all)
	clear(sges) // keep the caller's memory alive no longer
	c.mu.Lock()
	s.posting = false
	if err != nil {
		c.fail(fmt.Errorf("post send: %w", err))
	}
	c.sendControl()
	if c.writers.Waiting() > 0 {
		c.writers.WakeAll() // keep-alive may wait beside a writer
	}
	if c.queue.wantsWritable {
		c.signalWritable()
	}
	if err != nil {
		return c.dead
	}
	return nil
}

// postAside hands one request to the device that is no message. Nothing is posted on a
// connection that is over, or whose disconnect is under way.
func (c *conn) postAside(wr ibv.SendWR) error {
	if c.dead != nil {
		return c.dead
	}
	if _, err := c.qp.PostSend([]ibv.SendWR{wr}); err != nil {
		c.fail(fmt.Errorf("post %s: %w", wr.Op, err))
		return c.dead
	}
	return nil
}

// answerGrant prepares the RDMA Write that goes ahead of a message.
func (c *conn) answerGrant(wr *ibv.SendWR, g *grant) {
	s := &c.send
	s.seq++
	*wr = ibv.SendWR{ID: sendID | s.seq, Op: ibv.OpWrite, Flags: ibv.SendSignaled, RemoteAddr: g.addr, RKey: g.key,
		SGL: []ibv.SGE{{Buf: g.o.p[g.at : g.at+g.n], LKey: g.o.source.LKey}}}
	g.o.writing++
	c.tx.writing++
	s.signaled.Push(signaledSend{seq: s.seq, bytes: s.unsignaledBytes, o: g.o, n: g.n})
	s.unsignaledBytes, s.unsignaledSends = 0, 0
	c.stats.Signaled++
	c.wait.Interrupt() // it may sleep for receives only
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
	if headerLen(full)+full <= c.inline {
		return segs, size, bufs
	}
	for i := range segs {
		n := min(full, size-i*full)
		if headerLen(n)+n <= c.inline {
			continue
		}
		buf := c.sendBuffer()
		if buf == nil {
			return i, i * full, bufs
		}
		bufs.Push(buf)
	}
	return segs, size, bufs
}

// sendBuffer returns a registered buffer for one send, nil if there is none.
func (c *conn) sendBuffer() *regmem.Buffer {
	buf, err := c.sends.Get()
	if err != nil {
		buf, c.send.reservedFree = c.send.reservedFree, nil
	}
	return buf
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
	defer c.mu.Unlock()
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
		if done, err := c.postFIN(); done {
			return err
		}
		c.waitToSend()
	}
}
