package rdmanet

import (
	"time"
)

// Messages without payload: grants of credits, answers, what the peer is told of transfers,
// and FIN. What is due is made when mu is let go of and nothing else is queued (flush), so
// nobody has to see to it that it is sent.

// queueDue is queueControl for what has become due when nothing else is queued.
func (c *conn) queueDue() bool { return c.queueControl(c.wait.Sleeping()) }

// queueControl queues a message without payload that is due, and reports whether it did:
// grants that nothing else would carry, the answer that the peer has asked for, this side's
// probe, and what the peer is to be told of transfers. idle says that nothing else is about
// to be sent, as far as one can tell.
func (c *conn) queueControl(idle bool) bool {
	switch {
	case c.credits.toGrant() == 0 && !c.send.responseDue && !c.send.probeDue && !c.rx.hasControl() && !c.tx.hasControl():
		return false // as mostly
	case !idle && c.lane.seq == 0:
		return false // the first message of the program takes the first grant along
	}
	transfer := c.rx.hasControl() || c.tx.hasControl() && c.hasSlots(2) // one may be for a Write
	if c.send.wantsCredit && !c.send.responseDue && !c.send.probeDue && !transfer && c.credits.spendable() > 0 {
		return false // the writer that waits takes the grant along; it would need this credit
	}
	busy := c.in.held > 0 && !c.in.discarding && c.in.copyBreakBytes == 0 // else receives come free without the reader
	grant := c.credits.grantDue(c.in.held, busy, idle)
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
