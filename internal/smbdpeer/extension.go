package smbdpeer

import (
	"encoding/binary"
	"fmt"
)

// This file has rdmanet's extensions of SMB Direct, as docs/protocol.md describes them.

// These are the bits of DataTransfer.Flags that are extensions.
const (
	FlagFIN          uint16 = 0x8000
	FlagTransfer     uint16 = 0x4000
	FlagExpedited    uint16 = 0x2000
	FlagPartial      uint16 = 0x1000
	FlagEmptyMessage uint16 = 0x0800
	FlagNoResponse   uint16 = 0x0400
	FlagLarge        uint16 = 0x0200
	FlagWantsCredits uint16 = 0x0100
)

// These are the bits of PrivateData.Features.
const (
	FeatureFIN         uint16 = 1 << 0
	FeatureMessages    uint16 = 1 << 1
	FeatureTransfer    uint16 = 1 << 3
	FeatureEarly       uint16 = 1 << 4
	FeatureNoRead      uint16 = 1 << 5
	FeatureNoEmptyRead uint16 = 1 << 6
	FeatureProbeTarget uint16 = 1 << 7
	FeatureLarge       uint16 = 1 << 8
)

// LargeReceiveSize is the length in bytes of the receives that a message with FlagLarge
// grants.
const LargeReceiveSize = 65560

// These are the lengths of private data in bytes.
const (
	PrivateLen       = 20
	EarlyRequestLen  = PrivateLen + NegotiateRequestLen + 2 // EarlyRequestLen includes the first grant.
	EarlyResponseLen = PrivateLen + NegotiateResponseLen
	ProbeTargetLen   = 12
)

const privateMagic = "RDNT"

// PrivateData is the private data of an end that connects or accepts.
type PrivateData struct {
	IRD, ORD       uint32
	Rdmanet        bool // Rdmanet is set if the fields below are used.
	Features       uint16
	MaxReceiveSize uint32
}

// Append appends the private data: 20 bytes, or only the depths if Rdmanet is false.
func (p PrivateData) Append(b []byte) []byte {
	be := binary.BigEndian
	b = be.AppendUint32(be.AppendUint32(b, p.IRD), p.ORD)
	if !p.Rdmanet {
		return b
	}
	b = append(append(b, privateMagic...), 1, 0) // The bytes are the version and a reserved one.
	return be.AppendUint32(be.AppendUint16(b, p.Features), p.MaxReceiveSize)
}

// ParsePrivateData decodes the private data of any peer. Missing fields are zero. The
// depths are not changed.
func ParsePrivateData(b []byte) (p PrivateData) {
	be := binary.BigEndian
	if len(b) < 8 {
		return p
	}
	p.IRD, p.ORD = be.Uint32(b), be.Uint32(b[4:])
	if len(b) < PrivateLen || string(b[8:12]) != privateMagic || b[12] != 1 {
		return p
	}
	p.Rdmanet, p.Features, p.MaxReceiveSize = true, be.Uint16(b[14:]), be.Uint32(b[16:])
	return p
}

// EarlyRequest returns the Negotiate Request and the first grant in the private data of an
// active side. ok is false if there is none.
func EarlyRequest(b []byte) (m NegotiateRequest, granted uint16, ok bool) {
	if len(b) < EarlyRequestLen || ParsePrivateData(b).Features&FeatureEarly == 0 {
		return m, 0, false
	}
	m, err := ParseNegotiateRequest(b[PrivateLen:])
	return m, binary.LittleEndian.Uint16(b[EarlyRequestLen-2:]), err == nil
}

// EarlyResponse returns the Negotiate Response in the private data of a passive side. ok is
// false if there is none.
func EarlyResponse(b []byte) (m NegotiateResponse, ok bool) {
	if len(b) < EarlyResponseLen || ParsePrivateData(b).Features&FeatureEarly == 0 {
		return m, false
	}
	m, err := ParseNegotiateResponse(b[PrivateLen:])
	return m, err == nil
}

// A ProbeTarget is memory that a peer may read, in place of an RDMA Read of zero bytes.
type ProbeTarget struct {
	Addr uint64
	Key  uint32
}

