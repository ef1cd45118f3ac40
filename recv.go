package rdmanet

import (
	"bytes"
	"io"
	"math"
	"os"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// The way in.
//
//  1. Receives of the negotiated size are posted, as many as the credit window
//     says (replenish).
//  2. A completion hands one back with a message: it is checked, its credits
//     and flags are heeded, its payload joins the unread queue (received).
//  3. Read copies from the queue; a buffer that is used up is posted again and
//     granted to the peer with the next message, or with one of its own.
//
// Everything but the copying runs with mu held.

// delivery is a message that has come.
type delivery struct {
	buf      *regmem.Buffer // what it is in
	payload  []byte
	h        segmentHeader
	t        transferHeader // if transfer is set
	transfer bool
	opens    bool // the transfer belongs to the stream
	empty    bool // a message all the same
	flags    MsgFlags
}

// received handles the completion of a receive.
func (c *conn) received(wc *ibv.WC) {
	m := delivery{buf: c.posted.Pop()}
	if c.dead != nil && wc.Status == ibv.WCSuccess {
		c.drop(m.buf) // it may lie behind a message that could not be taken
		return
	}
	if wc.Status == ibv.WCSuccess && wc.ByteLen > c.agreed.maxReceive {
		// A receive that was posted before the agreement may be larger.
		wc = &ibv.WC{ID: wc.ID, Status: ibv.WCLocLenErr}
	}
	if wc.Status != ibv.WCSuccess {
		c.drop(m.buf)
		c.status(wc, ibv.WCRecv)
		return
	}
	if err := c.parse(&m, int(wc.ByteLen)); err != nil {
		c.drop(m.buf)
		c.fail(err)
		return
	}
	c.credits.receive(&m.h)
	if c.credits.peerCredits() < 0 {
		// The receive was posted, but the peer had not been told of it.
		m.buf.Release()
		c.fail(errNoCredit)
		return
	}
	if wc.Flags&ibv.WCWithInv != 0 {
		c.stats.KeysInvalidated++
	}
	c.receivedSince, c.probing = true, false
	c.pagesTouched = c.pagesTouched || wc.ByteLen > regmem.PageSize
	c.scheduleTrim()
	if m.h.Flags&flagResponseRequested != 0 {
		c.send.responseDue = true
	}
	var last bool
	err := c.checkOffer(&m)
	if err == nil {
		last, err = c.reassemble(&m)
	}
	if err != nil {
		m.buf.Release()
		c.fail(err)
		return
	}
	c.store(&m, last)
	c.trimAfter(&m)
	c.wait.Interrupt()
	if m.transfer {
		c.credits.pendingGrant = true
		if err := c.transferred(&m.t, last, m.flags); err != nil {
			c.fail(err)
			return
		}
	}
	if c.reasm.ended && !c.eof {
		c.eof = true
		c.readers.WakeAll()
	} else if len(m.payload) > 0 || m.opens || m.empty {
		c.sentAtReceive = c.stats.MessagesSent
		c.readers.Wake()
	}
	c.writers.WakeAll()
}

// drop gives a buffer back that was posted and will not be again.
func (c *conn) drop(buf *regmem.Buffer) {
	c.credits.posted--
	buf.Release()
}

// parse reads the headers of m, of which n bytes have come.
func (c *conn) parse(m *delivery, n int) (err error) {
	b := m.buf.B[:min(n, len(m.buf.B))]
	if m.payload, err = m.h.parse(b); err != nil {
		return err
	}
	m.empty = c.messages && m.h.Flags&flagEmpty != 0
	m.flags = c.messageFlags(&m.h)
	if m.transfer = m.h.Flags&flagTransfer != 0 && c.rx.mode != transferNone; m.transfer {
		err = m.t.parse(&m.h, b)
		m.opens = m.t.opens()
	}
	return err
}

// reassemble puts m in its place in a message and reports whether that ends with it,
// or with its transfer.
func (c *conn) reassemble(m *delivery) (last bool, err error) {
	var first bool
	if m.opens {
		first, last, err = c.reasm.acceptTransfer(&m.h, &m.t)
	} else {
		first, last, err = c.reasm.accept(&m.h)
	}
	if first {
		sum := uint64(m.h.DataLength) + uint64(m.h.Remaining)
		if m.opens { // else its other fields mean nothing
			sum += uint64(m.t.Length) + m.t.Rest // cannot wrap
		}
		c.openedSize = int(min(sum, math.MaxInt))
	}
	return last, err
}

// store keeps the payload of m for a reader.
func (c *conn) store(m *delivery, last bool) {
	last = last && (!m.opens || m.t.Length == 0) // with the payload
	c.stats.countReceived(len(m.payload), last)
	if len(m.payload) == 0 && !m.empty || c.discarding {
		c.reuse(m.buf)
	} else {
		s := segment{data: m.payload, buf: m.buf, size: c.openedSize, last: last, flags: m.flags}
		c.openedSize = 0
		if c.copyBreaks(m.payload) {
			s.n = len(m.payload)
			s.data, s.copyBreak = c.copyToChunk(m.payload)
			s.buf = nil
			c.reuse(m.buf)
			c.credits.oweGrant(m.flags&NoResponse != 0)
		} else {
			c.heldBuffers++
		}
		c.unread.Push(s)
	}
	if m.opens || c.discarding && len(m.payload) > 0 {
		c.credits.oweGrant(m.flags&NoResponse != 0)
	}
}

// transferred handles what a message says of a transfer.
func (c *conn) transferred(t *transferHeader, last bool, flags MsgFlags) error {
	switch t.Kind {
	case transferOffer, transferRequest:
		if t.Length == 0 {
			return nil // payload only
		}
		if last {
			c.stats.MessagesReceived++
		}
		size := c.openedSize
		c.openedSize = 0
		c.offered(t, segment{size: size, last: last, flags: flags})
		return nil
	case transferGrant:
		return c.granted(t)
	case transferWritten:
		return c.written(t)
	case transferDone:
		return c.transferDoneBy(t)
	default:
		return c.withdrawn(t)
	}
}

// received is the number of messages that have come.
func (s *Stats) received() uint64 { return s.SegmentsReceived + s.EmptyReceived }

func (s *Stats) countReceived(n int, last bool) {
	if last {
		s.MessagesReceived++
	}
	if n == 0 {
		s.EmptyReceived++
		return
	}
	s.SegmentsReceived++
	s.BytesReceived += uint64(n)
}

// reuse posts a buffer again, or gives it back when the window is full.
func (c *conn) reuse(buf *regmem.Buffer) {
	if c.dead != nil || c.hasFailed() || c.credits.room(c.heldBuffers, c.send.wantsCredit) == 0 {
		buf.Release()
		return
	}
	if buf.Pool() != c.pool { // posted before the size was agreed on
		if fit, err := c.pool.Get(); err == nil {
			buf.Release()
			buf = fit
		}
	} else if c.trimmed && c.dom.Private {
		buf = c.pool.Older(buf)
	}
	if c.trimmed && c.stats.moved() == c.moved && c.pool.Drops() {
		dropPosted(buf.B) // a message without payload leaves nothing to read
	}
	c.postRecv(buf)
}

// postRecv posts one receive.
func (c *conn) postRecv(buf *regmem.Buffer) {
	c.recvSGE[0] = buf.SGE(int(c.agreed.maxReceive))
	c.recvWR[0].SGL = c.recvSGE[:]
	_, err := c.lane.qp.PostRecv(c.recvWR[:])
	if err != nil {
		buf.Release()
		c.fail(err)
		return
	}
	c.posted.Push(buf)
	c.credits.post(1)
	if c.queue.wantsWritable {
		c.signalWritable()
	}
	if c.send.wantsCredit && c.credits.spendable() > 0 {
		// A writer with one credit left has a grant to send it with now. The
		// peer may be in the same place: neither would hear of the other.
		c.writers.WakeAll()
		c.wait.Interrupt() // it may be the leader, whoever else waits
	}
}

// replenish posts receives up to the window. On a queue pair that has failed they
// would come back at once, again and again until the event tells why.
func (c *conn) replenish() {
	for c.dead == nil && !c.hasFailed() && c.credits.room(c.heldBuffers, c.send.wantsCredit) > 0 {
		buf, err := c.pool.Get()
		if err != nil && c.credits.reserveShort() > 0 {
			buf = c.evict()
		}
		if buf == nil {
			if c.posted.Len()+c.heldBuffers == 0 {
				c.fail(err)
			}
			return // fewer will do
		}
		c.pagesTouched = c.pagesTouched || buf.Stale
		c.postRecv(buf)
	}
}

// evict moves the latest payload that waits for the reader into ordinary memory, and
// returns the buffer that it came in: nil if there is none to be had. The first one
// stays, which the reader may be at.
func (c *conn) evict() *regmem.Buffer {
	for i := c.unread.Len() - 1; i > 0; i-- {
		if s := c.unread.At(i); s.buf != nil {
			buf := s.buf
			s.data, s.buf = bytes.Clone(s.data), nil
			c.stats.BytesCopied += uint64(len(s.data))
			return buf
		}
	}
	return nil
}

// consumed takes the head of the unread queue off after its last byte was read.
func (c *conn) consumed() { c.done(c.unread.Pop()) }

// done gives back what a segment held.
func (c *conn) done(s segment) {
	if s.transfer != nil {
		if s.transfer.taken < s.transfer.length {
			c.discard(s.transfer)
		}
		c.dropPieces(s.transfer)
		return
	}
	if s.copyBreak != nil {
		c.releaseFromChunk(s.copyBreak, s.n)
		return
	}
	c.heldBuffers--
	c.credits.oweGrant(s.flags&NoResponse != 0)
	if s.buf == nil { // evicted
		c.replenish()
	} else {
		c.reuse(s.buf)
	}
}

// dropUnread throws away what nobody will read.
func (c *conn) dropUnread() {
	for c.unread.Len() > 0 {
		c.consumed()
	}
}

// waitReadable waits until there is something to read, or returns why not. A
// deadline in the past wins over data.
func (c *conn) waitReadable() error {
	for {
		if c.readDue.expired && !c.closed {
			return os.ErrDeadlineExceeded
		}
		if err := c.readErr(); err != nil || c.unread.Len() > 0 {
			return err
		}
		c.credits.readerWaited = true
		c.await(&c.readers)
	}
}

// copyUnlocked is the length from which a copy is made without holding mu.
const copyUnlocked = 4 << 10

// take copies from the head of the unread queue into p.
func (c *conn) take(p []byte) (n int, last bool) {
	s := c.unread.At(0)
	data := s.data
	if n = min(len(p), len(data)); n >= copyUnlocked {
		// Only the reader, who holds readMu, takes from the queue.
		c.unlocked(func() { copy(p, data[:n]) })
		s = c.unread.At(0)
	} else {
		copy(p, data[:n])
	}
	c.stats.BytesCopied += uint64(n)
	s.data = data[n:]
	s.size = 0 // begun: ReadMsg takes the rest as it is
	if len(s.data) > 0 {
		return n, false
	}
	last = s.last
	c.consumed()
	return n, last
}

func (c *conn) read(p []byte) (n int, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, err
	}
	defer buf.Return(nil)
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	if len(p) == 0 {
		if c.closed {
			return 0, c.readErr()
		}
		return 0, nil
	}
	c.rx.reading++
	defer c.doneReading()
	for n == 0 {
		if err := c.waitReadable(); err != nil {
			return 0, err
		}
		for n < len(p) && c.unread.Len() > 0 && !c.closed {
			k, _, err := c.next(p[n:], n == 0, false)
			n += k
			if k == 0 {
				if n == 0 && err != nil {
					return 0, err
				}
				break
			}
		}
	}
	c.replenish()
	return n, nil
}

