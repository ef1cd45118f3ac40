package rdmanet

import (
	"bytes"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// drop gives a buffer back that was posted and will not be again.
func (c *conn) drop(buf *regmem.Buffer) {
	c.credits.posted--
	buf.Release()
}

// reuse posts a buffer again, or gives it back when the window is full.
func (c *conn) reuse(buf *regmem.Buffer) {
	if !c.life.posts() || c.credits.room(c.in.held, c.send.wantsCredit) == 0 {
		buf.Release()
		return
	}
	if buf.Pool() != c.pool { // posted before the size was agreed on
		if fit, err := c.pool.Get(); err == nil {
			buf.Release()
			buf = fit
		}
	} else if c.idle.trimmed && c.dom.Private {
		buf = c.pool.Older(buf)
	}
	if c.idle.trimmed && c.stats.moved() == c.idle.moved && c.pool.Drops() {
		dropPosted(buf.B) // a message without payload leaves nothing to read
	}
	c.postRecv(buf)
}

// postRecv posts one receive.
func (c *conn) postRecv(buf *regmem.Buffer) {
	c.in.sge[0] = buf.SGE(int(c.agreed.maxReceive))
	c.in.wr[0].SGL = c.in.sge[:]
	_, err := c.lane.qp.PostRecv(c.in.wr[:])
	if err != nil {
		buf.Release()
		c.fail(err)
		return
	}
	c.in.posted.Push(buf)
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
	for c.life.posts() && c.credits.room(c.in.held, c.send.wantsCredit) > 0 {
		buf, err := c.pool.Get()
		if err != nil && c.credits.reserveShort() > 0 {
			buf = c.evict()
		}
		if buf == nil {
			if c.in.posted.Len()+c.in.held == 0 {
				c.fail(err)
			}
			return // fewer will do
		}
		c.idle.pagesTouched = c.idle.pagesTouched || buf.Stale
		c.postRecv(buf)
	}
}

// evict moves the latest payload that waits for the reader into ordinary memory, and
// returns the buffer that it came in: nil if there is none to be had. The first one
// stays, which the reader may be at.
func (c *conn) evict() *regmem.Buffer {
	for i := c.in.unread.Len() - 1; i > 0; i-- {
		if s := c.in.unread.At(i); s.buf != nil {
			buf := s.buf
			s.data, s.buf = bytes.Clone(s.data), nil
			c.stats.BytesCopied += uint64(len(s.data))
			return buf
		}
	}
	return nil
}
