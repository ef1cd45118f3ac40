package rdmanet

import (
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// Stats has the counters of a connection since its set-up.
type Stats struct {
	// BytesSent counts the bytes of payload sent, those of large transfers included.
	BytesSent uint64

	// BytesReceived counts the bytes of payload received, those of large transfers
	// included.
	BytesReceived uint64

	// MessagesSent counts the messages of the upper layer sent, each of one or more
	// segments or large transfers.
	MessagesSent uint64

	// MessagesReceived counts the messages of the upper layer received.
	MessagesReceived uint64

	// SegmentsSent counts the RDMA Sends with payload.
	SegmentsSent uint64

	// SegmentsReceived counts the RDMA Sends with payload that have arrived.
	SegmentsReceived uint64

	// EmptySent counts the RDMA Sends without payload: credits, keep-alive, FIN, and
	// messages about large transfers.
	EmptySent uint64

	// EmptyReceived counts the RDMA Sends without payload that have arrived.
	EmptyReceived uint64

	// Posts counts the batches of sends that were handed to the device. A batch may have
	// many sends.
	Posts uint64

	// Signaled counts the sends and RDMA Writes that asked for a completion.
	Signaled uint64

	// BytesCopied counts the bytes that were copied on this host, between the program's
	// memory and registered memory or into memory for unread data.
	BytesCopied uint64

	// CreditStalls counts the times that a write waited for the peer's credits.
	CreditStalls uint64

	// QueueStalls counts the times that a write waited until the device had completed
	// earlier sends.
	QueueStalls uint64

	// KeepAliveSent counts the messages sent that ask the peer for an answer. There are none
	// where the device asks the peer's host.
	KeepAliveSent uint64

	// TransfersSent counts the large transfers that were announced to the peer. Those that
	// were withdrawn later are included.
	TransfersSent uint64

	// TransfersReceived counts the large transfers received.
	TransfersReceived uint64

	// TransferBytesSent counts the bytes of BytesSent that went by large transfers.
	TransferBytesSent uint64

	// TransferBytesReceived counts the bytes of BytesReceived that came by large transfers.
	TransferBytesReceived uint64

	// TransfersRefused counts the times that memory could not be registered for a large
	// transfer.
	TransfersRefused uint64

	// KeysInvalidated counts the memory keys of this side that the peer has invalidated.
	KeysInvalidated uint64

	// SendCredits is how many sends the peer can take at this moment.
	SendCredits int

	// ReceiveCredits is how many receives are posted at this moment.
	ReceiveCredits int

	// ReceiveWindow is how many receives the connection keeps posted or unread. It grows
	// with use, and falls when the connection is idle or its receives become large.
	ReceiveWindow int
}

// moved returns a number that changes with everything that is sent or received for the
// programs.
func (s *Stats) moved() uint64 {
	return s.BytesSent + s.MessagesSent + s.BytesReceived + s.MessagesReceived
}

// Info describes what carries a connection, and what was negotiated.
type Info struct {
	// Device is the name of the device, "iwarp" for the software device.
	Device string

	// Transport is "iWARP", "RoCE" or "InfiniBand".
	Transport string

	// Port is the port of the device, counted from 1.
	Port int

	// QPN is the queue pair number of this side.
	QPN uint32

	// LocalGID is the address of this side as a GID.
	LocalGID ibv.GID

	// RemoteGID is the address of the peer as a GID.
	RemoteGID ibv.GID

	// MTU is the most bytes of payload in a packet or frame.
	MTU int

	// Link says what carries the frames of the software device: "tcp", or "shared memory"
	// between processes of one host (see [Config].SameHost). It is empty for other devices.
	Link string

	// LinkReason is why Link is not "shared memory", if it is not.
	LinkReason string

	// Extensions says which extensions of SMB Direct were agreed with the peer.
	Extensions Extensions

	// MaxSendSize is the longest segment that this side sends, in bytes, as negotiated.
	MaxSendSize int

	// MaxReceiveSize is the longest segment that the peer sends, in bytes, as negotiated.
	MaxReceiveSize int

	// MaxFragmentedSize is the longest message that the peer takes in segments, in bytes;
	// see [Conn.MaxMessageSize].
	MaxFragmentedSize int
}

func gidOf(a netip.AddrPort) ibv.GID { return ibv.GIDFromAddr(a.Addr().WithZone("")) }
