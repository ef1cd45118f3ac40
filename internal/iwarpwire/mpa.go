package iwarpwire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
)

// These are sizes of MPA in bytes.
const (
	MaxPrivate = 512   // MaxPrivate is the limit of PD_Length, which also counts the control bytes of RFC 6581.
	StartLen   = 20    // StartLen is the length of a Start frame without its private data.
	MaxULPDU   = 65535 // MaxULPDU is the greatest value of the 16-bit length field.
	LengthLen  = 2     // LengthLen is the length of the length field in front of the ULPDU.
	CRCLen     = 4     // CRCLen is the length of the CRC field, which is always present.
)

// DepthNotNegotiated as IRD or ORD means that the depth is agreed by other means (RFC
// 6581).
const DepthNotNegotiated = 0x3fff

// These are the reasons for refusing a Start frame. The errors wrap them with the value
// that is wrong.
var (
	ErrStartLen   = errors.New("mpa: frame length does not match")
	ErrKey        = errors.New("mpa: wrong key, as from a peer that does not speak iWARP")
	ErrRevision   = errors.New("mpa: revision not supported")
	ErrPrivateLen = errors.New("mpa: too much private data")
	ErrControl    = errors.New("mpa: enhanced frame without its control bytes")
	ErrDepth      = errors.New("mpa: IRD or ORD does not fit in 14 bits")
)

const (
	keyRequest = "MPA ID Req Frame"
	keyReply   = "MPA ID Rep Frame"
	keyLen     = len(keyRequest)

	// These are the bits of the flags octet. The low four bits are reserved and not
	// checked: Linux siw announces a private extension in one of them.
	flagMarkers  = 0x80
	flagCRC      = 0x40
	flagReject   = 0x20
	flagEnhanced = 0x10

	// These are the two control words of RFC 6581. Each has two flags and a 14-bit depth.
	controlLen   = 4
	depthMask    = 0x3fff
	flagP2P      = 0x8000 // flagP2P is in the first word, with IRD.
	flagRTRSend  = 0x4000
	flagRTRWrite = 0x8000 // flagRTRWrite is in the second word, with ORD.
	flagRTRRead  = 0x4000
)

// Start is an MPA Request or Reply frame, the first frame of each side.
type Start struct {
	Reply    bool
	Markers  bool   // Markers is set if the sender wants to receive markers.
	CRC      bool   // CRC is set if the sender wants CRCs.
	Reject   bool   // Reject is set if the connection is refused. It is for a Reply only.
	Enhanced bool   // Enhanced is set if the frame has the fields below (RFC 6581). It needs revision 2.
	Rev      uint8  // Rev is the revision, 1 or 2.
	Private  []byte // Private is the private data of the program. In an Enhanced frame it follows the control bytes.

	// IRD and ORD are how many RDMA Reads the sender serves and issues at a time, or
	// DepthNotNegotiated.
	IRD, ORD uint16

	P2P      bool // P2P is peer-to-peer mode: the initiator sends a ready-to-receive message first.
	RTRSend  bool // RTRSend is set if that message may be a Send of length zero.
	RTRWrite bool // RTRWrite is set if it may be an RDMA Write of length zero.
	RTRRead  bool // RTRRead is set if it may be an RDMA Read of length zero.
}

// Append appends the encoded frame to b. On an error it returns b unchanged. The errors are
// ErrRevision, ErrPrivateLen and ErrDepth.
func (s *Start) Append(b []byte) ([]byte, error) {
	if s.Rev < 1 || s.Rev > 2 || s.Enhanced && s.Rev < 2 {
		return b, fmt.Errorf("%w: %d", ErrRevision, s.Rev)
	}
	if s.Enhanced && (s.IRD > depthMask || s.ORD > depthMask) {
		return b, fmt.Errorf("%w: IRD %d, ORD %d", ErrDepth, s.IRD, s.ORD)
	}
	privateLen := len(s.Private)
	if s.Enhanced {
		privateLen += controlLen
	}
	if privateLen > MaxPrivate {
		return b, fmt.Errorf("%w: %d bytes, the limit is %d", ErrPrivateLen, privateLen, MaxPrivate)
	}

	b = slices.Grow(b, len(keyRequest)+4+privateLen)
	if s.Reply {
		b = append(b, keyReply...)
	} else {
		b = append(b, keyRequest...)
	}
	flags := bit(s.Markers, flagMarkers) | bit(s.CRC, flagCRC) |
		bit(s.Reject && s.Reply, flagReject) | bit(s.Enhanced, flagEnhanced)
	b = append(b, byte(flags), s.Rev)
	b = binary.BigEndian.AppendUint16(b, uint16(privateLen))
	if s.Enhanced {
		b = binary.BigEndian.AppendUint16(b, s.IRD|bit(s.P2P, flagP2P)|bit(s.RTRSend, flagRTRSend))
		b = binary.BigEndian.AppendUint16(b, s.ORD|bit(s.RTRWrite, flagRTRWrite)|bit(s.RTRRead, flagRTRRead))
	}
	return append(b, s.Private...), nil
}

