package ibv

import (
	"context"
	"net/netip"
)

// A Listener hands out connection requests, after rdma_listen(3) and
// rdma_get_request(3). All methods may be called by several goroutines at once.
type Listener interface {
	// Addr is the bound address, with the port that was chosen if 0 was asked.
	Addr() netip.AddrPort

	// Accept waits for the next connection request and returns its ID, which
	// the caller must Accept or Reject, and Close. The error is net.ErrClosed
	// after Close and ctx's own when ctx ends. It matches syscall.ENODEV when the
	// device that has the address is gone, and no more requests will come.
	Accept(ctx context.Context) (ID, error)

	// Close stops listening and rejects the requests that were not accepted.
	Close() error
}

// An ID is one end of a connection, after struct rdma_cm_id. Setting up is for
// one goroutine; once established all methods may be called by several.
//
// For datagrams there is no connection, only a question and its answer: which
// queue pair serves an address. An ID of [Provider.ResolveUD] asks with Connect
// and keeps the answer for UDParam; one that a listener of [Provider.ListenUD]
// handed out answers with Accept or Reject. None of them need outlive that, but
// one on which a queue pair was created lives as long as the queue pair. One
// queue pair does for any number of peers: CreateQP is called once, on the ID of
// [Provider.BindUD] for instance, and Accept names it for the others. Param is
// empty, and Disconnect matches [ErrState].
type ID interface {
	// Device is the device that serves the connection, Port its port.
	Device() Device
	Port() int

	// PathMTU is how many bytes one packet carries to the peer, or how many a
	// datagram may have; 0 where the device does not say (iWARP) or not yet.
	PathMTU() int

	// LocalAddr and RemoteAddr are the addresses of the two ends, in the port
	// space of TCP or, for datagrams, of UDP.
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort

	// CreateQP creates the queue pair in [QPSInit], that for datagrams in
	// [QPSRTS]; see rdma_create_qp(3). More than the device can do matches
	// [ErrLimit].
	CreateQP(pd PD, init QPInit) (QP, error)

	// Connect asks the peer for the connection and returns when it is
	// established and the queue pair in [QPSRTS]. A refusal is a *RejectError;
	// when nobody listens the error matches syscall.ECONNREFUSED.
	Connect(ctx context.Context, param ConnParam) error

	// Accept agrees to the peer's request and returns when the connection is
	// established, see rdma_accept(3); for datagrams when the answer is sent.
	// It is established to a peer that has sent something and disconnected by
	// then: what was sent is received, and [EventDisconnected] follows.
	Accept(ctx context.Context, param ConnParam) error

	// Reject refuses the peer's request, see rdma_reject(3). private reaches
	// the peer in its RejectError.
	Reject(private []byte) error

	// PrivateData is what the peer sent with its request or its answer. Some
	// devices pad it with zeros. It must not be changed.
	PrivateData() []byte

	// MaySendFirst reports, on the passive side, whether it may send before the
	// active side has. On iWARP it may only if the two devices have agreed on a
	// message of their own that goes first (RFC 6581); elsewhere it
	// always may.
	MaySendFirst() bool

	// Param returns the depths that hold for the established connection.
	Param() ConnParam

	// UDParam returns what Connect has learnt of the peer of datagrams.
	UDParam() UDParam

	// JoinMulticast joins an IP multicast group on the ID's device and port, of
	// an ID for datagrams, and waits until that is done; see
	// rdma_join_multicast_ex(3). It returns what a datagram to the group names:
	// the way there, [MulticastQPN] and the key. A full member's queue pair, if
	// the ID has one, is attached to the group. Group and key know no ports:
	// each member receives all that is sent to the group, its own too where the
	// device has it so. A group that the ID has joined already matches
	// syscall.EADDRINUSE, more than the device can do ErrLimit. Devices without
	// [CapMulticast] return an error that matches errors.ErrUnsupported, as do
	// those that have multicast, but not of the address's family. When LeaveMulticast
	// or Close comes in between the error matches net.ErrClosed.
	JoinMulticast(ctx context.Context, group netip.Addr, how JoinFlags) (UDParam, error)

	// LeaveMulticast leaves a group that was joined; see
	// rdma_leave_multicast(3). What has arrived may still complete afterwards.
	// One that was not joined matches syscall.EADDRNOTAVAIL.
	LeaveMulticast(group netip.Addr) error

	// Notify sets the function that hears of what befalls the connection
	// afterwards. It is called from the device's goroutines, at most once for
	// each kind of event, and must not block. An event that came before is
	// delivered at once.
	Notify(func(Event))

	// Disconnect ends the connection in an orderly way and returns without
	// waiting for the peer; both sides get [EventDisconnected]. Sends that have
	// not completed may be flushed, so a caller who minds waits for them first.
	Disconnect() error

	// Close gives the ID up, and leaves its groups. The queue pair is closed first.
	Close() error
}

// Unsender is implemented by the IDs of devices whose sends complete while their bytes
// are still on this host, in the buffers of the kernel for instance.
type Unsender interface {
	// Unsent returns how many bytes of what was posted have not left the host yet, as
	// far as the device can tell: those would be lost if the process ended now. It may
	// be called at any time, also of a connection that is over.
	Unsent() int
}

// ConnParam is what the two ends tell each other at set-up, after struct
// rdma_conn_param.
type ConnParam struct {
	// Private is the consumer's data for the peer, at most
	// [DeviceAttr.MaxPrivateData] bytes, for datagrams MaxPrivateDataUD.
	Private []byte

	// ResponderResources is how many RDMA Reads of the peer this side serves
	// at a time (IRD), InitiatorDepth how many it will have outstanding (ORD).
	ResponderResources int
	InitiatorDepth     int

	// QPN is, for datagrams, the queue pair that Accept tells the peer of, on
	// the ID's device and port; not looked at when the ID has one of its own.
	QPN uint32
}

// EventKind says what happened to a connection, after enum rdma_cm_event_type
// and enum ibv_event_type.
type EventKind uint8

// The events after establishment.
const (
	EventDisconnected   EventKind = iota // either side ended the connection
	EventQPFatal                         // the queue pair failed on its own
	EventPortError                       // the port went down
	EventDeviceRemoval                   // the device is gone
	EventMulticastError                  // a group that was joined is lost
)

// String returns the event's name in lower case.
func (k EventKind) String() string {
	names := [...]string{"disconnected", "queue pair fatal", "port error", "device removed", "multicast error"}
	if int(k) < len(names) {
		return names[k]
	}
	return "unknown"
}

// Event is one thing that befell a connection.
type Event struct {
	Kind EventKind

	// Err tells why. For EventDisconnected it is nil when the peer closed in
	// an orderly way.
	Err error
}
