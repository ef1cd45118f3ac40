package twin

import (
	"time"

	"github.com/rdmanet/rdmanet"
)

// Kind says what an Op does.
type Kind uint8

// The operations of the writing lane come first, then those of the reading lane, then
// those that any lane may have.
const (
	Write      Kind = iota + 1 // Size bytes by Write
	ReadFrom                   // Size bytes by ReadFrom, from a reader that yields Part bytes at a time
	Buffers                    // Size bytes by net.Buffers of Part bytes each
	WriteMsg                   // Size bytes by WriteMsg
	Pieces                     // Size bytes by WriteMsg with Partial, Part bytes at a time
	TryMsg                     // Size bytes by WriteMsg with NonBlocking, as many as are taken
	Queue                      // Size bytes by QueueMsg, messages of Part bytes, then wait for all
	Malformed                  // on a wire-level peer: a malformed message, Size says which
	Read                       // once, into Size bytes
	ReadFull                   // until Size bytes are there, into Part bytes at a time
	WriteTo                    // by WriteTo until at least Size bytes are there
	ReadMsg                    // by ReadMsg, into Size bytes
	ReadPiece                  // by ReadPiece, into Size bytes
	Pause                      // for Wait
	Meet                       // waits until every lane with a Meet of the same Size has come to it
	AwaitTaken                 // waits until this end's calls have written Size bytes
	AwaitRead                  // waits until this end has read Size bytes
	SetRead                    // SetReadDeadline, Wait from now
	SetWrite                   // SetWriteDeadline, Wait from now
	SetBoth                    // SetDeadline, Wait from now
	ClearRead                  // SetReadDeadline, none
	ClearWrite                 // SetWriteDeadline, none
	CloseWrite                 // CloseWrite
	CloseRead                  // CloseRead
	Close                      // Close
)

var kindNames = map[Kind]string{
	Write: "Write", ReadFrom: "ReadFrom", Buffers: "Buffers", WriteMsg: "WriteMsg", Pieces: "Pieces", TryMsg: "TryMsg",
	Queue: "Queue", Malformed: "Malformed", Read: "Read", ReadFull: "ReadFull", WriteTo: "WriteTo", ReadMsg: "ReadMsg",
	ReadPiece: "ReadPiece", Pause: "Pause", Meet: "Meet", AwaitTaken: "AwaitTaken", AwaitRead: "AwaitRead", SetRead: "SetRead",
	SetWrite: "SetWrite", SetBoth: "SetBoth", ClearRead: "ClearRead", ClearWrite: "ClearWrite", CloseWrite: "CloseWrite",
	CloseRead: "CloseRead", Close: "Close",
}

// String returns the name of the constant.
func (k Kind) String() string { return kindNames[k] }

// writes reports whether the operation sends bytes of the stream.
func (k Kind) writes() bool { return k >= Write && k <= Malformed }

// reads reports whether the operation receives bytes of the stream.
func (k Kind) reads() bool { return k >= Read && k <= ReadPiece }

// message reports whether the operation needs the methods that rdmanet has for messages.
// Over TCP a Write or Read takes its place.
func (k Kind) message() bool {
	switch k {
	case WriteMsg, Pieces, TryMsg, Queue, ReadMsg, ReadPiece:
		return true
	}
	return false
}

// An Op is one operation of a lane.
type Op struct {
	Do   Kind
	Size int           // bytes
	Part int           // bytes at a time
	Wait time.Duration // how long, or how far away the deadline is; it may be in the past
	Own  bool          // the memory is a Buffer of rdmanet's, not of the Go heap
}

// An End is what one end does. The three lanes run at the same time. When the writing
// lane is through it calls CloseWrite, the reading lane reads to the end of the stream,
// and when all three are through the end is closed.
type End struct {
	Setup   Setup
	Writing []Op
	Reading []Op
	Control []Op
}

// Setup is what differs from a Config of zeros; see [rdmanet.Config].
type Setup struct {
	TransferSize      int
	NoRDMARead        bool
	MaxSegment        int // MaxSendSize and MaxReceiveSize
	MaxFragmentedSize int
	InitialCredits    int
	MaxCredits        int
	TransferMemory    int
	KeepAlive         time.Duration
	Linger            time.Duration
}

