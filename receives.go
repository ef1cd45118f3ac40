package rdmanet

import (
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file posts receives and takes their buffers back. credit.go decides how many
// receives are posted, and delivery.go handles what arrives in them.

// drop releases the buffer of a completed receive, which is not posted again.
func (c *conn) drop(buf *regmem.Buffer) {
	c.credits.posted--
	buf.Release()
}

// reuse posts a buffer again, or releases it if enough receives are posted.
func (c *conn) reuse(buf *regmem.Buffer) {
	if !c.life.posts() || c.credits.room(c.in.held, c.send.wantsCredit) == 0 {
		buf.Release()
		return
	}
	// The buffer was posted before the size of receives was agreed on.
	if buf.Pool() != c.pool {
		if fit, err := c.pool.Get(); err == nil {
			buf.Release()
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
		buf, err := c.pool.Get()
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
