package iwarp

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file sends. Everything here runs with qp.sq.mu held and never blocks.
//
//  1. push is called when there may be something to send. While a sender goroutine is at
//     work, push does nothing.
//  2. frame makes a batch of FPDUs from requests and Read Responses. Headers and small
//     payloads are in scratch memory. Large payloads stay where they are.
//  3. The batch is offered to the link. The bytes that the link takes complete requests
//     (account, then qp.reap).
//  4. If the link is full, a sender goroutine (flush) waits for room, and repeats 2 and 3
//     until nothing is left. Where the caller of a post waits for its data to be handed over,
//     that goroutine does it (inplace.go).
type transmitter struct {
	awaits   bool // awaits is set while this side must wait for the peer's first FPDU.
	rtr      rtrKind
	first    *time.Timer // first runs until the peer's first frame comes: see nudge.go.
	draining bool        // draining is set after closeSends and disconnect. Nothing more is posted.
	finished bool        // finished is set when this direction of the link is closed.
	stopped  bool        // stopped is set when nothing is sent any more.

	// announced is set when an event has told that nothing is sent any more, or the end of the
	// stream.
	announced bool

	faulted bool // faulted is set if the next request cannot be done. The stream is ending.

	// open is set if the stream has ended and the link has not, because it still tells what the
	// peer has acknowledged. abort closes it.
	open bool

	disconnected bool // disconnected is set after disconnect. A Send that finds no receive is dropped.
	withPeer     bool // withPeer is set if the end of the peer's direction ends the stream.

	// unreadable is set if memory that was to be sent could not be read. Nothing is sent any more.
	unreadable bool

	flushing bool // flushing is set while a sender goroutine writes to the link, or is to.
	inPlace  inPlace

	// The batch was framed, and the link has not taken all of it.
	out      []chunk
	mem      *batchMemory // mem is nil while there is no batch.
	used     int          // used is how many bytes of its scratch are used.
	owned    *[]byte      // owned has copies of inline data in out.
	ends     []uint64
	framed   uint64 // framed counts the bytes framed on this connection.
	taken    uint64 // taken counts the bytes that the link has taken.
	boundary uint64 // boundary is the last end of an FPDU at or before taken.

	msg     outgoing   // msg is the message that is being framed.
	sendMSN uint32     // sendMSN counts the messages begun on queue 0.
	readMSN uint32     // readMSN counts the messages begun on queue 1.
	reads   int        // reads is how many RDMA Reads of this side have no complete response.
	resp    []response // resp has the Read Responses that the peer waits for, oldest first.
	turn    bool       // turn is set if a response goes before the next request.

	write, flush func(uintptr) bool
	n            int // n is the result of write.
	wait         bool
	err          error
}

const (
	batchChunks = 8       // batchChunks is how many elements a writev has.
	smallChunk  = 1 << 10 // smallChunk is the greatest length of payloads that are copied behind their header.
	scratchSize = smallChunk + 512

	// batchBytes is how many bytes a batch has, about. The peer can begin on a TCP segment
	// only when all of it has arrived, and segments have 64 KiB on loopback. With batches
	// of half that both ends work at the same time. With larger batches they work in turn.
	// Sends of 64 KiB run at 5.5 GB/s in batches of 32 KiB, and otherwise at 2.1.
	batchBytes = 32 << 10

	frameOverhead = 2 + iwarpwire.ReadRequestLen + 3 + 4 // frameOverhead is for length, header, padding and CRC at most.
)

// batchMemory is the memory of a batch until the link has taken the batch. An idle queue
// pair has none. With it an idle connection would have a tenth more memory.
type batchMemory struct {
	scratch [scratchSize]byte   // scratch has headers and small payloads.
	iov     [batchChunks][]byte // iov is for writev.
}

var batchPool = sync.Pool{New: func() any { return new(batchMemory) }}

type rtrKind uint8

const (
	rtrNone rtrKind = iota
	rtrWrite
	rtrRead
)

// chunk is a range of bytes that the link has to take.
type chunk struct {
	b      []byte
	mr     *mr  // mr is the region of the bytes, which may be taken away.
	inline bool // inline is set if it is memory of the post's caller, which may be used only until the post returns.
	resp   bool // resp is set for a Read Response, whose key must be valid too.
}

// gone reports whether the memory was taken away. The caller holds the gate for reading.
func (c *chunk) gone() bool { return c.mr.closed || c.resp && c.mr.dead }

// outgoing is the message that is being framed.
type outgoing struct {
	active bool
	resp   bool // resp is set for a Read Response. Otherwise the message is the request at sq.sent.
	inline bool
	hdr    iwarpwire.Header
	segs   []segment
	left   int
}

