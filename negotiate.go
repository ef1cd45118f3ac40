package rdmanet

import (
	"encoding/binary"
	"fmt"
)

// This file has the negotiation messages and their rules. The first message of the active
// side is a Negotiate Request, and the first one of the passive side a Negotiate Response.
// All fields are little-endian, [MS-SMBD] 2.2.1 and 2.2.2. Only the beginning of a longer
// message counts, because the text asks for "at least" these lengths. setup_messages.go
// sends the messages, or they travel in the private data (privatedata.go).

const (
	negotiateRequestLen  = 20
	negotiateResponseLen = 32

	// smbdVersion is version 1.0, the only version that exists.
	smbdVersion uint16 = 0x0100
)

// These sizes are what the specification requires of every peer, and where this side stops.
const (
	// minReceiveSize is the least MaxReceiveSize in bytes.
	minReceiveSize = 128

	// minFragmentedSize is the least MaxFragmentedSize in bytes.
	minFragmentedSize = 128 * 1024

	// sizeCeiling bounds every size in bytes. It keeps sizes far from the largest int32 and
	// uint32.
	sizeCeiling = 1 << 30
)

// These are the NTSTATUS codes that this side sends in a Negotiate Response.
const (
	statusOK                    uint32 = 0
	statusInsufficientResources uint32 = 0xC000009A // No receive could be posted.
	statusNotSupported          uint32 = 0xC00000BB // There is no common version.
)

var (
	errRequestShort    = &protocolError{"Negotiate Request", "too short"}
	errResponseShort   = &protocolError{"Negotiate Response", "too short"}
	errVersion         = &protocolError{"MinVersion, MaxVersion", "version 1.0 not among those offered"}
	errNegotiated      = &protocolError{"NegotiatedVersion", "not 1.0"}
	errCreditsGranted  = &protocolError{"CreditsGranted", "zero"}
	errReceiveSize     = &protocolError{"MaxReceiveSize", "less than 128"}
	errFragmentedSize  = &protocolError{"MaxFragmentedSize", "less than 131072"}
	errPreferredToSend = &protocolError{"PreferredSendSize", "more than the MaxReceiveSize offered"}
)

// statusError is the reason that the passive side gave for a refusal.
type statusError uint32

func (e statusError) Error() string {
	name, advice := "status", ""
	switch uint32(e) {
	case statusNotSupported:
		name = "STATUS_NOT_SUPPORTED"
	case statusInsufficientResources:
		name, advice = "STATUS_INSUFFICIENT_RESOURCES", "; it lacks memory or queues, which a limit on locked memory may be the cause of"
	}
	return fmt.Sprintf("smb direct: negotiation refused by the peer: %s (%#08x)%s", name, uint32(e), advice)
}

// negotiateRequest is the wire form of [MS-SMBD] 2.2.1 without Reserved.
type negotiateRequest struct {
	MinVersion        uint16
	MaxVersion        uint16
	CreditsRequested  uint16
	PreferredSendSize uint32
	MaxReceiveSize    uint32
	MaxFragmentedSize uint32
}

// put writes the message to the front of b and returns its length.
func (m *negotiateRequest) put(b []byte) int {
	_ = b[negotiateRequestLen-1]
	le := binary.LittleEndian
	le.PutUint16(b[0:], m.MinVersion)
	le.PutUint16(b[2:], m.MaxVersion)
	le.PutUint16(b[4:], 0) // This field is reserved.
	le.PutUint16(b[6:], m.CreditsRequested)
	le.PutUint32(b[8:], m.PreferredSendSize)
	le.PutUint32(b[12:], m.MaxReceiveSize)
	le.PutUint32(b[16:], m.MaxFragmentedSize)
	return negotiateRequestLen
}

// parse reads a received message. It checks only the length.
func (m *negotiateRequest) parse(b []byte) error {
	if len(b) < negotiateRequestLen {
		return errRequestShort
	}
	le := binary.LittleEndian
	m.MinVersion = le.Uint16(b[0:])
	m.MaxVersion = le.Uint16(b[2:])
	m.CreditsRequested = le.Uint16(b[6:])
	m.PreferredSendSize = le.Uint32(b[8:])
	m.MaxReceiveSize = le.Uint32(b[12:])
	m.MaxFragmentedSize = le.Uint32(b[16:])
	return nil
}

// negotiateResponse is the wire form of [MS-SMBD] 2.2.2 without Reserved.
type negotiateResponse struct {
	MinVersion        uint16
	MaxVersion        uint16
	NegotiatedVersion uint16
	CreditsRequested  uint16

	// CreditsGranted counts the receives posted before the response is sent.
	CreditsGranted uint16

	Status            uint32
	MaxReadWriteSize  uint32
	PreferredSendSize uint32
	MaxReceiveSize    uint32
	MaxFragmentedSize uint32
}

