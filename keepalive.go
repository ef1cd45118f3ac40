package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// What time does to a connection, with one timer.
//
// Keep-alive, [MS-SMBD] 3.1.5.9 and its timers: when nothing has come from the
// peer for KeepAlive, it is asked for a message; if none comes either, the
// connection is broken. That question and its answer need a credit each, which
// are not to be had while a program does not read what the other end writes, for
// as long as it likes. Then an RDMA Read (queueBarrier) asks the peer's device, which
// answers whatever the program does. Where the connection allows no Reads, or the
// peer's device is known to fail at empty ones and there is no pulse, it is a Write,
// which must complete. Over iWARP that says only that TCP has taken it: whether
// anybody acknowledges it is up to TCP.
//
// A sender whose data goes one way may hear nothing for long: an RDMA Read is served by
// its device, and the grants for segments come when a good part of a window has been
// used up. Its own probe queues behind the data, and the answer may come too late. So
// an end that receives data and sends nothing says something every confirmEvery (confirm).
//
// Giving memory back: credits cannot be called in, as posted receives cannot
// be taken out of a queue pair. But their holder can use them up: a side where
// nothing moves for idleAfter, but for such questions and answers, asks for few
// credits (CreditsRequested) and spends the rest on empty messages, and the peer
// does not post those receives again. Only done to peers that are rdmanet; within the
// rules for any. What stays posted keeps no pages of the system's where the device
// does not pin them, and lies close together where it does.

const (
	idleAfter = 5 * time.Second
	lookEvery = idleAfter / 4 // while there may be something to give back
)

func (c *conn) startTimer() {
	c.live.lastReceived = time.Now()
	if c.set.keepAlive > 0 && !c.life.failing() { // else reasonWithin runs already
		c.setTimer(c.set.keepAlive)
	}
}

// scheduleTrim has the timer look soon when the connection has taken more memory than one
// that is idle needs.
func (c *conn) scheduleTrim() {
	if c.idle.trimmable || !c.hasIdleMemory() {
		return
	}
	c.idle.trimmable, c.idle.trimmed = true, false
	c.idle.checkedAt = time.Now()
	c.idle.moved, c.idle.movedAt = c.stats.moved(), c.idle.checkedAt
	if c.set.keepAlive <= 0 || c.live.timerAt.Sub(c.idle.checkedAt) > lookEvery { // else keep-alive looks sooner
		c.setTimer(lookEvery)
	}
}

// hasIdleMemory reports whether there is something to give back when idle.
func (c *conn) hasIdleMemory() bool {
	return c.idle.pagesTouched || c.credits.window > c.set.initial || c.credits.have > c.credits.idleReceives()
}

func (c *conn) tick() {
	c.mu.Lock()
	defer c.unlock()
	wait := c.runTimer(time.Now())
	if wait <= 0 || c.life.closed || c.life.over() { // by now: to send something it lets go of mu
		return
	}
	if c.life.failing() {
		wait = min(wait, reasonWithin)
	}
	c.setTimer(wait)
}

// runTimer does what is due, and returns when to runTimer again, 0 for never.
func (c *conn) runTimer(now time.Time) time.Duration {
	if !c.life.closed && !c.life.over() {
		c.wait.Poll() // the device's answer wakes nobody, and is none to what is asked from here on
	}
	if c.life.closed || c.life.over() {
		return 0
	}
	if c.life.failing() {
		wait := reasonWithin - now.Sub(c.life.failedAt)
		if wait <= 0 {
			c.fail(errUntold)
		}
		return wait
	}
	if c.idle.trimmable && now.Sub(c.idle.checkedAt) >= lookEvery {
		c.idle.checkedAt = now
		if moved := c.stats.moved(); moved != c.idle.moved {
			c.idle.moved, c.idle.movedAt = moved, now
		}
		if now.Sub(c.idle.movedAt) >= idleAfter {
			c.shrinkIdle()
		}
	}
	if c.set.keepAlive <= 0 {
		if c.idle.trimmable {
			return lookEvery
		}
		return 0
	}
	wait := c.set.keepAlive - now.Sub(c.live.lastReceived)
	switch {
	case wait <= 0 && c.live.probing:
		if wait = c.set.probe - now.Sub(c.live.probedAt); wait <= 0 {
			c.fail(errSilent)
		}
	case wait <= 0:
		c.live.probedAt = now
		c.sendProbe()
		wait = c.set.probe
	case c.live.probing || c.send.probeDue:
		wait = min(wait, c.set.probe)
	}
	if c.idle.trimmable {
		wait = min(wait, lookEvery)
	}
	return wait
}

