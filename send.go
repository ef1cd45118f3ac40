package rdmanet

import (
	"cmp"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file sends data by segments.
//
//  1. Write acquires the send queue (write.go, acquire.go). Then it waits until it may
//     send: for credits of the peer, and for room in the queue pair (waitToSend).
//  2. It cuts what may go now into segments, queues them as one batch, and returns when the
//     device has taken the last batch (post). Each batch of a stream is a message of its
//     own, so no message of a stream straddles a wait. The message of a WriteMsg may.
//  3. Payload goes inline if the device takes that much, and otherwise through registered
//     buffers. Either way the caller's memory is free on return.
//  4. A batch of a stream ends in front of memory that cannot be read, as with TCP, and the call
//     fails behind it. A message fails before its first segment (readable, write.go).
//  5. Only some sends are signaled. A completion stands for all sends before it (sent,
//     completion.go).
//
// write_transfer.go sends data by transfers, control.go messages without payload. batch.go
// builds the work requests, and lane.go posts them.

// waitToSend waits until a message that could not be sent may be sent: for credits, or for
// room in the queue pair.
func (c *conn) waitToSend() {
	s := &c.send
	switch {
	case c.credits.spendable() == 0:
		s.wantsCredit = true
		// The last credit may be spent only with a grant, for which a receive is posted.
		c.replenish()
		if c.credits.spendable() > 0 {
			s.wantsCredit = false
			return
		}
		c.stats.CreditStalls++
	default:
		if c.wait.Poll() > 0 {
			return
		}
		c.stats.QueueStalls++
		c.wantsSendCompletion = true
	}
	c.await(&c.writers)
	s.wantsCredit = false
}

// writeSegments sends p by segments. The caller has acquired the send queue, and holds mu.
func (c *conn) writeSegments(p []byte, m sendOptions) (n int, err error) {
	// A send that may end in the middle goes in pieces. For SMB Direct each piece is a
	// message of its own.
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
	checked := m.checked // checked is how many bytes of p have been found readable.
	var cut error        // cut is set when p ends in front of memory that cannot be read.
	for {
		err = c.sendErr(m.call())
		if cut != nil && (m.message || len(p) == 0) {
			err = cut // A message goes as a whole or not at all, and of a stream nothing more can go.
		}
		if err != nil {
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
			c.yieldQueue(m.call())
			checked = 0 // That may have taken long.
			continue
		}
		small := c.joins(len(p), &m)
		if small && (c.send.joined.n > 0 || c.ahead()) {
			k, err := c.join(p)
			n, p, checked = n+k, p[k:], max(checked-k, 0)
			if err != nil {
				return n, err
			}
			if len(p) == 0 {
				for c.lane.crowded() {
					c.lane.waitTurn()
				}
				return n, cut
			}
			if k > 0 && c.queueJoined() {
				continue
			}
		}
		switch {
		case c.queueJoined():
		case c.queue.kind == expedited:
			c.send.joined.sealed = true
		case !wait:
			return c.wouldBlock(n, shortage{kind: c.queue.kind, segments: 1})
		default:
			c.waitToSend()
			checked = 0
			continue
		}
		longest, _ := c.sendSize()
		segs, size, full := c.sendable(len(p), len(p), longest)
		if good := checked; size > checked {
			c.unlocked(func() { good += fault.Readable(p[checked:size]) })
			if good < size {
				p, cut = p[:good], errno.EFAULT
			}
			checked = good
			continue // The state may have changed meanwhile.
		}
		room := size
		var bufs regmem.Buffers
		if segs > 0 {
			segs, size, bufs = c.lane.sendBuffers(segs, size, full)
		}
		if segs == 0 && headerLen(full)+full > int(c.agreed.maxSend) {
			// There is no memory for large sends. More might go by short ones than was checked.
			if segs, size, full = c.sendable(len(p), checked, int(c.agreed.maxSend)); segs > 0 {
				segs, size, bufs = c.lane.sendBuffers(segs, size, full)
			}
		}
		switch {
		// The message goes as a whole or not at all.
		case !wait && !pieces && (segs == 0 || size < len(p)):
			c.lane.putBuffers(bufs)
			full = segmentData(len(p), int(c.agreed.maxSend))
			return c.wouldBlock(n, shortage{kind: c.queue.kind, segments: (len(p) + full - 1) / full, bytes: len(p), buffer: size < room})
		case !wait && segs == 0:
			return c.wouldBlock(n, shortage{kind: c.queue.kind, segments: 1, buffer: size < room})
		case segs == 0:
			c.waitToSend()
			checked = 0
			continue
		}
		o := sendBatch{p: p[:size], segs: segs, full: full, token: m.token, bufs: bufs, more: size < len(p)}
		if good := c.fill(&o); good < size {
			// The memory has gone since it was checked.
			c.lane.putBuffers(o.bufs)
			p, checked, cut = p[:good], good, errno.EFAULT
			continue
		}
		if small {
			o.flags = c.sendsSmall()
		}
		if c.messages {
			o.all = m.wire()
		}
		switch left := len(p) - size; {
		case !pieces:
			o.rest = left
		case (left > 0 || cut != nil) && (m.message || c.queue.partial):
			o.all |= flagPartial
		}
		c.send.idle, c.send.midMessage = false, o.rest > 0
		if o.rest == 0 {
			c.queue.partial, c.queue.partialKind = o.all&flagPartial != 0, c.queue.kind
		}
		if taken, err := c.post(&o, &m); err != nil {
			return n + min(taken*full, size), err
		}
		m.token = 0 // Exactly one segment carries the token, [MS-SMBD] 3.1.5.4.
		n, checked = n+size, max(checked-size, 0)
		if p = p[size:]; len(p) == 0 {
			// All of it was taken, whatever has happened meanwhile.
			return n, cut
		}
	}
}

// sendable returns how many segments may be posted now of n bytes to be sent, how many bytes
// of payload these carry, most at the most, and how many each but the last one carries. longest
// is the most bytes of a Send.
func (c *conn) sendable(n, most, longest int) (segs, size, full int) {
	budget := batchBudget - c.lane.inFlight
	if budget <= 0 && c.wait.Poll() > 0 {
		budget = batchBudget - c.lane.inFlight
	}
	_, alike := c.sendSize()
	segs = min(c.credits.spendable(), alike, c.freeSlots()-reservedSlots, batchSegments)
	if segs <= 0 || budget <= 0 {
		return 0, 0, 0
	}
	full = segmentData(n, longest)
	size = min(most, segs*full, max(budget, full), int(c.agreed.maxFragmentedSend))
	if size < n && size > full {
		size -= size % full // Only the last segment is short.
	}
	return (size + full - 1) / full, size, full
}

// sendSize returns the most bytes of the next Send, and how many Sends in a row may have so
// many.
func (c *conn) sendSize() (size, n int) {
	if c.holds {
		return int(c.agreed.maxSend), batchSegments
	}
	n, large := c.credits.granted.next(c.credits.have)
	if large {
		return largeSegment, n
	}
	return int(c.agreed.maxSend), n
}

// sendEmpty sends a message without payload for a call of the program.
func (c *conn) sendEmpty(m sendOptions) error {
	for {
		if err := c.writeErr(); err != nil {
			return err
		}
		wait := m.flags&NonBlocking == 0
		if wait && c.queue.mustYield() {
			c.yieldQueue(m.call())
			continue
		}
		short := shortage{kind: c.queue.kind, segments: 1}
		if !c.queueJoined() && c.queue.kind == expedited {
			c.send.joined.sealed = true
		}
		if (c.send.joined.n == 0 || c.queue.kind == expedited) && c.canSend() && c.credits.spendable() > 0 {
			n, bufs := c.emptyBuffers(1, false)
			if n > 0 {
				o := sendBatch{segs: 1, token: m.token, bufs: bufs}
				if c.messages {
					o.all = m.wire() | flagEmpty
				}
				c.queue.partial = false
				c.stats.MessagesSent++
				_, err := c.post(&o, &m)
				return err
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

// queueFIN queues FIN if that is possible now, and reports whether it did. FIN has a credit
// of its own, and goes with what Writes have joined. So it never waits for the peer's
// reader.
func (c *conn) queueFIN() bool {
	if c.credits.have == 0 || !c.hasSlots(1) {
		return false
	}
	o, ok := c.takeJoined()
	if !ok {
		if o.segs, o.bufs = c.emptyBuffers(1, false); o.segs == 0 {
			return false
		}
		o.control = true
	}
	o.flags = flagFIN
	c.send.ended = true
	c.credits.reserveOut = 0
	_, err := c.queueBatch(&o)
	return err == nil
}

// closeSends has the device end this side's direction behind everything that was posted.
// Nothing may be queued. An error says why the peer does not get the end.
func (c *conn) closeSends() error {
	c.send.ended, c.send.closed = true, true
	if err := c.holding.CloseSends(); err != nil {
		return c.whyFailed(err)
	}
	return nil
}

// post queues a batch of a call, and returns when the device has taken it, and handed it over
// if calls wait for that. With an error, that is known of the first taken segments only. The
// caller holds mu, and has checked that all of the batch may be sent. The device takes batches
// without mu.
func (c *conn) post(o *sendBatch, m *sendOptions) (taken int, err error) {
	b, err := c.queueBatch(o)
	if err != nil {
		return 0, err
	}
	b.awaited, b.inPlace = true, c.lane.inPlace != nil
	left, posted := 0, c.lane.await(b)
	if b.lent {
		left, err = c.handOver(m)
	}
	if !posted {
		left, err = o.segs, cmp.Or(err, c.life.cause)
	}
	c.lane.free(b)
	return o.segs - left, err
}

// wouldBlock ends a non-blocking send of which n bytes were taken. short is what the send
// lacked for more.
func (c *conn) wouldBlock(n int, short shortage) (int, error) {
	q := &c.queue
	short.done = c.lane.done
	q.wantsWritable, q.lacking = true, short
	if c.credits.spendable() == 0 {
		// A receive may be posted for the last credit, as in waitToSend.
		c.send.wantsCredit = true
		c.replenish()
		c.send.wantsCredit = false
	}
	c.wantSendCompletion()
	if !c.wait.Leading() {
		// Without a leader nobody would handle new credits for a while.
		go c.wait.Run()
	}
	if n > 0 {
		return n, nil
	}
	return 0, errno.EAGAIN
}

// signalAll makes sure that a completion will stand for everything that is queued. It goes
// on as long as pending reports true.
func (c *conn) signalAll(pending func() bool) {
	for c.lane.unsignaledSends > 0 && pending() {
		if c.hasSlots(1) {
			c.queueEmptyWrite()
		} else {
			c.await(&c.writers)
		}
	}
}
