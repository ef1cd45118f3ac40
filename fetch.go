package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file asks for the data of incoming transfers and handles its arrival.
// transfer_recv.go has the steps and the state, directread.go the Reads that the device
// fills, and read_transfer.go what the reader takes.

// checkOffer checks an offer or a request, before the payload that comes with it joins
// the stream.
func (c *conn) checkOffer(opens bool, t *transferHeader) error {
	in := &c.rx
	switch {
	// Nothing is to be moved: the message has no offer, or one of payload only.
	case !opens || t.Length == 0:
		return nil
	case (t.Kind == transferOffer) != (in.mode == TransferRead):
		return errTransferKind
	case t.ID != in.last+1:
		return errTransferID
	case in.live.Len() >= maxTransfers:
		return errTransferCount
	}
	return nil
}

// offered begins the transfer of an offer or a request that checkOffer has passed. s is its
// segment in the unread queue.
func (c *conn) offered(t *transferHeader, s segment) {
	in := &c.rx
	in.last++
	x := &recvTransfer{id: t.ID, addr: t.Addr, key: t.Key, length: int(t.Length), first: s.size > 0}
	in.live.Push(x)
	c.stats.TransfersReceived++
	if c.in.discarding {
		c.discard(x)
		return
	}
	s.transfer = x
	c.in.unread.Push(s)
	switch {
	case in.readsAhead:
		c.readAhead()
	case in.reading == 0:
		c.startPrefetchTimer()
	}
}

// startPrefetchTimer has prefetch called after prefetchAfter.
func (c *conn) startPrefetchTimer() {
	if c.rx.prefetchTimer == nil {
		c.rx.prefetchTimer = time.AfterFunc(prefetchAfter, c.prefetch)
	} else {
		c.rx.prefetchTimer.Reset(prefetchAfter)
	}
}

// markAccepted notes that Accept returns the connection.
func (c *conn) markAccepted() *conn {
	c.mu.Lock()
	defer c.unlock()
	c.rx.notAccepted = false
	if c.rx.live.Len() > 0 && c.rx.reading == 0 && !c.life.closed {
		c.startPrefetchTimer()
	}
	return c
}

// prefetch fetches what was offered if no call reads.
func (c *conn) prefetch() {
	c.mu.Lock()
	defer c.unlock()
	if c.rx.reading == 0 && !c.rx.notAccepted && !c.in.discarding && !c.life.over() {
		c.readAhead()
	}
}

// canAsk reports whether another fetch may be asked for.
func (c *conn) canAsk() bool {
	if !c.life.posts() || c.rx.pace.next() == 0 {
		return false
	}
	if c.rx.mode == TransferRead {
		return c.rx.inFlight.Len() < c.rx.depth
	}
	return c.rx.inFlight.Len() < maxTransfers
}

// peerWrites is the access of a peer that fills memory by RDMA Write.
const peerWrites = ibv.AccessLocalWrite | ibv.AccessRemoteWrite

// fetch asks for the next bytes of x, which go to f.b: by an RDMA Read, or by a memory
// grant that is sent later. lkey is the local key of f.b.
func (c *conn) fetch(f *fetch, lkey uint32) {
	x := f.x
	f.at, f.under = time.Now(), c.rx.pace.ask(len(f.b))
	if c.rx.mode == TransferWrite {
		c.rx.inFlight.Push(f)
		c.rx.unsentGrants.Push(f)
		x.asked += len(f.b)
		return
	}
	from := x.addr + uint64(x.asked)
	x.asked += len(f.b)
	if c.life.over() {
		c.fetchOver(f)
		return
	}
	c.rx.inFlight.Push(f)
	b := c.lane.looseBatch()
	wr := b.next()
	wr.ID, wr.Op, wr.Flags, wr.RemoteAddr, wr.RKey = fetchID, ibv.OpRead, ibv.SendSignaled, from, x.key
	b.element(wr, f.b, lkey)
	// The leader may wait for receives only.
	c.wait.Interrupt()
}