func bit(on bool, mask uint16) uint16 {
	if on {
		return mask
	}
	return 0
}

// ParseStartHeader checks the first StartLen bytes of a Start frame and returns
// how many bytes of private data follow, control bytes included. The errors are
// ErrStartLen, ErrKey, ErrRevision and ErrPrivateLen.
func ParseStartHeader(b []byte, reply bool) (privateLen int, err error) {
	if len(b) < StartLen {
		return 0, fmt.Errorf("%w: %d bytes, a header has %d", ErrStartLen, len(b), StartLen)
	}
	key := keyRequest
	if reply {
		key = keyReply
	}
	if string(b[:keyLen]) != key {
		return 0, fmt.Errorf("%w: %q", ErrKey, b[:keyLen])
	}
	if rev := b[17]; rev < 1 || rev > 2 {
		return 0, fmt.Errorf("%w: %d", ErrRevision, rev)
	}
	privateLen = int(binary.BigEndian.Uint16(b[18:]))
	if privateLen > MaxPrivate {
		return 0, fmt.Errorf("%w: %d bytes, the limit is %d", ErrPrivateLen, privateLen, MaxPrivate)
	}
	return privateLen, nil
}

// ParseStart decodes a whole Start frame. b has the header and the private data, and
// nothing else. Private aliases b. The errors are those of ParseStartHeader, and ErrControl
// for an enhanced frame that is too short for its control bytes.
func ParseStart(b []byte, reply bool) (Start, error) {
	privateLen, err := ParseStartHeader(b, reply)
	if err != nil {
		return Start{}, err
	}
	private := b[StartLen:]
	if len(private) != privateLen {
		return Start{}, fmt.Errorf("%w: %d bytes of private data, the header says %d", ErrStartLen, len(private), privateLen)
	}
	flags, rev := b[16], b[17]
	s := Start{
		Reply:    reply,
		Markers:  flags&flagMarkers != 0,
		CRC:      flags&flagCRC != 0,
		Reject:   reply && flags&flagReject != 0,
		Enhanced: rev >= 2 && flags&flagEnhanced != 0,
		Rev:      rev,
	}
	if s.Enhanced {
		if len(private) < controlLen {
			return Start{}, fmt.Errorf("%w: %d bytes", ErrControl, len(private))
		}
		word0, word1 := binary.BigEndian.Uint16(private), binary.BigEndian.Uint16(private[2:])
		s.IRD, s.ORD = word0&depthMask, word1&depthMask
		s.P2P, s.RTRSend = word0&flagP2P != 0, word0&flagRTRSend != 0
		s.RTRWrite, s.RTRRead = word1&flagRTRWrite != 0, word1&flagRTRRead != 0
		private = private[controlLen:]
	}
	s.Private = private
	return s, nil
}

// Pad returns how many zero bytes follow a ULPDU of that length. With them the length field
// and the ULPDU fill words of four bytes.
func Pad(ulpduLen int) int {
	return -(LengthLen + ulpduLen) & 3
}

// FPDULen returns the length on the wire of the FPDU with a ULPDU of that length, from the
// length field to the CRC.
func FPDULen(ulpduLen int) int {
	return LengthLen + ulpduLen + Pad(ulpduLen) + CRCLen
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC updates crc, which is 0 at first, with b. The CRC of an FPDU covers everything in
// front of it: length field, ULPDU and pad.
func CRC(crc uint32, b []byte) uint32 {
	return crc32.Update(crc, castagnoli, b)
}

// PutCRC writes crc into the first CRCLen bytes of b. If CRCs are not used, the field
// exists and has the value 0.
func PutCRC(b []byte, crc uint32) {
	binary.LittleEndian.PutUint32(b, crc)
}

// GetCRC reads the field that PutCRC writes.
func GetCRC(b []byte) uint32 {
	return binary.LittleEndian.Uint32(b)
}