// refusal returns the response that refuses a peer. All fields but the versions and the
// status are zero, [MS-SMBD] 3.1.5.3.
func refusal(status uint32) negotiateResponse {
	return negotiateResponse{MinVersion: smbdVersion, MaxVersion: smbdVersion, Status: status}
}

// put writes the message to the front of b and returns its length.
func (m *negotiateResponse) put(b []byte) int {
	_ = b[negotiateResponseLen-1]
	le := binary.LittleEndian
	le.PutUint16(b[0:], m.MinVersion)
	le.PutUint16(b[2:], m.MaxVersion)
	le.PutUint16(b[4:], m.NegotiatedVersion)
	le.PutUint16(b[6:], 0) // This field is reserved.
	le.PutUint16(b[8:], m.CreditsRequested)
	le.PutUint16(b[10:], m.CreditsGranted)
	le.PutUint32(b[12:], m.Status)
	le.PutUint32(b[16:], m.MaxReadWriteSize)
	le.PutUint32(b[20:], m.PreferredSendSize)
	le.PutUint32(b[24:], m.MaxReceiveSize)
	le.PutUint32(b[28:], m.MaxFragmentedSize)
	return negotiateResponseLen
}

// parse reads a received message. It checks only the length.
func (m *negotiateResponse) parse(b []byte) error {
	if len(b) < negotiateResponseLen {
		return errResponseShort
	}
	le := binary.LittleEndian
	m.MinVersion = le.Uint16(b[0:])
	m.MaxVersion = le.Uint16(b[2:])
	m.NegotiatedVersion = le.Uint16(b[4:])
	m.CreditsRequested = le.Uint16(b[8:])
	m.CreditsGranted = le.Uint16(b[10:])
	m.Status = le.Uint32(b[12:])
	m.MaxReadWriteSize = le.Uint32(b[16:])
	m.PreferredSendSize = le.Uint32(b[20:])
	m.MaxReceiveSize = le.Uint32(b[24:])
	m.MaxFragmentedSize = le.Uint32(b[28:])
	return nil
}

// limits is what one end brings to the negotiation: sizes in bytes, and credits in
// messages. A size out of bounds is moved to the nearest one allowed. So buffers get their
// size from the agreement and not from the limits.
type limits struct {
	maxSend    uint32 // maxSend is the largest Send that this side makes.
	maxReceive uint32 // maxReceive is the largest Send that this side takes.

	// maxFragmented is the longest message that this side reassembles.
	maxFragmented uint32

	// creditsRequested is how many credits this side would like for sending
	// (SendCreditTarget).
	creditsRequested uint16

	// creditsGranted is how many receives this side posts at a time, at most
	// (ReceiveCreditMax). 0 means as many as the peer asks for.
	creditsGranted uint16

	maxReadWrite uint32 // maxReadWrite is the longest RDMA Read or Write for one request.
}

// agreement is the result of the negotiation, which both ends keep to.
type agreement struct {
	// maxSend is the most bytes of a Send, header and padding included: at least 128.
	maxSend uint32

	// maxReceive is the size of the receives to post in bytes: at least 128.
	maxReceive uint32

	// maxFragmentedSend is the length of the longest message that the peer reassembles.
	maxFragmentedSend uint32

	// maxFragmentedReceive is the length of the longest message that this side reassembles.
	maxFragmentedReceive uint32

	// sendCredits is how many credits this side has. It is 0 on the passive side until the
	// peer's first message, except after an early negotiation.
	sendCredits uint16

	// receiveCreditTarget is how many receives to keep posted: as many as the peer wishes,
	// at least 1, at most this side's limit.
	receiveCreditTarget uint16

	// maxReadWrite is the longest RDMA Read or Write for one request, in bytes.
	maxReadWrite uint32
}

// bounded returns l with every size between its least and its greatest value. The least
// values are above those of the specification, because ksmbd refuses a peer that offers
// exactly those.
func (l limits) bounded() limits {
	l.maxSend = min(max(l.maxSend, minReceiveSize), sizeCeiling)
	l.maxReceive = min(max(l.maxReceive, minReceiveSize+8), sizeCeiling)
	l.maxFragmented = min(max(l.maxFragmented, minFragmentedSize+8), sizeCeiling)
	l.creditsRequested = max(l.creditsRequested, 1)
	return l
}

