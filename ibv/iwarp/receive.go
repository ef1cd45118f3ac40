package iwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// The way in. Everything here runs in the goroutine that holds the receiving
// role.
//
//  1. pump reads from the link: into the staging buffer, or, once a header
//     has told where a payload belongs, straight into that memory, with the
//     trailer and the next header behind it in staging.
//  2. parse takes frames apart as far as the bytes go: header checks and
//     placement (place.go), payload, trailer with the CRC.
//  3. A message that is complete is delivered: completions, Read Responses.
//
// A check that fails ends the stream with a Terminate naming layer and code.
type receiver struct {
	pump func(uintptr) bool

	staging *[]byte // nil while empty
	r, w    int     // staging[r:w] is to be parsed

	// The frame in progress.
	inFrame bool
	ulen    int
	hdr     iwarpwire.Header
	raw     [iwarpwire.UntaggedLen]byte // its header as received, for a Terminate
	left    int                         // payload bytes to come
	crc     uint32
	target  target

	seen    bool // the peer's first frame has come
	eatSend bool // the first Send is an RTR and goes to no receive
	eatRead bool // the first Read Response answers our RTR

	// Untagged messages.
	sendMSN uint32 // messages begun on queue 0
	readMSN uint32 // and on queue 1
	cur     recvReq
	inMsg   bool // cur is being filled
	filled  int  // bytes of cur so far

	inWrite bool // the last RDMA Write lacks its end

	// The Read Response in progress.
	readDone int // bytes placed of the oldest outstanding read

	ctl [iwarpwire.ReadRequestLen + 64]byte // payload of Read Request or Terminate
	iov [4][]byte
}

// target is where the payload of the frame in progress goes.
type target struct {
	segs []segment // the memory
	off  int       // bytes of segs[0] that are filled
	one  [1]segment
}

// pumpReads is how often pump reads at most: a peer that never pauses must not
// keep its caller from a deadline, or from an interruption.
const pumpReads = 64

// pump reads until the link is empty (then it asks to be called again), the
// receiver has what it came for, or it is time for its caller to look around.
func (st *stream) pump(at uintptr) bool {
	for range pumpReads {
		if !st.parse() || st.stop() || st.closing.Load() {
			return true
		}
		n, wait, err := st.readSome(at)
		if wait {
			st.rx.rest()
			return st.once
		}
		if !st.arrived(n, err) {
			return true
		}
		if st.once {
			break
		}
	}
	st.parse()
	return true
}

// readSome reads once and notes what came. While the read goes straight into
// registered memory, and until the CRC has been computed there, the gate is held.
func (st *stream) readSome(at uintptr) (n int, wait bool, err error) {
	rx := &st.rx
	staging := *rx.stage()
	if !rx.inFrame || rx.left == 0 {
		n, wait, err = st.link.readv(at, append(rx.iov[:0], staging[rx.w:]))
		rx.w += n
		return n, wait, err
	}
	// parse has used up staging, so it is empty here.
	extra := staging
	if rx.left >= len(staging) {
		// In the middle of bulk data: fetch the next header too, but leave its
		// payload to be read where it belongs.
		extra = staging[:iwarpwire.Pad(rx.ulen)+4+2+iwarpwire.UntaggedLen]
	}
	bufs := rx.iov[:0]
	room := rx.left
	for i := range rx.target.segs {
		b := rx.target.segs[i].buf
		if i == 0 {
			b = b[rx.target.off:]
		}
		if len(b) > room {
			b = b[:room]
		}
		if len(b) == 0 {
			continue
		}
		if len(bufs) == len(rx.iov)-1 {
			break
		}
		bufs = append(bufs, b)
		room -= len(b)
	}
	if room == 0 {
		bufs = append(bufs, extra)
	}
	gate := &st.qp.pd.gate
	gate.RLock()
	defer gate.RUnlock()
	if !rx.valid() {
		return 0, false, errRegionGone
	}
	n, wait, err = st.link.readv(at, bufs)
	k := min(n, rx.left)
	rx.advance(k, st.crc)
	rx.w += n - k
	return n, wait, err
}

