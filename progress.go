package rdmanet

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// Who waits for completions. At any time at most one goroutine, the leader,
// waits on the completion queue; it handles whatever comes, for everybody, and
// wakes those whose turn it is.
//
//  1. A Read or Write that must wait becomes the leader if there is none (so a
//     reply needs no goroutine switch), else it waits for the leader.
//  2. A leader that leaves wakes one of the others to take over.
//  3. When nobody is left and stays away for a while, a keeper goroutine
//     is started: credits, keep-alive and the peer's end need answers even when
//     the program is busy elsewhere. It leaves as soon as somebody waits.

var backgroundLeaders = vacancy.Sweeper{Min: time.Millisecond, Max: 50 * time.Millisecond}

// await waits until something may have changed. The caller holds mu, and again
// on return; cond and waiting are its own side's.
func (c *conn) await(cond *sync.Cond, waiting *int) {
	answer := cond == &c.readable && c.answerDue()
	if c.leading {
		if (c.wantsSendCompletion || c.moving()) && !c.cqLost {
			// The leader may sleep for receives only.
			if err := c.cq.Arm(false); err != nil {
				c.cqLost = true
				c.fail(err)
				return
			}
			if c.poll() > 0 {
				return
			}
		}
		if c.backgroundLeads && answer && c.poller.wouldPoll() {
			c.interruptLeader() // the keeper, which does not poll
		}
		*waiting++
		cond.Wait()
		*waiting--
		return
	}
	c.lead(answer)
	c.handOver()
}

// answerDue reports whether a Read that waits does so for an answer: something was sent
// since the peer has last sent something, and there is nothing to read.
func (c *conn) answerDue() bool {
	return c.stats.MessagesSent != c.sentAtReceive && !c.answered() && !c.stopsReading()
}

// answered reports whether there is something to read, or never will be.
func (c *conn) answered() bool { return c.unread.Len() > 0 || c.eof }

// handOver gives the lead to somebody who waits. Not everybody among the writers takes
// it, see waitPosted, so all of them hear.
func (c *conn) handOver() {
	if c.readers > 0 {
		c.readable.Signal()
	}
	if c.writers > 0 {
		c.writable.Broadcast()
	}
}

// lead waits for completions once and handles them. answer says that
// somebody has sent something, and waits for what the peer says to it. The caller holds mu.
func (c *conn) lead(answer bool) {
	c.leading = true
	c.vacancy.Taken()
	if !c.polls(c.poller.begin(answer)) {
		c.sleep()
	}
	c.poller.end(c.answered(), c.closed || c.dead != nil)
	c.leading = false
	if !c.closed {
		c.vacancy.Vacant()
	}
}

// moving reports whether RDMA Reads or Writes of transfers are under way.
func (c *conn) moving() bool {
	return c.tx.writing > 0 || c.rx.mode == transferRead && c.rx.inFlight.Len() > 0
}

// sleep waits for the next event: arm, look once more, then wait.
func (c *conn) sleep() {
	if c.cqLost { // and the connection dead: there are no events, but perhaps completions
		c.mu.Unlock()
		time.Sleep(time.Millisecond)
		c.mu.Lock()
		c.poll()
		return
	}
	// A peer that is rdmanet marks its messages as solicited; the completions
	// of our own sends then wake nobody, those of transfers must. Soft-RoCE does not
	// wake for a failed one either: then keep-alive finds it, if there is such.
	if err := c.cq.Arm(c.peer.rdmanet && c.set.keepAlive > 0 && !c.wantsSendCompletion && !c.moving()); err != nil {
		c.cqLost = true
		c.fail(err)
		return
	}
	if c.poll() > 0 || c.dead != nil && !c.moving() && !c.end.disconnected { // else there is memory to be had back, or the peer's end to come
		return
	}
	c.sleeping = true
	c.mu.Unlock()
	err := c.cq.Wait(time.Time{})
	c.mu.Lock()
	c.sleeping = false
	if err != nil && !errors.Is(err, ibv.ErrInterrupted) && !errors.Is(err, net.ErrClosed) {
		c.cqLost = true
		c.fail(err)
	}
	c.poll()
}

