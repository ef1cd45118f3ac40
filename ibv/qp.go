package ibv

// A QP is a queue pair, created by [ID.CreateQP]. All methods may be called by several
// goroutines at once. The work requests of concurrent posts are not mixed.
//
// The ID decides whether it is reliably connected or for datagrams. A queue pair for
// datagrams sends with [OpSend] and [OpSendImm] only. Each send is a datagram of one packet
// to the peer that it names. If it is longer than the port's MTU, the error matches
// [ErrLimit]. Datagrams may be lost, doubled or late. A datagram that finds no receive
// posted is dropped. Datagrams to the same peer are sent in the order in which they were
// posted.
type QP interface {
	// QPN is the queue pair's number on its device.
	QPN() uint32

	// Cap returns the capacities that were granted, at least those asked for.
	Cap() QPCap

	// State returns the present state.
	State() QPState

	// PostSend posts wrs in order. It returns how many were taken. The error is that of
	// the first request that was not taken. If the queue is full, the error matches
	// [ErrQueueFull]: the caller must poll completions first. wrs and the SGLs in it may
	// be used again when PostSend returns, but the buffers may not (see [SendInline]). In
	// the error state requests are taken and flushed. In the states before [QPSRTS] they
	// are refused.
	PostSend(wrs []SendWR) (int, error)

	// PostRecv posts receives in order, from [QPSInit] on. Otherwise it is like PostSend.
	PostRecv(wrs []RecvWR) (int, error)

	// RegMR is [PD.RegMR] in the queue pair's domain, for a region whose remote key
	// belongs to this queue pair. This queue pair's peer may use the key, and invalidate
	// it with [OpSendInv]. Peers of other queue pairs in the domain may not. The local key
	// is like any other. When the queue pair is closed, the remote key opens nothing any
	// more. The region stays until its own Close, and keeps the domain busy until then.
	// Without [CapQPRegion] the error matches errors.ErrUnsupported.
	RegMR(buf []byte, access Access) (MR, error)

	// AttachMcast makes a queue pair for datagrams receive what is sent to a group, and
	// DetachMcast ends that. The group is named by gid, and on InfiniBand also by lid. See
	// ibv_attach_mcast(3). [ID.JoinMulticast] attaches the queue pair by itself, and joins
	// the group on the network, which AttachMcast does not. Above the device's limits the
	// error matches ErrLimit. Without [CapMulticast] it matches errors.ErrUnsupported. A
	// queue pair of a connection is refused.
	AttachMcast(gid GID, lid uint16) error
	DetachMcast(gid GID, lid uint16) error

	// SetError moves the queue pair to [QPSError]: the connection ends at once, and all
	// posted work is flushed.
	SetError() error

	// Close destroys the queue pair. Work that has not completed is dropped without a
	// completion. Completions that were not polled stay in the CQ. When Close returns, the
	// device uses none of the posted buffers any more. If the queue pair is attached to a
	// group, or its ID is a full member of one, the error matches [ErrBusy].
	Close() error
}

// An IdleQP is a queue pair that can give memory back while no data is expected. It is an
// optional interface of [QP], which the software device has. An adapter cannot have it: it
// reads the addresses of its receives at any time, and its queues keep the length that they
// were made with.
type IdleQP interface {
	// Idle frees what the queues and completion queues have grown by. It calls unused with
	// the memory of each posted receive that no message has begun to fill. No message
	// begins to fill it before unused has returned. So unused may give the pages back to
	// the system, if the system maps new pages when the memory is used again. unused must
	// not call methods of the queue pair.
	Idle(unused func(buf []byte))
}

