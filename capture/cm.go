package capture

import (
	"encoding/binary"
	"fmt"
)

// CMAttribute names a message of the InfiniBand connection manager
// (InfiniBand Architecture Specification, volume 1, 12.6).
type CMAttribute uint16

// The messages.
const (
	CMConnect       CMAttribute = 0x10 // REQ
	CMMRA           CMAttribute = 0x11
	CMReject        CMAttribute = 0x12 // REJ
	CMReply         CMAttribute = 0x13 // REP
	CMReady         CMAttribute = 0x14 // RTU
	CMDisconnect    CMAttribute = 0x15 // DREQ
	CMDisconnected  CMAttribute = 0x16 // DREP
	CMServiceLookup CMAttribute = 0x17 // SIDR REQ
	CMServiceReply  CMAttribute = 0x18 // SIDR REP
)

var cmNames = [...]string{"REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "SIDR REQ", "SIDR REP"}

// String returns the short name that the specification gives the message.
func (a CMAttribute) String() string {
	if i := int(a) - int(CMConnect); i >= 0 && i < len(cmNames) {
		return cmNames[i]
	}
	return fmt.Sprintf("attribute 0x%x", uint16(a))
}

// CM is a message of the connection manager. Fields that its attribute does not
// have are zero.
type CM struct {
	Attribute         CMAttribute
	LocalID, RemoteID uint32 // communication IDs, local to the sender
	ServiceID         uint64
	QPN               uint32 // REQ, REP, SIDR REP: the sender's; DREQ: the receiver's
	StartPSN          uint32 // REQ, REP: the first PSN that the sender expects to receive
	MTU               int    // REQ: path MTU in bytes, 0 if the code is not known
	Reason            uint16 // REJ
	Private           []byte // with rdma_cm's header; padded with zeros as received; aliases the packet
}

const (
	madLen      = 256
	madHeader   = 24
	madClassCM  = 7
	cmPrivateIP = 36 // what rdma_cm puts in front of the private data of REQ and SIDR REQ
)

// parse reads the MAD that a UD packet to QP 1 carries. It returns false if
// that is not a message of the connection manager, or was cut off.
func (m *CM) parse(b []byte) bool {
	if len(b) < madLen || b[0] != 1 || b[1] != madClassCM {
		return false
	}
	be := binary.BigEndian
	*m = CM{Attribute: CMAttribute(be.Uint16(b[16:]))}
	b = b[madHeader:madLen]
	switch m.Attribute {
	case CMConnect:
		m.LocalID, m.ServiceID = be.Uint32(b), be.Uint64(b[8:])
		m.QPN, m.StartPSN = be.Uint32(b[32:])>>8, be.Uint32(b[44:])>>8
		if code := b[50] >> 4; code >= 1 && code <= 5 {
			m.MTU = 128 << code
		}
		m.Private = b[140:232]
	case CMReply:
		m.LocalID, m.RemoteID = be.Uint32(b), be.Uint32(b[4:])
		m.QPN, m.StartPSN = be.Uint32(b[12:])>>8, be.Uint32(b[20:])>>8
		m.Private = b[36:232]
	case CMReject:
		m.LocalID, m.RemoteID, m.Reason = be.Uint32(b), be.Uint32(b[4:]), be.Uint16(b[10:])
	case CMMRA, CMReady, CMDisconnected:
		m.LocalID, m.RemoteID = be.Uint32(b), be.Uint32(b[4:])
	case CMDisconnect:
		m.LocalID, m.RemoteID, m.QPN = be.Uint32(b), be.Uint32(b[4:]), be.Uint32(b[8:])>>8
	case CMServiceLookup:
		m.LocalID, m.ServiceID, m.Private = be.Uint32(b), be.Uint64(b[8:]), b[16:232]
	case CMServiceReply:
		m.LocalID, m.QPN, m.Private = be.Uint32(b), be.Uint32(b[8:])>>8, b[96:232]
	default:
		return false
	}
	return true
}

// ports returns the ports that rdma_cm connects: of the service ID the one that
// was called, of the private data of a REQ the one it was called from; 0 where
// they are not rdma_cm's.
func (m *CM) ports() (from, to uint16) {
	if m.ServiceID>>24 == 1 { // prefix of rdma_cm's service IDs
		to = uint16(m.ServiceID)
		if len(m.Private) >= cmPrivateIP {
			from = binary.BigEndian.Uint16(m.Private[2:])
		}
	}
	return from, to
}

// consumerPrivate returns the private data without what rdma_cm put in front.
func (m *CM) consumerPrivate() []byte {
	if m.Attribute == CMConnect && m.ServiceID>>24 == 1 {
		return m.Private[cmPrivateIP:]
	}
	return m.Private
}