// response is a Read Response that the peer waits for.
type response struct {
	seg  [1]segment
	stag uint32
	to   uint64
}

// push sends what can be sent now. waits is set if the caller will flush if the link is full.
func (st *stream) push(waits bool) {
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
			if t.inPlace.parked = waits && t.inPlace.n > 0; !t.inPlace.parked {
				go st.flush()
			}
			break
		}
	}
	st.maybeFinish()
}

// writeSome offers the batch to the link once.
func (st *stream) writeSome(at uintptr) bool {
	t := &st.tx
	t.n, t.wait, t.err = 0, false, nil
	bufs, gated, err := st.gather()
	if gated {
		defer st.qp.pd.gate.RUnlock()
	}
	if err == nil {
		t.n, t.wait, err = st.link.writev(at, bufs)
	}
	if t.err = err; errors.Is(err, errno.EFAULT) {
		t.err = fault.ErrMidway
	}
	return true
}

// gather lists the batch for writev. If the batch has registered memory, the gate is held
// on return. The batch cannot be sent if a region was taken away from it, or if a part of it
// could not be read.
func (st *stream) gather() (bufs [][]byte, gated bool, err error) {
	t := &st.tx
	switch {
	case t.unreadable:
		return nil, false, errno.EFAULT
	case t.mem == nil:
		return nil, false, nil
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
				return nil, gated, errRegionGone
			}
		}
		bufs = append(bufs, c.b)
	}
	return bufs, gated, nil
}

// copyOut copies what is to be sent. The memory may be that of a mapped file that has been cut
// short.
func (t *transmitter) copyOut(dst, src []byte) {
	if _, err := fault.Copy(dst, src); err != nil {
		t.unreadable = true
	}
}

// appendOut is copyOut to the end of b.
func (t *transmitter) appendOut(b, src []byte) []byte {
	at := len(b)
	b = slices.Grow(b, len(src))[:at+len(src)]
	t.copyOut(b[at:], src)
	return b
}

// flush runs in the sender goroutine.
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

// flushSome continues where push has stopped. It returns false to be called again when the
// link has room.
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
			if t.inPlace.byCaller && t.inPlace.n == 0 {
				st.flusherLeaves()
				go st.flush() // The caller does not wait for what others have posted.
				return true
			}
			return false
		}
	}
	st.flusherLeaves()
	t.flushing = false
	if !t.stopped {
		st.maybeFinish()
	}
	return true
}

// account notes that the link has taken n bytes of the batch.
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
			r.done = true // The link has the data, so the buffer is the caller's again.
		}
		if r.lent {
			r.lent = false
			t.inPlace.free1()
		}
	}
	st.qp.reap(nil)
}

// trim frees the lists of a batch while there is no batch.
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
		clear(t.mem.iov[:]) // The memory of the post's caller is not referred to any more.
		batchPool.Put(t.mem)
		t.mem = nil
	}
	putBlock(t.owned)
	t.owned = nil
}

// txFailed stops sending after an error of the link. The receiver will find the same end.
// Before that it reads what the peer has sent. It cannot while a Send waits for a receive.
func (st *stream) txFailed() {
	st.dropBatch()
	st.tx.flushing = false
	if errors.Is(st.tx.err, errno.EFAULT) {
		st.tx.unreadable = true // The link has found that, and the post in progress has to tell.
	}
	switch err := st.tx.err; {
	case !endOfPeer(err):
		go st.abort(err, true) // Neither the receiver nor the peer would notice it otherwise.
	case st.half.Load() && errors.Is(err, errno.EPIPE):
		go st.abort(nil, false) // The peer has closed behind its last word, and nobody receives that.
	case st.half.Load():
		go st.abort(&net.OpError{Op: "write", Net: Name, Err: err}, false)
	case st.holding.Load():
		st.sendsFailed()
	default:
		st.ensureReceiver()
	}
}

// sendsFailed tells that nothing is sent any more, before the receiver finds the end.
func (st *stream) sendsFailed() {
	t := &st.tx
	if !t.announced {
		t.announced = true
		go st.notify(ibv.Event{Kind: ibv.EventSQError, Err: t.err})
		t.inPlace.free.Broadcast()
	}
}

// endOfPeer reports whether a write failed because the connection has ended. A read finds
// that end too.
func endOfPeer(err error) bool {
	return errors.Is(err, errno.EPIPE) || errors.Is(err, errno.ECONNRESET) || errno.HostSilent(err) ||
		errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed)
}

