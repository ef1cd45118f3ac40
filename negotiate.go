package rdmanet

import (
	"encoding/binary"
	"fmt"
)

// The first message each way on a connection is a Negotiate Request from the
// active side and a Negotiate Response from the passive one. All fields are
// little-endian, [MS-SMBD] 2.2.1 and 2.2.2. Longer messages are taken by their
// beginning, as the text only asks for "at least" these lengths.
const (
	negotiateRequestLen  = 20
	negotiateResponseLen = 32

	smbdVersion uint16 = 0x0100 // 1.0, the only one there is
)

// What the specification requires of every peer, and where we stop.
const (
	minReceiveSize    = 128        // least MaxReceiveSize
	minFragmentedSize = 128 * 1024 // least MaxFragmentedSize
	sizeCeiling       = 1 << 30    // bytes, of anything: keeps sizes far from the ends of int32 and uint32
)

// The NTSTATUS codes of a Negotiate Response that we send.
const (
	statusOK                    uint32 = 0
	statusInsufficientResources uint32 = 0xC000009A // no receive could be posted
	statusNotSupported          uint32 = 0xC00000BB // no common version
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

// A statusError is the reason that the passive side gave for refusing.
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
	le.PutUint16(b[4:], 0) // Reserved
	le.PutUint16(b[6:], m.CreditsRequested)
	le.PutUint32(b[8:], m.PreferredSendSize)
	le.PutUint32(b[12:], m.MaxReceiveSize)
	le.PutUint32(b[16:], m.MaxFragmentedSize)
	return negotiateRequestLen
}

// parse reads one received message; it checks no more than the length.
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
	CreditsGranted    uint16 // receives posted before the response is sent
	Status            uint32
	MaxReadWriteSize  uint32
	PreferredSendSize uint32
	MaxReceiveSize    uint32
	MaxFragmentedSize uint32
}

// refusal returns the response that turns a peer away: all but the versions
// and the status is zero, [MS-SMBD] 3.1.5.3.
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
	le.PutUint16(b[6:], 0) // Reserved
	le.PutUint16(b[8:], m.CreditsRequested)
	le.PutUint16(b[10:], m.CreditsGranted)
	le.PutUint32(b[12:], m.Status)
	le.PutUint32(b[16:], m.MaxReadWriteSize)
	le.PutUint32(b[20:], m.PreferredSendSize)
	le.PutUint32(b[24:], m.MaxReceiveSize)
	le.PutUint32(b[28:], m.MaxFragmentedSize)
	return negotiateResponseLen
}

// parse reads one received message; it checks no more than the length.
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

// limits is what one end brings to the negotiation: sizes in bytes, credits
// in messages. Sizes out of bounds are moved to the nearest one allowed, so
// buffers are sized from the agreement, not from here.
type limits struct {
	maxSend          uint32 // largest Send we make
	maxReceive       uint32 // largest Send we take
	maxFragmented    uint32 // longest message we reassemble
	creditsRequested uint16 // credits we would like for sending (SendCreditTarget)
	creditsGranted   uint16 // most receives we post at a time (ReceiveCreditMax); 0: as many as are asked for
	maxReadWrite     uint32 // longest RDMA Read or Write for one request
}

// agreement is what both ends hold to once the negotiation is over.
type agreement struct {
	maxSend              uint32 // bytes of a Send, header and padding included; at least 128
	maxReceive           uint32 // size of the receives to post; at least 128
	maxFragmentedSend    uint32 // longest message the peer reassembles
	maxFragmentedReceive uint32 // longest message we reassemble
	sendCredits          uint16 // in hand now; 0 on the passive side until the peer's first message
	receiveCreditTarget  uint16 // receives to keep posted, at least 1; the peer's wish, bounded by ours
	maxReadWrite         uint32 // longest RDMA Read or Write for one request
}

// bounded returns l with every size between its floor and its ceiling. The
// floors lie above the minima of the specification because ksmbd refuses a
// peer that offers exactly those.
func (l limits) bounded() limits {
	l.maxSend = min(max(l.maxSend, minReceiveSize), sizeCeiling)
	l.maxReceive = min(max(l.maxReceive, minReceiveSize+8), sizeCeiling)
	l.maxFragmented = min(max(l.maxFragmented, minFragmentedSize+8), sizeCeiling)
	l.creditsRequested = max(l.creditsRequested, 1)
	return l
}

// request returns the active side's opening message, [MS-SMBD] 3.1.5.2.
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

// acceptRequest is the passive side's answer to the first message received,
// [MS-SMBD] 3.1.5.6. There are three outcomes:
//
//   - err is nil: a holds. Post receives, set resp.CreditsGranted to their
//     number and send resp; where none can be posted, send a refusal instead.
//   - err is not nil and status is not statusOK: send resp, then disconnect.
//   - err is not nil and status is statusOK: disconnect without a word.
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

// acceptResponse is what the active side makes of the answer to its request,
// [MS-SMBD] 3.1.5.7. The connection ends where err is not nil.
func (l limits) acceptResponse(msg []byte) (agreement, error) {
	var resp negotiateResponse
	if err := resp.parse(msg); err != nil {
		return agreement{}, err
	}
	l = l.bounded()
	switch {
	case resp.Status != statusOK: // first, for a refusal has nothing else in it
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

// agree combines l, bounded, with the peer's checked values: the part that is
// the same on both sides. Nothing of ours is sized by a value of the peer's
// that is larger than our own; maxFragmentedSend alone follows the peer, up to
// sizeCeiling, as it only bounds what we may be asked to send.
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
