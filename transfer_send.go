package rdmanet

import (
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// The sender's side of large transfers; transfer.go has the protocol.
//
// Memory is open to the peer from the offer until the peer says that it is
// done, exactly the bytes of the transfer, to this connection only (expose).
// Write waits for that, as the memory is its caller's. ReadFrom offers scratch
// and goes on, and so do queued sends, whose memory is lent for as long as it takes.

// transferSender is what a connection knows of the transfers that it sends.
type transferSender struct {
	mode     transferMode
	last     uint32                   // ID of the latest
	live     ring.Ring[*sendTransfer] // those that are not over, oldest first
	grants   ring.Ring[grant]         // to be answered by RDMA Write, oldest first
	writing  int                      // RDMA Writes under way
	wrote    time.Time                // when the last one was done
	withdraw *sendTransfer            // the peer is to be told that it ends
}

// trim gives back what the lists have grown by.
func (o *transferSender) trim() {
	o.live.Trim()
	o.grants.Trim()
}

// sendTransfer is one transfer.
type sendTransfer struct {
	id       uint32
	p        []byte
	open     ibv.MR              // p, for the peer to read
	source   regmem.Registration // p, for this side's device
	chunk    *regmem.Chunk       // where p lies, if it is ours
	detached bool                // no call waits for it: it is scratch's, or a queued send's
	granted  int                 // bytes that the peer has asked for, written or not
	writing  int                 // RDMA Writes under way
	moved    int                 // bytes that the peer has, as far as this side knows
	message  bool                // it is WriteMsg's
	ended    bool                // withdrawn
	done     bool                // the peer wants no more of it
	over     bool                // and its memory is in use no more
}

// wanted reports whether there is something left to be granted memory for.
func (o *sendTransfer) wanted() bool { return o.granted < len(o.p) }

// index is where a transfer stands among those that live, -1 if it does not.
func (o *transferSender) index(id uint32) int {
	if o.live.Len() > 0 {
		if i := id - (*o.live.At(0)).id; i < uint32(o.live.Len()) {
			return int(i)
		}
	}
	return -1
}

// grant is memory of the peer's for n bytes of a transfer.
type grant struct {
	o    *sendTransfer
	addr uint64
	key  uint32
	at   int // of the transfer's bytes, which
	n    int
}

// withdrawWithin is how long a call that has to give up a transfer waits, while nothing
// is heard of the peer, for it to let go of the memory, and withdrawTimes how many times
// as long in any case. After that the connection is broken: the memory is the caller's
// again, and the peer may be in the middle of reading it.
var withdrawWithin = 5 * time.Second

const withdrawTimes = 12

// closedShare is the part of withdrawWithin that such a call waits after Close: nobody
// will use the connection any more.
const closedShare = 5

// withdrawPatience is how long a call that has a reason to end waits for a silent peer.
func (c *conn) withdrawPatience() time.Duration {
	if c.closed {
		return withdrawWithin / closedShare
	}
	return withdrawWithin
}

var errTransferHeld = &resetError{syscall.ETIMEDOUT, errors.New("the peer does not let go of a transfer")}

// large reports whether a Write or WriteMsg of p is to be a transfer.
func (c *conn) large(p []byte, message bool) bool {
	switch {
	case c.tx.mode == transferNone:
		return false
	case len(p) >= c.set.transfer, message && len(p) > int(c.agreed.maxFragmentedSend):
		return true
	}
	return len(p) >= c.set.ofBuffer && regmem.Find(p) != nil
}

// writeLarge sends p by transfers. The caller has the turn, and does not hold mu.
func (c *conn) writeLarge(p []byte, m sendOptions) (n int, err error) {
	initial, open := 0, c.queue.partial // only who has the turn changes that
	if regmem.Find(p) == nil {
		// What is copied anyway goes along, and can be read at once.
		initial = min(int(c.agreed.maxSend)-transferOffset, len(p)-1)
	}
	for len(p) > 0 {
		size := min(len(p), initial+transferCeiling)
		o := &sendTransfer{p: p[initial:size:size], message: m.message}
		if err := c.openMemory(o); err != nil {
			k, err := c.writeCopying(p, n > 0, m)
			return n + k, err
		}
		sent, err := c.offer(o, p[:initial], len(p)-size, m)
		if sent && err == nil {
			moved := 0
			moved, err = c.awaitTransfer(o)
			n += initial + moved
		}
		o.closeMemory()
		if err != nil {
			c.truncateMessage(m.message && n > 0)
			if sent && n == 0 {
				c.reopen(open)
			}
			return n, err
		}
		p, initial = p[size:], 0
	}
	return n, nil
}

// transferChunk is copyMuch by way of a chunk, which it gives back in the end: while the
// peer fetches from one, r fills the next.
func (c *conn) transferChunk(s *regmem.Chunk, r io.Reader) (written int64, more bool, err error) {
	n, err := s.Fill(r)
	w, werr := c.writeChunk(s, n)
	if werr != nil {
		err = c.opError("write", werr)
	}
	return int64(w), n == regmem.ChunkSize, err
}

// writeCopied sends p by segments: who reads into p goes on when the device has it, not
// when the peer has.
func (c *conn) writeCopied(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.mu.Lock()
	defer c.unlock()
	if err := c.acquireQueue(normal); err != nil {
		return 0, err
	}
	defer c.releaseQueue()
	return c.writeSegments(p, sendOptions{})
}

// writeChunk sends the first n bytes of s, which is given back in the end.
func (c *conn) writeChunk(s *regmem.Chunk, n int) (int, error) {
	c.mu.Lock()
	defer c.unlock()
	if err := c.acquireQueue(normal); err != nil {
		s.Release()
		return 0, err
	}
	defer c.releaseQueue()
	o := &sendTransfer{p: s.B[:n:n], chunk: s, detached: true}
	if n < c.set.ofScratch || c.openChunk(o) != nil {
		defer s.Release()
		return c.writeSegments(o.p, sendOptions{})
	}
	var sent bool
	var err error
	c.unlocked(func() { sent, err = c.offer(o, nil, 0, sendOptions{}) })
	if !sent {
		o.closeMemory()
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// openMemory registers what is to be sent.
func (c *conn) openMemory(o *sendTransfer) (err error) {
	if c.tx.mode == transferRead {
		o.open, err = c.dom.Expose(c.lane.qp, o.p, ibv.AccessRemoteRead)
	} else {
		o.source, err = c.dom.RegisterSource(o.p)
	}
	if err != nil {
		c.mu.Lock()
		c.stats.TransfersRefused++
		c.unlock()
	}
	return err
}

// openChunk is openMemory for who holds mu.
func (c *conn) openChunk(o *sendTransfer) (err error) {
	c.unlocked(func() { err = c.openMemory(o) })
	return err
}

// closeMemory takes the memory back, once. Scratch that the device may still use is
// lost.
func (o *sendTransfer) closeMemory() {
	var err error
	if o.open != nil {
		err = o.open.Close()
		o.open = nil
	} else {
		err = o.source.Close()
	}
	if o.chunk != nil && err == nil {
		o.chunk.Release()
	}
	o.chunk = nil
}

// sendLarge sends s by a transfer and, as soon as the peer has been told of it, passes
// the turn: the next may follow while the peer fetches. It reports whether it could.
// The caller has the turn and holds mu.
func (c *conn) sendLarge(s *Send) bool {
	if c.writeErr() != nil || len(s.p) > transferCeiling || !c.large(s.p, true) {
		return false
	}
	var sent bool
	var err error
	o := &sendTransfer{p: s.p, message: true, detached: true}
	c.unlocked(func() {
		if err = c.openMemory(o); err == nil {
			sent, err = c.offer(o, nil, 0, s.m)
		} else {
			o.moved, err = c.writeCopying(s.p, false, s.m)
		}
	})
	c.releaseQueue()
	for sent && !o.over && c.dead == nil {
		c.await(&c.writers)
	}
	o.closeMemory()
	switch {
	case o.over:
		err = nil
	case sent && c.closed:
		err = net.ErrClosed
	case sent:
		err = c.dead
	}
	s.finish(o.moved, err)
	return true
}

// writeCopying sends p where its memory cannot be registered. begun says that it
// is the rest of a message that began with a transfer.
func (c *conn) writeCopying(p []byte, begun bool, m sendOptions) (n int, err error) {
	if !m.message || !begun && len(p) <= int(c.agreed.maxFragmentedSend) {
		c.mu.Lock()
		defer c.unlock()
		return c.writeSegments(p, m)
	}
	for n < len(p) {
		k := min(len(p)-n, int(c.agreed.maxSend)-transferOffset)
		if _, err := c.offer(nil, p[n:n+k], len(p)-n-k, m); err != nil {
			c.truncateMessage(begun || n > 0)
			return n, err
		}
		n += k
	}
	return n, nil
}

// truncateMessage notes that a message has begun and will not end.
func (c *conn) truncateMessage(cut bool) {
	c.mu.Lock()
	c.send.truncated = c.send.truncated || cut
	c.unlock()
}

// reopen says that the message that was withdrawn as a whole has never been, and
// whether one was open before it.
func (c *conn) reopen(open bool) {
	c.mu.Lock()
	c.queue.partial, c.send.midMessage = open, false
	c.unlock()
}

// offer tells the peer of o, alone if a call waits for it, which may have to
// withdraw it, with the bytes in front of it; left bytes of what is sent follow
// later. o is nil where those bytes are all. It reports whether o is under way: with
// an error as well if the device has refused what was to tell the peer.
func (c *conn) offer(o *sendTransfer, initial []byte, left int, m sendOptions) (bool, error) {
	c.mu.Lock()
	defer c.unlock()
	var bufs regmem.Buffers
	for {
		if err := c.writeErr(); err != nil {
			return false, err
		}
		if c.queue.mustYield() && !c.send.midMessage {
			c.yieldQueue()
			continue
		}
		if busy := c.tx.live.Len(); o != nil && (busy >= maxBounceBuffers || busy > 0 && !o.detached) {
			c.await(&c.writers)
			continue
		}
		if c.credits.spendable() > 0 && c.freeSlots() > reservedSlots {
			var n int
			if n, bufs = c.transferBuffers(len(initial)); n > 0 {
				break
			}
		}
		c.waitToSend()
	}
	var all uint16
	if c.messages {
		all = m.wire()
	}
	rest := 0
	if m.message {
		rest = left
	} else if left > 0 && c.queue.partial {
		all |= flagPartial
	}
	t := transferHeader{Kind: transferOffer, Rest: uint64(rest)}
	if c.tx.mode == transferWrite {
		t.Kind = transferRequest
	}
	if o != nil {
		c.tx.last++
		o.id = c.tx.last
		t.ID, t.Length = o.id, uint32(len(o.p))
		if t.Kind == transferOffer {
			t.Addr, t.Key = o.open.Addr(), o.open.RKey()
		}
		c.tx.live.Push(o)
		c.stats.TransfersSent++
		c.stats.BytesSent += uint64(len(o.p))
		c.stats.TransferBytesSent += uint64(len(o.p))
	}
	c.send.idle, c.send.midMessage = false, rest > 0
	if rest == 0 {
		c.queue.partial, c.queue.partialKind = all&flagPartial != 0, c.queue.kind
		c.stats.MessagesSent++
	}
	return true, c.post(sendBatch{p: initial, segs: 1, all: all, bufs: bufs, head: &t})
}

// awaitTransfer waits until o is over, or gives it up, and returns how much of it was
// moved. On a connection that is dead what came before its end may still be heard
// afterwards.
func (c *conn) awaitTransfer(o *sendTransfer) (moved int, _ error) {
	c.mu.Lock()
	defer c.unlock()
	for !o.over {
		if err := c.writeErr(); err != nil {
			c.giveUp(o)
			if o.over && o.moved == len(o.p) {
				return o.moved, nil
			}
			return o.moved, err
		}
		c.await(&c.writers)
	}
	return o.moved, nil
}

// giveUp ends o early: when it returns the peer has let go of the memory, or
// the connection is dead.
func (c *conn) giveUp(o *sendTransfer) {
	if c.dead != nil {
		return
	}
	o.ended = true
	c.tx.withdraw = o
	since := time.Now()
	var late *time.Timer
	late = time.AfterFunc(c.withdrawPatience(), func() {
		c.mu.Lock()
		defer c.unlock()
		if o.over || c.dead != nil {
			return
		}
		if more := c.remainingPatience(since); more > 0 {
			late.Reset(more)
		} else {
			c.fail(errTransferHeld)
		}
	})
	defer late.Stop()
	for hurried := c.closed; !o.over && c.dead == nil; {
		if c.closed && c.set.linger < 0 {
			c.fail(errPeerClosed) // this connection does not linger
			break
		}
		if c.closed && !hurried {
			hurried = true
			late.Reset(max(c.remainingPatience(since), 0))
		}
		c.await(&c.writers)
	}
	unsent := uint64(len(o.p) - o.moved)
	c.stats.BytesSent -= unsent
	c.stats.TransferBytesSent -= unsent
}

// remainingPatience returns how much longer a call that has a reason to end since then waits for
// the peer to let go of its memory, unless something more is heard. Not more than 0 is
// no longer.
func (c *conn) remainingPatience(since time.Time) time.Duration {
	whole := withdrawTimes*withdrawWithin - time.Since(since)
	for _, t := range []time.Time{c.lastReceived, c.tx.wrote} {
		if t.After(since) {
			since = t
		}
	}
	return min(whole, c.withdrawPatience()-time.Since(since))
}

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

// hasControl reports whether nextSenderControl has something.
func (o *transferSender) hasControl() bool { return o.grants.Len() > 0 || o.withdraw != nil }

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
	c.receivedSince, c.probing = true, false // also where TCP has taken it: TCP has room for it because the peer takes data
	o.moved += min(n, len(o.p)-o.moved)      // what the peer said may have been heard first
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
