package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// This file ends a connection for other reasons than Close, and wakes the goroutines that
// wait for a change of its state. life.go has the phases of a connection, and close.go has
// Close.

// fail ends the connection because of err, unless it is over already.
func (c *conn) fail(err error) {
	if !c.life.fail(broken(err)) {
		return
	}
	c.logBroken(err)
	c.lane.qp.SetError()
	// The connection managers of InfiniBand and RoCE do not watch the queue pair.
	c.lane.id.Disconnect()
	c.wakeAll()
}

// sendFailed notes that nothing can be sent any more because of err, and returns the error of
// calls that send. What the peer has sent can still be read.
func (c *conn) sendFailed(err error) error {
	if !c.life.over() && c.send.failed == nil {
		c.send.failed = broken(err)
		if errors.Is(err, errno.EPIPE) {
			c.send.failed = errPeerClosed
		}
		c.wakeAll()
	}
	if err := c.sendErr(closeCall); err != nil {
		return err
	}
	return c.send.failed
}

// peerEnded handles the device's event for the end of the connection. Everything that
// arrived before the event has been handled.
func (c *conn) peerEnded(event *ibv.Event) {
	// A process may end in the middle of what its kernel has taken.
	cut := c.holds && errors.Is(event.Err, io.ErrUnexpectedEOF)
	if event.Kind == ibv.EventDisconnected && (event.Err == nil || cut) {
		c.in.eof = c.in.eof || c.holds && !cut
		c.life.peerEnded()
	} else {
		err := errors.New(event.Kind.String())
		if event.Err != nil {
			err = fmt.Errorf("%s: %w", event.Kind, event.Err)
		}
		c.life.fail(broken(err))
		c.logBroken(err)
	}
	c.wakeAll()
}

// logBroken logs why the connection is broken.
func (c *conn) logBroken(err error) {
	c.set.failureLog.Debug("rdmanet: connection broken", "local", c.local, "remote", c.remote, "err", err)
}

// wakeAll wakes every goroutine that waits, and interrupts the leader.
func (c *conn) wakeAll() {
	c.readers.WakeAll()
	c.writers.WakeAll()
	c.lane.posters.WakeAll()
	if c.send.handingOver {
		c.lane.inPlace.FlushInterrupt()
	}
	c.wait.Interrupt()
	c.recheckQueue()
}

// recheckQueue checks the waits for the send queue and for Writable after a change.
func (c *conn) recheckQueue() {
	q := &c.queue
	if q.waiting > 0 {
		c.failWaiters()
	}
	if q.wantsWritable {
		c.signalWritable()
	}
}

// failWaiters ends the waits of the entries in the send queue that cannot be sent. A send
// that has yielded the queue gets it back, and finds the error itself.
func (c *conn) failWaiters() {
	q := &c.queue
	for i := range q.waiters {
		for t, next := q.waiters[i].first, (*queueEntry)(nil); t != nil; t = next {
			next = t.next
			err := c.sendErr(t.call)
			if err == nil {
				continue
			}
			q.remove(t)
			if t.send != nil {
				t.send.finish(0, err)
			} else {
				t.ready <- err
			}
		}
	}
	if t := q.yielded; t != nil && !q.busy && c.sendErr(t.call) != nil {
		q.yielded = nil
		q.waiting--
		q.acquire(t.kind)
		t.ready <- nil
	}
}

// writableChan returns the channel of Writable.
func (c *conn) writableChan() <-chan struct{} {
	c.mu.Lock()
	defer c.unlock()
	return c.queue.writableChan()
}

// writableChan returns the channel that signalWritable sends to, and makes it on the first
// call.
func (q *sendQueue) writableChan() chan struct{} {
	if q.writable == nil {
		q.writable = make(chan struct{}, 1)
	}
	return q.writable
}

// signalWritable sends to the channel of Writable if there is what a non-blocking send
// lacked, or if nothing can be sent any more.
func (c *conn) signalWritable() {
	q, l, short := &c.queue, &c.lane, &c.queue.lacking
	if c.refusal(short.kind) == nil {
		if !q.available(short.kind) || c.credits.spendable() < short.segments {
			// The function that changes this calls signalWritable again.
			return
		}
		if room := batchBudget - l.inFlight; c.freeSlots()-reservedSlots < short.segments ||
			room <= 0 || room < short.bytes && l.inFlight > 0 || short.buffer && short.done == l.done && l.busy() {
			c.wantSendCompletion()
			return
		}
	}
	q.wantsWritable = false
	select {
	case q.writableChan() <- struct{}{}:
	default:
	}
}

// wantSendCompletion makes sure that the next completion of a send is handled soon. If a
// goroutine wants that already, the leader need not be interrupted.
func (c *conn) wantSendCompletion() {
	if !c.wantsSendCompletion {
		c.wantsSendCompletion = true
		// The leader may wait for receives only.
		c.wait.Interrupt()
	}
}

// freeSlots returns how many work requests the queue pair's send queue has room for. A
// queue pair that has failed, or whose sends are closed, has no room.
func (c *conn) freeSlots() int {
	if c.life.failing() || c.send.closed {
		return 0
	}
	return c.lane.freeSlots()
}

// hasSlots reports whether the queue pair's send queue has room for n work requests. If it
// has not, the next completion of a send is handled soon.
func (c *conn) hasSlots(n int) bool {
	if c.freeSlots() >= n {
		return true
	}
	c.wantSendCompletion()
	return false
}

// reasonWithin is how long the device may take to report why a queue pair has failed.
var reasonWithin = 5 * time.Second

// status ends the connection because of a failed completion. Flushed requests are a
// consequence of an end, not its cause. The device reports the cause by an event, by itself
// or when it is asked to disconnect. Soft-RoCE does not when its link is down, so the
// device has reasonWithin for it.
func (c *conn) status(wc *ibv.WC, op ibv.WCOpcode) {
	if wc.Status == ibv.WCFlushErr {
		if c.life.posts() && c.event.Load() == nil {
			c.life.queuePairFailed(time.Now())
			c.lane.id.Disconnect()
			c.live.setTimer(reasonWithin)
		}
	} else {
		c.fail(&ibv.WCError{Status: wc.Status, Op: op, ID: wc.ID &^ (barrierID | fetchID), VendorErr: wc.VendorErr, Device: c.lane.id.Device().Name()})
	}
}
