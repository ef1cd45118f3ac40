package rdmanet

import (
	"context"
	"net"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

func (c *conn) checkFlags(flags MsgFlags) error {
	switch {
	case flags&^allMsgFlags != 0:
		return errFlags
	case flags&Partial != 0 && !c.messages:
		return errPieces
	}
	return nil
}

// writeMsg sends p as a message, or as a piece of one.
func (c *conn) writeMsg(p []byte, flags MsgFlags) (n int, err error) {
	if err := c.checkFlags(flags); err != nil {
		return 0, err
	}
	return c.write(p, sendOptions{message: true, flags: flags})
}

// Send is a message in the queue: see QueueMsg. Its methods may be called by
// several goroutines at once.
type Send struct {
	c     *conn
	owner *Conn // keeps the Conn from being dropped before the Send is done
	entry queueEntry
	p     []byte
	size  int            // of p, which finish lets go of
	buf   *regmem.Memory // that p lies in, held
	m     sendOptions

	done chan struct{} // closed when the rest is set
	n    int
	err  error
}

// queueMsg returns the Send for p, in the queue or done.
func (c *Conn) queueMsg(p []byte, flags MsgFlags) *Send {
	s := &Send{c: c.conn, owner: c, p: p, size: len(p), m: sendOptions{message: true, flags: flags}, done: make(chan struct{})}
	s.entry.send = s
	buf, err := regmem.Borrow(p)
	s.buf = buf
	c.mu.Lock()
	defer c.unlock()
	if err == nil {
		err = c.checkFlags(flags)
	}
	if err == nil && flags&NonBlocking != 0 {
		err = errQueuedFlags
	}
	if err == nil {
		err = c.writeErr()
	}
	kind := flags.kind()
	switch {
	case err != nil:
		s.finish(0, err)
	case c.queue.available(kind):
		c.queue.acquire(kind)
		s.start()
	default:
		c.enqueue(&s.entry, kind)
	}
	return s
}

// cancel takes the Send out of the queue, and reports whether it was there.
func (s *Send) cancel() bool {
	c := s.c
	c.mu.Lock()
	defer c.unlock()
	if s.entry.list == nil {
		return false
	}
	c.queue.remove(&s.entry)
	s.finish(0, context.Canceled)
	return true
}

// finish tells that the Send is done. The caller holds mu.
func (s *Send) finish(n int, err error) {
	s.buf.Return(nil)
	s.n, s.err, s.p, s.buf, s.owner = n, err, nil, nil, nil
	close(s.done)
}

// start implements [pendingSend].
func (s *Send) start() { go s.c.sendQueued(s) }

// sendQueued sends s, which has the turn, and those that come next, until one is sent
// by a transfer.
func (c *conn) sendQueued(s *Send) {
	c.mu.Lock()
	defer c.unlock()
	for s != nil {
		if c.sendLarge(s) {
			return
		}
		s.finish(c.writeInTurn(s.p, s.m))
		c.queue.busy = false
		s, _ = c.acquireNext().(*Send)
	}
	if !c.queue.busy {
		c.releaseQueue()
	}
}

// sendLarge sends s by a transfer and, as soon as the peer has been told of it, passes
// the turn: the next may follow while the peer fetches. It reports whether it could.
// The caller has the turn and holds mu.
func (c *conn) sendLarge(s *Send) bool {
	if c.writeErr() != nil || len(s.p) > transferCeiling || !c.large(s.p, true) {
		return false
	}
	var sent bool
	var err error
	o := &sendTransfer{p: s.p, message: true, detached: true}
	c.unlocked(func() {
		if err = c.openMemory(o); err == nil {
			sent, err = c.offer(o, nil, 0, s.m)
		} else {
			o.moved, err = c.writeCopying(s.p, false, s.m)
		}
	})
	c.releaseQueue()
	for sent && !o.over && !c.life.over() {
		c.await(&c.writers)
	}
	o.closeMemory()
	switch {
	case o.over:
		err = nil
	case sent && c.life.closed:
		err = net.ErrClosed
	case sent:
		err = c.life.cause
	}
	s.finish(o.moved, err)
	return true
}