// fetched handles the completion of an RDMA Read of a transfer.
func (c *conn) fetched(wc *ibv.WC) {
	f := c.rx.inFlight.Pop()
	if wc.Status == ibv.WCSuccess {
		c.live.received, c.live.probing = true, false
		c.arrived(f, len(f.b))
		if f.x.withdrawn && f.x.arrived < f.x.length {
			// Each message extends the peer's wait for its memory (remainingPatience).
			c.send.responseDue = true
		}
		return
	}
	c.fetchOver(f)
	c.status(wc, ibv.WCRead)
}

// fetchCanceled ends the latest fetch, because its RDMA Read was not posted.
func (c *conn) fetchCanceled() {
	last := c.rx.inFlight.At(c.rx.inFlight.Len() - 1)
	f := *last
	*last = nil
	c.rx.inFlight.Undo()
	c.fetchOver(f)
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
		c.arrived(in.inFlight.Pop(), n)
		return nil
	}
	x, err := c.findWithdrawn(t)
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
		c.fetchOver(f)
	}
	for in.unsentGrants.Len() > 0 && (*in.unsentGrants.At(0)).x == x {
		in.unsentGrants.Pop()
	}
	x.asked = x.arrived
	c.truncate(x, t)
	return nil
}

// arrived notes that n bytes of f have arrived.
func (c *conn) arrived(f *fetch, n int) {
	f.got = n
	f.x.arrived += n
	if f.into != nil {
		f.into.got += n
	}
	c.stats.BytesReceived += uint64(n)
	c.stats.TransferBytesReceived += uint64(n)
	c.fetchOver(f)
	c.retire()
	// More is fetched ahead for a reader that takes little at a time, or for none.
	if c.rx.readsAhead || c.rx.reading == 0 {
		c.readAhead()
	}
}

// fetchOver notes that the device no longer uses the memory of f.
func (c *conn) fetchOver(f *fetch) {
	f.over = true
	if f.got > 0 {
		c.rx.pace.arrived(len(f.b), f.under, f.at, time.Now())
	} else {
		c.rx.pace.drop(len(f.b))
	}
	if f.mr != nil {
		// The peer's key is closed before the data is read.
		if f.mr.Close() != nil && f.in != nil {
			f.in.stuck = true
		}
		f.mr = nil
	}
	if f.into != nil {
		f.into.pending--
	}
	if f.x.dropped {
		c.dropFetches(f.x)
	}
	c.readers.WakeAll()
	c.wait.Interrupt()
}

// retire removes the transfers that have arrived as a whole from live. It has a done
// message sent for them if the peer does not know that they are over.
func (c *conn) retire() {
	in := &c.rx
	for in.live.Len() > 0 {
		x := *in.live.At(0)
		if x.arrived < x.length {
			return
		}
		in.live.Pop()
		// A peer that has written all of the data knows that the transfer is over.
		if in.mode == TransferRead || x.dropped {
			in.doneDue, in.done, in.length = true, x.id, x.length
		}
	}
}

// withdrawn handles the withdrawal of a transfer by RDMA Read. The data that was asked for
// still arrives, and no more is asked for.
func (c *conn) withdrawn(t *transferHeader) error {
	in := &c.rx
	if in.mode != TransferRead {
		return errTransferKind
	}
	x, err := c.findWithdrawn(t)
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
	c.retire()
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
		c.dropFetches(x)
		*s = segment{}
		c.in.unread.Undo()
	}
}

// nextReceiverControl returns the next message to send about incoming transfers.
func (c *conn) nextReceiverControl() transferHeader {
	in := &c.rx
	if in.doneDue {
		in.doneDue = false
		return transferHeader{Kind: transferDone, ID: in.done, Length: uint32(in.length)}
	}
	f := in.unsentGrants.Pop()
	return transferHeader{Kind: transferGrant, ID: f.x.id, Addr: f.addr, Key: f.key, Length: uint32(len(f.b))}
}

