package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Messages without payload: grants of credits, answers, what the peer is told of transfers,
// and FIN. What is due is made when mu is let go of and nothing else is queued (flush), so
// nobody has to see to it that it is sent.

// queueControl queues a message without payload that is due, and reports whether it did:
// grants that nothing else would carry, the answer that the peer has asked for, this side's
// probe, and what the peer is to be told of transfers. idle says that nothing else is about
// to be sent, as far as one can tell.
func (c *conn) queueControl(idle bool) bool {
	if !idle && c.lane.seq == 0 {
		return false // the first message of the program takes the first grant along
	}
	transfer := c.rx.hasControl() || c.tx.hasControl() && c.hasSlots(2) // one may be for a Write
	if c.send.wantsCredit && !c.send.responseDue && !c.send.probeDue && !transfer && c.credits.spendable() > 0 {
		return false // the writer that waits takes the grant along; it would need this credit
	}
	busy := c.heldBuffers > 0 && !c.discarding && c.copyBreakBytes == 0 // else receives come free without the reader
	grant := c.credits.grantDue(c.heldBuffers, busy, idle)
	due := c.send.responseDue || c.send.probeDue || grant || transfer
	if !due || c.midMessage() || !c.credits.maySendControl() || !c.hasSlots(1) {
		return false
	}
	if grant {
		c.credits.grantAlone(time.Now())
	}
	if transfer {
		return c.queueTransferControl()
	}
	return c.queueEmpty(1)
}

// midMessage reports whether a message of ours is unfinished. To a peer that
// follows the letter of [MS-SMBD] 3.1.5.8 nothing may come between its segments.
func (c *conn) midMessage() bool { return c.send.midMessage && !c.peer.rdmanet }

// answerFlags are the flags of a message that takes the place of the answer
// and the probe that are due. The answer does not ask back: two peers would
// never stop.
func (c *conn) answerFlags() uint16 {
	s := &c.send
	s.responseDue = false
	if !s.probeDue {
		return 0
	}
	s.probeDue = false
	c.stats.KeepAliveSent++
	return flagResponseRequested
}

// requested is what we tell the peer of how many credits we want: few when
// there is nothing to send, see keepalive.go.
func (c *conn) requested() uint16 {
	if c.send.idle {
		return uint16(c.set.initial)
	}
	return uint16(c.set.target)
}

// queueEmpty queues up to n messages without payload, and reports whether it did.
func (c *conn) queueEmpty(n int) bool {
	n, bufs := c.emptyBuffers(n, false)
	if n == 0 {
		return false
	}
	_, err := c.queueBatch(sendBatch{segs: n, bufs: bufs, control: true})
	return err == nil
}

// queueTransferControl queues what the peer is to be told next of transfers.
func (c *conn) queueTransferControl() bool {
	n, bufs := c.emptyBuffers(1, true)
	if n == 0 {
		return false
	}
	o := sendBatch{segs: 1, bufs: bufs, control: true}
	var t transferHeader
	if c.rx.hasControl() {
		t = c.nextReceiverControl()
	} else {
		t, o.grant = c.nextSenderControl()
	}
	o.head = &t
	_, err := c.queueBatch(o)
	return err == nil
}

// emptyBuffers is sendBuffers for messages without payload, or with a transfer
// header only. When it has none, the completion that brings one back will be heard
// of.
func (c *conn) emptyBuffers(n int, head bool) (segs int, bufs regmem.Buffers) {
	if head {
		segs, bufs = c.transferBuffers(0)
	} else if dataHeaderLen <= c.lane.inline {
		return n, bufs
	} else {
		segs, _, bufs = c.sendBuffers(n, 0)
	}
	if segs == 0 {
		c.wantSendCompletion()
	}
	return segs, bufs
}

// wantSendCompletion makes sure that the next completion of a send is noticed. Where somebody
// wants that already the leader is not roused: it wakes others, who come here again.
func (c *conn) wantSendCompletion() {
	if !c.wantsSendCompletion {
		c.wantsSendCompletion = true
		c.wait.Interrupt() // it may sleep for receives only
	}
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

// queueFIN ends the stream if that can be done now, and reports whether it could. FIN has a
// credit of its own.
func (c *conn) queueFIN() bool {
	if c.credits.have == 0 || !c.hasSlots(1) {
		return false
	}
	n, bufs := c.emptyBuffers(1, false)
	if n == 0 {
		return false
	}
	c.send.finSent = true
	c.credits.reserveOut = 0
	_, err := c.queueBatch(sendBatch{segs: 1, flags: flagFIN, bufs: bufs, control: true})
	return err == nil
}

// signalAll makes sure that the completion of everything queued can be waited for, as long
// as wanted says so.
func (c *conn) signalAll(wanted func() bool) {
	for c.lane.unsignaledSends > 0 && wanted() {
		if c.hasSlots(1) {
			c.queueEmptyWrite()
		} else {
			c.await(&c.writers)
		}
	}
}

// queueEmptyWrite has the device find out whether the peer's is there: an RDMA Write of no
// bytes needs neither a credit nor a key.
func (c *conn) queueEmptyWrite() {
	if c.freeSlots() == 0 || c.dead != nil {
		return
	}
	l := &c.lane
	wr := ibv.SendWR{Op: ibv.OpWrite}
	l.number(&wr, 0, true)
	l.signal(&wr, signaledSend{})
	c.stats.Signaled++
	l.enqueueAlone(wr)
}

// queueBarrier has the peer's device say that it has got everything: an RDMA Read of no
// bytes, or of the peer's probe target, needs no credit and is answered behind what was sent
// before. It reports whether one is under way, of which there is one at most.
func (c *conn) queueBarrier() bool {
	if c.send.barrier {
		return true
	}
	if c.lane.id.Param().InitiatorDepth == 0 || c.dead != nil || c.hasFailed() {
		return false
	}
	wr := ibv.SendWR{ID: barrierID, Op: ibv.OpRead, Flags: ibv.SendSignaled}
	if c.peerProbe != nil {
		sge := c.probeMem.readInto(c.peerProbe, &wr)
		c.lane.enqueueAlone(wr, sge)
	} else {
		c.lane.enqueueAlone(wr)
	}
	c.send.barrier = true
	return true
}
