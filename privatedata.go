package rdmanet

import (
	"encoding/binary"
	"math/bits"
)

// The private data that both ends give to the connection manager. Its first
// eight bytes are the IRD and ORD that SMB Direct exchanges on iWARP; what
// follows lets two rdmanet peers recognise each other and is ignored by any
// other. All fields are big-endian; docs/protocol.md has the layout.
const (
	privateMagic   = "RDNT"
	privateVersion = 1
	privateLen     = 20

	depthLen = 8   // the IRD/ORD pair
	maxDepth = 255 // verbs carry both depths in eight bits
)

// Bits of privateData.features. An extension is used only where both ends set
// its bit; bits not named here are sent as 0 and ignored.
const (
	featureFIN         uint16 = 1 << 0 // half-close by flagFIN
	featureMessages    uint16 = 1 << 1 // expedited, partial and empty messages
	featureTransfer    uint16 = 1 << 3 // large transfers, transfer.go
	featureEarly       uint16 = 1 << 4 // the negotiation message follows here
	featureNoRead      uint16 = 1 << 5 // large transfers without RDMA Read, either way
	featureNoEmptyRead uint16 = 1 << 6 // to be spared RDMA Reads of no bytes
	featurePulse       uint16 = 1 << 7 // memory follows to be read in their place, probe.go
)

// privateData is what one end says of itself before the negotiation.
type privateData struct {
	ird, ord uint32 // RDMA Reads taken and issued at a time, at most maxDepth; 0: not said

	rdmanet    bool   // the peer is rdmanet; without it the fields below are 0
	features   uint16 // offered, not yet agreed
	maxReceive uint32 // bytes of the largest segment the sender is willing to receive
}

// append adds the wire form to b: privateLen bytes, or the bare IRD/ORD pair
// where rdmanet is false.
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

// parsePrivate reads private data as it was received: absent, cut short or
// padded, from any kind of peer. It never fails; what is not said is zero.
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

// Early negotiation: two rdmanet peers send the negotiation messages behind
// their private data and save a round trip. The request is followed by a grant,
// which saves the active side's first message as well.
const (
	earlyRequestLen  = privateLen + negotiateRequestLen + 2
	earlyResponseLen = privateLen + negotiateResponseLen
)

// earlyRequest returns the request and the grant in the private data b of an
// active side; the request is nil if there is none.
func earlyRequest(b []byte) (msg []byte, granted uint16) {
	if len(b) < earlyRequestLen || parsePrivate(b).features&featureEarly == 0 {
		return nil, 0
	}
	return b[privateLen : earlyRequestLen-2], binary.LittleEndian.Uint16(b[earlyRequestLen-2:])
}

// earlyResponse returns the response in the private data b of a passive side,
// nil if there is none.
func earlyResponse(b []byte) []byte {
	if len(b) < earlyResponseLen || parsePrivate(b).features&featureEarly == 0 {
		return nil
	}
	return b[privateLen:earlyResponseLen]
}

// parseDepth reads an IRD or ORD. Convention has it big-endian, but there are
// Linux clients that send it in the byte order of the host. As no depth needs
// more than sixteen bits, the smaller reading is the one that was meant.
func parseDepth(b []byte) uint32 {
	v := binary.BigEndian.Uint32(b)
	return min(v, bits.ReverseBytes32(v), maxDepth)
}
