package smbdpeer

import (
	"encoding/binary"
	"fmt"
)

// These are lengths and offsets in bytes, and the version of the protocol.
const (
	HeaderLen            = 20 // HeaderLen is the length of a Data Transfer message without payload.
	PayloadOffset        = 24 // PayloadOffset is the DataOffset of a payload right behind the header.
	NegotiateRequestLen  = 20
	NegotiateResponseLen = 32

	Version uint16 = 0x0100
)

// These are values of Status in a Negotiate Response.
const (
	StatusSuccess      uint32 = 0
	StatusNotSupported uint32 = 0xc00000bb
)

// FlagResponseRequested is SMB_DIRECT_RESPONSE_REQUESTED.
const FlagResponseRequested uint16 = 0x0001

// A DataTransfer is the header of a Data Transfer message, [MS-SMBD] 2.2.3.
type DataTransfer struct {
	CreditsRequested    uint16
	CreditsGranted      uint16
	Flags               uint16
	RemainingDataLength uint32
	DataOffset          uint32
	DataLength          uint32
}

// Append appends the header. If there is a payload, it also appends padding up to
// DataOffset.
func (h DataTransfer) Append(b []byte) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = le.AppendUint16(b, h.CreditsRequested)
	b = le.AppendUint16(b, h.CreditsGranted)
	b = le.AppendUint16(b, h.Flags)
	b = le.AppendUint16(b, 0)
	b = le.AppendUint32(b, h.RemainingDataLength)
	b = le.AppendUint32(b, h.DataOffset)
	b = le.AppendUint32(b, h.DataLength)
	for h.DataLength > 0 && len(b)-start < int(h.DataOffset) {
		b = append(b, 0)
	}
	return b
}

// Message returns a message of size bytes that begins with the header, whatever sizes the
// header has. Each byte behind the header is the low byte of its offset.
func (h DataTransfer) Message(size int) []byte {
	b := make([]byte, max(size, HeaderLen))
	for i := range b {
		b[i] = byte(i)
	}
	header := h
	header.DataLength = 0 // There is no padding.
	copy(b, header.Append(nil))
	binary.LittleEndian.PutUint32(b[16:], h.DataLength)
	return b[:size]
}

// ParseDataTransfer returns the header and the payload of a Data Transfer message. The payload
// aliases b.
func ParseDataTransfer(b []byte) (h DataTransfer, payload []byte, err error) {
	if len(b) < HeaderLen {
		return h, nil, fmt.Errorf("smbdpeer: a message of %d bytes", len(b))
	}
	le := binary.LittleEndian
	h = DataTransfer{le.Uint16(b), le.Uint16(b[2:]), le.Uint16(b[4:]), le.Uint32(b[8:]), le.Uint32(b[12:]), le.Uint32(b[16:])}
	end := uint64(h.DataOffset) + uint64(h.DataLength)
	if h.CreditsRequested == 0 || h.DataOffset%8 != 0 || end > uint64(len(b)) || h.DataLength > 0 && h.DataOffset < HeaderLen {
		return h, nil, fmt.Errorf("smbdpeer: malformed header %+v in %d bytes", h, len(b))
	}
	return h, b[h.DataOffset:end], nil
}

// A NegotiateRequest is the message of [MS-SMBD] 2.2.1.
type NegotiateRequest struct {
	MinVersion        uint16
	MaxVersion        uint16
	CreditsRequested  uint16
	PreferredSendSize uint32
	MaxReceiveSize    uint32
	MaxFragmentedSize uint32
}

// Append appends the message.
func (m NegotiateRequest) Append(b []byte) []byte {
	le := binary.LittleEndian
	for _, v := range []uint16{m.MinVersion, m.MaxVersion, 0, m.CreditsRequested} {
		b = le.AppendUint16(b, v)
	}
	for _, v := range []uint32{m.PreferredSendSize, m.MaxReceiveSize, m.MaxFragmentedSize} {
		b = le.AppendUint32(b, v)
	}
	return b
}

// ParseNegotiateRequest decodes the message at the beginning of b.
func ParseNegotiateRequest(b []byte) (m NegotiateRequest, err error) {
	if len(b) < NegotiateRequestLen {
		return m, fmt.Errorf("smbdpeer: a Negotiate Request of %d bytes", len(b))
	}
	le := binary.LittleEndian
	return NegotiateRequest{le.Uint16(b), le.Uint16(b[2:]), le.Uint16(b[6:]), le.Uint32(b[8:]), le.Uint32(b[12:]), le.Uint32(b[16:])}, nil
}

// A NegotiateResponse is the message of [MS-SMBD] 2.2.2.
type NegotiateResponse struct {
	MinVersion        uint16
	MaxVersion        uint16
	NegotiatedVersion uint16
	CreditsRequested  uint16
	CreditsGranted    uint16
	Status            uint32
	MaxReadWriteSize  uint32
	PreferredSendSize uint32
	MaxReceiveSize    uint32
	MaxFragmentedSize uint32
}

// Append appends the message.
func (m NegotiateResponse) Append(b []byte) []byte {
	le := binary.LittleEndian
	for _, v := range []uint16{m.MinVersion, m.MaxVersion, m.NegotiatedVersion, 0, m.CreditsRequested, m.CreditsGranted} {
		b = le.AppendUint16(b, v)
	}
	for _, v := range []uint32{m.Status, m.MaxReadWriteSize, m.PreferredSendSize, m.MaxReceiveSize, m.MaxFragmentedSize} {
		b = le.AppendUint32(b, v)
	}
	return b
}

// ParseNegotiateResponse decodes the message at the beginning of b.
func ParseNegotiateResponse(b []byte) (m NegotiateResponse, err error) {
	if len(b) < NegotiateResponseLen {
		return m, fmt.Errorf("smbdpeer: a Negotiate Response of %d bytes", len(b))
	}
	le := binary.LittleEndian
	return NegotiateResponse{le.Uint16(b), le.Uint16(b[2:]), le.Uint16(b[4:]), le.Uint16(b[8:]), le.Uint16(b[10:]),
		le.Uint32(b[12:]), le.Uint32(b[16:]), le.Uint32(b[20:]), le.Uint32(b[24:]), le.Uint32(b[28:])}, nil
}

// Refusal returns the response that refuses a connection with this status.
func Refusal(status uint32) NegotiateResponse {
	return NegotiateResponse{MinVersion: Version, MaxVersion: Version, Status: status}
}