// confirmReceipt has a message sent to a peer whose data has been coming for a while in which
// nothing was sent.
func (c *conn) confirmReceipt(now time.Time) {
	o := &c.live.oneWay
	switch {
	case !c.peer.rdmanet:
	case c.stats.Posts != o.posts:
		*o = oneWay{c.stats.Posts, now, c.stats.BytesReceived}
	case now.Sub(o.since) >= confirmEvery && c.stats.BytesReceived-o.bytes >= confirmFrom:
		c.send.responseDue = true
	}
}

// sendProbe wants an answer from the peer, or where that may not be possible from its
// device.
func (c *conn) sendProbe() {
	c.send.probeSeq = 0
	able := c.credits.posted > c.credits.reserveIn+1 // is the peer, to answer
	if !able && c.live.answersReads && c.queueBarrier() {
		c.live.probing = true
		return
	}
	c.live.probing, c.send.probeDue = able, true
	if c.queueControl(true) && !c.send.probeDue {
		return
	}
	if c.live.probing = c.live.answersReads && c.queueBarrier(); c.live.probing {
		return
	}
	c.queueEmptyWrite()
	if n := c.lane.signaled.Len(); n > 0 { // with a full queue it is another's
		c.live.probing, c.send.probeSeq = true, c.lane.signaled.At(n-1).seq
	}
}

// shrinkIdle brings an idle connection back to its initial size.
func (c *conn) shrinkIdle() {
	c.credits.window = c.set.initial
	again := !c.idle.trimmed // once more: the peer's last messages come after this, and bring pages back
	c.idle.trimmable, c.idle.trimmed, c.idle.pending = false, true, true
	c.idle.compactions = 2 * (c.set.initial + c.credits.transferReserve)
	if c.peer.rdmanet {
		c.send.idle = true
		c.returnCredits()
		c.idle.trimmable = c.credits.have > c.credits.idleReceives()
	}
	c.trimMemory()
	c.idle.trimmable = c.idle.trimmable || again || c.credits.charge.Charged() > 0 || c.lane.signaled.Len() > 0 // buffers of sends that nobody polls for
}

// returnCredits sends empty messages for the credits beyond the initial ones, so that the
// peer does not post those receives again. It goes on when sends complete if the queue
// pair has no room for all of them.
func (c *conn) returnCredits() {
	c.idle.returnsCredits = false
	for !c.life.closed && !c.life.over() && c.credits.have > c.set.initial && c.canSend() && !c.send.midMessage {
		n := min(c.credits.have-c.set.initial, c.freeSlots(), c.credits.spendable(), batchSegments)
		if !c.queueEmpty(n) {
			c.idle.returnsCredits = true
			return
		}
	}
	c.idle.returnsCredits = c.credits.have > c.set.initial && !c.life.failing() && !c.hasSlots(1)
}

// grantedLate reports whether an idle connection has been granted receives since it used
// up its credits, as a peer does that becomes idle later. One more than the initial credits
// is what the peer's reserve makes. Only where receives keep slabs pinned is that worth
// messages, which bring pages of receives back elsewhere.
func (c *conn) grantedLate() bool {
	return c.idle.trimmed && c.dom != nil && c.dom.Private && c.send.idle && c.peer.rdmanet && c.credits.have > c.set.initial+c.credits.transferReserve
}

// trimAfter looks, when a message with so many bytes of payload has come, whether an idle connection has got back what its peer
// held, and can give up more.
func (c *conn) trimAfter(payload int) {
	if c.idle.trimmed && payload == 0 && (c.idle.pending || c.idle.compactions > 0) {
		c.trimMemory()
	}
}

// trimMemory gives back what an idle connection does not need for what it still has: memory of
// queues, and pages of receives that are posted. It comes once more when the peer has
// used up the credits that it does not need.
func (c *conn) trimMemory() {
	c.credits.lowerCharge(c.in.held)
	if c.idle.pending {
		c.idle.pending = c.in.posted.Len() > c.set.initial+c.credits.transferReserve
		c.in.posted.Trim()
		c.in.unread.Trim()
		c.lane.trim()
		c.rx.trim()
		c.tx.trim()
		if q, ok := c.lane.qp.(ibv.IdleQP); ok && (c.idle.pagesTouched || !c.idle.pending) {
			q.Idle(func(buf []byte) { dropPosted(buf) })
			if own := c.lane.reservedFree; own != nil && c.lane.buffers.Drops() {
				dropPosted(own.B)
			}
		}
		c.idle.pagesTouched = false
	}
	// A receive that lies apart keeps a slab pinned. The next message uses the oldest one
	// up, and the one that is posted in its place lies with the others.
	if c.dom != nil && c.dom.Private && c.idle.compactions > 0 && !c.idle.pending && c.peer.rdmanet {
		if c.idle.compactions--; c.pool.Scattered(&c.in.posted) {
			c.send.probeDue = true
		} else {
			c.idle.compactions = 0
		}
	}
}

// dropPosted gives back the pages of a buffer that is in use and holds nothing.
func dropPosted(b []byte) { regmem.DropPages(b[:cap(b)]) }
