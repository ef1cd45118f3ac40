package rdmanet

import "time"

// This file sends messages without payload that have become due: grants, answers, probes,
// and messages about transfers. When a goroutine lets go of mu and nothing else is queued,
// lane.flush calls queueDue. So a function that makes something due does not have to send
// it. batch.go builds the messages, and credit.go decides when a grant is due.

// queueDue implements [laneOwner]. It queues what Writes have joined if that may go, and else
// a message without payload if one is due.
func (c *conn) queueDue() bool {
	if c.queueJoinedDue() || c.queueControl(c.wait.Sleeping()) {
		return true
	}
	c.watchJoined()
	return false
}

// queueControl queues a message without payload if one is due, and reports whether it did.
// It may carry a grant that no other message would carry, the answer that the peer has
// asked for, or this side's probe. Otherwise it is about a transfer. idle is set if no
// other message seems about to be sent.
func (c *conn) queueControl(idle bool) bool {
	if !c.owesControl() || !idle && c.lane.seq == 0 {
		// The program's first message carries the first grant.
		return false
	}
	// An RDMA Write may go in front of the message, and takes up room as well.
	transfer := c.rx.hasControl() || c.tx.hasControl() && c.hasSlots(2)
	if c.send.wantsCredit && !c.send.responseDue && !c.send.probeDue && !transfer && c.credits.spendable() > 0 {
		// The writer that waits for a credit carries the grant, and needs the credit that
		// this message would use.
		return false
	}
	// busy is set if receives become free only when the reader goes on.
	busy := c.in.held > 0 && !c.in.discarding && c.in.copies.bytes == 0
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

// queueTransferControl queues the next message about a transfer, and reports whether it
// did.
func (c *conn) queueTransferControl() bool {
	n, bufs := c.emptyBuffers(1, true)
	if n == 0 {
		return false
	}
	o := sendBatch{segs: 1, bufs: bufs, control: true}
	var t transferHeader
	if c.rx.hasControl() {
		t = c.rx.nextControl()
	} else {
		t, o.grant = c.tx.nextControl()
	}
	o.head = &t
	_, err := c.queueBatch(&o)
	return err == nil
}