var errRegionGone = fmt.Errorf("%s: memory region closed while in use", Name)

// valid reports whether the target is still to be had: an RDMA Write goes by
// the key, other payload by the region. The caller holds the gate for reading.
func (rx *receiver) valid() bool {
	for i := range rx.target.segs {
		if m := rx.target.segs[i].mr; m != nil && (m.closed || m.dead && rx.hdr.Op == iwarpwire.Write) {
			return false
		}
	}
	return true
}

// arrived tells by the result of a read whether to go on.
func (st *stream) arrived(n int, err error) bool {
	if n == 0 {
		st.ending(err)
	}
	return n > 0
}

// ending meets the end of the link's bytes or its failure.
func (st *stream) ending(err error) {
	rx := &st.rx
	switch {
	case st.closing.Load():
	case errors.Is(err, io.EOF):
		if err := st.sendError(); err != nil {
			st.end(&net.OpError{Op: "write", Net: Name, Err: err}, nil, ibv.WCFlushErr)
			return
		}
		// RFC 5044: a FIN between messages is the orderly end.
		if rx.inFrame || rx.w > rx.r || rx.inMsg || rx.inWrite || rx.readDone > 0 {
			st.end(errPeerQuit, nil, ibv.WCFlushErr)
			return
		}
		st.end(nil, nil, ibv.WCFlushErr)
	case errors.Is(err, errRegionGone):
		st.end(errRegionGone, &iwarpwire.TermMsg{Err: *iwarpwire.ErrLocalCatastrophic}, ibv.WCFlushErr)
	default:
		st.end(&net.OpError{Op: "read", Net: Name, Err: err}, nil, ibv.WCFlushErr)
	}
}

// stage returns the staging buffer, with what is unparsed moved to its front.
func (rx *receiver) stage() *[]byte {
	if rx.staging == nil {
		rx.staging = stagingPool.Get().(*[]byte)
	}
	if rx.r > 0 {
		rx.w = copy(*rx.staging, (*rx.staging)[rx.r:rx.w])
		rx.r = 0
	}
	return rx.staging
}

// rest gives the staging buffer back if it is empty.
func (rx *receiver) rest() {
	if rx.r == rx.w && rx.staging != nil {
		stagingPool.Put(rx.staging)
		rx.staging, rx.r, rx.w = nil, 0, 0
		clear(rx.iov[:])
	}
}

// release drops what is unparsed.
func (rx *receiver) release() {
	rx.r = rx.w
	rx.rest()
}

// advance notes that k payload bytes have been placed in the target.
func (rx *receiver) advance(k int, crc bool) {
	rx.left -= k
	t := &rx.target
	for k > 0 {
		b := t.segs[0].buf[t.off:]
		n := min(k, len(b))
		if crc {
			rx.crc = iwarpwire.CRC(rx.crc, b[:n])
		}
		t.off += n
		k -= n
		if t.off == len(t.segs[0].buf) {
			t.segs, t.off = t.segs[1:], 0
		}
	}
}

// parse takes apart what staging holds. It reports whether to read on.
func (st *stream) parse() bool {
	rx := &st.rx
	for !st.ended {
		if !rx.inFrame {
			if rx.w-rx.r < 2 {
				return true
			}
			ok, more := st.beginReceive()
			if !ok {
				return false
			}
			if more {
				return true
			}
		}
		if rx.left > 0 && rx.w > rx.r && !st.placeStaged() {
			return false
		}
		if rx.left > 0 {
			return true
		}
		tail := iwarpwire.Pad(rx.ulen) + 4
		if rx.w-rx.r < tail {
			return true
		}
		b := (*rx.staging)[rx.r : rx.r+tail]
		if st.crc && iwarpwire.CRC(rx.crc, b[:tail-4]) != iwarpwire.GetCRC(b[tail-4:]) {
			st.violation(iwarpwire.ErrBadCRC, false)
			return false
		}
		rx.r += tail
		rx.inFrame = false
		if !rx.seen {
			st.firstFrame()
		}
		if !st.deliver() {
			return false
		}
	}
	return false
}

