package rdmanet

import (
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// Stats counts what a connection has done since it was set up.
type Stats struct {
	BytesSent        uint64 // payload
	BytesReceived    uint64
	MessagesSent     uint64 // upper-layer messages, each of one or more segments
	MessagesReceived uint64
	SegmentsSent     uint64 // RDMA Sends with payload
	SegmentsReceived uint64
	EmptySent        uint64 // RDMA Sends without payload: credits, keep-alive, FIN
	EmptyReceived    uint64

	Posts         uint64 // calls that posted sends; each may carry many
	Signaled      uint64 // sends that asked for a completion
	BytesCopied   uint64 // bytes that were copied between the caller's memory and registered memory
	CreditStalls  uint64 // times a write waited for the peer's credits
	QueueStalls   uint64 // times a write waited for the send queue
	KeepAliveSent uint64 // probes

	TransfersSent         uint64 // large transfers, whose bytes the devices move
	TransfersReceived     uint64
	TransferBytesSent     uint64 // of BytesSent, those
	TransferBytesReceived uint64
	TransfersRefused      uint64 // times that memory could not be registered for one

	KeysInvalidated uint64 // keys of ours that the peer has taken back

	SendCredits    int // sends that the peer can take now
	ReceiveCredits int // receives posted now
	ReceiveWindow  int // receives to keep posted: grows with use, falls when idle
}

// moved changes with all that is sent and received for the programs.
func (s *Stats) moved() uint64 {
	return s.BytesSent + s.MessagesSent + s.BytesReceived + s.MessagesReceived
}

// Info tells what carries a connection.
type Info struct {
	Device    string // "iwarp" for the software device
	Transport string // "iWARP", "RoCE", "InfiniBand"
	Port      int    // of the device, counted from 1
	QPN       uint32 // queue pair number of this side
	LocalGID  ibv.GID
	RemoteGID ibv.GID
	MTU       int // bytes of payload in a packet or frame at most

	Rdmanet           bool // the peer is rdmanet: half-close works
	MessageFlags      bool // the peer knows expedited, partial and empty messages
	MaxSendSize       int  // as negotiated, bytes
	MaxReceiveSize    int
	MaxFragmentedSize int // longest message that the peer takes in segments; see MaxMessageSize
}

func gidOf(a netip.AddrPort) ibv.GID { return ibv.GIDFromAddr(a.Addr().WithZone("")) }
