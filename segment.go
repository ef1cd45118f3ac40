package rdmanet

import (
	"encoding/binary"
	"fmt"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// This file has the format of Data Transfer messages, [MS-SMBD] 2.2.3. Every message after
// the negotiation is one: a single RDMA Send that holds a header and at most one segment of
// a message of the upper layer. All fields are little-endian. reassemble.go has the rules
// for the sequence of messages, and transfer.go the header of large transfers.

const (
	// dataHeaderLen is the length of a message without payload.
	dataHeaderLen = 20

	// dataOffset is where the payload of this side begins: the first multiple of 8 behind
	// the header.
	dataOffset = 24
)

// These are the bits of segmentHeader.Flags. A receiver ignores unknown bits. All but
// flagResponseRequested are no part of SMB Direct: they are sent, and count, only if both
// ends have offered the feature that they belong to (docs/protocol.md).
const (
	// flagResponseRequested asks for any message as an answer, soon. It makes the message a
	// keep-alive probe.
	flagResponseRequested uint16 = 0x0001

	// flagFIN ends the sender's stream: no payload follows the payload of this message. It
	// belongs to featureFIN.
	flagFIN uint16 = 0x8000

	// flagTransfer is set if a transfer header lies between the header and the payload. It
	// belongs to featureTransfer.
	flagTransfer uint16 = 0x4000

	// flagExpedited marks a message of the upper layer that was sent ahead of others. It is
	// set in each of its segments. It belongs to featureMessages.
	flagExpedited uint16 = 0x2000

	// flagPartial marks a piece of a message that is not the last one. It is set in each of
	// its segments. It belongs to featureMessages.
	flagPartial uint16 = 0x1000

	// flagEmpty makes a Data Transfer message without payload an empty message of the upper
	// layer. It belongs to featureMessages.
	flagEmpty uint16 = 0x0800

	// flagNoResponse is set if the sender needs no credits soon. It belongs to
	// featureMessages.
	flagNoResponse uint16 = 0x0400

	// flagLarge is set if the receives that the message grants are large, see large.go. It
	// belongs to featureLarge.
	flagLarge uint16 = 0x0200

	// flagWantsCredits is set if the sender has payload that waits for credits. It belongs to
	// featureMessages.
	flagWantsCredits uint16 = 0x0100

	// flagEndSeen is set if the sender has found the end of the receiver's direction, behind
	// everything that the receiver has sent. It belongs to featureHold.
	flagEndSeen uint16 = 0x0080
)

// ErrMessageTooLong is returned for a message that is longer than the peer reassembles
// ([Info].MaxFragmentedSize), where no large transfer carries it. A message of exactly that
// length is sent. Nothing of a message that is too long was sent, and the connection stays
// usable. The error matches syscall.EMSGSIZE.
var ErrMessageTooLong = fmt.Errorf("rdmanet: longer than the peer takes in segments (Info.MaxFragmentedSize): %w", errno.EMSGSIZE)

// protocolError names the field of a received message that broke a rule. The connection
// cannot go on after it. Each value is made once and compared by identity.
type protocolError struct {
	field string // field is spelled as in [MS-SMBD].
	rule  string
}

func (e *protocolError) Error() string { return "smb direct: " + e.field + ": " + e.rule }

var (
	errSegmentShort     = &protocolError{"Data Transfer message", "shorter than its header"}
	errNoCredit         = &protocolError{"Data Transfer message", "sent without a credit"}
	errCreditsRequested = &protocolError{"CreditsRequested", "zero"}
	errGrantRuns        = &protocolError{"CreditsGranted", "too many changes between normal and large receives"}
	errOffsetAlignment  = &protocolError{"DataOffset", "not a multiple of 8"}
	errOffsetInHeader   = &protocolError{"DataOffset", "payload overlaps the header"}
	errDataBeyondEnd    = &protocolError{"DataLength", "payload ends behind the end of the message"}
)

// segmentHeader is the header of a Data Transfer message, [MS-SMBD] 2.2.3.
type segmentHeader struct {
	// CreditsRequested is how many credits the sender would like to hold in all, at least
	// 1.
	CreditsRequested uint16

	// CreditsGranted is how many receives were newly posted. The peer adds it to its
	// credits.
	CreditsGranted uint16

	Flags uint16

	// Remaining is RemainingDataLength: how many bytes of the message follow this segment.
	Remaining uint32

	// DataOffset is where the payload begins, from the first byte of the header. It may be
	// 0 without payload.
	DataOffset uint32

	// DataLength is the length of the payload in bytes.
	DataLength uint32
}

// put writes the header to the front of b, and in front of a payload the padding up to
// DataOffset. b must have room for it. put returns the number of bytes written:
// dataHeaderLen, or DataOffset, where the payload belongs.
func (h *segmentHeader) put(b []byte) int {
	_ = b[dataHeaderLen-1]
	le := binary.LittleEndian
	le.PutUint16(b[0:], h.CreditsRequested)
	le.PutUint16(b[2:], h.CreditsGranted)
	le.PutUint16(b[4:], h.Flags)
	le.PutUint16(b[6:], 0) // This field is reserved.
	le.PutUint32(b[8:], h.Remaining)
	le.PutUint32(b[12:], h.DataOffset)
	le.PutUint32(b[16:], h.DataLength)
	if h.DataLength == 0 {
		// A message without payload has no padding either, [MS-SMBD] 3.1.5.4.
		return dataHeaderLen
	}
	clear(b[dataHeaderLen:h.DataOffset])
	return int(h.DataOffset)
}

// parse reads the header of b, which is exactly one received message, and checks what
// [MS-SMBD] 3.1.5.8 requires of a single message. The reassembler checks what it requires
// of a sequence. The payload aliases b.
//
// As in the specification, parse accepts bytes behind the payload, a non-zero Reserved
// field or padding, unknown flags, and an aligned DataOffset inside a message without
// payload. A payload must not overlap the header; the specification does not say so, and
// bounds DataOffset only from above.
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

	end := uint64(h.DataOffset) + uint64(h.DataLength) // The sum cannot overflow.
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

// segmentData returns how many bytes of payload the next segment carries of a message with
// left bytes unsent. maxSend is the most bytes of a Send. Each segment but the last one is
// full, [MS-SMBD] 3.1.5.4.
func segmentData(left, maxSend int) int {
	return min(left, maxSend-dataOffset)
}

// checkMessageLength returns ErrMessageTooLong if a message of n bytes is longer than the
// peer reassembles, [MS-SMBD] 3.1.5.4.
func checkMessageLength(n int, maxFragmentedSend uint32) error {
	if uint64(n) > uint64(maxFragmentedSend) {
		return ErrMessageTooLong
	}
	return nil
}

// headerLen returns the length of the header in front of n bytes of payload.
func headerLen(n int) int {
	if n == 0 {
		return dataHeaderLen
	}
	return dataOffset
}
