package iwarpwire

import (
	"encoding/binary"
	"fmt"
)

// Opcode is the RDMAP message that a DDP segment belongs to (RFC 5040).
type Opcode uint8

// These are the messages of RFC 5040. Those of RFC 7306 are unknown.
const (
	Write Opcode = iota
	ReadRequest
	ReadResponse
	Send
	SendInv
	SendSE
	SendSEInv
	Terminate
)

// messages has the properties of each opcode.
var messages = [...]struct {
	name   string
	tagged bool
	qn     uint32 // qn is the queue number of an untagged message.
}{
	Write:        {"RDMA Write", true, 0},
	ReadRequest:  {"RDMA Read Request", false, QNReadRequest},
	ReadResponse: {"RDMA Read Response", true, 0},
	Send:         {"Send", false, QNSend},
	SendInv:      {"Send with Invalidate", false, QNSend},
	SendSE:       {"Send with Solicited Event", false, QNSend},
	SendSEInv:    {"Send with Solicited Event and Invalidate", false, QNSend},
	Terminate:    {"Terminate", false, QNTerminate},
}

// String returns the message's name, for instance "RDMA Write".
func (o Opcode) String() string {
	if int(o) < len(messages) {
		return messages[o].name
	}
	return fmt.Sprintf("opcode %d", uint8(o))
}

// Invalidates tells whether the message names an STag to invalidate.
func (o Opcode) Invalidates() bool { return o == SendInv || o == SendSEInv }

// These are lengths of headers in bytes, from the first byte of the ULPDU.
const (
	TaggedLen      = 14
	UntaggedLen    = 18
	ReadRequestLen = UntaggedLen + ReadReqLen // ReadRequestLen is the exact length of a Read Request.
)

// These are the queue numbers of the untagged messages.
const (
	QNSend        = 0
	QNReadRequest = 1
	QNTerminate   = 2
)

const (
	ddpVersion   = 1
	rdmapVersion = 1

	// These are the bits of the first octet: T, L, four reserved bits, DDP version.
	flagTagged = 0x80
	flagLast   = 0x40
	ddpMask    = 0x03

	// These are the bits of the second octet: RDMAP version, two reserved bits, opcode.
	rdmapShift = 6
	opcodeMask = 0x0f
)

// Header is the DDP header, and the RDMAP control octet in it. Every ULPDU starts with one.
// The zero value is not valid, because Tagged must fit Op.
type Header struct {
	Tagged bool // Tagged is set for Write and ReadResponse.
	Last   bool // Last is set for the last segment of a message.
	Op     Opcode

	// STag and TO are used in tagged messages.
	STag uint32
	TO   uint64 // TO is the tagged offset of the segment's first payload byte.

	// The next fields are used in untagged messages.
	InvSTag uint32 // InvSTag is the receiver's STag that SendInv and SendSEInv invalidate.
	QN      uint32 // QN is the number of the queue.
	MSN     uint32 // MSN is the number of the message on that queue, from 1 on.
	MO      uint32 // MO is how many bytes of the message are in front of this segment.
}

// Put writes the header to the start of b. It returns the header's length, TaggedLen or
// UntaggedLen. It panics if b is shorter.
func (h *Header) Put(b []byte) int {
	b[0] = ddpVersion
	if h.Last {
		b[0] |= flagLast
	}
	b[1] = rdmapVersion<<rdmapShift | byte(h.Op)&opcodeMask
	if h.Tagged {
		b[0] |= flagTagged
		binary.BigEndian.PutUint32(b[2:], h.STag)
		binary.BigEndian.PutUint64(b[6:], h.TO)
		return TaggedLen
	}
	inv := uint32(0) // The field is reserved in messages that do not invalidate.
	if h.Op.Invalidates() {
		inv = h.InvSTag
	}
	binary.BigEndian.PutUint32(b[2:], inv)
	binary.BigEndian.PutUint32(b[6:], h.QN)
	binary.BigEndian.PutUint32(b[10:], h.MSN)
	binary.BigEndian.PutUint32(b[14:], h.MO)
	return UntaggedLen
}

// Parse decodes the header at the start of the ULPDU b, and returns its length. The rest of
// b is payload. If the peer must not send such a header, Parse returns the error to
// terminate the stream with, and does not change h:
//
//   - ErrTaggedVersion, ErrUntaggedVersion: DDP version other than 1
//   - ErrRDMAPVersion: RDMAP version other than 1
//   - ErrUnexpectedOpcode: unknown, or not sent by this buffer model
//   - ErrBadQN: not the queue of this opcode
//   - ErrMarker: the ULPDU ends inside the header
//
// Only a stream can check STag, offsets and message numbers.
func (h *Header) Parse(b []byte) (int, *TermError) {
	if len(b) < 2 {
		return 0, ErrMarker
	}
	tagged := b[0]&flagTagged != 0
	if b[0]&ddpMask != ddpVersion {
		if tagged {
			return 0, ErrTaggedVersion
		}
		return 0, ErrUntaggedVersion
	}
	if b[1]>>rdmapShift != rdmapVersion {
		return 0, ErrRDMAPVersion
	}
	op := Opcode(b[1] & opcodeMask)
	if int(op) >= len(messages) || messages[op].tagged != tagged {
		return 0, ErrUnexpectedOpcode
	}
	last := b[0]&flagLast != 0

	if tagged {
		if len(b) < TaggedLen {
			return 0, ErrMarker
		}
		*h = Header{
			Tagged: true, Last: last, Op: op,
			STag: binary.BigEndian.Uint32(b[2:]),
			TO:   binary.BigEndian.Uint64(b[6:]),
		}
		return TaggedLen, nil
	}

	if len(b) < UntaggedLen {
		return 0, ErrMarker
	}
	qn := binary.BigEndian.Uint32(b[6:])
	if qn != messages[op].qn {
		return 0, ErrBadQN
	}
	*h = Header{
		Last: last, Op: op,
		QN:  qn,
		MSN: binary.BigEndian.Uint32(b[10:]),
		MO:  binary.BigEndian.Uint32(b[14:]),
	}
	if op.Invalidates() {
		h.InvSTag = binary.BigEndian.Uint32(b[2:])
	}
	return UntaggedLen, nil
}
