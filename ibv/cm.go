package ibv

import (
	"context"
	"net/netip"
	"time"
)

// A Listener returns connection requests, see rdma_listen(3) and rdma_get_request(3). All
// methods may be called by several goroutines at once.
type Listener interface {
	// Addr is the bound address. If port 0 was asked for, it has the port that was chosen.
	Addr() netip.AddrPort

	// Accept waits for the next connection request and returns its ID. The caller must
	// Accept or Reject the ID, and Close it. The error is net.ErrClosed after Close, and
	// that of ctx when ctx ends. It matches syscall.ENODEV when the device of the address
	// was removed, and no more requests will come.
	Accept(ctx context.Context) (ID, error)

	// Close stops listening and rejects the requests that were not accepted.
	Close() error
}

// An ID is one end of a connection, after struct rdma_cm_id. Only one goroutine may set it
// up. Once the connection is established, all methods may be called by several goroutines.
//
// For datagrams there is no connection. There is only a request for the queue pair that
// serves an address, and its reply. Connect on an ID of [Provider.ResolveUD] sends the
// request, and UDParam returns the reply. Accept or Reject on an ID of a listener of
// [Provider.ListenUD] sends the reply. These IDs may be closed then. An ID on which a queue
// pair was created lives as long as the queue pair. One queue pair serves any number of
// peers. So CreateQP is called once, for instance on the ID of [Provider.BindUD], and
// Accept names that queue pair on the other IDs. Param is empty, and Disconnect fails with
// an error that matches [ErrState].
type ID interface {
	// Device is the device that serves the connection, and Port is the device's port.
	Device() Device
	Port() int

	// PathMTU is how many bytes a packet to the peer carries, or how many a datagram may
	// have. It is 0 if the device does not know it, as on iWARP, or does not know it yet.
	PathMTU() int

	// LocalAddr and RemoteAddr are the addresses of the two ends, in the port
	// space of TCP or, for datagrams, of UDP.
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort

	// CreateQP creates the queue pair in [QPSInit], or in [QPSRTS] for datagrams; see
	// rdma_create_qp(3). Above the device's limits the error matches [ErrLimit].
	CreateQP(pd PD, init QPInit) (QP, error)

	// Connect requests the connection from the peer. It returns when the connection is
	// established and the queue pair is in [QPSRTS]. If the peer refuses, the error is a
	// *RejectError. If nobody listens, it matches syscall.ECONNREFUSED.
	Connect(ctx context.Context, param ConnParam) error

	// Accept accepts the peer's request, see rdma_accept(3). It returns when the
	// connection is established, or for datagrams when the reply is sent. The peer may
	// have sent something and disconnected by then. The connection is established all the
	// same: what was sent is received, and [EventDisconnected] follows.
	Accept(ctx context.Context, param ConnParam) error

	// Reject refuses the peer's request, see rdma_reject(3). The peer finds private in its
	// RejectError.
	Reject(private []byte) error

	// PrivateData is the private data of the peer's request or answer. Some devices pad it
	// with zeros. It must not be changed.
	PrivateData() []byte

	// MaySendFirst reports whether the passive side may send before the active side has
	// sent. On iWARP it may only if the two devices have agreed on a first message of
	// their own (RFC 6581). Elsewhere it always may.
	MaySendFirst() bool

	// Param returns the depths that were agreed for the connection.
	Param() ConnParam

	// UDParam returns the peer's reply to Connect, for datagrams.
	UDParam() UDParam

	// JoinMulticast joins an IP multicast group on the device and port of an ID for
	// datagrams, and waits until that is done; see rdma_join_multicast_ex(3). It returns
	// what a datagram to the group must name: the path, [MulticastQPN] and the key. If the
	// ID has a queue pair, and joins as a full member, the queue pair is attached to the
	// group.
	//
	// A group has no ports. Each member receives all that is sent to the group, on some
	// devices also what it has sent itself.
	//
	// If the ID has joined the group already, the error matches syscall.EADDRINUSE. Above
	// the device's limits it matches ErrLimit. Without [CapMulticast], or if the device
	// has no multicast for the address's family, it matches errors.ErrUnsupported. If
	// LeaveMulticast or Close is called meanwhile, it matches net.ErrClosed.
	JoinMulticast(ctx context.Context, group netip.Addr, how JoinFlags) (UDParam, error)

	// LeaveMulticast leaves a group that was joined; see rdma_leave_multicast(3).
	// Datagrams that have arrived may still complete afterwards. If the group was not
	// joined, the error matches syscall.EADDRNOTAVAIL.
	LeaveMulticast(group netip.Addr) error

	// Notify sets the function that is called for later events of the connection.
	// Goroutines of the device call it, at most once for each kind of event. It must not
	// block. An event that has happened before is reported at once.
	Notify(func(Event))

	// Disconnect ends the connection in an orderly way, and returns without waiting for
	// the peer. Both sides get [EventDisconnected]. Sends that have not completed may be
	// flushed. A caller that needs them waits for their completions first, or calls
	// [HoldingQP].CloseSends.
	Disconnect() error

	// Close releases the ID, and leaves its groups. It fails with an error that matches
	// [ErrBusy] while the ID has a queue pair.
	Close() error
}

