package rdmanet

import "time"

// This file handles what moves the transfers that a connection sends: the peer's done
// messages and memory grants, and completions of RDMA Writes. transfer_send.go has the
// state, and fetch.go the receiving side.

// transferDoneBy handles a done message: the peer wants no more of a transfer, and has all
// of those before it.
func (c *conn) transferDoneBy(t *transferHeader) error {
	live := &c.tx.live
	if c.tx.index(t.ID) < 0 {
		if c.tx.mode == TransferWrite && t.ID-1 < c.tx.last {
			// The transfer was over here before the peer knew.
			return nil
		}
		return errTransferID
	}
	for {
		o := *live.At(0)
		n := len(o.p)
		if o.id == t.ID {
			n = int(t.Length)
		}
		if n > len(o.p) || n < len(o.p) && !o.ended {
			return errTransferLength
		}
		c.finish(o, n)
		if o.id == t.ID {
			return nil
		}
	}
}

// finish removes o, the oldest transfer, from live. moved is how many of its bytes the peer
// has.
func (c *conn) finish(o *sendTransfer, moved int) {
	c.tx.live.Pop()
	for c.tx.grants.Len() > 0 && c.tx.grants.At(0).o == o {
		// The peer no longer wants the data.
		c.tx.grants.Pop()
	}
	o.moved, o.done = moved, true
	o.over = o.writing == 0
	if c.tx.withdraw == o {
		c.tx.withdraw = nil
	}
	if o.detached && o.over {
		o.closeMemory()
	}
	c.transferOver()
}

// transferOver wakes the goroutines that wait for the end of a transfer. One of them may be
// the leader, and another goroutine may have found that end.
func (c *conn) transferOver() {
	c.writers.WakeAll()
	c.wait.Interrupt()
}

// granted handles a memory grant.
func (c *conn) granted(t *transferHeader) error {
	if c.tx.mode != TransferWrite {
		return errTransferKind
	}
	i := c.tx.index(t.ID)
	if i < 0 {
		if t.ID-1 < c.tx.last {
			// The transfer was withdrawn before the grant arrived.
			return nil
		}
		return errTransferID
	}
	o := *c.tx.live.At(i)
	n := int(t.Length)
	switch {
	case o.ended:
		return nil
	case i > 0 && (*c.tx.live.At(i - 1)).wantsGrant():
		// Transfers are granted memory in their order.
		return errTransferID
	case n == 0 || n > len(o.p)-o.granted:
		return errTransferLength
	case c.tx.grants.Len() >= maxTransfers:
		return errTransferCount
	}
	c.tx.grants.Push(memoryGrant{o: o, addr: t.Addr, key: t.Key, at: o.granted, n: n})
	o.granted += n
	return nil
}

// nextSenderControl returns the next message to send about outgoing transfers, and the
// memory grant that the message answers, or nil.
func (c *conn) nextSenderControl() (t transferHeader, _ *memoryGrant) {
	if o := c.tx.withdraw; o != nil {
		c.tx.withdraw = nil
		t = transferHeader{Kind: transferWithdraw, ID: o.id}
		if o.message {
			t.Flags |= transferCut
		}
		if c.tx.mode == TransferWrite {
			t.Kind = transferWritten
			t.Flags |= transferEnd
			c.finish(o, o.moved)
		}
		return t, nil
	}
	g := c.tx.grants.Pop()
	return transferHeader{Kind: transferWritten, ID: g.o.id, Length: uint32(g.n)}, &g
}

// wrote handles the completion of an RDMA Write of n bytes.
func (c *conn) wrote(o *sendTransfer, n int) {
	c.tx.wrote = time.Now()
	// The completion counts as a message of the peer. Over iWARP it shows only that TCP had
	// room, and TCP has room because the peer takes data.
	c.live.received, c.live.probing = true, false
	// The peer's done may have been handled before this completion.
	o.moved += min(n, len(o.p)-o.moved)
	c.writeEnded(o)
}

// writeEnded notes that an RDMA Write of o no longer uses its memory.
func (c *conn) writeEnded(o *sendTransfer) {
	o.writing--
	c.tx.writing--
	if !o.done && !o.ended && o.moved == len(o.p) {
		c.finish(o, o.moved)
	} else if o.done && o.writing == 0 {
		o.over = true
		if o.detached {
			o.closeMemory()
		}
		c.transferOver()
	}
}

// unwritten ends the RDMA Write of s, if there is one: it will never complete. It gives the
// memory back if the transfer is done and no call waits for it.
func unwritten(s signaledSend) {
	if t := s.transfer; t != nil && t.done && !t.over && t.detached {
		t.over = true
		t.closeMemory()
	}
}

// releaseTransfers gives back the memory of transfers that no call waits for. The queue
// pair is closed.
func (c *conn) releaseTransfers() {
	for c.tx.live.Len() > 0 {
		if o := c.tx.live.Pop(); o.detached {
			o.closeMemory()
		}
	}
}
