package rdmanet

import (
	"errors"
	"fmt"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// fail ends the connection because of err, the first one only.
func (c *conn) fail(err error) {
	if !c.life.fail(broken(err)) {
		return
	}
	c.logBroken(err)
	c.lane.qp.SetError()
	c.lane.id.Disconnect() // InfiniBand's connection manager does not watch the queue pair
	c.wakeAll()
}

// peerEnded notes what the device has told of the end of the connection. Calls see it when
// everything that arrived before has been handled.
func (c *conn) peerEnded(event *ibv.Event) {
	if event.Kind == ibv.EventDisconnected && event.Err == nil {
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

func (c *conn) logBroken(err error) {
	c.set.log.Debug("rdmanet: connection broken", "local", c.local, "remote", c.remote, "err", err)
}

// wakeAll makes every goroutine that waits look again, the leader included.
func (c *conn) wakeAll() {
	c.readers.WakeAll()
	c.writers.WakeAll()
	c.lane.posters.WakeAll()
	c.wait.Interrupt()
	c.recheckQueue()
}

// recheckQueue is for when something has changed that those who wait should know of.
func (c *conn) recheckQueue() {
	q := &c.queue
	if q.waiting > 0 {
		c.failWaiters()
	}
	if q.wantsWritable {
		c.signalWritable()
	}
}

// failWaiters ends the wait of all in line if nothing can be sent. Who has stepped
// aside gets the turn back, to find out for itself.
func (c *conn) failWaiters() {
	q := &c.queue
	err := c.writeErr()
	if err == nil {
		return
	}
	for i := range q.waiters {
		for t := q.waiters[i].first; t != nil; t = q.waiters[i].first {
			q.remove(t)
			if t.send != nil {
				t.send.finish(0, err)
			} else {
				t.ready <- err
			}
		}
	}
	if t := q.yielded; t != nil && !q.busy {
		q.yielded = nil
		q.waiting--
		q.acquire(t.kind)
		t.ready <- nil
	}
}

func (c *conn) writableChan() chan struct{} {
	if c.queue.writable == nil {
		c.queue.writable = make(chan struct{}, 1)
	}
	return c.queue.writable
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

// wantSendCompletion makes sure that the next completion of a send is noticed. Where somebody
// wants that already the leader is not roused: it wakes others, who come here again.
func (c *conn) wantSendCompletion() {
	if !c.wantsSendCompletion {
		c.wantsSendCompletion = true
		c.wait.Interrupt() // it may sleep for receives only
	}
}

// freeSlots is the room in the queue pair's send queue. One that was flushed has none: the
// end of the connection is on its way.
func (c *conn) freeSlots() int {
	if c.life.failing() {
		return 0
	}
	return c.lane.freeSlots()
}

// hasSlots reports whether the send queue has room for n. If it has not, the
// completion that makes some will be heard of.
func (c *conn) hasSlots(n int) bool {
	if c.freeSlots() >= n {
		return true
	}
	c.wantSendCompletion()
	return false
}

// setTimer sets the timer.
func (c *conn) setTimer(d time.Duration) {
	c.live.timerAt = time.Now().Add(d)
	if c.live.timer == nil {
		c.live.timer = time.AfterFunc(d, c.live.onTimer)
	} else {
		c.live.timer.Reset(d)
	}
}

// reasonWithin is how long the device may take to tell why a queue pair has failed.
var reasonWithin = 5 * time.Second

// status ends the connection over a failed completion. Flushed requests are
// the consequence of an end, not its cause: the device reports that on its own,
// or when it is asked to end the connection, which its queue pair no longer has. A device
// that does not, as Soft-RoCE does not where its link is down, is given reasonWithin.
func (c *conn) status(wc *ibv.WC, op ibv.WCOpcode) {
	if wc.Status == ibv.WCFlushErr {
		if c.life.posts() && c.event.Load() == nil {
			c.life.queuePairFailed(time.Now())
			c.lane.id.Disconnect()
			c.setTimer(reasonWithin)
		}
	} else {
		c.fail(&ibv.WCError{Status: wc.Status, Op: op, ID: wc.ID &^ barrierID, VendorErr: wc.VendorErr, Device: c.lane.id.Device().Name()})
	}
}
