package rdmanet

import "time"

// transferDoneBy handles the peer's word that it has what it wants of a transfer.
func (c *conn) transferDoneBy(t *transferHeader) error {
	live := &c.tx.live
	if c.tx.index(t.ID) < 0 {
		if c.tx.mode == transferWrite && t.ID-1 < c.tx.last {
			return nil // it was over here before
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

// finish takes o, the oldest, off the books.
func (c *conn) finish(o *sendTransfer, moved int) {
	c.tx.live.Pop()
	for c.tx.grants.Len() > 0 && c.tx.grants.At(0).o == o {
		c.tx.grants.Pop() // the peer has lost interest
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

// transferOver wakes whoever waits for the end of a transfer. That may be the
// leader, and this be said by another's post or found by another's look.
func (c *conn) transferOver() {
	c.writers.WakeAll()
	c.wait.Interrupt()
}

// granted handles the peer's offer of memory to write to.
func (c *conn) granted(t *transferHeader) error {
	if c.tx.mode != transferWrite {
		return errTransferKind
	}
	i := c.tx.index(t.ID)
	if i < 0 {
		if t.ID-1 < c.tx.last {
			return nil // it was withdrawn meanwhile
		}
		return errTransferID
	}
	o := *c.tx.live.At(i)
	n := int(t.Length)
	switch {
	case o.ended:
		return nil
	case i > 0 && (*c.tx.live.At(i - 1)).wanted():
		return errTransferID // one after the other
	case n == 0 || n > len(o.p)-o.granted:
		return errTransferLength
	case c.tx.grants.Len() >= maxTransfers:
		return errTransferCount
	}
	c.tx.grants.Push(grant{o: o, addr: t.Addr, key: t.Key, at: o.granted, n: n})
	o.granted += n
	return nil
}

// nextSenderControl returns what the peer is to be told next of the transfers that
// go out, and the grant that is answered by it, if one is.
func (c *conn) nextSenderControl() (t transferHeader, _ *grant) {
	if o := c.tx.withdraw; o != nil {
		c.tx.withdraw = nil
		t = transferHeader{Kind: transferWithdraw, ID: o.id}
		if o.message {
			t.Flags |= transferCut
		}
		if c.tx.mode == transferWrite {
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
	c.live.received, c.live.probing = true, false // also where TCP has taken it: TCP has room for it because the peer takes data
	o.moved += min(n, len(o.p)-o.moved)           // what the peer said may have been heard first
	c.writeEnded(o)
}

// writeEnded notes that the device does not use memory of o for one RDMA Write any more.
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

// unwritten ends the RDMA Write of a transfer that will never complete. The memory is given
// back if the transfer is done and no call waits for it.
func unwritten(s signaledSend) {
	if t := s.transfer; t != nil && t.done && !t.over && t.detached {
		t.over = true
		t.closeMemory()
	}
}

// releaseTransfers gives back the memory of transfers that nobody waits for. The
// queue pair is closed.
func (c *conn) releaseTransfers() {
	for c.tx.live.Len() > 0 {
		if o := c.tx.live.Pop(); o.detached {
			o.closeMemory()
		}
	}
}