// findWithdrawn returns the transfer that the peer withdraws. Only the latest transfer can
// be withdrawn, and only if no other is under way. A nil transfer without an error was over
// here before the peer knew.
func (c *conn) findWithdrawn(t *transferHeader) (*recvTransfer, error) {
	live := &c.rx.live
	switch {
	case t.ID != c.rx.last || live.Len() > 1:
		return nil, errTransferID
	case live.Len() == 0:
		return nil, nil
	}
	return *live.At(0), nil
}

// readAhead fetches offered data into bounce buffers, as far as it may.
func (c *conn) readAhead() {
	for i := 0; i < c.rx.live.Len(); i++ {
		x := *c.rx.live.At(i)
		for x.asked < x.length {
			if c.rx.filling == nil && c.rx.bounceBuffers >= maxBounceBuffers || !c.canAsk() || !c.beginFetch(x) {
				return
			}
		}
	}
}

// beginFetch asks for the next bytes of x, into a bounce buffer, and reports whether it
// could. Short fetches of the same transfer share a bounce buffer.
func (c *conn) beginFetch(x *recvTransfer) bool {
	l := c.rx.filling
	if l == nil {
		if l = c.getBounceBuffer(); l == nil {
			return false
		}
		l.used, l.fetches = 0, 0
	}
	f := &fetch{x: x, in: l, b: l.b[l.used:][:min(len(l.b)-l.used, x.length-x.asked, c.rx.pace.next())]}
	if c.rx.mode == TransferWrite && !c.grantFetch(f) {
		return false
	}
	l = f.in
	if l.fetches++; l.fetches == 1 {
		c.rx.bounceBuffers++
	}
	l.used += len(f.b)
	c.rx.filling = nil
	if l.used < len(l.b) && x.asked+len(f.b) < x.length {
		c.rx.filling = l
	}
	x.fetches.Push(f)
	c.fetch(f, f.in.lkey)
	return true
}

// grantFetch lets the peer write to f.b, and reports whether it could. If the memory cannot
// be registered, grantFetch makes f.b shorter, or uses the reserved bounce buffer.
func (c *conn) grantFetch(f *fetch) bool {
	mr, err := f.in.mr, error(nil)
	// at is the offset of f.b in the memory of mr.
	at := f.in.used
	if mr == nil {
		at = 0
		mr, err = c.dom.Expose(c.lane.qp, f.b, peerWrites)
		if err != nil && c.rx.bounceBuffers == 0 && !c.rx.hasReserved && len(f.b) > regmem.PageSize {
			f.b = f.b[:regmem.PageSize]
			mr, err = c.dom.Expose(c.lane.qp, f.b, peerWrites)
		}
		f.mr = mr
	}
	if err != nil {
		c.rx.refused = err
		if f.in == c.rx.filling {
			// The bounce buffer is given back with its last fetch.
			c.rx.filling = nil
			return false
		}
		c.putBounceBuffer(f.in)
		if f.in = c.takeReserved(); f.in == nil {
			return false
		}
		f.in.used, f.in.fetches = 0, 0
		f.b, at = f.in.b[:min(len(f.in.b), len(f.b))], 0
		mr = f.in.mr
	}
	f.addr, f.key = mr.Addr()+uint64(at), mr.RKey()
	return true
}

