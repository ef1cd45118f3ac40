package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Messages without payload, for credits, answers, transfers and FIN, are posted
// by whoever finds them due.

// sendControl posts the messages without payload that are due: grants that
// nothing else would carry, the answer that the peer asked for, our own probe.
// A batch under way takes their place and calls again when it is out.
func (c *conn) sendControl() {
	c.control(c.wait.Sleeping()) // a leader that sleeps will not look again
}

// control is sendControl; idle is set when nothing else is about to be sent, as
// far as one can tell. It reports whether something was posted, for which mu was
// let go.
func (c *conn) control(idle bool) bool {
	if c.send.posting || c.dead != nil {
		return false
	}
	news := c.rx.hasControl() || c.tx.hasControl() && c.hasSlots(2) // one may be for a Write
	if c.send.wantsCredit && !c.send.responseDue && !c.send.probeDue && !news && c.credits.spendable() > 0 {
		return false // the writer that waits takes the grant along; it would need this credit
	}
	busy := c.heldBuffers > 0 && !c.discarding && c.copyBreakBytes == 0 // else receives come free without the reader
	owed := c.credits.grantDue(c.heldBuffers, busy, idle)
	due := c.send.responseDue || c.send.probeDue || owed || news
	if !due || c.midMessage() || !c.credits.maySendControl() || !c.hasSlots(1) {
		return false
	}
	if owed {
		c.credits.grantAlone(time.Now())
	}
	if news {
		return c.postTransferControl()
	}
	return c.postEmpty(1)
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

// postEmpty posts up to n messages without payload and reports whether it did.
func (c *conn) postEmpty(n int) bool {
	n, bufs := c.emptyBuffers(n, false)
	if n == 0 {
		return false
	}
	c.post(sendBatch{segs: n, bufs: bufs, control: true}) // an error is the connection's end
	return true
}

// postTransferControl posts what the peer is to be told next of transfers.
func (c *conn) postTransferControl() bool {
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
	c.post(o)
	return true
}

// emptyBuffers is sendBuffers for messages without payload, or with a transfer
// header only. When it has none, the completion that brings one back will be heard
// of.
func (c *conn) emptyBuffers(n int, head bool) (segs int, bufs regmem.Buffers) {
	if head {
		segs, bufs = c.transferBuffers(0)
	} else if dataHeaderLen <= c.inline {
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

// postFIN ends our stream if that can be done now. FIN has a credit of its own.
func (c *conn) postFIN() (done bool, err error) {
	if c.send.posting || c.credits.have == 0 || !c.hasSlots(1) {
		return false, nil
	}
	n, bufs := c.emptyBuffers(1, false)
	if n == 0 {
		return false, nil
	}
	c.send.finSent = true
	c.credits.reserveOut = 0
	return true, c.post(sendBatch{segs: 1, flags: flagFIN, bufs: bufs, control: true})
}

// signalAll makes sure that the completion of everything posted can be waited
// for, as long as wanted says so.
func (c *conn) signalAll(wanted func() bool) {
	for wanted() {
		switch {
		case c.send.posting:
			c.writers.Wait()
		case c.send.unsignaledSends == 0:
			return
		case c.hasSlots(1):
			c.postEmptyWrite()
		default:
			c.await(&c.writers)
		}
	}
}

// postEmptyWrite has the device find out whether the peer's is there: an RDMA Write
// of no bytes needs neither a credit nor a key.
func (c *conn) postEmptyWrite() {
	s := &c.send
	if c.freeSlots() == 0 || c.dead != nil {
		return
	}
	s.seq++
	s.signaled.Push(signaledSend{seq: s.seq, bytes: s.unsignaledBytes})
	s.unsignaledBytes, s.unsignaledSends = 0, 0
	c.stats.Signaled++
	c.postAside(ibv.SendWR{ID: sendID | s.seq, Op: ibv.OpWrite, Flags: ibv.SendSignaled}) // an error is the connection's end
}

// barrierID is the request of postBarrier.
const barrierID = sendID | 1<<62

// postBarrier has the peer's device say that it has got everything: an RDMA Read
// of no bytes, or of the peer's pulse, which needs no credit, is answered behind what
// was sent before. It reports whether one is under way, of which there is one at most.
func (c *conn) postBarrier() bool {
	if c.send.barrier {
		return true
	}
	if c.id.Param().InitiatorDepth == 0 || c.dead != nil || c.hasFailed() {
		return false
	}
	wr := ibv.SendWR{ID: barrierID, Op: ibv.OpRead, Flags: ibv.SendSignaled}
	if c.peerProbe != nil {
		c.probeMem.readInto(c.peerProbe, &wr)
	}
	c.send.barrier = c.postAside(wr) == nil
	return c.send.barrier
}
