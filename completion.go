package rdmanet

import (
	"errors"
	"fmt"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
)

// Completions of the connection's queue pair. Package cqwait decides which goroutine waits
// for them; that goroutine handles whatever has arrived, for all, and wakes those that it
// concerns: readers wait in Conn.readers, everything else in Conn.writers.

// completions is a connection as package cqwait sees it.
type completions conn

func (o *completions) conn() *conn { return (*conn)(o) }

func (o *completions) Poll() int     { return o.conn().poll() }
func (o *completions) Arrived() bool { return o.conn().answered() }
func (o *completions) Over() bool    { return o.closed || o.dead != nil }

func (o *completions) Failed(err error) { o.conn().fail(err) }

func (o *completions) Stopped(answer bool) bool {
	if answer {
		return o.conn().stopsReading()
	}
	return o.dead != nil || o.closed || o.readDue.expired || o.writeDue.expired
}

// Silent reports false on a broken connection while memory is to be had back from the
// device, and after a disconnect until the peer's end has come.
func (o *completions) Silent() bool {
	return o.dead != nil && !o.conn().moving() && !o.end.disconnected
}

// Solicited reports whether a leader may sleep for receives only. A peer that is rdmanet
// marks its messages as solicited. Completions of this side's sends then wake nobody, but
// those of transfers must. Soft-RoCE does not wake for a send that failed either; keep-alive
// finds it, so there must be one.
func (o *completions) Solicited() bool {
	return o.peer.rdmanet && o.set.keepAlive > 0 && !o.wantsSendCompletion && !o.conn().moving()
}

// Background reports true on a broken connection too, while the device may still use memory.
func (o *completions) Background() bool {
	return !o.closed && (o.dead == nil || o.conn().moving() && !o.wait.HasFailed())
}

// await waits until something may have changed, as a goroutine of g. The caller holds mu,
// and again on return.
func (c *conn) await(g *cqwait.Group) {
	c.wait.Await(g, g == &c.readers && c.answerDue())
}

// answerDue reports whether a Read that waits does so for an answer: this side has sent
// something since the peer last sent something, and there is nothing to read.
func (c *conn) answerDue() bool {
	return c.stats.MessagesSent != c.sentAtReceive && !c.answered() && !c.stopsReading()
}

// answered reports whether there is something to read, or never will be.
func (c *conn) answered() bool { return c.unread.Len() > 0 || c.eof }

// moving reports whether RDMA Reads or Writes of transfers are under way.
func (c *conn) moving() bool {
	return c.tx.writing > 0 || c.rx.mode == transferRead && c.rx.inFlight.Len() > 0
}

// poll handles the completions that are there and returns how many, one more when it
// finds the end of the connection. The caller holds mu.
func (c *conn) poll() int {
	// The event is looked at first: what it ends was completed before it.
	event := c.event.Load()
	total := 0
	for {
		n, err := c.lane.cq.Poll(c.wcs[:])
		if err != nil {
			if !c.wait.HasFailed() {
				total++
			}
			c.wait.Fail(err)
			break
		}
		for i := range c.wcs[:n] {
			c.complete(&c.wcs[i])
		}
		total += n
		if n < len(c.wcs) {
			break
		}
	}
	if c.receivedSince {
		c.receivedSince, c.lastReceived = false, time.Now()
		c.confirmReceipt(c.lastReceived)
	}
	if event != nil && c.dead == nil {
		c.dead = errPeerClosed
		if event.Kind != ibv.EventDisconnected || event.Err != nil {
			err := errors.New(event.Kind.String())
			if event.Err != nil {
				err = fmt.Errorf("%s: %w", event.Kind, event.Err)
			}
			c.dead = broken(err)
			c.logBroken(err)
		}
		c.wakeAll()
		total++
	}
	if c.dead != nil {
		c.credits.charge.Lower(c.heldBuffers) // its receives come back, and no more will be posted
	}
	if total > 0 {
		c.replenish()
		if c.returnsCredits && c.send.idle || c.grantedLate() {
			c.returnCredits()
		}
		if c.queue.wantsWritable {
			c.signalWritable()
		}
	}
	return total
}

// complete handles one completion.
func (c *conn) complete(wc *ibv.WC) {
	if wc.ID&sendID != 0 {
		c.sent(wc)
	} else {
		c.received(wc)
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
		if !c.hasFailed() && c.dead == nil && c.event.Load() == nil {
			c.flushed = time.Now()
			c.lane.id.Disconnect()
			c.setTimer(reasonWithin)
		}
	} else {
		c.fail(&ibv.WCError{Status: wc.Status, Op: op, ID: wc.ID &^ barrierID, VendorErr: wc.VendorErr, Device: c.lane.id.Device().Name()})
	}
}

// hasFailed reports whether the queue pair was seen to have failed. Nothing is posted to it
// any more, whether or not the reason is known.
func (c *conn) hasFailed() bool { return !c.flushed.IsZero() }

// notify hears from the device that the connection is over. It comes from the
// device's goroutines and takes no lock. A port that is down may come back while
// the device still tries; if it does not, the completions tell.
func (c *conn) notify(e ibv.Event) {
	if e.Kind == ibv.EventPortError {
		c.set.log.Debug("rdmanet: port went down", "device", c.lane.id.Device().Name(), "port", c.lane.id.Port(), "local", c.local, "remote", c.remote)
		return
	}
	c.event.CompareAndSwap(nil, &e)
	c.lane.cq.Interrupt()
}

// wakeAll makes every goroutine that waits look again, the leader included.
func (c *conn) wakeAll() {
	c.readers.WakeAll()
	c.writers.WakeAll()
	c.lane.posters.WakeAll()
	c.wait.Interrupt()
	c.recheckQueue()
}