// beginReceive parses the header at the front of staging. more is set when it
// is not all there; ok is false when the stream has ended.
func (st *stream) beginReceive() (ok, more bool) {
	rx := &st.rx
	b := (*rx.staging)[rx.r:rx.w]
	ulen := int(binary.BigEndian.Uint16(b))
	b = b[2:]
	need := min(ulen, iwarpwire.UntaggedLen)
	if len(b) > 0 && b[0]&0x80 != 0 {
		need = min(ulen, iwarpwire.TaggedLen)
	}
	if len(b) < need || len(b) == 0 && ulen > 0 {
		return true, true
	}
	n, term := rx.hdr.Parse(b[:min(ulen, len(b))])
	rx.ulen = ulen
	clear(rx.raw[:])
	copy(rx.raw[:], b[:need])
	if term != nil {
		st.violation(term, false)
		return false, false
	}
	rx.left = ulen - n
	if st.crc {
		rx.crc = iwarpwire.CRC(0, (*rx.staging)[rx.r:rx.r+2+n])
	}
	if term := st.aim(); term != nil {
		st.refuse(term)
		return false, false
	}
	rx.r += 2 + n
	rx.inFrame = true
	return true, false
}

// placeStaged copies payload that was read together with its header.
func (st *stream) placeStaged() bool {
	rx := &st.rx
	gate := &st.qp.pd.gate
	gate.RLock()
	defer gate.RUnlock()
	if !rx.valid() {
		st.regionGone()
		return false
	}
	for rx.left > 0 && rx.w > rx.r {
		t := &rx.target
		n := copy(t.segs[0].buf[t.off:min(len(t.segs[0].buf), t.off+rx.left)], (*rx.staging)[rx.r:rx.w])
		rx.r += n
		if n == 0 {
			t.segs, t.off = t.segs[1:], 0
			continue
		}
		rx.advance(n, st.crc)
	}
	return true
}

// regionGone is ending for errRegionGone, called with the gate held: the end of
// the stream does not need the gate for itself, only lastWords might, and finds
// it shared.
func (st *stream) regionGone() { go st.abort(errRegionGone, true) }

// firstFrame lets a responder send: RFC 5044 makes it wait for the initiator's
// first FPDU.
func (st *stream) firstFrame() {
	st.rx.seen = true
	st.qp.sq.mu.Lock()
	st.tx.expectNoMore()
	if st.tx.hold {
		st.tx.hold = false
		st.push()
	}
	st.qp.sq.mu.Unlock()
}

// violation ends the stream because of what the peer sent. withReq adds the Read
// Request that was refused.
func (st *stream) violation(term *iwarpwire.TermError, withReq bool) {
	st.end(fmt.Errorf("%s: the peer broke the protocol: %w", Name, term), st.terminate(term, withReq), ibv.WCFlushErr)
}

// terminate makes the Terminate message for the frame in progress.
func (st *stream) terminate(term *iwarpwire.TermError, withReq bool) *iwarpwire.TermMsg {
	rx := &st.rx
	m := &iwarpwire.TermMsg{Err: *term}
	if term.Layer == 2 {
		return m // RFC 5044: nothing of the frame can be trusted
	}
	n := iwarpwire.UntaggedLen
	if rx.raw[0]&0x80 != 0 {
		n = iwarpwire.TaggedLen
	}
	if rx.ulen < n {
		return m
	}
	m.HasSegLen, m.SegLen, m.DDP = true, uint16(rx.ulen), rx.raw[:n]
	if withReq {
		m.RDMAP = rx.ctl[:iwarpwire.ReadRequestLen-iwarpwire.UntaggedLen]
	}
	return m
}
