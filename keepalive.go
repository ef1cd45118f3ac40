package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// This file has what a connection does after some time without events. Each connection has
// one timer, which calls tick. liveness.go has the state, and probe.go the memory for
// probes.
//
// Keep-alive, [MS-SMBD] 3.1.5.9: if nothing has arrived from the peer for KeepAlive, this
// side asks the peer for a message (sendProbe). If nothing arrives then either, the
// connection is broken.
//
// The question and the answer need a credit each. There may be none while a program does
// not read what the peer sends. Then an RDMA Read (queueBarrier) asks the peer's device,
// which answers whatever the program does. An empty RDMA Write takes the place of the Read
// if the connection allows no Reads, or if the peer's device fails at empty ones and there
// is no probe target. Over iWARP the Write completes when TCP has taken it, so there TCP
// alone finds out that nobody answers.
//
// A device may be able to ask the peer's host, which answers whatever the peer's process does
// (ibv.HostProber). The software device is. Then this side sends no probes (watchHost), and a
// process that is stopped keeps its connections.
//
// Confirmations: the sender of much data may receive nothing for long. Its device serves
// the RDMA Reads, and grants for segments come only when a good part of a window was used
// up. Its own probe queues behind the data, so the answer may come too late. So an end that
// receives data and sends nothing sends a message every confirmEvery (confirmReceipt).
//
// Idle memory: a grant cannot be taken back, because posted receives cannot be taken out of
// a queue pair. But the holder of credits can use them up. If no payload moves for
// idleAfter, a side asks for few credits (CreditsRequested) and spends its other credits on
// empty messages (returnCredits). The peer does not post those receives again. The
// specification allows this with any peer, but only rdmanet peers get such messages.
//
// Receives that stay posted keep little memory (trimMemory). Their pages go back to the
// system if the device does not pin them. Otherwise the receives are moved close together.

const (
	// idleAfter is how long no payload moves until a connection is idle.
	idleAfter = 5 * time.Second

	// lookEvery is how often the timer looks for an idle connection while there may be
	// something to give back.
	lookEvery = idleAfter / 4

	// minHostIdle and minHostPatience are the least times where the device asks the peer's
	// host: kernels count in seconds, and three probes fit in, of which some may be lost.
	minHostIdle     = time.Second
	minHostPatience = 3 * time.Second

	// maxLateReturns is how many credits for large receives an idle connection gives back
	// until its timer looks again. A peer that is short of memory may post large receives
	// in their place, and two idle ends must not go on for ever.
	maxLateReturns = 2 * defaultLarge
)

// startTimer sets the timer for keep-alive. A queue pair that has failed has set it already
// (status).
func (c *conn) startTimer() {
	c.live.lastReceived = time.Now()
	l := &c.live
	l.idle, l.patience = c.set.keepAlive, c.set.probe
	if l.idle <= 0 || c.life.failing() {
		return
	}
	if h, ok := c.lane.id.(ibv.HostProber); ok {
		idle, patience := max(l.idle, minHostIdle), max(l.patience, minHostPatience)
		if h.ProbeHost(idle, patience) {
			l.host, l.idle, l.patience = h, idle, patience
		}
	}
	if c.holds && l.host == nil {
		c.set.keepAlive = -1 // A question to the peer's process might wait behind a Send that waits for its reader.
		return
	}
	l.setTimer(l.idle)
}

// scheduleTrim has the timer look for an idle connection if this one has more memory than
// an idle one needs.
func (c *conn) scheduleTrim() {
	if c.idle.trimmable || !c.hasIdleMemory() {
		return
	}
	c.idle.trimmable, c.idle.trimmed = true, false
	c.idle.checkedAt = time.Now()
	c.idle.moved, c.idle.movedAt = c.stats.moved(), c.idle.checkedAt
	// The timer may be set to a sooner time for keep-alive already.
	if c.set.keepAlive <= 0 || c.live.timerAt.Sub(c.idle.checkedAt) > lookEvery {
		c.live.setTimer(lookEvery)
	}
}

// hasIdleMemory reports whether there is something to give back when the connection is
// idle.
func (c *conn) hasIdleMemory() bool {
	return c.idle.pagesTouched || c.credits.window > c.credits.initial || c.credits.have > c.credits.idleReceives() ||
		c.credits.granted.untilNormal() > 0 || c.credits.large.kept > 0
}

