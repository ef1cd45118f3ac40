package rdmanet

import (
	"io"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// large reports whether a Write or WriteMsg of p is to be a transfer.
func (c *conn) large(p []byte, message bool) bool {
	switch {
	case c.tx.mode == transferNone:
		return false
	case len(p) >= c.set.transfer, message && len(p) > int(c.agreed.maxFragmentedSend):
		return true
	}
	return len(p) >= c.set.ofBuffer && regmem.Find(p) != nil
}

// writeLarge sends p by transfers. The caller has the turn, and does not hold mu.
func (c *conn) writeLarge(p []byte, m sendOptions) (n int, err error) {
	initial, open := 0, c.queue.partial // only who has the turn changes that
	if regmem.Find(p) == nil {
		// What is copied anyway goes along, and can be read at once.
		initial = min(int(c.agreed.maxSend)-transferOffset, len(p)-1)
	}
	for len(p) > 0 {
		size := min(len(p), initial+transferCeiling)
		o := &sendTransfer{p: p[initial:size:size], message: m.message}
		if err := c.openMemory(o); err != nil {
			k, err := c.writeCopying(p, n > 0, m)
			return n + k, err
		}
		sent, err := c.offer(o, p[:initial], len(p)-size, m)
		if sent && err == nil {
			moved := 0
			moved, err = c.awaitTransfer(o)
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

// transferChunk is copyMuch by way of a chunk, which it gives back in the end: while the
// peer fetches from one, r fills the next.
func (c *conn) transferChunk(s *regmem.Chunk, r io.Reader) (written int64, more bool, err error) {
	n, err := s.Fill(r)
	w, werr := c.writeChunk(s, n)
	if werr != nil {
		err = c.opError("write", werr)
	}
	return int64(w), n == regmem.ChunkSize, err
}

// writeCopied sends p by segments: who reads into p goes on when the device has it, not
// when the peer has.
func (c *conn) writeCopied(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.mu.Lock()
	defer c.unlock()
	if err := c.acquireQueue(normal); err != nil {
		return 0, err
	}
	defer c.releaseQueue()
	return c.writeSegments(p, sendOptions{})
}

// writeChunk sends the first n bytes of s, which is given back in the end.
func (c *conn) writeChunk(s *regmem.Chunk, n int) (int, error) {
	c.mu.Lock()
	defer c.unlock()
	if err := c.acquireQueue(normal); err != nil {
		s.Release()
		return 0, err
	}
	defer c.releaseQueue()
	o := &sendTransfer{p: s.B[:n:n], chunk: s, detached: true}
	if n < c.set.ofScratch || c.openChunk(o) != nil {
		defer s.Release()
		return c.writeSegments(o.p, sendOptions{})
	}
	var sent bool
	var err error
	c.unlocked(func() { sent, err = c.offer(o, nil, 0, sendOptions{}) })
	if !sent {
		o.closeMemory()
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// openMemory registers what is to be sent.
func (c *conn) openMemory(o *sendTransfer) (err error) {
	if c.tx.mode == transferRead {
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

// openChunk is openMemory for who holds mu.
func (c *conn) openChunk(o *sendTransfer) (err error) {
	c.unlocked(func() { err = c.openMemory(o) })
	return err
}

// writeCopying sends p where its memory cannot be registered. begun says that it
// is the rest of a message that began with a transfer.
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

// truncateMessage notes that a message has begun and will not end.
func (c *conn) truncateMessage(cut bool) {
	c.mu.Lock()
	c.send.truncated = c.send.truncated || cut
	c.unlock()
}

// reopen says that the message that was withdrawn as a whole has never been, and
// whether one was open before it.
func (c *conn) reopen(open bool) {
	c.mu.Lock()
	c.queue.partial, c.send.midMessage = open, false
	c.unlock()
}

// offer tells the peer of o, alone if a call waits for it, which may have to
// withdraw it, with the bytes in front of it; left bytes of what is sent follow
// later. o is nil where those bytes are all. It reports whether o is under way: with
// an error as well if the device has refused what was to tell the peer.
func (c *conn) offer(o *sendTransfer, initial []byte, left int, m sendOptions) (bool, error) {
	c.mu.Lock()
	defer c.unlock()
	var bufs regmem.Buffers
	for {
		if err := c.writeErr(); err != nil {
			return false, err
		}
		if c.queue.mustYield() && !c.send.midMessage {
			c.yieldQueue()
			continue
		}
		if busy := c.tx.live.Len(); o != nil && (busy >= maxBounceBuffers || busy > 0 && !o.detached) {
			c.await(&c.writers)
			continue
		}
		if c.credits.spendable() > 0 && c.freeSlots() > reservedSlots {
			var n int
			if n, bufs = c.transferBuffers(len(initial)); n > 0 {
				break
			}
		}
		c.waitToSend()
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
	t := transferHeader{Kind: transferOffer, Rest: uint64(rest)}
	if c.tx.mode == transferWrite {
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
	return true, c.post(sendBatch{p: initial, segs: 1, all: all, bufs: bufs, head: &t})
}

// awaitTransfer waits until o is over, or gives it up, and returns how much of it was
// moved. On a connection that is dead what came before its end may still be heard
// afterwards.
func (c *conn) awaitTransfer(o *sendTransfer) (moved int, _ error) {
	c.mu.Lock()
	defer c.unlock()
	for !o.over {
		if err := c.writeErr(); err != nil {
			c.giveUp(o)
			if o.over && o.moved == len(o.p) {
				return o.moved, nil
			}
			return o.moved, err
		}
		c.await(&c.writers)
	}
	return o.moved, nil
}

// giveUp ends o early: when it returns the peer has let go of the memory, or
// the connection is dead.
func (c *conn) giveUp(o *sendTransfer) {
	if c.life.over() {
		return
	}
	o.ended = true
	c.tx.withdraw = o
	since := time.Now()
	var late *time.Timer
	late = time.AfterFunc(c.withdrawPatience(), func() {
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
	for hurried := c.life.closed; !o.over && !c.life.over(); {
		if c.life.closed && c.set.linger < 0 {
			c.fail(errPeerClosed) // this connection does not linger
			break
		}
		if c.life.closed && !hurried {
			hurried = true
			late.Reset(max(c.remainingPatience(since), 0))
		}
		c.await(&c.writers)
	}
	unsent := uint64(len(o.p) - o.moved)
	c.stats.BytesSent -= unsent
	c.stats.TransferBytesSent -= unsent
}
