package rdmanet

import (
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file posts receives and takes their buffers back. credit.go decides how many
// receives are posted, and delivery.go handles what arrives in them.

// drop releases the buffer of a completed receive, which is not posted again.
func (c *conn) drop(buf *regmem.Buffer) {
	c.credits.posted--
	c.release(buf)
}

// reuse posts a buffer again, or releases it if enough receives are posted.
func (c *conn) reuse(buf *regmem.Buffer) {
	if !c.life.posts() || c.credits.room(c.in.held, c.send.wantsCredit) == 0 {
		c.release(buf)
		return
	}
	// The buffer may have been posted before the size of receives was agreed on, or when they
	// had another size.
	if large := c.isLarge(buf); large != c.postsLarge() || !large && buf.Pool() != c.pool {
		if fit, err := c.receiveBuffer(); err == nil {
			c.release(buf)
			buf = fit
		}
	} else if c.idle.trimmed && c.dom.Private {
		buf = c.pool.Older(buf)
	}
	if c.idle.trimmed && c.stats.moved() == c.idle.moved && c.pool.Drops() {
		// The connection is idle: a message without payload leaves nothing to read.
		dropPosted(buf.B)
	}
	c.postRecv(buf)
}

// postRecv posts one receive. An error ends the connection.
func (c *conn) postRecv(buf *regmem.Buffer) {
	c.in.sge[0] = buf.SGE(c.receiveSize(buf))
	c.in.wr[0].SGL = c.in.sge[:]
	_, err := c.lane.qp.PostRecv(c.in.wr[:])
	if err != nil {
		c.release(buf)
		c.fail(err)
		return
	}
	c.in.posted.Push(buf)
	c.credits.post(1, c.isLarge(buf))
	if c.queue.wantsWritable {
		c.signalWritable()
	}
	if c.send.wantsCredit && c.credits.spendable() > 0 {
		// A writer with one credit left can send now, because it has a grant to send along.
		// The peer may be in the same state, so that nothing else would wake the writer.
		c.writers.WakeAll()
		// The writer may be the leader, which Wake does not reach.
		c.wait.Interrupt()
	}
}

// replenish posts receives up to the window. After a failure of the queue pair it posts
// none: they would complete with an error at once, again and again.
func (c *conn) replenish() {
	for c.life.posts() && c.credits.room(c.in.held, c.send.wantsCredit) > 0 {
		buf, err := c.receiveBuffer()
		if err != nil && c.credits.reserveShort() > 0 {
			buf = c.in.evict(&c.stats)
		}
		if buf == nil {
			if c.in.posted.Len()+c.in.held == 0 {
				c.fail(err)
			}
			// Fewer receives are enough to go on.
			return
		}
		c.idle.pagesTouched = c.idle.pagesTouched || buf.Stale
		c.postRecv(buf)
	}
}

// allowLarge has the connection use large receives where both ends know them.
func (c *conn) allowLarge() {
	l := &c.credits.large
	l.known = true
	l.most = min(c.set.mostLarge, c.set.maximum)
	if l.agreed = largeSegment > int(c.agreed.maxReceive) && l.most >= max(leastLarge, c.set.initial); l.agreed {
		c.largePool = c.dom.BulkPool(largeSegment)
		l.weight = (c.largePool.Size + c.pool.Size - 1) / c.pool.Size
	}
	if largeSegment > int(c.agreed.maxSend) {
		c.lane.large = c.dom.BulkPool(largeSegment)
	}
}

// isLarge reports whether a receive buffer is a large one.
func (c *conn) isLarge(buf *regmem.Buffer) bool {
	return c.largePool != nil && buf.Pool() == c.largePool
}

// receiveSize returns how many bytes a receive with that buffer takes.
func (c *conn) receiveSize(buf *regmem.Buffer) int {
	if c.isLarge(buf) {
		return largeSegment
	}
	return int(c.agreed.maxReceive)
}

// postsLarge reports whether the next receive is to be large. Receives beyond the window are
// normal: there may be as many of them as keep the peer able to send grants.
func (c *conn) postsLarge() bool {
	q := &c.credits
	return q.large.on && q.posted+c.in.held < min(q.window, q.target)+q.transferReserve
}

// receiveBuffer returns a buffer for the next receive.
func (c *conn) receiveBuffer() (*regmem.Buffer, error) {
	if c.postsLarge() {
		if buf, err := c.largePool.Get(); err == nil {
			c.credits.large.kept++
			return buf, nil
		}
	}
	return c.pool.Get()
}

// release gives back the buffer of a receive that is not posted again.
func (c *conn) release(buf *regmem.Buffer) {
	if c.isLarge(buf) {
		c.credits.large.kept--
	}
	buf.Release()
}

// dropPosted gives the pages of a posted buffer, which holds no data, back to the system.
func dropPosted(b []byte) { regmem.DropPages(b[:cap(b)]) }
