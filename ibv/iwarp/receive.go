package iwarp

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file receives. Everything here runs in the goroutine that holds the receiving role.
//
//  1. pump reads from the link. It reads into the staging buffer. When a header has shown
//     where a payload belongs, it reads straight into that memory, and reads the trailer
//     and the next header behind it into staging.
//  2. parse decodes frames as far as the bytes go: the header is checked and its place
//     found (place.go), then the payload, and the trailer with the CRC.
//  3. A complete message is delivered: completions, Read Responses.
//
// A check that fails ends the stream with a Terminate, which names layer and code.
type receiver struct {
	pump func(uintptr) bool

	staging *[]byte // staging is nil while it is empty.
	r, w    int     // staging[r:w] must be parsed.

	// These fields describe the frame in progress.
	inFrame bool
	ulen    int
	hdr     iwarpwire.Header
	raw     [iwarpwire.UntaggedLen]byte // raw is its header as it was received, for a Terminate.
	left    int                         // left is how many payload bytes are missing.
	crc     uint32
	target  target

	seen    bool // seen is set when the peer's first frame has arrived.
	eatSend bool // eatSend is set if the first Send is an RTR, which uses no receive.
	eatRead bool // eatRead is set if the first Read Response answers this side's RTR.

	// These fields are for untagged messages.
	sendMSN  uint32 // sendMSN counts the messages begun on queue 0.
	readMSN  uint32 // readMSN counts the messages begun on queue 1.
	cur      recvReq
	inMsg    bool // inMsg is set while cur is being filled.
	dropping bool // the message in progress has no receive and is dropped
	filled   int  // filled is how many bytes of cur are filled.

	inWrite bool // inWrite is set while the end of an RDMA Write is missing.

	// This is for the Read Response in progress.
	readDone int // readDone is how many bytes of the oldest outstanding Read were placed.

	ctl [iwarpwire.ReadRequestLen + 64]byte // ctl is the payload of a Read Request or Terminate.
	iov [4][]byte
}

// target is the memory for the payload of the frame in progress.
type target struct {
	segs []segment // segs is the memory.
	off  int       // off is how many bytes of segs[0] are filled.
	one  [1]segment
}

// pumpReads is how often pump reads at most. A peer that never pauses must not keep the
// caller from a deadline or an interruption.
const pumpReads = 64

// pump reads until the link is empty, until the receiver is done, or until it has read
// often enough. If the link is empty, pump asks to be called again.
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

// readSome reads once and notes the result. It holds the gate while it reads straight into
// registered memory, and until the CRC of that memory is computed.
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
		// In the middle of bulk data the next header is read too. Its payload is left, so
		// that it can be read straight into its place.
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
	if err := rx.advance(k, st.crc); err != nil {
		return 0, false, err
	}
	rx.w += n - k
	return n, wait, err
}

var errRegionGone = fmt.Errorf("%s: memory region closed while in use", Name)

// valid reports whether the target may still be used. For an RDMA Write the key decides,
// and for other payload the region. The caller holds the gate for reading.
func (rx *receiver) valid() bool {
	for i := range rx.target.segs {
		if m := rx.target.segs[i].mr; m != nil && (m.closed || m.dead && rx.hdr.Op == iwarpwire.Write) {
			return false
		}
	}
	return true
}

// arrived decides from the result of a read whether to continue.
func (st *stream) arrived(n int, err error) bool {
	if n == 0 {
		st.ending(err)
	}
	return n > 0
}

// ending handles the end of the link's bytes, or the link's failure.
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
		st.peerFinished()
	case errors.Is(err, errRegionGone):
		st.end(errRegionGone, &iwarpwire.TermMsg{Err: *iwarpwire.ErrLocalCatastrophic}, ibv.WCFlushErr)
	case errors.Is(err, errno.EFAULT):
		st.end(fault.ErrMidway, &iwarpwire.TermMsg{Err: *iwarpwire.ErrLocalCatastrophic}, ibv.WCFlushErr)
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

// rest releases the staging buffer if it is empty.
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

// advance notes that k payload bytes have been placed in the target. The error is
// errno.EFAULT if the CRC cannot be computed because the target cannot be read any more.
func (rx *receiver) advance(k int, crc bool) (err error) {
	rx.left -= k
	t := &rx.target
	for k > 0 {
		b := t.segs[0].buf[t.off:]
		n := min(k, len(b))
		if crc {
			err = cmp.Or(err, fault.Run(b[:n], func() { rx.crc = iwarpwire.CRC(rx.crc, b[:n]) }))
		}
		t.off += n
		k -= n
		if t.off == len(t.segs[0].buf) {
			t.segs, t.off = t.segs[1:], 0
		}
	}
	return err
}

// parse decodes the bytes in staging. It reports whether to read on.
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

// beginReceive parses the header at the front of staging. more is set if bytes of it are
// missing. ok is false if the header breaks a rule, and the stream has been ended then, or if
// it begins a Send that is to wait for a receive.
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
	switch term := st.aim(); term {
	case nil:
	case errHold:
		return false, false // It is parsed again when there is a receive.
	default:
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
		st.targetGone(errRegionGone)
		return false
	}
	for rx.left > 0 && rx.w > rx.r {
		t := &rx.target
		n, err := fault.Copy(t.segs[0].buf[t.off:min(len(t.segs[0].buf), t.off+rx.left)], (*rx.staging)[rx.r:rx.w])
		rx.r += n
		if n == 0 && err == nil {
			t.segs, t.off = t.segs[1:], 0
			continue
		}
		if err = cmp.Or(err, rx.advance(n, st.crc)); err != nil {
			st.targetGone(fault.ErrMidway)
			return false
		}
	}
	return true
}

// targetGone ends the stream because the memory for a payload was taken away. Another
// goroutine does that, because the caller holds the role and the gate.
func (st *stream) targetGone(cause error) { go st.abort(cause, true) }

// firstFrame lets a responder send. RFC 5044 makes a responder wait for the initiator's
// first FPDU.
func (st *stream) firstFrame() {
	st.rx.seen = true
	st.qp.sq.mu.Lock()
	st.tx.expectNoMore()
	if st.tx.awaits {
		st.tx.awaits = false
		st.push(false)
	}
	st.qp.sq.mu.Unlock()
}

// violation ends the stream because the peer has broken a rule. If withReq is set, the
// Terminate has the Read Request that was refused.
func (st *stream) violation(term *iwarpwire.TermError, withReq bool) {
	st.end(fmt.Errorf("%s: the peer broke the protocol: %w", Name, term), st.terminate(term, withReq), ibv.WCFlushErr)
}

// terminate makes the Terminate message for the frame in progress.
func (st *stream) terminate(term *iwarpwire.TermError, withReq bool) *iwarpwire.TermMsg {
	rx := &st.rx
	m := &iwarpwire.TermMsg{Err: *term}
	if term.Layer == 2 {
		return m // RFC 5044: nothing in the frame can be trusted.
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
