package capture

import (
	"fmt"
	"time"
)

// Kind says what a Message is.
type Kind uint8

// The kinds. Of the operations of RDMA each is one Message, whatever number of
// packets it took.
const (
	Send Kind = iota + 1
	Write
	Read         // a request and its responses
	CompareSwap  // a request and its acknowledgement
	FetchAdd     // the same
	Datagram     // UD
	Terminate    // iWARP
	Management   // InfiniBand connection management, see Message.CM
	StartRequest // iWARP, the first frame of the side that connects
	StartReply   // iWARP, the first frame of the other side
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

// Message is one operation of RDMA. It is valid, with everything in it, until
// the function returns that it was given to.
type Message struct {
	Conn *Conn
	From Side // who sent it; of a Read, who asked
	Kind Kind

	Time time.Time // of the first packet
	End  time.Time // of the last one

	// Key and Addr say whose memory: of a Write, Read or atomic operation that
	// of the other side. On iWARP they are STag and tagged offset, and
	// SinkKey and SinkAddr are where the data of a Read goes.
	Key, SinkKey   uint32
	Addr, SinkAddr uint64

	Size    uint64 // bytes: what was announced where there was such, else up to the last one seen
	Got     uint64 // of them, those in the capture
	Packets int    // packets or FPDUs with data, and those that asked

	// Complete tells that all is there, and what there is is right as far as
	// checksums tell.
	Complete bool
	Missing  []Range // which bytes are not, counted from the message's first
	HeadLost bool    // packets are missing in front of what Missing counts from
	TailLost bool    // packets are missing behind Size
	Overflow bool    // all was there but Data, for want of memory

	// Data, with Config.Data, has Size bytes, zero where they are missing, or
	// fewer where the last ones are.
	Data []byte

	Imm           uint32 // immediate data
	HasImm        bool
	Invalidate    uint32 // the key that a Send takes back
	HasInvalidate bool
	Solicited     bool

	Operand, Compare, Original uint64 // atomic operations; Operand is what is swapped in, or added

	CM     *CM    // Management
	SrcQP  uint32 // Datagram
	QKey   uint32 // Datagram
	Reason error  // Terminate: why

	nth      uint64 // among what its side has sent, from 1 on
	psn, msn uint32 // first PSN; MSN on iWARP
	lost     int    // Sends that may have been lost just before this one
	head     []byte // the beginning of a Send, whether or not Data is wanted
	buf      buffer

	mtu      int    // RoCE: bytes of every packet but the last
	count    int    // Read: PSNs that it takes, 0 if that is not known
	answered bool   // Read, atomic operations: at least in part
	seq      uint32 // Read on iWARP: where its request is in the TCP stream
	distinct bool   // Read on iWARP: its sink is not that of the Read before
	deadline uint64 // Read: when it is given up, in packets of the peer; 0 if there is no reason to
}

// Loss is something that is missing from the capture, or useless.
type Loss struct {
	Conn *Conn // nil if that is not known
	From Side
	Time time.Time // when it was found out
	What LossKind

	// PacketsLost: PSNs First to First+Count-1, modulo 2^24. BytesLost: Count
	// bytes of the TCP stream from offset First. Others: see there.
	First, Count uint64
}

// LossKind says what was lost.
type LossKind uint8

// The kinds of loss.
const (
	PacketsLost   LossKind = iota + 1 // RoCE requests that were not captured; Count PSNs, a Read takes several
	BytesLost                         // TCP segments that were not captured
	ResponsesLost                     // data of RDMA Reads whose request was not captured: Count bytes from PSN or sink offset First
	StreamLost                        // no FPDU can be found any more in a TCP stream
	Restarted                         // PSNs jumped, as if the QP had been connected anew: from First to Count
	MemoryShort                       // Config.Memory did not suffice: Count bytes were let go
)

var lossNames = [...]string{"", "packets lost", "bytes lost", "responses lost", "stream lost", "restarted", "memory short"}

// String returns the kind in words.
func (k LossKind) String() string {
	if k > 0 && int(k) < len(lossNames) {
		return lossNames[k]
	}
	return fmt.Sprintf("LossKind(%d)", uint8(k))
}

// String says what is missing.
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
	}
	return fmt.Sprintf("%v: %d", l.What, l.Count)
}