// tick does what is due when the timer fires, and sets the timer again.
func (c *conn) tick() {
	c.mu.Lock()
	defer c.unlock()
	wait := c.runTimer(time.Now())
	// runTimer may have ended the connection.
	if wait <= 0 || c.life.closed || c.life.over() {
		return
	}
	if c.life.failing() {
		wait = min(wait, reasonWithin)
	}
	c.live.setTimer(wait)
}

// runTimer does what is due at the given time. It returns how long to wait until the next
// call, or 0 or less if there is to be none.
func (c *conn) runTimer(now time.Time) time.Duration {
	if !c.life.closed && !c.life.over() {
		// Completions that have woken no goroutine are handled first. They do not answer a
		// probe that is sent from here on.
		c.wait.Poll()
	}
	if c.life.closed || c.life.over() {
		return 0
	}
	if c.life.failing() {
		wait := reasonWithin - now.Sub(c.life.failedAt)
		if wait <= 0 {
			c.fail(errNoReason)
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
	wait := c.live.idle - now.Sub(c.live.lastReceived)
	switch {
	case c.live.host != nil:
		if wait = c.watchHost(now); wait <= 0 {
			c.fail(errSilent)
		}
	case wait <= 0 && c.live.probing:
		if wait = c.live.patience - now.Sub(c.live.probedAt); wait <= 0 {
			c.fail(errSilent)
		}
	case wait <= 0:
		c.live.probedAt = now
		c.sendProbe()
		wait = c.live.patience
	case c.live.probing || c.send.probeDue:
		wait = min(wait, c.live.patience)
	}
	if c.idle.trimmable {
		wait = min(wait, lookEvery)
	}
	return wait
}

// watchHost asks the device whether the peer's host answers. It returns how long to wait
// until it is called again, or 0 or less if the host has been silent for too long. The host
// may have been silent for long because nobody has asked it. So what counts is also for how
// long it is known to owe an answer.
func (c *conn) watchHost(now time.Time) (wait time.Duration) {
	l := &c.live
	ago, owes := l.host.HostHeard()
	if !owes {
		l.probing = false
		return max(l.idle-ago, l.patience/4)
	}
	heard := now.Add(-ago)
	if !l.probing {
		l.probing, l.probedAt = true, now
	} else if heard.After(l.probedAt) {
		l.probedAt = heard // The host owes another answer than before.
	}
	return max(l.idle+l.patience-ago, l.patience-now.Sub(l.probedAt))
}

// confirmReceipt has a message sent to a peer if data has been arriving for a while and
// this side has sent nothing.
func (c *conn) confirmReceipt(now time.Time) {
	o := &c.live.oneWay
	switch {
	case !c.peer.rdmanet, c.live.host != nil:
	case c.stats.Posts != o.posts:
		*o = oneWay{c.stats.Posts, now, c.stats.BytesReceived}
	case now.Sub(o.since) >= confirmEvery && c.stats.BytesReceived-o.bytes >= confirmFrom:
		c.send.responseDue = true
	}
}

// sendProbe asks the peer for an answer. If the peer may be unable to send one, it asks the
// peer's device.
func (c *conn) sendProbe() {
	c.send.probeSeq = 0
	// able is set if the peer has a credit for an answer.
	able := c.credits.posted > c.credits.reserveIn+1
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
	// If the queue pair's send queue was full there is no new Write, and the completion of
	// an earlier send is the answer.
	if n := c.lane.signaled.Len(); n > 0 {
		c.live.probing, c.send.probeSeq = true, c.lane.signaled.At(n-1).seq
	}
}

// shrinkIdle brings an idle connection back to its initial size.
func (c *conn) shrinkIdle() {
	c.credits.window = c.credits.initial
	c.credits.large.on, c.credits.large.score = false, 0
	c.copyUnread()
	// The timer looks once more, because the peer's last messages arrive later and touch
	// pages again.
	again := !c.idle.trimmed
	c.idle.trimmable, c.idle.trimmed, c.idle.pending = false, true, true
	c.idle.compactions = 2 * (c.credits.initial + c.credits.transferReserve)
	if c.peer.rdmanet {
		c.send.idle = true
		c.idle.lateReturns = maxLateReturns
		c.returnCredits()
		c.grantSurplus()
		c.idle.trimmable = c.credits.have > c.credits.idleReceives() || c.credits.granted.untilNormal() > 0
	}
	c.trimMemory()
	// Sends that have not completed hold buffers, and their completions may wake no
	// goroutine.
	c.idle.trimmable = c.idle.trimmable || again || c.credits.charge.Charged() > 0 || c.credits.large.kept > 0 ||
		c.lane.signaled.Len() > 0
}

// returnCredits sends empty messages for the credits beyond the initial ones, and for all
// that are for large receives, so that the peer does not post those receives again. If the
// queue pair has no room for all of them, it is called again when sends complete. If large
// receives are left that only further credits give access to, it is called again when those
// come.
func (c *conn) returnCredits() {
	c.idle.returnsCredits = false
	for !c.life.closed && !c.life.over() && c.surplus() > 0 && c.canSend() && !c.send.midMessage {
		n := min(c.surplus(), c.freeSlots(), max(c.credits.spendable(), 1), batchSegments)
		if c.credits.granted.untilNormal() > 0 {
			c.idle.lateReturns -= n
		}
		if !c.queueEmpty(n) {
			c.idle.returnsCredits = true
			return
		}
	}
	c.idle.returnsCredits = c.surplus() > 0 && !c.life.failing() && (c.credits.granted.untilNormal() > 0 || !c.hasSlots(1))
}

// surplus returns how many credits an idle connection gives back.
func (c *conn) surplus() int {
	return max(c.credits.have-c.credits.initial, min(c.credits.granted.untilNormal(), c.idle.lateReturns))
}

// grantSurplus grants what an idle connection has posted beyond its initial receives, and what
// is large, for the peer to use it up. A window that has grown with the last messages of a
// stream was perhaps never granted.
func (c *conn) grantSurplus() {
	if c.credits.lacksReserve(c.in.held) && c.life.posts() {
		if buf, err := c.pool.Get(); err == nil {
			c.postRecv(buf)
		}
	}
	for !c.life.closed && !c.life.over() && c.credits.surplusDue() && c.canSend() && !c.send.midMessage {
		if !c.queueEmpty(1) {
			return
		}
	}
}

// grantedLate reports whether an idle connection was granted receives after it had used up
// its credits. A peer that becomes idle later does so. One credit more than the initial
// ones comes from the peer's reserve.
//
// Messages are worth it only if receives keep slabs pinned. Otherwise they would bring
// pages of receives back into memory.
func (c *conn) grantedLate() bool {
	if c.idle.trimmed && c.send.idle && min(c.credits.granted.untilNormal(), c.idle.lateReturns) > 0 {
		return true
	}
	return c.idle.trimmed && c.dom != nil && c.dom.Private && c.send.idle && c.peer.rdmanet && c.credits.have > c.credits.initial+c.credits.transferReserve
}

// trimAfter is called when a message with so many bytes of payload has arrived. If the
// connection is idle, it may have got back what its peer held, and can give up more.
func (c *conn) trimAfter(payload int) {
	if c.idle.trimmed && payload == 0 && (c.idle.pending || c.idle.compactions > 0) {
		c.trimMemory()
	}
}

// trimMemory gives back what an idle connection does not need for its remaining receives:
// memory of queues, and pages of posted receives. It does so once more when the peer has
// used up the credits that it does not need.
func (c *conn) trimMemory() {
	c.credits.lowerCharge(c.in.held)
	if c.idle.pending {
		c.idle.pending = c.in.posted.Len() > c.credits.initial+c.credits.transferReserve || c.credits.large.kept > 0
		c.in.posted.Trim()
		c.in.unread.Trim()
		c.credits.granted.runs.Trim()
		c.credits.toBe.runs.Trim()
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
	// A receive that lies apart keeps a slab pinned. The next message uses up the oldest
	// receive, and the one that is posted in its place lies with the others. So the peer is
	// asked for a message.
	if c.dom != nil && c.dom.Private && c.idle.compactions > 0 && !c.idle.pending && c.peer.rdmanet {
		if c.idle.compactions--; c.pool.Scattered(&c.in.posted) {
			c.send.probeDue = true
		} else {
			c.idle.compactions = 0
		}
	}
}