// next takes bytes from the head of the unread queue; see takeTransfer.
func (c *conn) next(p []byte, wait, message bool) (n int, last bool, err error) {
	if c.unread.At(0).transfer != nil {
		return c.takeTransfer(p, wait, message)
	}
	n, last = c.take(p)
	return n, last, nil
}

// readMsg reads a message, or with pieces set a piece of one.
func (c *conn) readMsg(p []byte, pieces bool) (n int, flags MsgFlags, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, 0, err
	}
	defer buf.Return(nil)
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	c.rx.reading++
	defer c.doneReading()
	for begun := false; ; {
		if err := c.waitReadable(); err != nil {
			if err == io.EOF && n > 0 {
				err = io.ErrUnexpectedEOF
			}
			if n > 0 {
				flags |= Partial
			}
			return n, flags, err
		}
		s := c.unread.At(0)
		flags = s.flags & (Expedited | Partial)
		empty := s.transfer == nil && len(s.data) == 0
		switch {
		case n == 0 && s.size > len(p):
			return s.size, flags, io.ErrShortBuffer
		case n == len(p) && !empty: // the rest of a message that was begun
			return n, flags | Partial, io.ErrShortBuffer
		}
		k, last, err := c.next(p[n:], true, true)
		n += k
		begun = begun || k > 0 || empty
		c.replenish()
		if err != nil {
			return n, flags | Partial, err
		}
		if last && begun { // else it was withdrawn as a whole
			if pieces || flags&Partial == 0 {
				return n, flags, nil
			}
			begun = false
		}
	}
}