// Append appends the probe target.
func (p ProbeTarget) Append(b []byte) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(b, p.Addr), p.Key)
}

// ParseProbeTarget returns the probe target at the end of private data. early is the offset
// behind an early negotiation message.
func ParseProbeTarget(b []byte, early int) (p ProbeTarget, ok bool) {
	at, features := PrivateLen, ParsePrivateData(b).Features
	if features&FeatureEarly != 0 {
		at = early
	}
	if features&FeatureProbeTarget == 0 || len(b) < at+ProbeTargetLen {
		return p, false
	}
	return ProbeTarget{binary.BigEndian.Uint64(b[at:]), binary.BigEndian.Uint32(b[at+8:])}, true
}

// A TransferKind is the kind of a transfer header.
type TransferKind uint8

// These are the kinds.
const (
	Offer    TransferKind = 1
	Request  TransferKind = 2
	Grant    TransferKind = 3
	Written  TransferKind = 4
	Done     TransferKind = 5
	Withdraw TransferKind = 6
)

// These are the bits of Transfer.Flags.
const (
	TransferEnd uint8 = 1 // TransferEnd with Written: nothing more is written.
	TransferCut uint8 = 2 // TransferCut: the message has no end.
)

// TransferPayloadOffset is the DataOffset of a payload right behind a transfer header.
const TransferPayloadOffset = PayloadOffset + transferLen

const transferLen = 32

// A Transfer is a transfer header.
type Transfer struct {
	Kind   TransferKind
	Flags  uint8
	ID     uint32
	Addr   uint64
	Key    uint32
	Length uint32
	Rest   uint64
}

// Append appends the transfer header only.
func (t Transfer) Append(b []byte) []byte {
	le := binary.LittleEndian
	b = append(b, byte(t.Kind), t.Flags, 0, 0)
	b = le.AppendUint64(le.AppendUint32(b, t.ID), t.Addr)
	b = le.AppendUint32(le.AppendUint32(b, t.Key), t.Length)
	return le.AppendUint64(b, t.Rest)
}

// Message returns a Data Transfer message with the transfer header and a payload. It asks
// for 16 credits and grants one.
func (t Transfer) Message(payload []byte) []byte {
	return t.MessageIn(DataTransfer{CreditsRequested: 16, CreditsGranted: 1}, payload)
}

// MessageIn is like Message, with the given fields of the Data Transfer header.
func (t Transfer) MessageIn(h DataTransfer, payload []byte) []byte {
	h.Flags |= FlagTransfer
	h.DataOffset, h.DataLength = 0, 0
	b := h.Append(make([]byte, 0, TransferPayloadOffset+len(payload)))
	b = t.Append(append(b, make([]byte, PayloadOffset-HeaderLen)...))
	if len(payload) > 0 {
		binary.LittleEndian.PutUint32(b[12:], TransferPayloadOffset)
		binary.LittleEndian.PutUint32(b[16:], uint32(len(payload)))
	}
	return append(b, payload...)
}

// ParseTransfer returns the transfer header of a Data Transfer message whose flags say that
// it has one.
func ParseTransfer(b []byte) (t Transfer, err error) {
	h, payload, err := ParseDataTransfer(b)
	if err != nil {
		return t, err
	}
	if len(b) < TransferPayloadOffset || len(payload) > 0 && h.DataOffset < TransferPayloadOffset {
		return t, fmt.Errorf("smbdpeer: no room for a transfer header in %d bytes with %+v", len(b), h)
	}
	le := binary.LittleEndian
	b = b[PayloadOffset:]
	t = Transfer{TransferKind(b[0]), b[1], le.Uint32(b[4:]), le.Uint64(b[8:]), le.Uint32(b[16:]), le.Uint32(b[20:]), le.Uint64(b[24:])}
	begins := t.Kind == Offer || t.Kind == Request
	if t.Kind < Offer || t.Kind > Withdraw || h.RemainingDataLength != 0 || len(payload) > 0 && !begins {
		return t, fmt.Errorf("smbdpeer: malformed transfer header %+v behind %+v", t, h)
	}
	return t, nil
}
