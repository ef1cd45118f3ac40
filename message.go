package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// MsgFlags say how a message is sent, and of a received one how it was. They can be
// combined.
type MsgFlags uint8

const (
	// Expedited sends a message ahead of all normal ones, and of all that Write and
	// ReadFrom have, that this side has not handed to the device yet; behind
	// expedited ones, and never in the middle of another message. So it waits
	// for the rest of a message that has begun, also for the last piece of one sent
	// with Partial.
	//
	// The receiver can tell such a message. One that does not know the flag (see
	// Info.MessageFlags) gets it as any other, and still early.
	Expedited MsgFlags = 1 << iota

	// Partial sends a piece of a message. More follows with the next sends of the
	// same kind, expedited or normal, whoever makes them; the first one without
	// Partial ends the message, and may be empty. Write is such a one. Until then
	// sends of the other kind wait. A message may have any number of pieces.
	// An empty piece is nothing, unless it is the last one.
	//
	// Received, it says that more of the message is to come.
	Partial

	// NoResponse is a hint: no answer is expected to this message, so the peer need
	// not hurry to make room for others. It does so when it must, or when it
	// sends something itself. Without it the peer takes some care that the sender
	// does not have to wait. A receiver does not see it.
	NoResponse

	// NonBlocking sends what can be handed to the device at once. Where that is
	// nothing the error is syscall.EAGAIN, and SendPossible tells when to try again.
	NonBlocking

	allMsgFlags = Expedited | Partial | NoResponse | NonBlocking
)

var (
	errPieces      = fmt.Errorf("pieces of a message: the peer does not know them: %w", errors.ErrUnsupported)
	errFlags       = fmt.Errorf("unknown flags: %w", syscall.EINVAL)
	errQueuedFlags = fmt.Errorf("a queued send has nothing to block: %w", syscall.EINVAL)
	errTooLongNow  = fmt.Errorf("longer than can be sent without blocking: %w", errno.EMSGSIZE)
	errMessageOpen = fmt.Errorf("the last piece of a message has not been sent: %w", syscall.EINVAL)
)

// sendOptions is how something is sent.
type sendOptions struct {
	message bool // as one message, not as a stretch of the stream
	flags   MsgFlags
	token   uint32 // taken back at the peer by the first segment, if not 0
}

// wire is what the segments say of it.
func (m *sendOptions) wire() (flags uint16) {
	if m.flags&Expedited != 0 {
		flags |= flagExpedited
	}
	if m.flags&Partial != 0 {
		flags |= flagPartial
	}
	if m.flags&NoResponse != 0 {
		flags |= flagNoResponse
	}
	return flags
}

// messageFlags is what a received segment says of its message.
func (c *conn) messageFlags(h *segmentHeader) (flags MsgFlags) {
	if !c.messages || h.Flags&(flagExpedited|flagPartial|flagNoResponse) == 0 {
		return 0
	}
	if h.Flags&flagExpedited != 0 {
		flags |= Expedited
	}
	if h.Flags&flagPartial != 0 {
		flags |= Partial
	}
	if h.Flags&flagNoResponse != 0 {
		flags |= NoResponse
	}
	return flags
}

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
		go c.sendQueued(s)
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
		s = c.acquireNext()
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

func (c *conn) writableChan() chan struct{} {
	if c.queue.writable == nil {
		c.queue.writable = make(chan struct{}, 1)
	}
	return c.queue.writable
}

// shortage is what a send had not enough of.
type shortage struct {
	kind     int
	segments int    // that it would have made
	bytes    int    // of payload that could not have gone in part, else 0
	buffer   bool   // there were no buffers, which sends bring back that were under way
	done     uint64 // sends that had completed then
}

// wouldBlock ends a non-blocking send of which n bytes were taken.
func (c *conn) wouldBlock(n int, short shortage) (int, error) {
	q := &c.queue
	short.done = c.lane.done
	q.wantsWritable, q.lacking = true, short
	if c.credits.spendable() == 0 {
		c.send.wantsCredit = true // as in waitToSend
		c.replenish()
		c.send.wantsCredit = false
	}
	c.wantSendCompletion()
	if !c.wait.Leading() {
		go c.wait.Run() // else nobody hears of credits for a while
	}
	if n > 0 {
		return n, nil
	}
	return 0, errno.EAGAIN
}

// signalWritable tells who waits for it that there is what a send was short of.
func (c *conn) signalWritable() {
	q, l, short := &c.queue, &c.lane, &c.queue.lacking
	if c.writeErr() == nil {
		if !q.available(short.kind) || c.credits.spendable() < short.segments {
			return // who changes that looks again
		}
		if room := batchBudget - l.inFlight; c.freeSlots()-reservedSlots < short.segments ||
			room <= 0 || room < short.bytes && l.inFlight > 0 || short.buffer && short.done == l.done && l.busy() {
			c.wantSendCompletion()
			return
		}
	}
	q.wantsWritable = false
	select {
	case c.writableChan() <- struct{}{}:
	default:
	}
}