// request returns the active side's first message, [MS-SMBD] 3.1.5.2.
func (l limits) request() negotiateRequest {
	l = l.bounded()
	return negotiateRequest{
		MinVersion:        smbdVersion,
		MaxVersion:        smbdVersion,
		CreditsRequested:  l.creditsRequested,
		PreferredSendSize: l.maxSend,
		MaxReceiveSize:    l.maxReceive,
		MaxFragmentedSize: l.maxFragmented,
	}
}

// acceptRequest handles the first message that the passive side receives, [MS-SMBD]
// 3.1.5.6. There are three outcomes:
//
//   - err is nil. The agreement is a. The caller posts receives, sets resp.CreditsGranted
//     to their number, and sends resp. If none can be posted, it sends a refusal instead.
//   - err is not nil and status is not statusOK. The caller sends resp and disconnects.
//   - err is not nil and status is statusOK. The caller disconnects without an answer.
func (l limits) acceptRequest(msg []byte) (a agreement, resp negotiateResponse, status uint32, err error) {
	var req negotiateRequest
	if err := req.parse(msg); err != nil {
		return a, resp, statusOK, err
	}
	switch {
	case req.MinVersion > smbdVersion || req.MaxVersion < smbdVersion:
		return a, refusal(statusNotSupported), statusNotSupported, errVersion
	case req.CreditsRequested == 0:
		return a, resp, statusOK, errCreditsRequested
	case req.MaxReceiveSize < minReceiveSize:
		return a, resp, statusOK, errReceiveSize
	case req.MaxFragmentedSize < minFragmentedSize:
		return a, resp, statusOK, errFragmentedSize
	}
	l = l.bounded()
	a = l.agree(req.PreferredSendSize, req.MaxReceiveSize, req.MaxFragmentedSize, req.CreditsRequested)
	a.maxReadWrite = l.maxReadWrite
	resp = negotiateResponse{
		MinVersion:        smbdVersion,
		MaxVersion:        smbdVersion,
		NegotiatedVersion: smbdVersion,
		CreditsRequested:  l.creditsRequested,
		Status:            statusOK,
		MaxReadWriteSize:  a.maxReadWrite,
		PreferredSendSize: a.maxSend,
		MaxReceiveSize:    a.maxReceive,
		MaxFragmentedSize: a.maxFragmentedReceive,
	}
	return a, resp, statusOK, nil
}

// acceptResponse handles the response to the active side's request, [MS-SMBD] 3.1.5.7. With
// an error the connection ends.
func (l limits) acceptResponse(msg []byte) (agreement, error) {
	var resp negotiateResponse
	if err := resp.parse(msg); err != nil {
		return agreement{}, err
	}
	l = l.bounded()
	switch {
	// The status is checked first, because a refusal has no other values.
	case resp.Status != statusOK:
		return agreement{}, statusError(resp.Status)
	case resp.NegotiatedVersion != smbdVersion:
		return agreement{}, errNegotiated
	case resp.MaxReceiveSize < minReceiveSize:
		return agreement{}, errReceiveSize
	case resp.MaxFragmentedSize < minFragmentedSize:
		return agreement{}, errFragmentedSize
	case resp.CreditsGranted == 0:
		return agreement{}, errCreditsGranted
	case resp.CreditsRequested == 0:
		return agreement{}, errCreditsRequested
	case resp.PreferredSendSize > l.maxReceive:
		return agreement{}, errPreferredToSend
	}
	a := l.agree(resp.PreferredSendSize, resp.MaxReceiveSize, resp.MaxFragmentedSize, resp.CreditsRequested)
	a.maxReadWrite = min(l.maxReadWrite, resp.MaxReadWriteSize)
	a.sendCredits = resp.CreditsGranted
	return a, nil
}

// agree combines l, which is bounded, with the checked values of the peer. It is the part
// of the rules that both sides share.
//
// Nothing on this side gets its size from a value of the peer that is larger than this
// side's own. Only maxFragmentedSend follows the peer, up to sizeCeiling, because it only
// bounds what this side sends.
func (l limits) agree(preferredSend, maxReceive, maxFragmented uint32, creditsRequested uint16) agreement {
	a := agreement{
		maxSend:              min(l.maxSend, maxReceive),
		maxReceive:           max(minReceiveSize, min(l.maxReceive, preferredSend)),
		maxFragmentedSend:    min(maxFragmented, sizeCeiling),
		maxFragmentedReceive: l.maxFragmented,
		receiveCreditTarget:  creditsRequested,
	}
	if l.creditsGranted != 0 {
		a.receiveCreditTarget = min(a.receiveCreditTarget, l.creditsGranted)
	}
	return a
}
