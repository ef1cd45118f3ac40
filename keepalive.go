package rdmanet

import "time"

// What time does to a connection, with one timer.
//
// Keep-alive, [MS-SMBD] 3.1.5.9 and its timers: when nothing has come from the
// peer for KeepAlive, it is asked for a message; if none comes either, the
// connection is broken. That question and its answer need a credit each, which
// are not to be had while a program does not read what the other end writes, for
// as long as it likes. Then an RDMA Read (postBarrier) asks the peer's device, which
// answers whatever the program does. Where the connection allows no Reads, or the
// peer's device is known to fail at empty ones and there is no pulse, it is a Write,
// which must complete. Over iWARP that says only that TCP has taken it: whether
// anybody acknowledges it is up to TCP.
//
// Giving memory back: credits cannot be called in, as posted receives cannot
// be taken out of a queue pair. But their holder can use them up: a side where
// nothing moves for idleAfter, but for such questions and answers, asks for few
// credits (CreditsRequested) and spends the rest on empty messages, and the peer
// does not post those receives again. Only done to peers that are rdmanet; within the
// rules for any.

const idleAfter = 5 * time.Second

func (c *Conn) startTimer() {
	c.lastHeard = time.Now()
	if c.set.keepAlive > 0 {
		c.lookIn(c.set.keepAlive)
	}
}

// lookIn sets the timer.
func (c *Conn) lookIn(d time.Duration) {
	c.lookAt = time.Now().Add(d)
	if c.timer == nil {
		c.timer = time.AfterFunc(d, c.tick)
	} else {
		c.timer.Reset(d)
	}
}

// warmUp has the timer look soon when the connection has grown beyond its
// initial credits.
func (c *Conn) warmUp() {
	if c.warm || c.credits.window <= c.set.initial && c.credits.have <= c.keepCredits() && len(c.in.spare) == 0 {
		return
	}
	c.warm = true
	if c.set.keepAlive <= 0 || time.Until(c.lookAt) > idleAfter { // else keep-alive looks sooner
		c.lookIn(idleAfter)
	}
}

// keepCredits is how many credits an idle connection keeps.
func (c *Conn) keepCredits() int { return 2 * c.set.initial }

func (c *Conn) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait := c.look(time.Now())
	if wait > 0 && !c.closed && c.dead == nil { // by now: to send something it lets go of mu
		c.lookIn(wait)
	}
}

// look does what is due, and returns when to look again, 0 for never.
func (c *Conn) look(now time.Time) time.Duration {
	if !c.closed && c.dead == nil {
		c.poll() // the device's answer wakes nobody, and is none to what is asked from here on
	}
	if c.closed || c.dead != nil {
		return 0
	}
	if now.Sub(c.reckoned) >= idleAfter {
		moved := c.stats.moved()
		idle := moved == c.moved
		c.reckoned, c.moved = now, moved
		if c.warm && idle {
			c.coolDown()
			c.sendControl() // a smaller window may make a grant due
		}
	}
	if c.set.keepAlive <= 0 {
		if c.warm {
			return idleAfter
		}
		return 0
	}
	wait := c.set.keepAlive - now.Sub(c.lastHeard)
	switch {
	case wait <= 0 && c.probing:
		if wait = c.set.probe - now.Sub(c.asked); wait <= 0 {
			c.fail(errSilent)
		}
	case wait <= 0:
		c.asked = now
		c.ask()
		wait = c.set.probe
	case c.probing || c.send.probe:
		wait = min(wait, c.set.probe)
	}
	if c.warm {
		wait = min(wait, idleAfter)
	}
	return wait
}

// ask wants an answer from the peer, or where that may not be possible from its
// device.
func (c *Conn) ask() {
	for c.send.posting { // whether a message can go is not known before its end
		c.waitPosted()
	}
	if c.closed || c.dead != nil {
		return
	}
	c.send.touch = 0
	able := c.credits.posted > c.credits.reserveIn+1 // is the peer, to answer
	if !able && c.answers && c.postBarrier() {
		c.probing = true
		return
	}
	c.probing, c.send.probe = able, true
	c.sendControl() // the answer may be here when it returns
	if !c.send.probe {
		return
	}
	if c.probing = c.answers && c.postBarrier(); c.probing {
		return
	}
	c.postTouch()
	if n := c.send.marks.Len(); n > 0 { // with a full queue it is another's
		c.probing, c.send.touch = true, c.send.marks.At(n-1).seq
	}
}

// coolDown brings an idle connection back to its initial size.
func (c *Conn) coolDown() {
	c.credits.window = c.set.initial
	c.releaseSpare()
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