// polls polls instead of sleeping, for as long as Config.BusyPoll says or else for d, and
// reports whether there is no need to sleep. Who waits although there is a reason to stop
// waits for the device or the peer to let go of something, which may take long: that is no
// time to keep others from mu.
func (c *conn) polls(d time.Duration) (done bool) {
	if c.set.busyPoll > 0 {
		return !c.stopping() && c.spin(c.set.busyPoll, false)
	}
	if d > 0 {
		done = c.spin(d, true)
		c.poller.polled(c.answered(), c.readDue.expired)
	}
	return done
}

// spin polls for d. answer says that only an answer will do, and only while there is room.
func (c *conn) spin(d time.Duration, answer bool) (done bool) {
	for start, on := time.Now(), true; on; {
		done = c.poll() > 0 || done // who waits sees to what that makes due
		if !answer && (done || c.stopping()) || answer && (c.answered() || c.stopsReading()) {
			return true
		}
		c.sleeping = true
		c.mu.Unlock() // let others in
		on = (!answer || c.poller.room()) && time.Since(start) < d
		c.mu.Lock()
		if !c.sleeping {
			return true // roused
		}
		c.sleeping = false
	}
	return done
}

// stopping reports whether some who wait have a reason not to.
func (c *conn) stopping() bool {
	return c.dead != nil || c.closed || c.readDue.expired || c.writeDue.expired
}

// poll handles the completions that are there and returns how many, one more when it
// finds the end of the connection. The caller holds mu.
func (c *conn) poll() int {
	// The event is looked at first: what it ends was completed before it.
	event := c.event.Load()
	total := 0
	for {
		n, err := c.cq.Poll(c.wcs[:])
		if err != nil {
			if !c.cqLost {
				total++
			}
			c.cqLost = true
			c.fail(err)
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
		c.credits.charge.lower(c.heldBuffers) // its receives come back, and no more will be posted
	}
	if total > 0 {
		c.replenish()
		if c.grantedLate() {
			c.returnCredits()
		}
		c.sendControl()
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
			c.id.Disconnect()
			c.setTimer(reasonWithin)
		}
	} else {
		c.fail(&ibv.WCError{Status: wc.Status, Op: op, ID: wc.ID &^ barrierID, VendorErr: wc.VendorErr, Device: c.id.Device().Name()})
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
		c.set.log.Debug("rdmanet: port went down", "device", c.id.Device().Name(), "port", c.id.Port(), "local", c.local, "remote", c.remote)
		return
	}
	c.event.CompareAndSwap(nil, &e)
	c.cq.Interrupt()
}

// interruptLeader makes the leader look again. What it waits for may have been found by
// another's poll, or have come about by a post; and it may be asleep for less than is
// to be heard of from now on. A leader that is not waiting looks again anyway.
func (c *conn) interruptLeader() {
	if c.sleeping {
		c.sleeping = false
		c.cq.Interrupt()
	}
}

// wakeAll makes everybody look again, the leader too.
func (c *conn) wakeAll() {
	c.readable.Broadcast()
	c.writable.Broadcast()
	c.interruptLeader()
	c.recheckQueue()
}

// startBackgroundLeader is called when nobody has led for a while.
func (c *conn) startBackgroundLeader() { go c.leadInBackground() }

func (c *conn) leadInBackground() {
	c.mu.Lock()
	defer c.mu.Unlock()
	// When the connection is dead there may still be memory in the device's hands.
	for !c.closed && (c.dead == nil || c.moving() && !c.cqLost) && !c.leading {
		if c.readers > 0 || c.writers > 0 {
			c.vacancy.Vacant() // they may have got what they wait for, and go without having led
			break
		}
		if !c.control(true) {
			c.backgroundLeads = true
			c.lead(false)
			c.backgroundLeads = false
		}
	}
	if c.dead != nil && !c.leading {
		c.poller.notServed(false) // nobody may ever look at it again
	}
	c.handOver()
}
