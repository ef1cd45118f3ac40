package rdmanet

import (
	"context"
	"net"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// writeMsg sends p as a message, or as a piece of one.
func (c *conn) writeMsg(p []byte, opts []MsgOption) (n int, err error) {
	m, err := c.messageOptions(p, opts)
	if err != nil {
		return 0, err
	}
	return c.write(p, m)
}

// PendingMessage is a message that QueueMsg has queued. Its methods may be called by
// several goroutines at once.
type PendingMessage struct {
	c     *conn
	owner *Conn // owner keeps the Conn from being dropped before the message is done.
	entry queueEntry
	p     []byte         // p is nil when the message is done.
	size  int            // size is the length of p.
	buf   *regmem.Memory // buf is the held memory of a Buffer that p lies in, or nil.
	m     sendOptions

	done chan struct{} // done is closed when n and err are set.
	n    int
	err  error
}

// queueMsg returns the message p. It is in the queue, is being sent, or is done with an error.
func (c *Conn) queueMsg(p []byte, opts []MsgOption) *PendingMessage {
	m, refused := c.messageOptions(p, opts)
	if refused == nil && m.flags&NonBlocking != 0 {
		refused = errQueuedFlags
	}
	s := &PendingMessage{c: c.conn, owner: c, p: p, size: len(p), m: m, done: make(chan struct{})}
	s.entry.send = s
	buf, err := regmem.Borrow(p)
	s.buf = buf
	c.mu.Lock()
	defer c.unlock()
	if err == nil {
		err = refused
	}
	kind := m.flags.kind()
	if err == nil {
		err = c.refusal(kind)
	}
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

// cancel takes the message out of the queue, and reports whether it was there.
func (s *PendingMessage) cancel() bool {
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

// finish ends the message. The caller holds mu.
func (s *PendingMessage) finish(n int, err error) {
	s.buf.Return(nil)
	s.n, s.err, s.p, s.buf, s.owner = n, err, nil, nil, nil
	close(s.done)
}

// start implements [pendingSend].
func (s *PendingMessage) start() { go s.c.sendQueued(s) }

// sendQueued sends s, which has the send queue, and the messages that follow in the queue,
// until one of them goes by a transfer.
func (c *conn) sendQueued(s *PendingMessage) {
	c.mu.Lock()
	defer c.unlock()
	for s != nil {
		if c.sendLarge(s) {
			return
		}
		s.finish(c.writeInTurn(s.p, s.m))
		c.queue.busy = false
		s, _ = c.acquireNext().(*PendingMessage)
	}
	if !c.queue.busy {
		c.releaseQueue()
	}
}

// sendLarge sends s by a transfer, and reports whether it could. It releases the send queue
// when the transfer has been announced to the peer: the next message may follow while the
// peer fetches this one. The caller has the send queue and holds mu.
func (c *conn) sendLarge(s *PendingMessage) bool {
	if c.writeErr() != nil || len(s.p) > transferCeiling || !c.large(s.p, s.m) || !c.readable(s.p, 0) {
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