// A HoldingQP is a queue pair of a device with [CapHoldSends]. All queue pairs for connections
// of such a device have this interface.
type HoldingQP interface {
	// StopHolding ends the effect of QPInit.HoldSends, also for a Send that waits.
	StopHolding()

	// PeerHolds tells the queue pair that the peer's holds Sends too. From then on it sends
	// nothing but what is posted, and answers to that.
	PeerHolds()

	// CloseSends ends this side's direction behind everything that was posted, and nothing can
	// be posted to the send queue any more. The other direction goes on. A peer whose queue pair
	// holds Sends gets [EventSendsClosed], and to any other it is the end of the connection.
	// The error matches [ErrState] before the connection is established.
	CloseSends() error

	// SendsHaveRoom reports whether there is room for megabytes of Sends that wait, as in the
	// buffers of sockets. If not, the owner may post receives so that the peer can go on. It may
	// be another answer later.
	SendsHaveRoom() bool

	// PeerCloses tells the queue pair that the peer ends the connection, and not its direction
	// alone. Then the end of that direction ends the queue pair too, as it does where no Sends
	// are held. That is so also if EventSendsClosed has come before.
	PeerCloses()
}

// An InPlaceQP is a queue pair that sends inline data straight from the caller's memory, if
// the caller waits for that. It is an optional interface of [QP], which the software device
// has. Its methods may be called by several goroutines at once, except that data is posted in
// place by one at a time.
type InPlaceQP interface {
	// PostInPlace is PostSend, but does not copy inline data that it could not hand over at
	// once. If there is such data lent is set. Then the caller's memory is in use until Flush
	// returns 0 or an error, or Keep returns. One of them must be called.
	PostInPlace(wrs []SendWR) (n int, lent bool, err error)

	// Flush hands over what PostInPlace has left, and waits for that, as write(2) waits for a
	// socket. It returns of how many requests not all data was handed over, the last ones that
	// were posted. There may be some if FlushInterrupt was called meanwhile or before, and with
	// an error, which says why nothing can be sent any more.
	Flush() (left int, err error)

	// FlushInterrupt ends the Flush in progress, or else the next one.
	FlushInterrupt()

	// Keep copies what is left, to be handed over later. An error says why nothing can be sent
	// any more, and left is as in Flush then, and otherwise 0.
	Keep() (left int, err error)
}

// A PollPayer is a queue pair of a device with [CapWaitReceives] that knows when polling its
// completion queue before a Wait pays all the same. It is an optional interface of [QP],
// which the software device has.
type PollPayer interface {
	// PollPays reports whether a poll that begins now is likely to find the peer's next
	// message sooner than a Wait would. It takes no longer than a Poll.
	PollPays() bool
}

// QPCap holds the capacities of a queue pair, after struct ibv_qp_cap.
type QPCap struct {
	MaxSendWR  int // MaxSendWR is the number of work requests in the send queue.
	MaxRecvWR  int // MaxRecvWR is the number of work requests in the receive queue.
	MaxSendSGE int // MaxSendSGE is the number of elements of a send.
	MaxRecvSGE int // MaxRecvSGE is the number of elements of a receive.
	MaxInline  int // MaxInline is the number of bytes of an inline send.
}

// QPInit has the properties of a new queue pair, after struct ibv_qp_init_attr.
type QPInit struct {
	SendCQ CQ // SendCQ may be the same as RecvCQ.
	RecvCQ CQ
	Cap    QPCap

	// SignalAll gives every send a completion, as if it had [SendSignaled].
	SignalAll bool

	// HoldSends has a Send of the peer's wait if it finds no receive posted, until one is, as
	// receiver-not-ready does that is repeated for ever. Everything that the peer sends behind
	// it waits too. Behind Disconnect such a Send is dropped instead. Without HoldSends it ends
	// the connection. HoldSends needs [CapHoldSends].
	HoldSends bool
}

// QPState is the state of a queue pair, after enum ibv_qp_state.
type QPState uint8

// These are the states. iWARP devices map their states onto them.
const (
	QPSReset QPState = iota
	QPSInit          // QPSInit: receives may be posted.
	QPSRTR           // QPSRTR: the queue pair is ready to receive.
	QPSRTS           // QPSRTS: the queue pair is ready to send, and connected.
	QPSSQD           // QPSSQD: the send queue is draining.
	QPSSQE           // QPSSQE: the send queue has an error.
	QPSError         // QPSError: all work is flushed.
)

// String returns the state's usual name, "RTS" for instance.
func (s QPState) String() string {
	names := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	if int(s) < len(names) {
		return names[s]
	}
	return "unknown"
}