// writeSegment passes the next unread bytes to w without copying them. They are
// off the queue meanwhile and no lock is held: w may take its time,
// and Close must not wait for it. The caller holds a reference on the memory.
func (c *conn) writeSegment(w io.Writer) (n int, err error) {
	data, done, err := c.detach()
	if err != nil {
		return 0, c.opError("read", err)
	}
	defer func() { // also when w panics
		c.mu.Lock()
		defer c.unlock()
		done()
		c.replenish()
	}()
	n, err = w.Write(data)
	if n < len(data) && err == nil {
		err = io.ErrShortWrite
	}
	return n, err
}

// detach takes the next unread bytes off the queue, and returns how to give back
// their memory, with mu held.
func (c *conn) detach() (data []byte, done func(), err error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	c.rx.reading++
	defer c.doneReading()
	for {
		if err := c.waitReadable(); err != nil {
			return nil, nil, err
		}
		if s := c.unread.At(0); s.transfer == nil && len(s.data) == 0 {
			c.consumed() // an empty message
			continue
		}
		if c.unread.At(0).transfer == nil {
			s := c.unread.Pop()
			return s.data, func() { c.done(s) }, nil
		}
		f, err := c.takeFetch()
		if err != nil {
			return nil, nil, err
		}
		if f != nil {
			return f.b[f.taken:f.got], func() { c.donePiece(f) }, nil
		}
	}
}
