package rdmanet

import (
	"fmt"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// lane is one way to the peer: a queue pair, and the work requests of its send queue from
// the moment in which they are made until they have completed. Conn.mu guards it.
//
// Work requests are made with mu held and join a queue of batches (enqueue). flush hands the
// batches to the device, in order, and is the only function that lets go of mu to do so.
// conn.unlock calls it. So nothing that is decided with mu held changes before it is queued, and what is
// queued leaves as soon as a goroutine lets go of mu.
type lane struct {
	owner laneOwner
	mu    *sync.Mutex // mu is the connection's lock, which flush releases.

	id ibv.ID
	cq ibv.CQ
	qp ibv.QP

	inPlace ibv.InPlaceQP // it is qp where calls wait until their data was handed over, and otherwise nil

	inline      int  // inline is how many bytes a send may have without a registered buffer.
	invalidates bool // invalidates is set if the device has Send with Invalidate.
	signalEach  bool // signalEach is set if each send from a buffer is signaled, because nothing else frees the buffer.
	slots       int  // slots is how many work requests the send queue takes besides RDMA Reads.

	open    bool // open is set when the connection has been set up and batches may be posted.
	queue   ring.Ring[*postBatch]
	posting bool         // posting is set while a goroutine hands a batch to the device, without mu.
	turns   int          // turns is how many batches that goroutine has handed over.
	takers  int          // takers counts the goroutines that wait to hand over batches in its place.
	posters cqwait.Group // posters are the goroutines that wait for a batch to be posted.
	spare   *postBatch   // spare is a small batch that is not in use.

	// Sends are numbered from 1. A completion stands for all sends before it.
	seq, done uint64
	failed    uint64 // failed is the number of the first send that the device did not carry out, or 0.
	inFlight  int    // inFlight is how many queued bytes are not known to be completed.
	signaled  ring.Ring[signaledSend]

	// These are the bytes and the number of the sends since the last signaled one.
	unsignaledBytes, unsignaledSends int

	// buffers are for sends that do not go inline. The connection has one of its own:
	// receives or other connections may have taken the last of the pool, and nothing would
	// come back if no grants could be sent.
	buffers      *regmem.Pool
	large        *regmem.Pool // large has buffers for large segments, or is nil.
	reserved     *regmem.Buffer
	reservedFree *regmem.Buffer // reservedFree is reserved, unless a send uses it.
}

// laneOwner is the connection as its lane sees it. The methods are called with the lock held.
type laneOwner interface {
	// over reports whether nothing may be posted any more.
	over() bool

	// queueDue queues a message without payload that has become due, and reports whether
	// there was one. It is called when nothing else is queued, also when over.
	queueDue() bool

	// postFailed ends the connection because the device has refused a work request.
	postFailed(err error)

	// requestCanceled notes that the work request of that ID was not posted. t is the
	// transfer that it would have written a part of, or nil.
	requestCanceled(id uint64, t *sendTransfer)
}

// signaledSend is a signaled send, and what its completion frees.
type signaledSend struct {
	seq      uint64
	bytes    int // bytes has the bytes of this send and of the unsignaled ones before it.
	bufs     regmem.Buffers
	transfer *sendTransfer // transfer is the transfer that the send writes a part of, or nil.
	written  int           // written is how many bytes that part has.
}

// postBatch is work requests that are posted together.
type postBatch struct {
	wrs     []ibv.SendWR
	sges    []ibv.SGE
	hdrs    [][transferOffset]byte
	big     bool
	loose   bool // it has work requests that are no messages, and more may join them
	awaited bool // awaited is set if a goroutine waits for the batch, and frees it.
	posted  bool // it was posted, or never will be
	failed  bool // failed is set if the device has not taken all of it.
	inPlace bool // the goroutine that waits for the batch also waits until its data was handed over
	lent    bool // that is still to come
}

const (
	sendID    = 1 << 63        // sendID is set in the IDs of work requests of the send queue.
	barrierID = sendID | 1<<62 // barrierID is the ID of the RDMA Read of queueBarrier.
	fetchID   = sendID | 1<<61 // fetchID is the ID of an RDMA Read of a transfer.

	batchSegments = 16       // batchSegments is how many segments one post has at most.
	signalBytes   = 64 << 10 // signalBytes is after how many bytes a send is signaled at the latest.
	fairTurns     = 8        // fairTurns is how many batches a goroutine hands over at most while another one waits to do so.
	reservedSlots = 4        // reservedSlots is how many work requests of the send queue are kept for messages without payload.
)

// smallBatches hold one message, with an RDMA Write before it or without; bigBatches hold
// batchSegments.
var (
	smallBatches = sync.Pool{New: func() any { return newPostBatch(2, 3, 1, false) }}
	bigBatches   = sync.Pool{New: func() any { return newPostBatch(batchSegments, 2*batchSegments, batchSegments, true) }}
)

func newPostBatch(wrs, sges, hdrs int, big bool) *postBatch {
	return &postBatch{wrs: make([]ibv.SendWR, 0, wrs), sges: make([]ibv.SGE, 0, sges), hdrs: make([][transferOffset]byte, hdrs), big: big}
}

// newBatch returns an empty batch for so many segments.
func (l *lane) newBatch(segs int) *postBatch {
	if segs > 1 {
		return bigBatches.Get().(*postBatch)
	}
	if b := l.spare; b != nil {
		l.spare = nil
		return b
	}
	return smallBatches.Get().(*postBatch)
}

// free gives a batch back, and keeps nothing alive that it named.
func (l *lane) free(b *postBatch) {
	clear(b.sges) // the work requests name nothing else
	b.wrs, b.sges = b.wrs[:0], b.sges[:0]
	b.loose, b.awaited, b.posted, b.failed, b.inPlace, b.lent = false, false, false, false, false, false
	switch {
	case b.big:
		bigBatches.Put(b)
	case l.spare == nil:
		l.spare = b
	default:
		smallBatches.Put(b)
	}
}

// next appends an empty work request.
func (b *postBatch) next() *ibv.SendWR {
	n := len(b.wrs)
	b.wrs = b.wrs[:n+1]
	wr := &b.wrs[n]
	*wr = ibv.SendWR{}
	return wr
}

// element appends an element to the list of wr, the latest work request.
func (b *postBatch) element(wr *ibv.SendWR, buf []byte, lkey uint32) {
	n := len(b.sges)
	b.sges = b.sges[:n+1]
	b.sges[n] = ibv.SGE{Buf: buf, LKey: lkey}
	from := n - len(wr.SGL)
	wr.SGL = b.sges[from : n+1 : n+1]
}

// enqueue appends a batch to those that are to be posted.
func (l *lane) enqueue(b *postBatch) { l.queue.Push(b) }

// looseBatch returns a batch to which a work request that is no message may be appended. The
// batch is queued.
func (l *lane) looseBatch() *postBatch {
	if n := l.queue.Len(); n > 0 {
		if b := *l.queue.At(n - 1); b.loose && len(b.wrs) < cap(b.wrs) {
			return b
		}
	}
	b := l.newBatch(1)
	b.loose = true
	l.enqueue(b)
	return b
}

// number makes wr the next send, which takes n bytes of memory. It is signaled if signal says so,
// or when enough was sent since the last one that was.
func (l *lane) number(wr *ibv.SendWR, n int, signal bool) (signaled bool) {
	l.seq++
	l.unsignaledSends++
	l.unsignaledBytes += n
	l.inFlight += n
	wr.ID = sendID | l.seq
	return signal || l.unsignaledBytes >= signalBytes || l.unsignaledSends >= l.slots/4
}

// signal has wr, the latest send, signaled. Its completion frees bufs. It also tells that
// the device has written so many bytes of t, if t is not nil.
func (l *lane) signal(wr *ibv.SendWR, bufs regmem.Buffers, t *sendTransfer, written int) {
	wr.Flags |= ibv.SendSignaled
	s := l.signaled.Next()
	s.seq, s.bytes, s.bufs, s.transfer, s.written = l.seq, l.unsignaledBytes, bufs, t, written
	l.unsignaledBytes, l.unsignaledSends = 0, 0
}

// freeSlots is the room in the send queue.
func (l *lane) freeSlots() int { return l.slots - int(l.seq-l.done) }

// busy reports whether sends are not known to be completed.
func (l *lane) busy() bool { return l.done < l.seq }

// unsent returns how many bytes of what was written are still on this host, as far as the
// device can tell.
func (l *lane) unsent() int {
	if f, ok := l.id.(ibv.Unsender); ok {
		return f.Unsent()
	}
	return 0
}

// quiet reports whether every batch has been posted.
func (l *lane) quiet() bool { return !l.posting && l.queue.Len() == 0 }

// completed notes that the send of that number, and all before it, have completed.
func (l *lane) completed(seq uint64, ok bool) {
	if seq > l.done {
		l.done = seq
		if !ok && l.failed == 0 {
			l.failed = seq
		}
	}
}

// canceled notes that the send of that number was not posted, and returns the transfer that
// it would have written a part of, or nil.
func (l *lane) canceled(seq uint64) (t *sendTransfer) {
	if l.failed == 0 {
		l.failed = seq
	}
	for i := l.signaled.Len() - 1; i >= 0 && l.signaled.At(i).seq >= seq; i-- {
		if s := l.signaled.At(i); s.seq == seq {
			t, s.transfer = s.transfer, nil
		}
	}
	return t
}

// nextSignaled returns what the caller has to know of the oldest signaled send that has
// completed, once each: its number, and how many bytes of which transfer it has written.
func (l *lane) nextSignaled() (seq uint64, t *sendTransfer, written int, ok bool) {
	if l.signaled.Len() == 0 {
		return 0, nil, 0, false
	}
	s := l.signaled.At(0)
	if s.seq > l.done {
		return 0, nil, 0, false
	}
	seq, t, written = s.seq, s.transfer, s.written
	l.inFlight -= s.bytes
	l.putBuffers(s.bufs)
	s.bufs, s.transfer = regmem.Buffers{}, nil
	l.signaled.Drop()
	return seq, t, written, true
}

// buffer returns a registered buffer for a send of n bytes, nil if there is none.
func (l *lane) buffer(n int) *regmem.Buffer {
	if n > l.buffers.Size {
		buf, err := l.large.Get()
		if err != nil {
			return nil
		}
		return buf
	}
	buf, err := l.buffers.Get()
	if err != nil {
		buf, l.reservedFree = l.reservedFree, nil
	}
	return buf
}

// sendBuffers returns the registered buffers for segs segments with size bytes, one for
// each that is too long to go inline. All segments but the last have full bytes. If there
// are not enough buffers, it returns fewer segments and their bytes. It returns no segments
// while the connection's own buffer is in use, which the completion of a send brings back.
func (l *lane) sendBuffers(segs, size, full int) (_, _ int, bufs regmem.Buffers) {
	if headerLen(full)+full <= l.inline {
		return segs, size, bufs
	}
	for i := range segs {
		n := min(full, size-i*full)
		if headerLen(n)+n <= l.inline {
			continue
		}
		buf := l.buffer(headerLen(full) + full) // All have one size, as any of them may be for any segment.
		if buf == nil {
			return i, i * full, bufs
		}
		bufs.Push(buf)
	}
	return segs, size, bufs
}

// transferBuffers is sendBuffers for one message with a transfer header and n bytes of
// payload. It returns 0 segments if there is no buffer.
func (l *lane) transferBuffers(n int) (segs int, bufs regmem.Buffers) {
	if transferOffset+n <= l.inline {
		return 1, bufs
	}
	if buf := l.buffer(transferOffset + n); buf != nil {
		bufs.Push(buf)
		segs = 1
	}
	return segs, bufs
}

// putBuffers takes back buffers that no send names any more.
func (l *lane) putBuffers(bufs regmem.Buffers) {
	for b := bufs.Pop(); b != nil; b = bufs.Pop() {
		if b == l.reserved {
			l.reservedFree = b
		} else {
			b.Release()
		}
	}
}

// reserve gets the buffer that the connection has of its own.
func (l *lane) reserve() (err error) {
	l.reserved, err = l.buffers.Get()
	l.reservedFree = l.reserved
	return err
}

// release gives back the buffers of sends that will never complete, and the connection's
// own. The queue pair is closed. f is called with each signaled send.
func (l *lane) release(f func(signaledSend)) {
	for l.signaled.Len() > 0 {
		s := l.signaled.Pop()
		l.putBuffers(s.bufs)
		f(s)
	}
	if l.reserved != nil {
		l.reserved.Release()
		l.reserved, l.reservedFree = nil, nil
	}
	l.dropSpare()
}

// trim gives back memory of queues that have grown.
func (l *lane) trim() {
	l.queue.Trim()
	l.signaled.Trim()
	l.dropSpare()
}

// dropSpare leaves the spare batch to other connections.
func (l *lane) dropSpare() {
	if l.spare != nil {
		smallBatches.Put(l.spare)
		l.spare = nil
	}
}

// flush hands to the device what is queued, and what has become due meanwhile. It lets go
// of the lock only while the device takes a batch, so callers look at their state again. A
// goroutine that finds another one posting leaves everything to that one.
//
// After fairTurns batches it leaves the rest to a goroutine that waits anyway. Otherwise
// others that write all the time could keep it.
func (l *lane) flush() {
	if l.posting {
		return
	}
	for l.turns = 0; l.open && (l.queue.Len() > 0 || l.owner.queueDue()); l.turns++ {
		if l.owner.over() {
			l.cancelQueued()
			return
		}
		if l.turns >= fairTurns && l.takers > 0 {
			l.posters.WakeAll()
			return
		}
		b := l.queue.Pop()
		l.posting = true
		l.mu.Unlock()
		var n int
		var err error
		if b.inPlace {
			n, b.lent, err = l.inPlace.PostInPlace(b.wrs)
		} else {
			n, err = l.qp.PostSend(b.wrs)
		}
		l.mu.Lock()
		l.posting = false
		if err != nil {
			l.owner.postFailed(fmt.Errorf("post %s: %w", b.wrs[min(n, len(b.wrs)-1)].Op, err))
			l.cancel(b, n)
		}
		l.batchPosted(b)
	}
}

// await flushes until the device has taken b or never will, and reports whether the device
// has taken all of it. b is queued, and awaited. The caller frees it.
func (l *lane) await(b *postBatch) (posted bool) {
	for l.flush(); !b.posted; l.flush() {
		l.waitTurn()
	}
	return !b.failed
}

// waitTurn waits for a change of what is queued or posted, to hand over batches then.
func (l *lane) waitTurn() {
	l.takers++
	l.posters.Wait()
	l.takers--
}

// crowded reports whether the goroutine that hands over batches has done so for others often
// enough.
func (l *lane) crowded() bool { return l.posting && l.turns >= fairTurns }

// awaitQuiet waits while batches are queued or posted, until something may have changed.
func (l *lane) awaitQuiet() {
	if l.flush(); !l.quiet() {
		l.posters.Wait()
	}
}

// batchPosted ends the wait for a batch, or frees it if no goroutine waits for it.
func (l *lane) batchPosted(b *postBatch) {
	b.posted = true
	if !b.awaited {
		l.free(b)
	}
	l.posters.WakeAll()
}

// cancelQueued drops the batches of a connection that is over.
func (l *lane) cancelQueued() {
	for l.queue.Len() > 0 {
		b := l.queue.Pop()
		l.cancel(b, 0)
		l.batchPosted(b)
	}
}

// cancel ends the work requests of a batch that were not posted, those after the first n.
// The connection is over. Requests that were posted before are still in the device's hands,
// with the memory that they name.
func (l *lane) cancel(b *postBatch, n int) {
	b.failed = true
	for i := range b.wrs[n:] {
		id := b.wrs[n+i].ID
		var t *sendTransfer
		if id != fetchID && id != barrierID {
			t = l.canceled(id &^ sendID)
		}
		l.owner.requestCanceled(id, t)
	}
}
