package rdmanet

import (
	"errors"
	"fmt"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// write acquires the send queue and sends p.
func (c *conn) write(p []byte, m sendOptions) (n int, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, err
	}
	defer buf.Return(nil)
	// Pages that have to come from a file do so before the lock is held.
	m.checked = fault.Readable(p[:min(len(p), batchBudget)])
	c.mu.Lock()
	defer c.unlock()
	kind := m.flags.kind()
	if err := c.refusal(kind); err != nil {
		return 0, err
	}
	if m.flags&NonBlocking != 0 && !c.queue.available(kind) {
		return c.wouldBlock(0, shortage{kind: kind, segments: 1})
	}
	if !c.queue.available(kind) {
		m.checked = 0 // It may take long until this call has its turn.
	}
	if err := c.acquireQueue(kind, m.call()); err != nil {
		return 0, err
	}
	n, err = c.writeInTurn(p, m)
	c.releaseQueue()
	return n, err
}

// writeInTurn sends p. The caller has acquired the send queue. mu is let go of meanwhile.
func (c *conn) writeInTurn(p []byte, m sendOptions) (n int, err error) {
	m.ends = c.queue.partial
	if m.message {
		if !c.readable(p, m.checked) {
			return 0, errno.EFAULT // A message goes as a whole or not at all.
		}
		m.checked = len(p)
	}
	if c.large(p, m) {
		c.unlocked(func() { n, err = c.writeLarge(p, m) })
		return n, err
	}
	return c.writeSegments(p, m)
}

// readable reports whether all of p can be read, of which the first bytes have been checked. It
// lets go of mu for the others, which may have to come from a file.
func (c *conn) readable(p []byte, checked int) (all bool) {
	if p = p[checked:]; len(p) == 0 {
		return true
	}
	c.unlocked(func() { all = fault.Readable(p) == len(p) })
	return all
}

// writingOver reports whether CloseWrite has nothing to do: the direction has ended, or the peer has
// closed the connection. TCP reports no error in the second case either.
func (c *conn) writingOver() bool {
	return !c.life.closed && (c.send.ended || c.life.peerClosed())
}

// closeWrite ends this side's direction of the stream. As with shutdown(2) on TCP, no deadline
// matters, and neither does the peer's reader: writes of the stream that have not sent
// everything end with errWriteClosed. Messages that came before go first.
func (c *conn) closeWrite() error {
	if !c.fin {
		return fmt.Errorf("close the writing side: the peer is not rdmanet: %w", errors.ErrUnsupported)
	}
	c.mu.Lock()
	defer c.unlock()
	if c.writingOver() {
		return nil
	}
	if err := c.sendErr(closeCall); err != nil {
		return err
	}
	if c.queue.partial && !c.queue.busy {
		return errMessageOpen
	}
	c.send.closing++
	defer func() { c.send.closing-- }()
	c.wakeAll()
	err := c.acquireQueue(normal, closeCall)
	if err == nil {
		defer c.releaseQueue()
	}
	for {
		if c.writingOver() {
			return nil
		}
		if err == nil {
			err = c.sendErr(closeCall)
		}
		switch {
		case err != nil:
			return err
		case c.queue.partial:
			return errMessageOpen
		case c.holds && c.life.failing():
			c.await(&c.writers) // The device will tell why.
		case c.holds && !c.lane.quiet():
			c.lane.awaitQuiet()
		case c.holds:
			return c.closeSends()
		case c.queueFIN():
			return nil
		default:
			c.waitToSend()
		}
	}
}