func (s Setup) config(device string) rdmanet.Config {
	return rdmanet.Config{
		Device:                device,
		TransferSize:          s.TransferSize,
		NoRDMARead:            s.NoRDMARead,
		MaxSendSize:           s.MaxSegment,
		MaxReceiveSize:        s.MaxSegment,
		MaxFragmentedSize:     s.MaxFragmentedSize,
		InitialReceiveCredits: s.InitialCredits,
		MaxReceiveCredits:     s.MaxCredits,
		TransferMemory:        s.TransferMemory,
		KeepAlive:             s.KeepAlive,
		LingerTimeout:         s.Linger,
	}
}

// linger is the linger time that holds.
func (s Setup) linger() time.Duration {
	if s.Linger == 0 {
		return 5 * time.Second
	}
	return s.Linger
}

// segment is the largest message, and window how many bytes the peer may send that nobody
// has read.
func (s Setup) segment() int64 {
	if s.MaxSegment == 0 {
		return 8 << 10
	}
	return int64(s.MaxSegment)
}

func (s Setup) window() int64 {
	if s.MaxCredits == 0 {
		return 255 * s.segment()
	}
	return int64(s.MaxCredits) * s.segment()
}

// silence is how long an end may be silent before the other one ends the connection.
func (s Setup) silence() time.Duration {
	if s.KeepAlive == 0 {
		return 140 * time.Second
	}
	return s.KeepAlive + min(s.KeepAlive, 20*time.Second)
}

// A Peer says what the second end is.
type Peer uint8

// The kinds of second ends.
const (
	Rdmanet  Peer = iota // the same as the first end
	Plain                // an SMB Direct peer without extensions
	Breaking             // one that sends a malformed message
)

var peerNames = [...]string{"Rdmanet", "Plain", "Breaking"}

// String returns the name of the constant.
func (p Peer) String() string { return peerNames[p] }

// A Link is what lies between the two ends. It carries the TCP of both networks.
type Link struct {
	Delay  time.Duration // one way
	Rate   int           // bytes a second, each way; 0 is as fast as it goes
	Faults []Fault
}

// direct reports whether there need be nothing in between.
func (l Link) direct() bool { return l.Delay == 0 && l.Rate == 0 && len(l.Faults) == 0 }

// frozen reports whether the link carries nothing any more in the end.
func (l Link) frozen() bool {
	for _, f := range l.Faults {
		if f.Do == Freeze {
			return true
		}
	}
	return false
}

// cut reports whether the link resets the connection.
func (l Link) cut() bool {
	for _, f := range l.Faults {
		if f.Do == Reset {
			return true
		}
	}
	return false
}

// FaultKind says what a Fault does.
type FaultKind uint8

// The faults of a link.
const (
	Stop   FaultKind = iota + 1 // nothing is carried for a while
	Freeze                      // nothing is carried any more, as when a cable is cut
	Reset                       // both ends get a TCP reset
)

var faultNames = [...]string{"", "Stop", "Freeze", "Reset"}

// String returns the name of the constant.
func (k FaultKind) String() string { return faultNames[k] }

// A Fault befalls the link at a time after the connection was set up, or when so many
// bytes have been carried, both ways together, whichever is first; zero is never.
type Fault struct {
	Do    FaultKind
	At    time.Duration
	Bytes int64
	For   time.Duration
}

// A Program is what is run over both networks.
type Program struct {
	Seed  uint64 // of the bytes
	Peer  Peer   // what the second end is
	Swap  bool   // the second end dials
	Link  Link
	First End
	Other End
}

func (p *Program) end(i int) *End {
	if i == 0 {
		return &p.First
	}
	return &p.Other
}

// lanes returns the lists of operations, for those who change them.
func (p *Program) lanes() []*[]Op {
	return []*[]Op{
		&p.First.Writing, &p.First.Reading, &p.First.Control,
		&p.Other.Writing, &p.Other.Reading, &p.Other.Control,
	}
}

// clone returns a copy that shares nothing with p.
func (p *Program) clone() *Program {
	q := *p
	for _, l := range q.lanes() {
		*l = append([]Op(nil), *l...)
	}
	q.Link.Faults = append([]Fault(nil), p.Link.Faults...)
	return &q
}

// has reports whether an end has such an operation.
func (e *End) has(kinds ...Kind) bool {
	for _, lane := range [][]Op{e.Writing, e.Reading, e.Control} {
		for _, op := range lane {
			for _, k := range kinds {
				if op.Do == k {
					return true
				}
			}
		}
	}
	return false
}

// bytes returns how many bytes the program writes, both ends together.
func (p *Program) bytes() (n int64) {
	for _, l := range p.lanes() {
		for _, op := range *l {
			if op.Do.writes() && op.Do != Malformed {
				n += int64(op.Size)
			}
		}
	}
	return n
}
