package rdmanet

import "time"

// This file handles what moves the transfers that a connection sends: the peer's done
// messages and memory grants, and completions of RDMA Writes. transfer_send.go has the
// state, and transfer_arrival.go the receiving side.

// doneBy handles a done message: the peer wants no more of a transfer, and has all
// of those before it.
func (out *transferSender) doneBy(t *transferHeader) error {
	live := &out.live
	if out.index(t.ID) < 0 {
		if out.mode == TransferWrite && t.ID-1 < out.last {
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
		out.finish(o, n)
		if o.id == t.ID {
			return nil
		}
	}
}

// finish removes o, the oldest transfer, from live. moved is how many of its bytes the peer
// has.
func (out *transferSender) finish(o *sendTransfer, moved int) {
	out.live.Pop()
	for out.grants.Len() > 0 && out.grants.At(0).o == o {
		// The peer no longer wants the data.
		out.grants.Pop()
	}
	o.moved, o.done = moved, true
	o.over = o.writing == 0
	if out.withdraw == o {
		out.withdraw = nil
	}
	if o.detached && o.over {
		o.closeMemory()
	}
	out.wake()
}

// wake wakes the goroutines that wait for the end of a transfer. One of them may be
// the leader, and another goroutine may have found that end.
func (out *transferSender) wake() {
	out.writers.WakeAll()
	out.wait.Interrupt()
}

// granted handles a memory grant.
func (out *transferSender) granted(t *transferHeader) error {
	if out.mode != TransferWrite {
		return errTransferKind
	}
	i := out.index(t.ID)
	if i < 0 {
		if t.ID-1 < out.last {
			// The transfer was withdrawn before the grant arrived.
			return nil
		}
		return errTransferID
	}
	o := *out.live.At(i)
	n := int(t.Length)
	switch {
	case o.ended:
		return nil
	case i > 0 && (*out.live.At(i - 1)).wantsGrant():
		// Transfers are granted memory in their order.
		return errTransferID
	case n == 0 || n > len(o.p)-o.granted:
		return errTransferLength
	case out.grants.Len() >= maxTransfers:
		return errTransferCount
	}
	out.grants.Push(memoryGrant{o: o, addr: t.Addr, key: t.Key, at: o.granted, n: n})
	o.granted += n
	return nil
}

// nextControl returns the next message to send about outgoing transfers, and the
// memory grant that the message answers, or nil.
func (out *transferSender) nextControl() (t transferHeader, _ *memoryGrant) {
	if o := out.withdraw; o != nil {
		out.withdraw = nil
		t = transferHeader{Kind: transferWithdraw, ID: o.id}
		if o.message {
			t.Flags |= transferCut
		}
		if out.mode == TransferWrite {
			t.Kind = transferWritten
			t.Flags |= transferEnd
			out.finish(o, o.moved)
		}
		return t, nil
	}
	g := out.grants.Pop()
	return transferHeader{Kind: transferWritten, ID: g.o.id, Length: uint32(g.n)}, &g
}

// wrote handles the completion of an RDMA Write of n bytes.
func (c *conn) wrote(o *sendTransfer, n int) {
	// The completion counts as a message of the peer. Over iWARP it shows only that TCP had
	// room, and TCP has room because the peer takes data.
	c.live.received, c.live.probing = true, false
	c.tx.moved(o, n)
}

// moved notes that an RDMA Write has moved n bytes of o.
func (out *transferSender) moved(o *sendTransfer, n int) {
	out.wrote = time.Now()
	// The peer's done may have been handled before this completion.
	o.moved += min(n, len(o.p)-o.moved)
	out.writeEnded(o)
}

// writeEnded notes that an RDMA Write of o no longer uses its memory.
func (out *transferSender) writeEnded(o *sendTransfer) {
	o.writing--
	out.writing--
	if !o.done && !o.ended && o.moved == len(o.p) {
		out.finish(o, o.moved)
	} else if o.done && o.writing == 0 {
		o.over = true
		if o.detached {
			o.closeMemory()
		}
		out.wake()
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

// release gives back the memory of transfers that no call waits for. The queue
// pair is closed.
func (out *transferSender) release() {
	for out.live.Len() > 0 {
		if o := out.live.Pop(); o.detached {
			o.closeMemory()
		}
	}
}
