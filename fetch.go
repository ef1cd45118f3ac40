package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file asks for the data of incoming transfers and notes its arrival. transfer_recv.go
// has the steps and the state, transfer_arrival.go handles the peer's messages, bounce.go has
// the memory for what is fetched ahead, and directread.go the Reads that the device fills.

// checkOffer checks an offer or a request, before the payload that comes with it joins
// the stream.
func (in *transferReceiver) checkOffer(opens bool, t *transferHeader) error {
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

// startPrefetchTimer has prefetch called after prefetchAfter.
func (in *transferReceiver) startPrefetchTimer() {
	in.again = unreadAgain
	if in.prefetchTimer == nil {
		in.prefetchTimer = time.AfterFunc(prefetchAfter, in.prefetch)
	} else {
		in.prefetchTimer.Reset(prefetchAfter)
	}
}

// canAsk reports whether another fetch may be asked for.
func (in *transferReceiver) canAsk() bool {
	if !in.life.posts() || in.pace.next() == 0 {
		return false
	}
	if in.mode == TransferRead {
		return in.inFlight.Len() < in.depth
	}
	return in.inFlight.Len() < maxTransfers
}

// ask asks for the next bytes of x, which go to f.b: by an RDMA Read, or by a memory
// grant that is sent later. lkey is the local key of f.b.
func (in *transferReceiver) ask(f *fetch, lkey uint32) {
	x := f.x
	f.at, f.under = time.Now(), in.pace.ask(len(f.b))
	if in.mode == TransferWrite {
		in.inFlight.Push(f)
		in.unsentGrants.Push(f)
		x.asked += len(f.b)
		return
	}
	from := x.addr + uint64(x.asked)
	x.asked += len(f.b)
	if in.life.over() {
		in.fetchOver(f)
		return
	}
	in.inFlight.Push(f)
	b := in.lane.looseBatch()
	wr := b.next()
	wr.ID, wr.Op, wr.Flags, wr.RemoteAddr, wr.RKey = fetchID, ibv.OpRead, ibv.SendSignaled, from, x.key
	b.element(wr, f.b, lkey)
	// The leader may wait for receives only.
	in.wait.Interrupt()
}

// fetchCanceled ends the latest fetch, because its RDMA Read was not posted.
func (in *transferReceiver) fetchCanceled() {
	last := in.inFlight.At(in.inFlight.Len() - 1)
	f := *last
	*last = nil
	in.inFlight.Undo()
	in.fetchOver(f)
}

// arrived notes that n bytes of f have arrived.
func (in *transferReceiver) arrived(f *fetch, n int) {
	f.got = n
	f.x.arrived += n
	if f.into != nil {
		f.into.got += n
	}
	in.stats.BytesReceived += uint64(n)
	in.stats.TransferBytesReceived += uint64(n)
	in.fetchOver(f)
	in.retire()
	// More is fetched ahead for a reader that takes little at a time, or for none.
	if (in.readsAhead || in.reading == 0) && !in.readAhead() && in.reading == 0 {
		in.startPrefetchTimer() // Nothing but the timer tells that there is memory again.
	}
}

// fetchOver notes that the device no longer uses the memory of f.
func (in *transferReceiver) fetchOver(f *fetch) {
	f.over = true
	if f.got > 0 {
		in.pace.arrived(len(f.b), f.under, f.at, time.Now())
	} else {
		in.pace.drop(len(f.b))
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
		in.dropFetches(f.x)
	}
	in.readers.WakeAll()
	in.wait.Interrupt()
}

// retire removes the transfers that have arrived as a whole from live. It has a done
// message sent for them if the peer does not know that they are over.
func (in *transferReceiver) retire() {
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

// nextControl returns the next message to send about incoming transfers.
func (in *transferReceiver) nextControl() transferHeader {
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
func (in *transferReceiver) findWithdrawn(t *transferHeader) (*recvTransfer, error) {
	live := &in.live
	switch {
	case t.ID != in.last || live.Len() > 1:
		return nil, errTransferID
	case live.Len() == 0:
		return nil, nil
	}
	return *live.At(0), nil
}

// readAhead fetches offered data into bounce buffers, as far as it may. It reports whether there
// was memory for that.
func (in *transferReceiver) readAhead() bool {
	for i := 0; i < in.live.Len(); i++ {
		x := *in.live.At(i)
		for x.asked < x.length {
			if in.filling == nil && in.bounceBuffers >= maxBounceBuffers || !in.canAsk() {
				return true
			}
			if !in.beginFetch(x) {
				return false
			}
		}
	}
	return true
}

// beginFetch asks for the next bytes of x, into a bounce buffer, and reports whether it
// could. Short fetches share a bounce buffer.
func (in *transferReceiver) beginFetch(x *recvTransfer) bool {
	l := in.filling
	if l == nil {
		if l = in.getBounceBuffer(); l == nil {
			return false
		}
		l.used, l.fetches = 0, 0
	}
	f := &fetch{x: x, in: l, b: l.b[l.used:][:min(len(l.b)-l.used, x.length-x.asked, in.pace.next())]}
	if in.mode == TransferWrite && !in.grantFetch(f) {
		return false
	}
	l = f.in
	if l.fetches++; l.fetches == 1 {
		in.bounceBuffers++
	}
	l.used += len(f.b)
	in.filling = nil
	if l.used < len(l.b) {
		in.filling = l
	}
	x.fetches.Push(f)
	in.ask(f, f.in.lkey)
	return true
}

// grantFetch lets the peer write to f.b, and reports whether it could. If the memory cannot
// be registered, grantFetch makes f.b shorter, or uses the reserved bounce buffer.
func (in *transferReceiver) grantFetch(f *fetch) bool {
	mr, err := f.in.mr, error(nil)
	// at is the offset of f.b in the memory of mr.
	at := f.in.used
	if mr == nil {
		at = 0
		mr, err = in.dom.Expose(in.lane.qp, f.b, peerWrites)
		if err != nil && in.bounceBuffers == 0 && !in.hasReserved && len(f.b) > regmem.PageSize {
			f.b = f.b[:regmem.PageSize]
			mr, err = in.dom.Expose(in.lane.qp, f.b, peerWrites)
		}
		f.mr = mr
	}
	if err != nil {
		in.refused = err
		if f.in == in.filling {
			// The bounce buffer is given back with its last fetch.
			in.filling = nil
			return false
		}
		in.putBounceBuffer(f.in)
		if f.in = in.takeReserved(); f.in == nil {
			return false
		}
		f.in.used, f.in.fetches = 0, 0
		f.b, at = f.in.b[:min(len(f.in.b), len(f.b))], 0
		mr = f.in.mr
	}
	f.addr, f.key = mr.Addr()+uint64(at), mr.RKey()
	return true
}

// releaseFetch notes that the data of f was read or dropped. The last fetch in a bounce buffer
// gives the bounce buffer back.
func (in *transferReceiver) releaseFetch(f *fetch) {
	if f.in.fetches--; f.in.fetches == 0 {
		if in.filling == f.in {
			in.filling = nil
		}
		in.bounceBuffers--
		in.putBounceBuffer(f.in)
	}
	if in.readsAhead {
		in.readAhead()
	}
}

// discard ends a transfer that no call will read. The peer gets a done message as if all of
// the data had been taken.
func (in *transferReceiver) discard(x *recvTransfer) {
	x.dropped = true
	// The bytes that were not asked for count as arrived.
	x.arrived += x.length - x.asked
	x.asked = x.length
	in.retire()
}

// dropFetches drops the fetches of x that are over and that no call will read.
func (in *transferReceiver) dropFetches(x *recvTransfer) {
	for x.fetches.Len() > 0 && (*x.fetches.At(0)).over {
		in.releaseFetch(x.fetches.Pop())
	}
}

// release gives back the memory of fetches that will not arrive. The queue pair is
// closed, and the unread data was dropped.
func (in *transferReceiver) release() {
	for in.inFlight.Len() > 0 {
		in.fetchOver(in.inFlight.Pop())
	}
	in.dom.UnregisterChunks(in)
	in.releaseReserved()
}