// getBounceBuffer returns memory for fetches, or nil if there is none. If there is no
// chunk, the connection has one bounce buffer at a time: its reserved one, or else a
// receive buffer.
func (c *conn) getBounceBuffer() *bounceBuffer {
	var s *regmem.Chunk
	var err error
	// For RDMA Writes the chunk is registered anew for each memory grant.
	if c.rx.mode == TransferWrite {
		s = c.dom.GetChunk(c.set.transferMemory)
	} else {
		s, err = c.dom.GetRegisteredChunk(c.set.transferMemory, c)
	}
	if s != nil {
		return &bounceBuffer{b: s.B, lkey: s.LKey(), chunk: s}
	} else if err != nil {
		c.rx.refused = err
	}
	if l := c.takeReserved(); l != nil || c.rx.bounceBuffers > 0 || c.rx.hasReserved {
		return l
	}
	buf, err := c.pool.Get()
	if err != nil {
		c.rx.refused = err
		return nil
	}
	return &bounceBuffer{b: buf.B, lkey: buf.LKey, buf: buf}
}

// takeReserved returns the reserved bounce buffer, or nil. It returns nil also while any
// other bounce buffer is in use.
func (c *conn) takeReserved() *bounceBuffer {
	if c.rx.bounceBuffers > 0 {
		return nil
	}
	l := c.rx.reserved
	c.rx.reserved = nil
	return l
}

// putBounceBuffer takes back what getBounceBuffer or takeReserved has returned.
func (c *conn) putBounceBuffer(l *bounceBuffer) {
	over := c.life.closed || c.life.over()
	switch {
	case l.stuck, l.chunk != nil && over && !l.chunk.Unregister():
		// The device may still use the memory, so it is never used again.
	case l.buf != nil && !over && c.rx.hasReserved && c.rx.reserved == nil:
		// The buffer stays reserved for the next time that there is no chunk.
		c.rx.reserved = l
	default:
		l.release()
	}
}

// reserveBounceBuffer reserves a bounce buffer on devices that pin memory. Without it a
// transfer could not be read when no more memory can be registered. For RDMA Writes the
// buffer is registered for the peer in advance: it never holds data of another peer.
func (c *conn) reserveBounceBuffer() error {
	if c.rx.mode == TransferNone || !regmem.PinsMemory(c.lane.id.Device()) {
		return nil
	}
	buf, err := c.pool.Get()
	if err != nil {
		return err
	}
	l := &bounceBuffer{b: buf.B, lkey: buf.LKey, buf: buf}
	if c.rx.mode == TransferWrite {
		if l.mr, err = c.dom.Expose(c.lane.qp, l.b, peerWrites); err != nil {
			buf.Release()
			return err
		}
	}
	c.rx.hasReserved, c.rx.reserved = true, l
	return nil
}

// releaseReserved releases the reserved bounce buffer, if it is not in use.
func (c *conn) releaseReserved() {
	if c.rx.reserved != nil {
		c.rx.reserved.release()
		c.rx.reserved = nil
	}
}

// releaseFetch notes that the data of f was read or dropped. The last fetch in a bounce buffer
// gives the bounce buffer back.
func (c *conn) releaseFetch(f *fetch) {
	if f.in.fetches--; f.in.fetches == 0 {
		if c.rx.filling == f.in {
			c.rx.filling = nil
		}
		c.rx.bounceBuffers--
		c.putBounceBuffer(f.in)
	}
	if c.rx.readsAhead {
		c.readAhead()
	}
}

// discard ends a transfer that no call will read. The peer gets a done message as if all of
// the data had been taken.
func (c *conn) discard(x *recvTransfer) {
	x.dropped = true
	// The bytes that were not asked for count as arrived.
	x.arrived += x.length - x.asked
	x.asked = x.length
	c.retire()
}

// dropFetches drops the fetches of x that are over and that no call will read.
func (c *conn) dropFetches(x *recvTransfer) {
	for x.fetches.Len() > 0 && (*x.fetches.At(0)).over {
		c.releaseFetch(x.fetches.Pop())
	}
}

// releaseFetches gives back the memory of fetches that will not arrive. The queue pair is
// closed, and the unread data was dropped.
func (c *conn) releaseFetches() {
	for c.rx.inFlight.Len() > 0 {
		c.fetchOver(c.rx.inFlight.Pop())
	}
	c.dom.UnregisterChunks(c)
	c.releaseReserved()
}
