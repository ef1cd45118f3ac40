package rdmanet

import (
	"encoding/binary"
	"math/bits"
)

// This file has the private data that both ends give to the connection manager. Its first
// eight bytes are the IRD and ORD that SMB Direct exchanges on iWARP. Other peers ignore
// the rest, by which two rdmanet peers recognise each other. All fields are big-endian,
// except for the negotiation messages behind them; docs/protocol.md has the layout.
// setup.go sends the private data.

const (
	privateMagic   = "RDNT"
	privateVersion = 1
	privateLen     = 20

	depthLen = 8   // depthLen is the length of the IRD and the ORD.
	maxDepth = 255 // maxDepth is the greatest depth: verbs have both in eight bits.
)

// These are the bits of privateData.features. An extension is used only if both ends set
// its bit. Other bits are sent as 0 and ignored.
const (
	// featureFIN is flagFIN, for half-close or, with featureHold, for Close.
	featureFIN uint16 = 1 << 0

	// featureMessages is expedited, partial and empty messages.
	featureMessages uint16 = 1 << 1

	// featureTransfer is large transfers, see transfer.go.
	featureTransfer uint16 = 1 << 3

	// featureEarly is set if a negotiation message follows in the private data.
	featureEarly uint16 = 1 << 4

	// featureNoRead is set if large transfers must not use RDMA Reads, in either direction.
	featureNoRead uint16 = 1 << 5

	// featureNoEmptyRead is set if the peer must not post RDMA Reads of no bytes.
	featureNoEmptyRead uint16 = 1 << 6

	// featureProbeTarget is set if a probe target follows in the private data, see probe.go.
	featureProbeTarget uint16 = 1 << 7

	// featureLarge is receives of largeSegment bytes for bulk data, see large.go.
	featureLarge uint16 = 1 << 8

	// featureHold is set if the device holds Sends until there are receives for them. If both
	// ends set it, there are no credits, see hold.go.
	featureHold uint16 = 1 << 9
)

// privateData is what one end announces before the negotiation.
type privateData struct {
	// ird is how many RDMA Reads the end serves at a time, and ord how many it issues. Both
	// are at most maxDepth; 0 means not announced.
	ird, ord uint32

	// rdmanet is set if the end is rdmanet. If it is not, features and maxReceive are 0.
	rdmanet bool

	// features has the extensions that the end offers.
	features uint16

	// maxReceive is the largest segment that the end is willing to receive, in bytes.
	maxReceive uint32
}

// append adds the wire form to b: privateLen bytes, or only the IRD and the ORD if rdmanet
// is not set.
func (p privateData) append(b []byte) []byte {
	be := binary.BigEndian
	b = be.AppendUint32(b, min(p.ird, maxDepth))
	b = be.AppendUint32(b, min(p.ord, maxDepth))
	if !p.rdmanet {
		return b
	}
	b = append(b, privateMagic...)
	b = append(b, privateVersion, 0)
	b = be.AppendUint16(b, p.features)
	return be.AppendUint32(b, p.maxReceive)
}

// parsePrivate reads private data as it was received: it may be absent, cut short or
// padded, and from any kind of peer. It never fails. What is missing is zero.
func parsePrivate(b []byte) privateData {
	var p privateData
	if len(b) < depthLen {
		return p
	}
	p.ird, p.ord = parseDepth(b[0:]), parseDepth(b[4:])
	if len(b) < privateLen || string(b[8:12]) != privateMagic || b[12] != privateVersion {
		return p
	}
	be := binary.BigEndian
	p.rdmanet = true
	p.features = be.Uint16(b[14:])
	p.maxReceive = be.Uint32(b[16:])
	return p
}

// In an early negotiation two rdmanet peers send the negotiation messages behind their
// private data, which saves a round trip. The grant behind the request saves the active
// side's first message as well.
const (
	earlyRequestLen  = privateLen + negotiateRequestLen + 2
	earlyResponseLen = privateLen + negotiateResponseLen
)

// earlyRequest returns the negotiation request and the grant in the private data b of an
// active side. The request is nil if there is none.
func earlyRequest(b []byte) (msg []byte, granted uint16) {
	if len(b) < earlyRequestLen || parsePrivate(b).features&featureEarly == 0 {
		return nil, 0
	}
	return b[privateLen : earlyRequestLen-2], binary.LittleEndian.Uint16(b[earlyRequestLen-2:])
}

// earlyResponse returns the negotiation response in the private data b of a passive side,
// or nil.
func earlyResponse(b []byte) []byte {
	if len(b) < earlyResponseLen || parsePrivate(b).features&featureEarly == 0 {
		return nil
	}
	return b[privateLen:earlyResponseLen]
}

// parseDepth reads an IRD or an ORD. By convention it is big-endian, but some Linux clients
// send it in the byte order of the host. No depth needs more than sixteen bits, so the
// smaller of the two readings is the right one.
func parseDepth(b []byte) uint32 {
	v := binary.BigEndian.Uint32(b)
	return min(v, bits.ReverseBytes32(v), maxDepth)
}
