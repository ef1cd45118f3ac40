package iwarp

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// The way out. Everything here runs with qp.sq.mu held and never blocks.
//
//  1. push is called when there may be something to send. While a sender
//     goroutine is at work it has nothing to do.
//  2. frame turns requests and Read Responses into a batch of FPDUs: headers
//     and small payloads in scratch memory, large payloads where they lie.
//  3. The batch is offered to the link. What the link takes completes
//     requests (account, then qp.reap).
//  4. If the link is full, a sender goroutine (flush) waits for room and goes
//     on with 2 and 3 until nothing is left.
type transmitter struct {
	hold     bool // the peer's first FPDU must come before ours
	rtr      rtrKind
	first    *time.Timer // runs until the peer's first frame comes: see nudge.go
	draining bool        // after disconnect: nothing more is posted
	finished bool        // our direction of the link is closed
	stopped  bool
	faulted  bool // the next request cannot be done, the stream is ending
	flushing bool // a sender goroutine owns the link's way out

	// The batch: framed, and not yet taken by the link.
	out      []chunk
	mem      *batchMemory // nil while there is no batch
	used     int          // bytes of its scratch
	owned    *[]byte      // copies of inline data in out
	ends     []uint64
	framed   uint64 // bytes framed so far on this connection
	taken    uint64 // bytes that the link has taken
	boundary uint64 // the last end of an FPDU at or before taken

	msg     outgoing   // the message being framed
	sendMSN uint32     // messages begun on queue 0
	readMSN uint32     // and on queue 1
	reads   int        // our RDMA Reads whose response is not complete
	resp    []response // Read Responses owed, oldest first
	turn    bool       // a response goes before the next request

	write, flush func(uintptr) bool
	n            int // result of write
	wait         bool
	err          error
}

const (
	batchChunks = 8       // elements of one writev
	smallChunk  = 1 << 10 // payloads up to this are copied behind their header
	scratchSize = smallChunk + 512

	// batchBytes is how many bytes a batch has, about. The peer can begin on a
	// TCP segment only when it is whole, and those have 64 KiB on loopback:
	// batches of half that keep both ends at work, larger ones make them take
	// turns. 64 KiB sends run at 5.5 GB/s in pieces of 32 KiB, else at 2.1.
	batchBytes = 32 << 10

	frameOverhead = 2 + iwarpwire.ReadRequestLen + 3 + 4 // length, header, padding, CRC at most
)

// batchMemory is what a batch needs until the link has taken it. An idle queue pair has
// none: with it an idle connection would take a tenth more.
type batchMemory struct {
	scratch [scratchSize]byte   // headers and small payloads
	iov     [batchChunks][]byte // for writev
}

var batchPool = sync.Pool{New: func() any { return new(batchMemory) }}

type rtrKind uint8

const (
	rtrNone rtrKind = iota
	rtrWrite
	rtrRead
)

// chunk is a stretch of bytes on its way to the link.
type chunk struct {
	b      []byte
	mr     *mr  // the region it lies in, which may be taken away
	inline bool // the poster's memory, only until the post returns
	resp   bool // of a Read Response, so that the key counts too
}

// gone reports whether the memory has been taken away. The caller holds the gate
// for reading.
func (c *chunk) gone() bool { return c.mr.closed || c.resp && c.mr.dead }

// outgoing is the message being framed.
type outgoing struct {
	active bool
	resp   bool // a Read Response, else the request at sq.sent
	inline bool
	hdr    iwarpwire.Header
	segs   []segment
	left   int
}

// response is a Read Response that is owed.
type response struct {
	seg  [1]segment
	stag uint32
	to   uint64
}

// push sends what can be sent now.
func (st *stream) push() {
	t := &st.tx
	if t.flushing || t.stopped {
		return
	}
	for {
		if len(t.out) == 0 && !st.frame() {
			break
		}
		if err := st.link.write(t.write); err != nil {
			t.err = err
		}
		if t.err != nil {
			st.txFailed()
			return
		}
		st.account(t.n)
		if t.wait {
			t.flushing = true
			go st.flush()
			break
		}
	}
	st.maybeFinish()
}

// writeSome offers the batch to the link once.
func (st *stream) writeSome(at uintptr) bool {
	t := &st.tx
	t.n, t.wait, t.err = 0, false, nil
	bufs, gated, ok := st.gather()
	if gated {
		defer st.qp.pd.gate.RUnlock()
	}
	if !ok {
		t.err = errRegionGone
		return true
	}
	t.n, t.wait, t.err = st.link.writev(at, bufs)
	return true
}

