package rdmanet

import (
	"errors"
	"io"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file sends data by transfers; send.go sends it by segments.
//
//  1. large decides which Writes go by transfers, and writeChunk does so for ReadFrom.
//  2. openMemory registers the data.
//  3. offer sends an offer or a request.
//  4. awaitTransfer waits until the transfer is over. A call that has to end earlier
//     withdraws it (giveUp).
//
// transfer_send.go has the state, and transfer_progress.go handles the peer's answers.

// large reports whether p goes by a transfer. A message that takes back a key goes in
// segments, because only a Send can do that. So does a message that must not block.
func (c *conn) large(p []byte, m sendOptions) bool {
	switch {
	case c.tx.mode == TransferNone, m.token != 0, m.flags&NonBlocking != 0:
		return false
	case len(p) >= c.set.transferMin, m.message && len(p) > int(c.agreed.maxFragmentedSend):
		return true
	}
	return len(p) >= c.set.bufferTransferMin && regmem.Find(p) != nil
}

// writeLarge sends p by transfers. The caller has acquired the send queue, and does not
// hold mu.
func (c *conn) writeLarge(p []byte, m sendOptions) (n int, err error) {
	// Only the send that has the queue changes partial, so mu is not needed.
	initial, open := 0, c.queue.partial
	m.checked = 0 // It counts from the beginning of the first part.
	if regmem.Find(p) == nil {
		// The beginning of data outside a Buffer goes as payload, and can be read at once.
		initial = min(int(c.agreed.maxSend)-transferOffset, len(p)-1)
	}
	for len(p) > 0 {
		size := min(len(p), initial+transferCeiling)
		o := &sendTransfer{p: p[initial:size:size], message: m.message}
		if fault.Readable(p[:size]) < size || c.openMemory(o) != nil {
			k, err := c.writeCopying(p, n > 0, m)
			return n + k, err
		}
		sent, err := c.offer(o, p[:initial], len(p)-size, m)
		if sent && err == nil {
			moved := 0
			moved, err = c.awaitTransfer(o, m.call())
			n += initial + moved
		}
		o.closeMemory()
		if err != nil {
			c.truncateMessage(m.message && n > 0)
			if sent && n == 0 {
				c.reopen(open)
			}
			return n, err
		}
		p, initial = p[size:], 0
	}
	return n, nil
}

// transferChunk is copyMuch with a chunk, which it releases in the end. While the peer
// fetches from one chunk, r fills the next.
func (c *conn) transferChunk(s *regmem.Chunk, r io.Reader) (written int64, more bool, rerr, err error) {
	n, rerr := s.Fill(r)
	w, err := c.writeChunk(s, n)
	return int64(w), n == regmem.ChunkSize, rerr, err
}

// writeCopied sends p by segments. It returns when the device has taken p, and does not
// wait for the peer.
func (c *conn) writeCopied(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.mu.Lock()
	defer c.unlock()
	if err := c.acquireStream(); err != nil {
		return 0, err
	}
	defer c.releaseQueue()
	return c.writeSegments(p, sendOptions{ends: c.queue.partial, checked: len(p)})
}

// writeChunk sends the first n bytes of s, by a transfer if they are enough for one. s is
// released when its data is no longer needed.
func (c *conn) writeChunk(s *regmem.Chunk, n int) (int, error) {
	c.mu.Lock()
	defer c.unlock()
	if err := c.acquireStream(); err != nil {
		s.Release()
		return 0, err
	}
	defer c.releaseQueue()
	o := &sendTransfer{p: s.B[:n:n], chunk: s, detached: true}
	m := sendOptions{ends: c.queue.partial, checked: n}
	if n < c.set.readFromTransferMin || c.openChunk(o) != nil {
		defer s.Release()
		return c.writeSegments(o.p, m)
	}
	var sent bool
	var err error
	c.unlocked(func() { sent, err = c.offer(o, nil, 0, m) })
	if !sent {
		o.closeMemory()
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// openMemory registers the data of o. The caller does not hold mu.
func (c *conn) openMemory(o *sendTransfer) (err error) {
	if c.tx.mode == TransferRead {
		o.open, err = c.dom.Expose(c.lane.qp, o.p, ibv.AccessRemoteRead)
	} else {
		o.source, err = c.dom.RegisterSource(o.p)
	}
	if err != nil {
		c.mu.Lock()
		c.stats.TransfersRefused++
		c.unlock()
	}
	return err
}

// openChunk is openMemory for a caller that holds mu.
func (c *conn) openChunk(o *sendTransfer) (err error) {
	c.unlocked(func() { err = c.openMemory(o) })
	return err
}

// writeCopying sends p without a transfer, because the memory of p cannot be registered, or not
// all of it can be read. begun is set if p is the rest of a message that began with a transfer.
func (c *conn) writeCopying(p []byte, begun bool, m sendOptions) (n int, err error) {
	if !m.message || !begun && len(p) <= int(c.agreed.maxFragmentedSend) {
		c.mu.Lock()
		defer c.unlock()
		return c.writeSegments(p, m)
	}
	for n < len(p) {
		k := min(len(p)-n, int(c.agreed.maxSend)-transferOffset)
		if _, err := c.offer(nil, p[n:n+k], len(p)-n-k, m); err != nil {
			c.truncateMessage(begun || n > 0)
			return n, err
		}
		n += k
	}
	return n, nil
}

// truncateMessage notes, if cut is set, that a message has begun and will not end.
func (c *conn) truncateMessage(cut bool) {
	c.mu.Lock()
	c.send.truncated = c.send.truncated || cut
	c.unlock()
}

// reopen undoes the beginning of a message that was withdrawn as a whole. open is the value
// of queue.partial before it.
func (c *conn) reopen(open bool) {
	c.mu.Lock()
	c.queue.partial, c.send.midMessage = open, false
	c.unlock()
}

// offer sends an offer or a request for o, with initial as payload in front of the data.
// left is how many bytes of the data that the program has passed follow later. A nil o
// means that initial is all.
//
// A transfer that a call waits for begins only when no other is under way, because the call
// may have to withdraw it.
//
// offer reports whether o is under way. It is under way with an error too, if the device
// has refused the message.
func (c *conn) offer(o *sendTransfer, initial []byte, left int, m sendOptions) (bool, error) {
	if fault.Readable(initial) < len(initial) {
		return false, errno.EFAULT
	}
	c.mu.Lock()
	defer c.unlock()
	var bufs regmem.Buffers
	for {
		if err := c.sendErr(m.call()); err != nil {
			return false, err
		}
		if c.queue.mustYield() && !c.send.midMessage {
			c.yieldQueue(m.call())
			continue
		}
		if busy := c.tx.live.Len(); o != nil && (busy >= maxBounceBuffers || busy > 0 && !o.detached) {
			c.await(&c.writers)
			continue
		}
		if c.queueJoined() && c.credits.spendable() > 0 && c.freeSlots() > reservedSlots {
			var n int
			if n, bufs = c.lane.transferBuffers(len(initial)); n > 0 {
				break
			}
		}
		c.waitToSend()
	}
	t := transferHeader{Kind: transferOffer}
	b := sendBatch{p: initial, segs: 1, bufs: bufs, head: &t}
	if c.fill(&b) < len(initial) {
		c.lane.putBuffers(b.bufs)
		return false, errno.EFAULT
	}
	var all uint16
	if c.messages {
		all = m.wire()
	}
	rest := 0
	if m.message {
		rest = left
	} else if left > 0 && c.queue.partial {
		all |= flagPartial
	}
	t.Rest = uint64(rest)
	if c.tx.mode == TransferWrite {
		t.Kind = transferRequest
	}
	if o != nil {
		c.tx.last++
		o.id = c.tx.last
		t.ID, t.Length = o.id, uint32(len(o.p))
		if t.Kind == transferOffer {
			t.Addr, t.Key = o.open.Addr(), o.open.RKey()
		}
		c.tx.live.Push(o)
		c.stats.TransfersSent++
		c.stats.BytesSent += uint64(len(o.p))
		c.stats.TransferBytesSent += uint64(len(o.p))
	}
	c.send.idle, c.send.midMessage = false, rest > 0
	if rest == 0 {
		c.queue.partial, c.queue.partialKind = all&flagPartial != 0, c.queue.kind
		c.stats.MessagesSent++
	}
	b.all = all
	_, err := c.post(&b, &m)
	return true, err
}

// awaitTransfer waits until o is over, or withdraws it, and returns how many bytes were
// moved. A transfer that is over as a whole counts as sent, even if the connection has
// ended.
func (c *conn) awaitTransfer(o *sendTransfer, call callKind) (moved int, _ error) {
	c.mu.Lock()
	defer c.unlock()
	for !o.over {
		if err := c.sendErr(call); err != nil {
			c.giveUp(o)
			switch {
			case o.over && o.moved == len(o.p):
				err = nil
			case c.life.over() && errors.Is(c.life.cause, errno.EFAULT):
				// The device met bad memory after the call had to end. The call says so, because
				// it is the last that can name what has broken the connection.
				err = c.life.cause
			}
			return o.moved, err
		}
		c.await(&c.writers)
	}
	return o.moved, nil
}

// giveUp withdraws o. When it returns, the peer has let go of the memory or the connection
// is over.
func (c *conn) giveUp(o *sendTransfer) {
	if c.life.over() {
		return
	}
	o.ended = true
	c.tx.withdraw = o
	for c.writeErr() == nil && !o.over {
		// CloseWrite ends the call. Neither has to return before the peer has answered.
		c.await(&c.writers)
	}
	since := time.Now()
	var late *time.Timer
	late = time.AfterFunc(c.life.withdrawPatience(), func() {
		c.mu.Lock()
		defer c.unlock()
		if o.over || c.life.over() {
			return
		}
		if more := c.remainingPatience(since); more > 0 {
			late.Reset(more)
		} else {
			c.fail(errTransferHeld)
		}
	})
	defer late.Stop()
	for shortened := c.life.closed; !o.over && !c.life.over(); {
		if c.life.closed && c.set.linger < 0 {
			// The connection does not linger.
			c.fail(errPeerClosed)
			break
		}
		if c.life.closed && !shortened {
			shortened = true
			late.Reset(max(c.remainingPatience(since), 0))
		}
		c.await(&c.writers)
	}
	unsent := uint64(len(o.p) - o.moved)
	c.stats.BytesSent -= unsent
	c.stats.TransferBytesSent -= unsent
}
