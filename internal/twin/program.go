package twin

import (
	"time"

	"github.com/rdmanet/rdmanet"
)

// Kind is what an Op does.
type Kind uint8

// These are the operations: first those of the writing lane, then those of the reading
// lane, then those of any lane.
const (
	Write Kind = iota + 1 // Write writes Size bytes by Write.

	// ReadFrom writes Size bytes by ReadFrom, from a reader that returns Part bytes at a
	// time.
	ReadFrom

	Writes   // Writes writes Size bytes by Writes of Part bytes each.
	Buffers  // Buffers writes Size bytes by net.Buffers of Part bytes each.
	WriteMsg // WriteMsg writes Size bytes by WriteMsg.
	Pieces   // Pieces writes Size bytes by WriteMsg with Partial, Part bytes at a time.
	TryMsg   // TryMsg writes Size bytes by WriteMsg with NonBlocking, as many as are taken.

	// Queue queues Size bytes by QueueMsg, in messages of Part bytes, and waits for all of
	// them.
	Queue

	// Malformed makes a wire-level peer send a malformed message. Size selects the kind.
	Malformed

	Read       // Read reads once, into Size bytes.
	ReadFull   // ReadFull reads Size bytes, at most Part bytes at a time.
	WriteTo    // WriteTo reads at least Size bytes by WriteTo.
	ReadMsg    // ReadMsg reads a message into Size bytes.
	ReadPiece  // ReadPiece reads a piece into Size bytes.
	Pause      // Pause does nothing for Wait.
	Meet       // Meet waits for every lane that has a Meet of the same Size.
	AwaitTaken // AwaitTaken waits until this end's calls have written Size bytes.
	AwaitRead  // AwaitRead waits until this end has read Size bytes.
	AwaitWrote // AwaitWrote waits, without a limit, until this end's writing lane has done all of its operations.
	AwaitEnd   // AwaitEnd waits, without a limit, until this end's reading lane is done.
	SetRead    // SetRead calls SetReadDeadline, Wait from now.
	SetWrite   // SetWrite calls SetWriteDeadline, Wait from now.
	SetBoth    // SetBoth calls SetDeadline, Wait from now.
	ClearRead  // ClearRead calls SetReadDeadline without a deadline.
	ClearWrite // ClearWrite calls SetWriteDeadline without a deadline.
	CloseWrite // CloseWrite calls CloseWrite.
	CloseRead  // CloseRead calls CloseRead.
	Close      // Close calls Close.
	Exit       // Exit ends the process of the second end, without Close. The program is Apart.
)

var kindNames = map[Kind]string{
	Write: "Write", ReadFrom: "ReadFrom", Writes: "Writes", Buffers: "Buffers", WriteMsg: "WriteMsg", Pieces: "Pieces", TryMsg: "TryMsg",
	Queue: "Queue", Malformed: "Malformed", Read: "Read", ReadFull: "ReadFull", WriteTo: "WriteTo", ReadMsg: "ReadMsg",
	ReadPiece: "ReadPiece", Pause: "Pause", Meet: "Meet", AwaitTaken: "AwaitTaken", AwaitRead: "AwaitRead", AwaitWrote: "AwaitWrote", AwaitEnd: "AwaitEnd", SetRead: "SetRead",
	SetWrite: "SetWrite", SetBoth: "SetBoth", ClearRead: "ClearRead", ClearWrite: "ClearWrite", CloseWrite: "CloseWrite",
	CloseRead: "CloseRead", Close: "Close", Exit: "Exit",
}

// String returns the name of the constant.
func (k Kind) String() string { return kindNames[k] }

// writes reports whether the operation sends bytes of the stream.
func (k Kind) writes() bool { return k >= Write && k <= Malformed }

// reads reports whether the operation receives bytes of the stream.
func (k Kind) reads() bool { return k >= Read && k <= ReadPiece }

// message reports whether the operation needs rdmanet's methods for messages. Over TCP a
// Write or Read is used instead.
func (k Kind) message() bool {
	switch k {
	case WriteMsg, Pieces, TryMsg, Queue, ReadMsg, ReadPiece:
		return true
	}
	return false
}

// An Op is one operation of a lane.
type Op struct {
	Do     Kind
	Size   int           // Size is in bytes.
	Part   int           // Part is how many bytes are used at a time.
	Wait   time.Duration // Wait is a time, or the distance of a deadline, which may be in the past.
	Memory Memory        // Memory is where the bytes are.
}

// Memory is a kind of memory.
type Memory uint8

// These are the kinds of memory.
const (
	Heap   Memory = iota // Heap: Go's heap.
	Own                  // Own: a Buffer of rdmanet.
	Mapped               // Mapped: a file that is mapped, and unmapped when the operation is done.
	Cut                  // Cut: a mapped file that was cut short, so that the second half cannot be accessed.
)