// gather lists the batch for writev. When it touches registered memory the
// gate is held on return. ok is false when a region was taken away under it.
func (st *stream) gather() (bufs [][]byte, gated, ok bool) {
	t := &st.tx
	if t.mem == nil {
		return nil, false, true
	}
	bufs = t.mem.iov[:0]
	for i := range t.out {
		if i == batchChunks {
			break
		}
		c := &t.out[i]
		if c.mr != nil {
			if !gated {
				st.qp.pd.gate.RLock()
				gated = true
			}
			if c.gone() {
				return nil, gated, false
			}
		}
		bufs = append(bufs, c.b)
	}
	return bufs, gated, true
}

// flush is the sender goroutine.
func (st *stream) flush() {
	if err := st.link.write(st.tx.flush); err != nil {
		st.qp.sq.mu.Lock()
		st.tx.flushing = false
		if !st.tx.stopped {
			st.tx.err = err
			st.txFailed()
		}
		st.qp.sq.mu.Unlock()
	}
}

// flushSome goes on where push had to leave off; false asks for another call
// when the link has room.
func (st *stream) flushSome(at uintptr) bool {
	t := &st.tx
	st.qp.sq.mu.Lock()
	defer st.qp.sq.mu.Unlock()
	for !t.stopped && (len(t.out) > 0 || st.frame()) {
		st.writeSome(at)
		if t.err != nil {
			st.txFailed()
			break
		}
		st.account(t.n)
		if t.wait {
			return false
		}
	}
	t.flushing = false
	if !t.stopped {
		st.maybeFinish()
	}
	return true
}

// account notes that the link took n bytes of the batch.
func (st *stream) account(n int) {
	t := &st.tx
	t.taken += uint64(n)
	i := 0
	for ; i < len(t.out) && n >= len(t.out[i].b); i++ {
		n -= len(t.out[i].b)
	}
	if i < len(t.out) {
		t.out[i].b = t.out[i].b[n:]
	}
	if i > 0 {
		rest := copy(t.out, t.out[i:])
		clear(t.out[rest:])
		t.out = t.out[:rest]
	}
	for i = 0; i < len(t.ends) && t.ends[i] <= t.taken; i++ {
		t.boundary = t.ends[i]
	}
	t.ends = t.ends[:copy(t.ends, t.ends[i:])]
	if len(t.out) == 0 {
		st.releaseBatch()
	}
	s := &st.qp.sq
	for i := range s.sent {
		r := s.at(i)
		if r.end > t.taken {
			break
		}
		if r.op != ibv.OpRead {
			r.done = true // the link has it: the buffer is the poster's again
		}
	}
	st.qp.reap(nil)
}

// trim gives back the lists of a batch while there is none.
func (t *transmitter) trim() {
	if len(t.out) == 0 && len(t.ends) == 0 && !t.flushing {
		t.out, t.ends = nil, nil
	}
	if len(t.resp) == 0 {
		t.resp = nil
	}
}

func (st *stream) releaseBatch() {
	t := &st.tx
	t.used = 0
	if t.mem != nil {
		clear(t.mem.iov[:]) // keep the poster's memory alive no longer
		batchPool.Put(t.mem)
		t.mem = nil
	}
	putBlock(t.owned)
	t.owned = nil
}

// txFailed stops sending after an error of the link. The receiver will meet
// the same end and reads first what the peer still said.
func (st *stream) txFailed() {
	st.tx.stopped = true
	if err := st.tx.err; endOfPeer(err) {
		st.ensureReceiver()
	} else {
		go st.abort(err, true) // the receiver would never hear of it, nor would the peer
	}
}

// endOfPeer reports whether a write failed because the connection has ended, which reading
// meets as well.
func endOfPeer(err error) bool {
	return errors.Is(err, errno.EPIPE) || errors.Is(err, errno.ECONNRESET) || errors.Is(err, syscall.ETIMEDOUT) ||
		errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed)
}

// sendError is how the link failed under a send. A reset is told once, to whoever
// comes first; those who read find the end of the stream then. EPIPE is no news
// to them: our data met a peer that had ended the stream.
func (st *stream) sendError() error {
	st.qp.sq.mu.Lock()
	defer st.qp.sq.mu.Unlock()
	if !st.tx.stopped || errors.Is(st.tx.err, errno.EPIPE) {
		return nil
	}
	return st.tx.err
}

