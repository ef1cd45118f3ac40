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

// SendMsg implements [Conn.SendMsg].
func (c *conn) SendMsg(p []byte, flags MsgFlags) (n int, err error) {
	if err = c.checkFlags(flags); err == nil {
		n, err = c.write(p, sendOptions{message: true, flags: flags})
	}
	return n, c.opError("write", err)
}

// RecvMsg implements [Conn.RecvMsg].
func (c *conn) RecvMsg(p []byte) (n int, flags MsgFlags, err error) {
	n, flags, err = c.readMsg(p, true)
	return n, flags, c.opError("read", err)
}

// Send is a message in the queue: see QueueMsg. Its methods may be called by
// several goroutines at once.
type Send struct {
	c     *conn
	owner *Conn // which is not dropped before the Send is done
	entry queueEntry
	p     []byte
	size  int            // of p, which finish lets go of
	buf   *regmem.Memory // that p lies in, held
	m     sendOptions

	done chan struct{} // closed when the rest is set
	n    int
	err  error
}

// queueMsg is QueueMsg; owner is the Conn that it was called on.
func (c *conn) queueMsg(p []byte, flags MsgFlags, owner *Conn) *Send {
	s := &Send{c: c, owner: owner, p: p, size: len(p), m: sendOptions{message: true, flags: flags}, done: make(chan struct{})}
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

// Done is closed when the message has been handed to the device, by a large transfer
// when the peer has fetched it, or when neither will be: then p is the caller's again
// and Result returns without waiting.
func (s *Send) Done() <-chan struct{} { return s.done }

// Result waits until the Send is done and returns how many bytes were taken and,
// if that is not all of them, why: what SendMsg would have returned, or an error
// that matches context.Canceled.
func (s *Send) Result() (n int, err error) {
	<-s.done
	return s.n, s.c.opError("write", s.err)
}

// Cancel takes the Send out of the queue and reports whether it could: then nothing
// of it is sent and it is done. Otherwise it is being sent, or is done already.
func (s *Send) Cancel() bool {
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

// SendPossible returns the channel that receives a value when, after a SendMsg with
// NonBlocking that did not take all it was given, another might take some; or when
// sending has become impossible, so that another would say why. There is one channel
// a connection, which holds one value: each is for one receiver, and may be of an
// earlier time, so that EAGAIN can follow all the same.
func (c *conn) SendPossible() <-chan struct{} {
	c.mu.Lock()
	defer c.unlock()
	return c.writableChan()
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
