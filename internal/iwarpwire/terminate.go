package iwarpwire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// TermError is the reason in a Terminate message. It is an error, and errors.Is compares it
// by value with the variables below.
type TermError struct {
	Layer uint8 // Layer is 0 for RDMAP, 1 for DDP and 2 for MPA. It has 4 bits.
	Type  uint8 // Type has 4 bits.
	Code  uint8
}

// These are the reasons that IANA has registered (RFC 6580). They must not be changed.
var (
	// These are reasons of RDMAP (RFC 5040). A remote protection error concerns the source
	// of an RDMA Read, or an STag to invalidate.
	ErrLocalCatastrophic         = reason(0, 0, 0x00, "")
	ErrRemoteInvalidSTag         = reason(0, 1, 0x00, "invalid STag")
	ErrRemoteBounds              = reason(0, 1, 0x01, "base or bounds violation")
	ErrRemoteAccess              = reason(0, 1, 0x02, "access rights violation")
	ErrSTagNotAssociated         = reason(0, 1, 0x03, "STag not associated with this stream")
	ErrTOWrap                    = reason(0, 1, 0x04, "tagged offset wraps")
	ErrCannotInvalidate          = reason(0, 1, 0x09, "STag cannot be invalidated")
	ErrProtectionUnspecified     = reason(0, 1, 0xff, "unspecified")
	ErrRDMAPVersion              = reason(0, 2, 0x05, "unknown RDMAP version")
	ErrUnexpectedOpcode          = reason(0, 2, 0x06, "unexpected opcode")
	ErrCatastrophic              = reason(0, 2, 0x07, "catastrophic for this stream")
	ErrCatastrophicGlobal        = reason(0, 2, 0x08, "catastrophic for all streams")
	ErrOperationCannotInvalidate = reason(0, 2, 0x09, "STag cannot be invalidated")
	ErrOperationUnspecified      = reason(0, 2, 0xff, "unspecified")

	// These are reasons of DDP (RFC 5041): tagged and untagged buffer errors.
	ErrDDPCatastrophic     = reason(1, 0, 0x00, "")
	ErrInvalidSTag         = reason(1, 1, 0x00, "invalid STag")
	ErrBaseBounds          = reason(1, 1, 0x01, "base or bounds violation")
	ErrTaggedNotAssociated = reason(1, 1, 0x02, "STag not associated with this stream")
	ErrTaggedWrap          = reason(1, 1, 0x03, "tagged offset wraps")
	ErrTaggedVersion       = reason(1, 1, 0x04, "unknown DDP version")
	ErrBadQN               = reason(1, 2, 0x01, "invalid queue number")
	ErrNoBuffer            = reason(1, 2, 0x02, "no buffer for the message")
	ErrMSNRange            = reason(1, 2, 0x03, "message sequence number out of range")
	ErrBadMO               = reason(1, 2, 0x04, "invalid message offset")
	ErrTooLong             = reason(1, 2, 0x05, "message too long for its buffer")
	ErrUntaggedVersion     = reason(1, 2, 0x06, "unknown DDP version")

	// These are reasons of MPA (RFC 5044; the last three are of RFC 6581).
	ErrTCPLost              = reason(2, 0, 0x01, "TCP connection lost")
	ErrBadCRC               = reason(2, 0, 0x02, "CRC mismatch")
	ErrMarker               = reason(2, 0, 0x03, "marker and ULPDU length do not match")
	ErrBadStart             = reason(2, 0, 0x04, "invalid Request or Reply frame")
	ErrMPALocalCatastrophic = reason(2, 0, 0x05, "local catastrophic")
	ErrInsufficientIRD      = reason(2, 0, 0x06, "insufficient IRD")
	ErrNoRTR                = reason(2, 0, 0x07, "no matching RTR")
)

// names is filled while the variables above are made. Later it is only read.
var names = map[TermError]string{}

func reason(layer, typ, code uint8, name string) *TermError {
	e := &TermError{layer, typ, code}
	names[*e] = name
	return e
}

// layers has the names of the layers, and of the types of error of each layer.
var layers = [...]struct {
	name  string
	types []string
}{
	{"RDMAP", []string{"local catastrophic error", "remote protection error", "remote operation error"}},
	{"DDP", []string{"local catastrophic error", "tagged buffer error", "untagged buffer error"}},
	{"MPA", []string{"error"}},
}

// Error describes the reason if it is a registered one.
func (e TermError) Error() string {
	name, ok := e.name()
	if !ok {
		return fmt.Sprintf("terminate: unknown error, layer %d type %d code 0x%02x", e.Layer, e.Type, e.Code)
	}
	s := layers[e.Layer].name + " " + layers[e.Layer].types[e.Type]
	if name != "" {
		s += ": " + name
	}
	return s
}

// name returns the registered name. A local catastrophic error of RDMAP or DDP may have any
// code.
func (e TermError) name() (string, bool) {
	if e.Layer <= 1 && e.Type == 0 {
		e.Code = 0
	}
	name, ok := names[e]
	return name, ok
}

