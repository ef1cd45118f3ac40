package capture

import (
	"fmt"
	"time"
)

// Kind is the kind of a Message.
type Kind uint8

// These are the kinds. Each operation of RDMA is one Message, whatever number of packets it
// took.
const (
	Send Kind = iota + 1
	Write
	Read         // Read is a request and its responses.
	CompareSwap  // CompareSwap is a request and its acknowledgement.
	FetchAdd     // FetchAdd is a request and its acknowledgement.
	Datagram     // Datagram is a Send of UD.
	Terminate    // Terminate is a message of iWARP.
	Management   // Management is a message of InfiniBand connection management, see Message.CM.
	StartRequest // StartRequest is the first frame of the side that connects by iWARP.
	StartReply   // StartReply is the first frame of the other side.
)

var kindNames = [...]string{"", "Send", "Write", "Read", "CompareSwap", "FetchAdd", "Datagram", "Terminate",
	"Management", "StartRequest", "StartReply"}

// String returns the name of the constant.
func (k Kind) String() string {
	if k > 0 && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Message is one operation of RDMA. A function that is given a Message may use it, and all
// that it refers to, until the function returns.
type Message struct {
	Conn *Conn
	From Side // From is the side that sent the message, for a Read the side that sent the request.
	Kind Kind

	Time time.Time // Time is that of the first packet.
	End  time.Time // End is the time of the last packet.

	// Key and Addr are the memory of the other side that a Write, Read or atomic operation
	// uses. On iWARP they are STag and tagged offset. SinkKey and SinkAddr are the place
	// that the data of a Read goes to on iWARP.
	Key, SinkKey   uint32
	Addr, SinkAddr uint64

	// Size is in bytes. It is the size that was announced. Without an announcement it
	// reaches to the last byte that was captured.
	Size uint64

	Got uint64 // Got is how many of these bytes were captured.

	// Packets counts the packets or FPDUs with data, and those of the request.
	Packets int

	// Complete is set if everything was captured, and the checksums that there are are
	// right.
	Complete bool
	Missing  []Range // Missing has the bytes that were not captured, counted from the first byte of the message.
	HeadLost bool    // HeadLost is set if packets are missing in front of the first byte that Missing counts.
	TailLost bool    // TailLost is set if packets are missing behind Size.
	Overflow bool    // Overflow is set if everything was captured, and there was no memory for Data.

	// Data has Size bytes if Config.Data is set. Bytes that are missing are zero. If the
	// last bytes are missing, Data may be shorter.
	Data []byte

	Imm           uint32 // Imm is the immediate data, if HasImm is set.
	HasImm        bool
	Invalidate    uint32 // Invalidate is the key that a Send invalidates, if HasInvalidate is set.
	HasInvalidate bool
	Solicited     bool

	// Operand is what an atomic operation swaps in or adds. Compare is what CompareSwap
	// compares with, and Original is the value before the operation.
	Operand, Compare, Original uint64

	CM     *CM    // CM is the message of connection management, if Kind is Management.
	SrcQP  uint32 // SrcQP is the queue pair that a Datagram is from.
	QKey   uint32 // QKey is the Q_Key of a Datagram.
	Reason error  // Reason is the cause that a Terminate gives.

	nth      uint64 // nth is the message's number among those of its side, from 1 on.
	psn, msn uint32 // psn is the first PSN. msn is the MSN on iWARP.
	lost     int    // lost is how many Sends may have been lost just before this one.
	head     []byte // head is the beginning of a Send. It is kept without Config.Data too.
	buf      buffer

	mtu      int    // mtu is how many bytes every packet of RoCE has, except the last one.
	count    int    // count is how many PSNs a Read takes, 0 if that is not known.
	answered bool   // answered is set if a Read or atomic operation was answered, at least in part.
	seq      uint32 // seq is where the request of a Read is in the TCP stream of iWARP.
	distinct bool   // distinct is set if a Read of iWARP has another sink than the Read before.
	deadline uint64 // deadline is when a Read is given up, in packets of the peer. 0 means never.
}

// Loss reports something that is missing from the capture, or that cannot be used.
type Loss struct {
	Conn *Conn // Conn is nil if the connection is not known.
	From Side
	Time time.Time // Time is when the loss was noticed.
	What LossKind

	// First and Count depend on What. For PacketsLost they are the PSNs First to
	// First+Count-1, modulo 2^24. For BytesLost they are Count bytes of the TCP stream
	// from offset First. The other kinds of loss describe them.
	First, Count uint64
}

// LossKind is the kind of a Loss.
type LossKind uint8

// These are the kinds of loss.
const (
	// PacketsLost: RoCE requests were not captured. They have Count PSNs. A Read takes
	// several PSNs.
	PacketsLost LossKind = iota + 1

	BytesLost // BytesLost: TCP segments were not captured.

	// ResponsesLost: the request of an RDMA Read was not captured. The data that answers
	// it is lost, Count bytes from the PSN or sink offset First on.
	ResponsesLost

	StreamLost  // StreamLost: no FPDU can be found any more in a TCP stream.
	Restarted   // Restarted: PSNs jumped from First to Count, as if the QP had been connected anew.
	MemoryShort // MemoryShort: Config.Memory was used up, and Count bytes were given up.

	// AnswersLost: Count requests of SMB2 or calls of RPC were given up. From asked, and many
	// requests later no answer to these had been captured.
	AnswersLost
)

var lossNames = [...]string{"", "packets lost", "bytes lost", "responses lost", "stream lost", "restarted", "memory short", "answers lost"}

// String returns the kind in words.
func (k LossKind) String() string {
	if k > 0 && int(k) < len(lossNames) {
		return lossNames[k]
	}
	return fmt.Sprintf("LossKind(%d)", uint8(k))
}

// String describes what is missing.
func (l Loss) String() string {
	switch l.What {
	case PacketsLost:
		if l.Count == 1 {
			return fmt.Sprintf("PSN %d is missing", l.First)
		}
		return fmt.Sprintf("PSN %d to %d are missing", l.First, (l.First+l.Count-1)&psnMask)
	case BytesLost:
		return fmt.Sprintf("%d bytes are missing at %d of the TCP stream", l.Count, l.First)
	case ResponsesLost:
		return fmt.Sprintf("%d bytes of a Read whose request is missing, at %d", l.Count, l.First)
	case Restarted:
		return fmt.Sprintf("PSN jumped from %d to %d", l.First, l.Count)
	case StreamLost:
		return "no FPDU to be found in the TCP stream"
	case AnswersLost:
		return fmt.Sprintf("%d requests without an answer", l.Count)
	}
	return fmt.Sprintf("%v: %d", l.What, l.Count)
}