// A Linker is an ID whose device can carry a connection in several ways. The software device
// has one.
type Linker interface {
	// Link returns the name of the way in use, and why it is not the best of them, if it is
	// not. Both are empty before the connection is established.
	Link() (name, reason string)
}

// Unsender is implemented by the IDs of devices whose sends complete while their bytes are
// still on this host, for instance in buffers of the kernel.
type Unsender interface {
	// Unsent returns how many of the posted bytes have not left the host yet, as far as
	// the device knows. These bytes would be lost if the process ended now. Unsent may be
	// called at any time, also when the connection is over.
	Unsent() int
}

// Acknowledger is implemented by the IDs of devices that know what the peer's host has got.
type Acknowledger interface {
	// Acknowledged tells, after Disconnect or [HoldingQP].CloseSends, whether the peer's host
	// has acknowledged all that was sent, and the end behind it. The peer's process may not
	// have read it. When the connection has ended, it can tell if both directions have ended
	// in an orderly way, until the queue pair is closed.
	Acknowledged() Ack
}

// Ack is what a device knows of what the peer's host has got.
type Ack uint8

// These are the answers of an Acknowledger.
const (
	AckUnknown Ack = iota // AckUnknown: the device cannot tell, or not any more.
	AckPending            // AckPending: the host has not acknowledged everything yet.
	AckAll                // AckAll: the host has acknowledged everything.
	AckNever              // AckNever: the connection has ended before the host had acknowledged everything.
)

// Ender is implemented by the IDs of devices that can send the end of a connection together
// with what is posted last.
type Ender interface {
	// Ending tells that few sends are still to be posted, none of which anything waits
	// for, and that Disconnect follows at once. The device may keep them back until then.
	Ending()
}

// HostProber is implemented by the IDs of devices that can ask the peer's host whether it is
// there, and get an answer whatever the peer's process does. Over TCP kernels answer each
// other.
type HostProber interface {
	// ProbeHost has the device ask the peer's host for an answer whenever nothing has come
	// from it for idle. If none comes within patience, [EventDisconnected] follows with an
	// error that matches syscall.ETIMEDOUT or says why the host cannot be reached. Both times
	// are at least one second, and may be rounded down to seconds. ProbeHost is called at most
	// once, for a connection that is established. It returns false, and does nothing, if the
	// device cannot ask.
	//
	// While the host owes an answer to something that was sent, or does not let this side
	// send, the device may not ask on its own, or less and less often. HostHeard is for that.
	ProbeHost(idle, patience time.Duration) bool

	// HostHeard returns how long ago something has come from the peer's host. owes is set if
	// the host should have answered something since then. HostHeard may be called at any
	// time after ProbeHost.
	HostHeard() (ago time.Duration, owes bool)
}

// ConnParam has the parameters that an end announces at set-up, after struct
// rdma_conn_param.
type ConnParam struct {
	// Private is data of the program for the peer. It has at most
	// [DeviceAttr.MaxPrivateData] bytes, for datagrams MaxPrivateDataUD.
	Private []byte

	// ResponderResources is how many RDMA Reads of the peer this side serves at a time
	// (IRD). InitiatorDepth is how many RDMA Reads this side will have outstanding (ORD).
	ResponderResources int
	InitiatorDepth     int

	// QPN is for datagrams. It is the queue pair that Accept reports to the peer, on the
	// ID's device and port. If the ID has a queue pair of its own, QPN is not used.
	QPN uint32
}

// String returns the answer in lower case.
func (a Ack) String() string {
	names := [...]string{"unknown", "pending", "all", "never"}
	if int(a) < len(names) {
		return names[a]
	}
	return "unknown"
}

// EventKind is the kind of an Event, after enum rdma_cm_event_type and enum ibv_event_type.
type EventKind uint8

// These are the events after establishment.
const (
	EventDisconnected   EventKind = iota // EventDisconnected: either side has ended the connection.
	EventQPFatal                         // EventQPFatal: the queue pair has failed by itself.
	EventPortError                       // EventPortError: the port has gone down.
	EventDeviceRemoval                   // EventDeviceRemoval: the device was removed.
	EventMulticastError                  // EventMulticastError: a group that was joined is lost.

	// EventSQError: nothing can be sent any more, and what the peer has sent may still come. A
	// queue pair that holds Sends has it, as the end of the connection is found behind those.
	EventSQError

	// EventSendsClosed: the peer has closed its sends (HoldingQP.CloseSends), or its process has
	// ended. Nothing more comes, and this side can go on sending. EventDisconnected follows when
	// this side has closed its own sends too.
	EventSendsClosed
)

// String returns the event's name in lower case.
func (k EventKind) String() string {
	names := [...]string{"disconnected", "queue pair fatal", "port error", "device removed", "multicast error", "send queue error", "sends closed"}
	if int(k) < len(names) {
		return names[k]
	}
	return "unknown"
}

// Event is something that happened to a connection.
type Event struct {
	Kind EventKind

	// Err is the cause. It is nil for EventDisconnected when the peer closed in an orderly
	// way.
	Err error
}
