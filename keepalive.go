package rdmanet

import "time"

// What time does to a connection, with one timer.
//
// Keep-alive, [MS-SMBD] 3.1.5.9 and its timers: when nothing has come from the
// peer for KeepAlive, it is asked for a message; if none comes either, the
// connection is broken. That question and its answer need a credit each, which
// are not to be had while a program does not read what the other end writes, for
// as long as it likes. Then an RDMA Write of no bytes asks the peer's device
// instead, for which the connection breaks if there is none any more.
//
// Giving memory back: credits cannot be called in, as posted receives cannot
// be taken out of a queue pair. But their holder can use them up: a side that
// has nothing to send for idleAfter asks for few credits (CreditsRequested) and
// spends the rest on empty messages, and the peer does not post those receives
// again. Only done to peers that are rdmanet; within the rules for any.

const idleAfter = 5 * time.Second

func (c *Conn) startTimer() {
	c.lastHeard = time.Now()
	if c.set.keepAlive > 0 {
		c.timer = time.AfterFunc(c.set.keepAlive, c.tick)
	}
}

// warmUp has the timer look soon when the connection has grown beyond its
// initial credits.
func (c *Conn) warmUp() {
	if c.warm || c.credits.window <= c.set.initial && c.credits.have <= c.keepCredits() {
		return
	}
	c.warm = true
	if c.timer == nil {
		c.timer = time.AfterFunc(idleAfter, c.tick)
	} else {
		c.timer.Reset(idleAfter)
	}
}

// keepCredits is how many credits an idle connection keeps.
func (c *Conn) keepCredits() int { return 2 * c.set.initial }

func (c *Conn) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.dead != nil {
		return
	}
	now := time.Now()
	quiet := !c.heard && c.stats.SegmentsSent == c.lastSent
	if c.heard {
		c.lastHeard = now
	}
	c.heard, c.lastSent = false, c.stats.SegmentsSent
	if c.warm && quiet {
		c.coolDown()
		c.sendControl() // a smaller window may make a grant due
	}
	if c.set.keepAlive <= 0 {
		if c.warm {
			c.timer.Reset(idleAfter)
		}
		return
	}
	wait := c.set.keepAlive - now.Sub(c.lastHeard)
	if wait <= 0 {
		if c.probing {
			c.fail(errSilent)
			return
		}
		able := c.credits.posted > c.credits.reserveIn+1 // is the peer, to answer
		c.probing, c.send.probe = able, true
		c.sendControl() // the answer may be here when it returns
		if c.send.probe && !c.send.posting {
			c.postTouch()
		}
		c.probing = c.probing && !c.send.probe
		wait = c.set.probe
	} else if c.probing || c.send.probe {
		wait = min(wait, c.set.probe)
	}
	if c.warm {
		wait = min(wait, idleAfter)
	}
	c.timer.Reset(wait)
}

// coolDown brings an idle connection back to its initial size.
func (c *Conn) coolDown() {
	c.credits.window = c.set.initial
	c.warm = false
	if !c.peer.rdmanet {
		return
	}
	c.send.idle = true
	for c.dead == nil && c.credits.have > c.set.initial && c.canSend() && !c.send.mid {
		n := min(c.credits.have-c.set.initial, c.freeSlots(), c.credits.spendable(), batchSegments)
		if !c.postEmpty(n) {
			break
		}
	}
	c.warm = c.credits.have > c.keepCredits()
}
