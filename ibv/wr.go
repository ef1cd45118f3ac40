package ibv

// Opcode is the kind of a send-queue work request, after enum ibv_wr_opcode.
type Opcode uint8

// These are the operations.
const (
	OpSend     Opcode = iota
	OpSendImm         // OpSendImm is a Send with 4 bytes for the peer's completion. It needs [CapSendImm].
	OpSendInv         // OpSendInv is a Send that invalidates a key of the peer. It needs [CapSendInvalidate].
	OpWrite           // OpWrite is an RDMA Write.
	OpWriteImm        // OpWriteImm is an RDMA Write that completes a receive of the peer. It needs [CapWriteImm].
	OpRead            // OpRead is an RDMA Read.
	OpCmpSwap         // OpCmpSwap needs [CapAtomic].
	OpFetchAdd        // OpFetchAdd needs [CapAtomic].
	OpLocalInv        // OpLocalInv invalidates a key of this side. It needs [CapLocalInvalidate].
)

// String returns the operation's name, "RDMA Write" for instance.
func (o Opcode) String() string {
	names := [...]string{"Send", "Send with Immediate", "Send with Invalidate", "RDMA Write",
		"RDMA Write with Immediate", "RDMA Read", "Compare and Swap", "Fetch and Add", "Local Invalidate"}
	if int(o) < len(names) {
		return names[o]
	}
	return "unknown"
}

// SendFlags modify a send-queue work request, after enum ibv_send_flags.
type SendFlags uint8

// These are the flags.
const (
	SendSignaled SendFlags = 1 << iota // SendSignaled requests a completion on success too.
	SendInline                         // SendInline makes the device copy: the buffers are free when PostSend returns.

	// SendSolicited raises the peer's solicited event. It is for sends and OpWriteImm
	// only.
	SendSolicited

	SendFence // SendFence starts the request only after earlier RDMA Reads have completed.
)

// SendWR is a work request for the send queue, after struct ibv_send_wr.
type SendWR struct {
	ID    uint64 // ID is returned in the completion.
	Op    Opcode
	Flags SendFlags
	SGL   []SGE // SGL is the source, or the destination of OpRead.

	Imm    uint32 // Imm is the immediate data of OpSendImm and OpWriteImm.
	InvKey uint32 // InvKey is the peer's RKey for OpSendInv, and a key of this side for OpLocalInv.

	// RemoteAddr and RKey name the peer's memory for OpWrite, OpWriteImm, OpRead,
	// OpCmpSwap and OpFetchAdd.
	RemoteAddr uint64
	RKey       uint32

	// CompareAdd is the value that the eight bytes must have for OpCmpSwap, and the value
	// that OpFetchAdd adds.
	CompareAdd uint64

	Swap uint64 // Swap is the new value for OpCmpSwap.

	// AH, RemoteQPN and RemoteQKey are the destination of a datagram: the path, the peer's
	// queue pair, and its key. A key whose highest bit is set stands for the key of the
	// sending queue pair.
	AH         AH
	RemoteQPN  uint32
	RemoteQKey uint32
}

// RecvWR is a work request for the receive queue, after struct ibv_recv_wr.
type RecvWR struct {
	ID  uint64 // ID is returned in the completion.
	SGL []SGE
}
