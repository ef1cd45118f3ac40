package ibv

// Opcode is the kind of a send-queue work request, after enum ibv_wr_opcode.
type Opcode uint8

// The operations.
const (
	OpSend     Opcode = iota
	OpSendImm         // Send with 4 bytes for the peer's completion; needs [CapSendImm]
	OpSendInv         // Send that takes back one of the peer's keys; needs [CapSendInvalidate]
	OpWrite           // RDMA Write
	OpWriteImm        // RDMA Write that completes a receive at the peer; needs [CapWriteImm]
	OpRead            // RDMA Read
	OpCmpSwap         // needs [CapAtomic]
	OpFetchAdd        // needs [CapAtomic]
	OpLocalInv        // takes back a key of this side; needs [CapLocalInvalidate]
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

// The flags.
const (
	SendSignaled  SendFlags = 1 << iota // a completion on success too
	SendInline                          // the device copies: buffers are free when PostSend returns
	SendSolicited                       // raise the peer's solicited event; sends and WriteImm only
	SendFence                           // start only after earlier RDMA Reads have completed
)

// SendWR is a work request for the send queue, after struct ibv_send_wr.
type SendWR struct {
	ID    uint64 // comes back in the completion
	Op    Opcode
	Flags SendFlags
	SGL   []SGE // source; for OpRead the destination

	Imm    uint32 // OpSendImm, OpWriteImm
	InvKey uint32 // OpSendInv: the peer's RKey; OpLocalInv: a key of this side

	RemoteAddr uint64 // OpWrite, OpWriteImm, OpRead, OpCmpSwap, OpFetchAdd
	RKey       uint32 // likewise

	CompareAdd uint64 // OpCmpSwap: what the eight bytes must hold; OpFetchAdd: what is added
	Swap       uint64 // OpCmpSwap: what they then hold

	// Where a datagram goes: the way, the queue pair there, and its key. A key
	// whose highest bit is set stands for that of the sending queue pair.
	AH         AH
	RemoteQPN  uint32
	RemoteQKey uint32
}

// RecvWR is a work request for the receive queue, after struct ibv_recv_wr.
type RecvWR struct {
	ID  uint64 // comes back in the completion
	SGL []SGE
}