// stopTransmit drops the batch; the requests in it are flushed by qp.fail.
func (st *stream) stopTransmit() {
	t := &st.tx
	t.stopped = true
	t.expectNoMore()
	clear(t.out)
	t.out = t.out[:0]
	t.resp = nil
	t.msg = outgoing{}
	st.releaseBatch()
}

// maybeFinish shuts our direction down once a disconnect has been asked for
// and nothing is left to send.
func (st *stream) maybeFinish() {
	t := &st.tx
	if !t.draining || t.finished || t.stopped || t.flushing || t.rtr != rtrNone || len(t.out) > 0 || t.msg.active ||
		st.qp.sq.reqs.Len() > 0 || len(t.resp) > 0 {
		return
	}
	t.finished = true
	st.link.closeWrite()
}

// unsent is how many bytes this host has still to send, or 1 where it has only the end
// of the stream: in the send queue, in the batch, and in the link. It is 0
// when the stream has failed, as nothing is sent any more.
func (st *stream) unsent() (n int) {
	s := &st.qp.sq
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &st.tx
	if t.stopped {
		return 0
	}
	for i := range t.out {
		n += len(t.out[i].b)
	}
	if t.msg.active {
		n += t.msg.left
	}
	next := s.sent
	if t.msg.active && !t.msg.resp {
		next++ // counted as the message being framed
	}
	for i := next; i < s.reqs.Len(); i++ {
		n += max(s.at(i).size, 1)
	}
	if n == 0 && t.draining && !t.finished {
		n = 1
	}
	return n + st.link.unsent()
}

// ownOut copies what the batch still borrows from the poster, and the rest of a
// message that is half framed: either may be without the other.
func (st *stream) ownOut() {
	t := &st.tx
	n := 0
	for i := range t.out {
		if t.out[i].inline {
			n += len(t.out[i].b)
		}
	}
	if n > 0 {
		// The batch is empty before a post adds to it, or has been owned already;
		// so nothing is owned twice.
		t.owned = getBlock(n)
		b := (*t.owned)[:0]
		for i := range t.out {
			if c := &t.out[i]; c.inline {
				at := len(b)
				b = append(b, c.b...)
				c.b, c.inline = b[at:len(b):len(b)], false
			}
		}
	}
	if m := &t.msg; m.active && m.inline {
		rest := make([]byte, 0, m.left)
		for _, s := range m.segs {
			rest = append(rest, s.buf...)
		}
		m.segs, m.inline = []segment{{buf: rest[len(rest)-m.left:]}}, false
	}
}

// lastWords returns what must still be written so that a Terminate can be
// understood: the rest of the frame in progress, then the Terminate.
func (st *stream) lastWords(term *iwarpwire.TermMsg) []byte {
	t := &st.tx
	if term == nil || t.stopped || t.hold || t.finished {
		return nil
	}
	var words []byte
	if t.taken > t.boundary {
		need := int(t.ends[0] - t.taken)
		bufs, gated, ok := st.gather()
		for _, b := range bufs {
			if k := min(need, len(b)); ok {
				words = append(words, b[:k]...)
				need -= k
			}
		}
		if gated {
			st.qp.pd.gate.RUnlock()
		}
		if need > 0 {
			return nil
		}
	}
	return appendTerminate(words, term, st.crc)
}

// appendTerminate appends a whole FPDU that holds a Terminate message.
func appendTerminate(b []byte, term *iwarpwire.TermMsg, crc bool) []byte {
	start := len(b)
	b = append(b, make([]byte, 2+iwarpwire.UntaggedLen)...)
	h := iwarpwire.Header{Op: iwarpwire.Terminate, Last: true, QN: iwarpwire.QNTerminate, MSN: 1}
	h.Put(b[start+2:])
	b = term.Append(b)
	ulen := len(b) - start - 2
	binary.BigEndian.PutUint16(b[start:], uint16(ulen))
	b = append(b, make([]byte, iwarpwire.Pad(ulen))...)
	var sum [4]byte
	if crc {
		iwarpwire.PutCRC(sum[:], iwarpwire.CRC(0, b[start:]))
	}
	return append(b, sum[:]...)
}