// sendError returns the error of the link that a write has found. A reset is reported once,
// to the first call, and a read finds the end of the stream then. So the error of the write
// is kept. EPIPE is not kept: it means that this side sent data after the peer had ended
// the stream, which a read finds too.
func (st *stream) sendError() error {
	st.qp.sq.mu.Lock()
	defer st.qp.sq.mu.Unlock()
	if !st.tx.stopped || errors.Is(st.tx.err, errno.EPIPE) {
		return nil
	}
	return st.tx.err
}

// stopTransmit drops the batch. qp.fail flushes its requests.
func (st *stream) stopTransmit() {
	t := &st.tx
	st.dropBatch()
	t.announced = true
	t.inPlace.free.Broadcast()
	if t.inPlace.byCaller {
		st.direct.interruptWrite()
	}
	t.expectNoMore()
	t.resp = nil
}

// dropBatch stops sending. The memory of callers is not referred to any more.
func (st *stream) dropBatch() {
	t := &st.tx
	t.stopped = true
	clear(t.out)
	t.out = t.out[:0]
	t.msg = outgoing{}
	st.releaseBatch()
	t.inPlace.stop()
}

// maybeFinish closes this direction if a disconnect was requested and nothing is left to
// send.
func (st *stream) maybeFinish() {
	t := &st.tx
	if !t.draining || t.finished || t.stopped || t.flushing || t.rtr != rtrNone || len(t.out) > 0 || t.msg.active ||
		st.qp.sq.reqs.Len() > 0 || len(t.resp) > 0 {
		return
	}
	if st.link.closeWrite() != nil {
		t.err = errno.ECONNRESET // The connection has gone, which the receiver may not have found.
		st.txFailed()
		return
	}
	t.finished = true
	if st.half.Load() {
		go st.conclude() // Both directions have ended.
	}
}

// unfinished reports whether this direction was not ended in an orderly way.
func (st *stream) unfinished() bool {
	st.qp.sq.mu.Lock()
	defer st.qp.sq.mu.Unlock()
	return !st.tx.finished
}

// unsent returns how many bytes this host has still to send: in the send queue, in the
// batch and in the link. It returns 1 if only the end of the stream is left. It returns 0
// when the link is closed, or nothing is sent any more.
func (st *stream) unsent() (n int) {
	s := &st.qp.sq
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &st.tx
	switch {
	case t.open:
		return st.link.unsent()
	case t.stopped:
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
		next++ // It is counted as the message that is being framed.
	}
	for i := next; i < s.reqs.Len(); i++ {
		n += max(s.at(i).size, 1)
	}
	if n == 0 && t.draining && !t.finished {
		n = 1
	}
	return n + st.link.unsent()
}

// ownOut copies the inline data of the post's caller that is in the batch, and the rest of
// a message of which a part was framed. Either may exist without the other.
func (st *stream) ownOut() {
	t := &st.tx
	n := 0
	for i := range t.out {
		if t.out[i].inline {
			n += len(t.out[i].b)
		}
	}
	if n > 0 {
		// Data that was posted in place may be copied after some was copied before. That block
		// is left to the garbage collector.
		t.owned = getBlock(n)
		b := (*t.owned)[:0]
		for i := range t.out {
			if c := &t.out[i]; c.inline {
				at := len(b)
				b = t.appendOut(b, c.b)
				c.b, c.inline = b[at:len(b):len(b)], false
			}
		}
	}
	if m := &t.msg; m.active && m.inline {
		rest := make([]byte, 0, m.left)
		for _, s := range m.segs {
			rest = t.appendOut(rest, s.buf)
		}
		m.segs, m.inline = []segment{{buf: rest[len(rest)-m.left:]}}, false
	}
}

// lastWords returns the bytes that must be sent for a Terminate to be understood: the rest
// of the frame in progress, then the Terminate.
func (st *stream) lastWords(term *iwarpwire.TermMsg) []byte {
	t := &st.tx
	if term == nil || t.stopped || t.awaits || t.finished {
		return nil
	}
	var words []byte
	if t.taken > t.boundary {
		need := int(t.ends[0] - t.taken)
		bufs, gated, err := st.gather()
		words = make([]byte, 0, need)
		for _, b := range bufs {
			words = t.appendOut(words, b[:min(need-len(words), len(b))])
		}
		if gated {
			st.qp.pd.gate.RUnlock()
		}
		if err != nil || t.unreadable || len(words) < need {
			return nil
		}
	}
	return appendTerminate(words, term, st.crc)
}

// appendTerminate appends a whole FPDU with a Terminate message.
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