var memoryNames = [...]string{"Heap", "Own", "Mapped", "Cut"}

// String returns the name of the constant.
func (m Memory) String() string { return memoryNames[m] }

// good returns how many of n bytes can be accessed.
func (m Memory) good(n int) int {
	if m == Cut {
		return n / 2
	}
	return n
}

// mayBeCut reports whether an operation may use memory that cannot be accessed. The others touch
// it themselves.
func (k Kind) mayBeCut() bool {
	switch k {
	case Write, Writes, Buffers, WriteMsg, Read, ReadFull:
		return true
	}
	return false
}

// An End is what one end does. The three lanes run at the same time. When the writing lane
// is done, it calls CloseWrite. Then the reading lane reads to the end of the stream. When
// all three are done, the end is closed.
type End struct {
	Setup   Setup
	Writing []Op
	Reading []Op
	Control []Op
}

// Setup has the fields that differ from a zero Config; see [rdmanet.Config].
type Setup struct {
	TransferSize      int
	NoRDMARead        bool
	MaxSegment        int // MaxSegment is MaxSendSize and MaxReceiveSize.
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

// linger returns the linger time that is used.
func (s Setup) linger() time.Duration {
	if s.Linger == 0 {
		return 5 * time.Second
	}
	return s.Linger
}

// segment returns the largest message. window returns how many bytes the peer may send that
// were not read.
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

// silence returns how long an end may be silent before the other end breaks the connection.
func (s Setup) silence() time.Duration {
	if s.KeepAlive == 0 {
		return 140 * time.Second
	}
	return s.KeepAlive + min(s.KeepAlive, 20*time.Second)
}

// A Peer is the kind of the second end.
type Peer uint8

// These are the kinds of second ends.
const (
	Rdmanet  Peer = iota // Rdmanet is the same as the first end.
	Plain                // Plain is an SMB Direct peer without extensions.
	Breaking             // Breaking is a peer that sends a malformed message.
)

var peerNames = [...]string{"Rdmanet", "Plain", "Breaking"}

// String returns the name of the constant.
func (p Peer) String() string { return peerNames[p] }

// A Link describes the link between the two ends. The TCP connections of both networks go
// through it.
type Link struct {
	Delay  time.Duration // Delay is the delay of one direction.
	Rate   int           // Rate is in bytes a second, for each direction. 0 means no limit.
	Faults []Fault
}

// direct reports whether the ends can be connected without a proxy.
func (l Link) direct() bool { return l.Delay == 0 && l.Rate == 0 && len(l.Faults) == 0 }

// frozen reports whether the link carries nothing any more at the end of the program.
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

// FaultKind is what a Fault does.
type FaultKind uint8

// These are the faults of a link.
const (
	Stop   FaultKind = iota + 1 // Stop: the link carries nothing for a while.
	Freeze                      // Freeze: the link carries nothing any more. Kernels still answer each other.
	Reset                       // Reset: both ends get a TCP reset.
)

var faultNames = [...]string{"", "Stop", "Freeze", "Reset"}

// String returns the name of the constant.
func (k FaultKind) String() string { return faultNames[k] }

// A Fault of the link begins at a time after the connection was set up, or when so many
// bytes were carried in both directions together. The earlier moment counts, and zero means
// never.
type Fault struct {
	Do    FaultKind
	At    time.Duration
	Bytes int64
	For   time.Duration
}

// A Span is a time for which something lasts. It counts from the set-up of the connection.
type Span struct{ At, For time.Duration }

// within returns how much of the span is between two moments.
func (s Span) within(from, to time.Duration) time.Duration {
	return max(0, min(s.At+s.For, to)-max(s.At, from))
}

// A Program is run over both networks.
type Program struct {
	Seed  uint64 // Seed is the seed of the bytes.
	Peer  Peer   // Peer is the kind of the second end.
	Swap  bool   // Swap is set if the second end dials.
	Apart bool   // Apart is set if the second end has a process of its own.
	Link  Link
	First End
	Other End

	Suspends []Span // Suspends has the times for which the second end's process is stopped.
}

// ahead reports whether an end reads only when it has written everything.
func (p *Program) ahead() bool { return p.First.has(AwaitWrote) || p.Other.has(AwaitWrote) }

func (p *Program) end(i int) *End {
	if i == 0 {
		return &p.First
	}
	return &p.Other
}

// lanes returns pointers to the lists of operations, so that they can be changed.
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
	q.Suspends = append([]Span(nil), p.Suspends...)
	return &q
}

// has reports whether an end has an operation of that kind.
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
func (p *Program) bytes() int64 { return p.First.bytes() + p.Other.bytes() }

// bytes returns how many bytes the end writes.
func (e *End) bytes() (n int64) {
	for _, op := range e.Writing {
		if op.Do.writes() && op.Do != Malformed {
			n += int64(op.Size)
		}
	}
	return n
}