func registered(e TermError) bool {
	_, ok := e.name()
	return ok
}

// Is tells whether target, a TermError or *TermError, is the same reason.
func (e TermError) Is(target error) bool {
	switch t := target.(type) {
	case *TermError:
		return t != nil && *t == e
	case TermError:
		return t == e
	}
	return false
}

// ErrTerminateLen is the error of a Terminate message that ends before the headers that it
// announces.
var ErrTerminateLen = errors.New("rdmap: terminate message too short")

// These are the bits of the third octet of the Terminate header. They say which headers
// follow.
const (
	hdrSegLen = 0x80 // M
	hdrDDP    = 0x40 // D
	hdrRDMAP  = 0x20 // R

	// These are the bits of siw. It uses bit fields of a little-endian host, so nibbles
	// and bits of an octet are in reverse order.
	siwSegLen = 0x01
	siwDDP    = 0x02
	siwRDMAP  = 0x04

	termControlLen = 4
	segLenLen      = 2
)

// TermMsg is the payload of a Terminate message (RFC 5040, section 4.8): the reason, and
// the headers of the segment that has caused it, if there is one.
type TermMsg struct {
	Err       TermError
	HasSegLen bool
	SegLen    uint16 // SegLen is the length of the segment in bytes. siw does not count its headers.

	// DDP is the DDP header of the segment, or empty. It has TaggedLen or UntaggedLen
	// bytes, depending on its T bit.
	DDP []byte

	RDMAP []byte // RDMAP is the RDMAP header of ReadReqLen bytes, or empty.
	Siw   bool   // Siw is set if the message was in siw's bit order. Append does not use it.
}

// Append appends the payload to b, in the bit order of the RFC.
func (m *TermMsg) Append(b []byte) []byte {
	var hdr byte
	if m.HasSegLen {
		hdr |= hdrSegLen
	}
	if len(m.DDP) > 0 {
		hdr |= hdrDDP
	}
	if len(m.RDMAP) > 0 {
		hdr |= hdrRDMAP
	}
	b = append(b, m.Err.Layer<<4|m.Err.Type&0x0f, m.Err.Code, hdr, 0)
	if m.HasSegLen {
		b = binary.BigEndian.AppendUint16(b, m.SegLen)
	}
	b = append(b, m.DDP...)
	return append(b, m.RDMAP...)
}

// ParseTerminate decodes the payload of a Terminate message in either bit order. payload is
// everything behind the message's untagged header. DDP and RDMAP alias payload. Bytes
// behind the last header are ignored. The error is ErrTerminateLen. Err is valid in that
// case too, if payload is long enough for it.
//
// Without headers the bit order of the message is not visible. It is taken for siw's if
// only that order makes a registered reason. Three pairs of reasons cannot be distinguished
// then, and are decoded in the order of the RFC: ErrUnexpectedOpcode and
// ErrInsufficientIRD, ErrCatastrophic and ErrNoRTR, ErrRDMAPVersion and
// ErrMPALocalCatastrophic.
func ParseTerminate(payload []byte) (TermMsg, error) {
	if len(payload) < termControlLen {
		return TermMsg{}, fmt.Errorf("%w: %d bytes", ErrTerminateLen, len(payload))
	}
	high, low, hdr := payload[0]>>4, payload[0]&0x0f, payload[2]
	straight := TermError{Layer: high, Type: low, Code: payload[1]}
	swapped := TermError{Layer: low, Type: high, Code: payload[1]}

	m := TermMsg{Err: straight}
	segLen, ddp, rdmap := hdr&hdrSegLen != 0, hdr&hdrDDP != 0, hdr&hdrRDMAP != 0
	if !segLen && !ddp && !rdmap {
		segLen, ddp, rdmap = hdr&siwSegLen != 0, hdr&siwDDP != 0, hdr&siwRDMAP != 0
		m.Siw = segLen || ddp || rdmap || !registered(straight) && registered(swapped)
	}
	if m.Siw {
		m.Err = swapped
	}

	rest := payload[termControlLen:]
	if segLen {
		if len(rest) < segLenLen {
			return m, fmt.Errorf("%w: no segment length", ErrTerminateLen)
		}
		m.HasSegLen, m.SegLen = true, binary.BigEndian.Uint16(rest)
		rest = rest[segLenLen:]
	}
	if ddp {
		n := UntaggedLen
		if len(rest) > 0 && rest[0]&flagTagged != 0 {
			n = TaggedLen
		}
		if len(rest) < n {
			return m, fmt.Errorf("%w: DDP header cut off after %d bytes", ErrTerminateLen, len(rest))
		}
		m.DDP, rest = rest[:n:n], rest[n:]
	}
	if rdmap {
		if len(rest) < ReadReqLen {
			return m, fmt.Errorf("%w: RDMAP header cut off after %d bytes", ErrTerminateLen, len(rest))
		}
		m.RDMAP = rest[:ReadReqLen:ReadReqLen]
	}
	return m, nil
}
