package rdmanet

import "github.com/rdmanet/rdmanet/ibv"

// This file handles what moves the transfers that a connection receives: the peer's offers,
// requests and withdrawals, and completions of RDMA Reads. transfer_recv.go has the state,
// and transfer_progress.go the sending side.

// offered begins the transfer of an offer or a request that checkOffer has passed. s is its
// segment in the unread queue.
func (c *conn) offered(t *transferHeader, s segment) {
	in := &c.rx
	in.last++
	x := &recvTransfer{id: t.ID, addr: t.Addr, key: t.Key, length: int(t.Length), first: s.size > 0}
	in.live.Push(x)
	c.stats.TransfersReceived++
	if c.in.discarding {
		in.discard(x)
		return
	}
	s.transfer = x
	c.in.unread.Push(s)
	switch {
	case in.readsAhead:
		in.readAhead()
	case in.reading == 0:
		in.startPrefetchTimer()
	}
}

// markAccepted notes that Accept returns the connection.
func (c *conn) markAccepted() *conn {
	c.mu.Lock()
	defer c.unlock()
	c.rx.notAccepted = false
	c.in.copies.charge.SetBound(int64(c.set.receiveMemory))
	if c.rx.live.Len() > 0 && c.rx.reading == 0 && !c.life.closed {
		c.rx.startPrefetchTimer() // There may be more memory now.
	}
	return c
}

// prefetch fetches what was offered if no call reads.
func (c *conn) prefetch() {
	c.mu.Lock()
	defer c.unlock()
	in := &c.rx
	if in.reading > 0 || c.in.discarding || c.life.closed || c.life.over() {
		return
	}
	in.refused = nil
	if in.readAhead() {
		return
	}
	in.prefetchTimer.Reset(in.again)
	if in.refused != nil {
		// Other connections give memory back soon. A device may never register more.
		in.again = min(2*in.again, prefetchAgain)
	}
}

// fetched handles the completion of an RDMA Read of a transfer.
func (c *conn) fetched(wc *ibv.WC) {
	f := c.rx.inFlight.Pop()
	if wc.Status == ibv.WCSuccess {
		c.live.received, c.live.probing = true, false
		c.rx.arrived(f, len(f.b))
		if f.x.withdrawn && f.x.arrived < f.x.length {
			// Each message extends the peer's wait for its memory (remainingPatience).
			c.send.responseDue = true
		}
		return
	}
	c.rx.fetchOver(f)
	c.status(wc, ibv.WCRead)
}

// written handles a written message: the peer has answered a memory grant, or withdraws its
// transfer.
func (c *conn) written(t *transferHeader) error {
	in := &c.rx
	if in.mode != TransferWrite {
		return errTransferKind
	}
	n := int(t.Length)
	if t.Flags&transferEnd == 0 {
		if in.inFlight.Len() == in.unsentGrants.Len() {
			// No memory grant was sent that is not answered.
			return errTransferCount
		}
		if f := *in.inFlight.At(0); t.ID != f.x.id || n != len(f.b) {
			return errTransferLength
		}
		in.arrived(in.inFlight.Pop(), n)
		return nil
	}
	x, err := in.findWithdrawn(t)
	if x == nil {
		return err
	}
	if n != 0 {
		return errTransferLength
	}
	for in.inFlight.Len() > 0 && (*in.inFlight.At(0)).x == x {
		f := in.inFlight.Pop()
		if f.into != nil {
			// The next fetch uses this memory.
			f.into.asked -= len(f.b)
		}
		in.fetchOver(f)
	}
	for in.unsentGrants.Len() > 0 && (*in.unsentGrants.At(0)).x == x {
		in.unsentGrants.Pop()
	}
	x.asked = x.arrived
	c.truncate(x, t)
	return nil
}

// withdrawn handles the withdrawal of a transfer by RDMA Read. The data that was asked for
// still arrives, and no more is asked for.
func (c *conn) withdrawn(t *transferHeader) error {
	in := &c.rx
	if in.mode != TransferRead {
		return errTransferKind
	}
	x, err := in.findWithdrawn(t)
	if x == nil {
		return err
	}
	x.withdrawn = true
	c.truncate(x, t)
	return nil
}

// truncate shortens a withdrawn transfer to the bytes that were asked for. If these are
// all, the withdrawal has come too late and changes nothing.
func (c *conn) truncate(x *recvTransfer, t *transferHeader) {
	if x.asked == x.length {
		return
	}
	x.length = x.asked
	x.cut = t.Flags&transferCut != 0 && (x.length > 0 || !x.first)
	if x.length == 0 && x.first {
		c.in.reasm.undo()
	}
	c.dropWithdrawn(x)
	c.rx.retire()
	c.readers.WakeAll()
}

// dropWithdrawn removes a transfer that was withdrawn as a whole from the unread queue.
// Otherwise a peer could fill memory with such transfers while no call reads.
//
// The transfer stays if a segment follows it, or if it marks the end of its message. It
// also stays while a call reads: the call may be at it, and must not take the next segment
// for it.
func (c *conn) dropWithdrawn(x *recvTransfer) {
	if x.length > 0 || c.rx.reading > 0 || c.in.unread.Len() == 0 {
		return
	}
	s := c.in.unread.At(c.in.unread.Len() - 1)
	if s.transfer == x && (x.first || x.cut || !s.last) {
		c.rx.dropFetches(x)
		*s = segment{}
		c.in.unread.Undo()
	}
}
