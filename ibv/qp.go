package ibv

// A QP is a queue pair, created by [ID.CreateQP]. All methods may be called by
// several goroutines at once; work requests of concurrent posts are not mixed.
//
// It is reliably connected, or one for datagrams, depending on the ID. The latter
// sends with [OpSend] and [OpSendImm] only, each a datagram of one packet to the
// peer that it names; more than the port's MTU matches [ErrLimit]. Datagrams may
// be lost, doubled or late; one that finds no receive posted is dropped. Those to
// the same peer are sent in the order they were posted.
type QP interface {
	// QPN is the queue pair's number on its device.
	QPN() uint32

	// Cap returns the capacities that were granted, at least those asked for.
	Cap() QPCap

	// State returns the state of the moment.
	State() QPState

	// PostSend posts wrs in order. It returns how many were taken; the one at
	// that index is the cause of the error. A full queue matches
	// [ErrQueueFull]: nothing is wrong, completions must be polled first. wrs
	// and the SGLs in it are free when PostSend returns, the buffers are not
	// (see [SendInline]). In the error state posts are taken and flushed; in
	// the states before [QPSRTS] they are refused.
	PostSend(wrs []SendWR) (int, error)

	// PostRecv posts receives in order, from [QPSInit] on; otherwise as PostSend.
	PostRecv(wrs []RecvWR) (int, error)

	// RegMR is [PD.RegMR] in the queue pair's domain for a region whose remote key
	// belongs to this queue pair: its peer may use it, and take it back with
	// [OpSendInv], and the peer of no other queue pair in the domain. The local key
	// is as any. When the queue pair is closed the remote key opens nothing any
	// more, but the region stays until its own Close, and keeps the domain busy.
	// Devices without [CapQPRegion] return an error that matches
	// errors.ErrUnsupported.
	RegMR(buf []byte, access Access) (MR, error)

	// AttachMcast has a queue pair for datagrams receive what is sent to the
	// group that gid, and on InfiniBand lid, name; DetachMcast ends that. See
	// ibv_attach_mcast(3). [ID.JoinMulticast] does it by itself and tells the
	// network as well; this alone does not. More than the device can do matches
	// ErrLimit. Devices without [CapMulticast] return an error that matches
	// errors.ErrUnsupported; a queue pair of a connection is refused.
	AttachMcast(gid GID, lid uint16) error
	DetachMcast(gid GID, lid uint16) error

	// SetError moves the queue pair to [QPSError]: the connection ends without
	// grace and all posted work is flushed.
	SetError() error

	// Close destroys the queue pair. Work that was not completed is dropped
	// without a completion; completions not yet polled stay in the CQ. When it
	// returns the device uses none of the posted buffers any more. One that is
	// attached to a group, or whose ID is a full member of one, matches
	// [ErrBusy].
	Close() error
}

// An IdleQP is a queue pair that can give memory back while nothing is to be expected:
// an optional interface of [QP], which the software device has. An adapter reads the
// addresses of its receives when it likes, and its queues have the length that they were
// made with.
type IdleQP interface {
	// Idle gives back what the queues and completion queues have grown by, and calls
	// unused with the memory of each receive that is posted and has not been begun on.
	// None is begun on before unused has returned, so that it may give the pages
	// back to the system, if the memory is such as comes back by itself when it is
	// touched again. unused must not call methods of the queue pair.
	Idle(unused func(buf []byte))
}

// QPCap holds the capacities of a queue pair, after struct ibv_qp_cap.
type QPCap struct {
	MaxSendWR  int // work requests in the send queue
	MaxRecvWR  int // work requests in the receive queue
	MaxSendSGE int // elements a send
	MaxRecvSGE int // elements a receive
	MaxInline  int // bytes of an inline send
}

// QPInit says what queue pair is wanted, after struct ibv_qp_init_attr.
type QPInit struct {
	SendCQ CQ // may be the same as RecvCQ
	RecvCQ CQ
	Cap    QPCap

	// SignalAll gives every send a completion, as if it had [SendSignaled].
	SignalAll bool
}

// QPState is the state of a queue pair, after enum ibv_qp_state.
type QPState uint8

// The states; iWARP devices map theirs onto them.
const (
	QPSReset QPState = iota
	QPSInit          // receives may be posted
	QPSRTR           // ready to receive
	QPSRTS           // ready to send: the connection is up
	QPSSQD           // send queue draining
	QPSSQE           // send queue error
	QPSError         // everything is flushed
)

// String returns the state's usual name, "RTS" for instance.
func (s QPState) String() string {
	names := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	if int(s) < len(names) {
		return names[s]
	}
	return "unknown"
}
