package rdmanet

import (
	"encoding/binary"
	"fmt"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// Every message after the negotiation is a Data Transfer message: one RDMA
// Send that holds a header and at most one segment of an upper-layer message.
// All fields are little-endian, [MS-SMBD] 2.2.3.
const (
	dataHeaderLen = 20 // a message without payload ends here
	dataOffset    = 24 // where our payload starts: the first multiple of 8 behind the header
)

// Bits of segmentHeader.Flags. A receiver ignores those it does not know.
const (
	// flagResponseRequested asks for any message in answer, soon: a
	// keep-alive probe.
	flagResponseRequested uint16 = 0x0001

	// flagFIN ends the sender's stream: no payload follows the one it came
	// with. It is not part of SMB Direct; it is sent, and heeded, only where
	// both ends offered featureFIN (see docs/protocol.md).
	flagFIN uint16 = 0x8000

	// flagTransfer says that a transfer header lies between the header and the
	// payload. It is not part of SMB Direct either; it is sent, and heeded, only
	// where both ends offered featureTransfer.
	flagTransfer uint16 = 0x4000

	// The following are not part of SMB Direct either; they are sent, and heeded,
	// only where both ends offered featureMessages. flagExpedited and flagPartial
	// are those of a message of the upper layer, the same in each of its segments.

	// flagExpedited marks a message that was sent ahead of others.
	flagExpedited uint16 = 0x2000

	// flagPartial says that more of the message comes in another one.
	flagPartial uint16 = 0x1000

	// flagEmpty makes what carries no payload a message of the upper layer.
	flagEmpty uint16 = 0x0800

	// flagNoResponse says that the sender needs no credits soon.
	flagNoResponse uint16 = 0x0400
)

// ErrMessageTooLong is returned for a message longer than the peer said that
// it reassembles ([Info].MaxFragmentedSize), where no large transfer carries it;
// one of exactly that length passes.
// Nothing of the message was sent and the connection stays usable. It matches
// syscall.EMSGSIZE.
var ErrMessageTooLong = fmt.Errorf("rdmanet: longer than the peer takes in segments (Info.MaxFragmentedSize): %w", errno.EMSGSIZE)

// A protocolError says which field of a received message broke which rule.
// The connection cannot go on after one. They are made once and compared by
// identity.
type protocolError struct {
	field string // as [MS-SMBD] spells it
	rule  string
}

func (e *protocolError) Error() string { return "smb direct: " + e.field + ": " + e.rule }

var (
	errSegmentShort     = &protocolError{"Data Transfer message", "shorter than its header"}
	errNoCredit         = &protocolError{"Data Transfer message", "sent without a credit"}
	errCreditsRequested = &protocolError{"CreditsRequested", "zero"}
	errOffsetAlignment  = &protocolError{"DataOffset", "not a multiple of 8"}
	errOffsetInHeader   = &protocolError{"DataOffset", "payload overlaps the header"}
	errDataBeyondEnd    = &protocolError{"DataLength", "payload ends behind the end of the message"}
)

// segmentHeader is the header of a Data Transfer message, [MS-SMBD] 2.2.3.
type segmentHeader struct {
	CreditsRequested uint16 // total that the sender would like to hold, at least 1
	CreditsGranted   uint16 // receives newly posted, to be added
	Flags            uint16
	Remaining        uint32 // RemainingDataLength: bytes of the message still to come after this segment
	DataOffset       uint32 // from the first byte of the header; 0 without payload
	DataLength       uint32 // bytes of payload
}

// put writes the header, and before a payload the padding up to DataOffset,
// to the front of b, which must have room for it. It returns the bytes
// written: dataHeaderLen, or DataOffset, where the payload belongs.
func (h *segmentHeader) put(b []byte) int {
	_ = b[dataHeaderLen-1]
	le := binary.LittleEndian
	le.PutUint16(b[0:], h.CreditsRequested)
	le.PutUint16(b[2:], h.CreditsGranted)
	le.PutUint16(b[4:], h.Flags)
	le.PutUint16(b[6:], 0) // Reserved
	le.PutUint32(b[8:], h.Remaining)
	le.PutUint32(b[12:], h.DataOffset)
	le.PutUint32(b[16:], h.DataLength)
	if h.DataLength == 0 {
		return dataHeaderLen // neither padding nor buffer, [MS-SMBD] 3.1.5.4
	}
	clear(b[dataHeaderLen:h.DataOffset])
	return int(h.DataOffset)
}

// parse reads the header of b, exactly one received message, and checks what
// [MS-SMBD] 3.1.5.8 asks of a single message; what it asks of a sequence is
// checked by reassembler. The payload aliases b.
//
// Tolerated, as there: bytes behind the payload, a non-zero Reserved field or
// padding, unknown flags, and an aligned DataOffset inside a message without
// payload. That a payload must not overlap the header is our own reading: the
// text bounds DataOffset only from above.
func (h *segmentHeader) parse(b []byte) (payload []byte, err error) {
	if len(b) < dataHeaderLen {
		return nil, errSegmentShort
	}
	le := binary.LittleEndian
	h.CreditsRequested = le.Uint16(b[0:])
	h.CreditsGranted = le.Uint16(b[2:])
	h.Flags = le.Uint16(b[4:])
	h.Remaining = le.Uint32(b[8:])
	h.DataOffset = le.Uint32(b[12:])
	h.DataLength = le.Uint32(b[16:])

	end := uint64(h.DataOffset) + uint64(h.DataLength) // cannot wrap
	switch {
	case h.CreditsRequested == 0:
		return nil, errCreditsRequested
	case h.DataOffset%8 != 0:
		return nil, errOffsetAlignment
	case end > uint64(len(b)):
		return nil, errDataBeyondEnd
	case h.DataLength == 0:
		return nil, nil
	case h.DataOffset < dataHeaderLen:
		return nil, errOffsetInHeader
	}
	return b[h.DataOffset:end:end], nil
}

// segmentData returns how many payload bytes the next segment carries of a
// message with left bytes unsent, when a Send may have maxSend bytes:
// all that fit behind dataOffset, [MS-SMBD] 3.1.5.4.
func segmentData(left, maxSend int) int {
	return min(left, maxSend-dataOffset)
}

// checkMessageLength returns ErrMessageTooLong when a message of n bytes is
// more than the peer reassembles, [MS-SMBD] 3.1.5.4.
func checkMessageLength(n int, maxFragmentedSend uint32) error {
	if uint64(n) > uint64(maxFragmentedSend) {
		return ErrMessageTooLong
	}
	return nil
}
