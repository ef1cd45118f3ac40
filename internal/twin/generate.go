package twin

import (
	"math/rand/v2"
	"slices"
	"time"
)

// A generator makes one program.
type generator struct {
	*rand.Rand
	p *Program
}

// shapes are the kinds of programs. Each has a number: how many of a hundred programs are
// of that kind.
var shapes = []struct {
	weight int
	make   func(g *generator)
}{
	{24, (*generator).mixed},
	{4, (*generator).unread},
	{16, (*generator).burst},
	{7, (*generator).silent},
	{4, (*generator).slow},
	{8, (*generator).timed},
	{6, (*generator).breaking},
	{6, (*generator).plain},
	{7, (*generator).severed},
	{8, (*generator).exiting},
	{6, (*generator).ahead},
	{4, (*generator).suspended},
}

// Generate makes the program of a seed.
func Generate(seed uint64) *Program {
	g := &generator{rand.New(rand.NewPCG(seed, 0x7477696e)), &Program{Seed: seed}}
	g.p.Swap = g.one(2)
	n := g.IntN(100)
	for _, s := range shapes {
		if n -= s.weight; n < 0 {
			s.make(g)
			break
		}
	}
	for i := range 2 {
		g.p.end(i).steadyQueue()
	}
	return g.p
}

// steadyQueue removes changes of the write deadline while messages wait in a queue. Each
// message fails or is sent by itself. With a deadline that changes, a message between two
// others may be missing. Then the place of the later ones in the stream is not known.
func (e *End) steadyQueue() {
	queues := slices.ContainsFunc(e.Writing, func(op Op) bool { return op.Do == Queue && op.Size > op.Part })
	changes := 0
	for _, lane := range [][]Op{e.Writing, e.Reading, e.Control} {
		for _, op := range lane {
			if op.Do == SetWrite || op.Do == SetBoth || op.Do == ClearWrite {
				changes++
			}
		}
	}
	if !queues || changes < 2 {
		return
	}
	for _, lane := range [][]Op{e.Reading, e.Control} {
		for i := range lane {
			switch lane[i].Do {
			case SetWrite, SetBoth:
				lane[i].Do = SetRead
			case ClearWrite:
				lane[i].Do = ClearRead
			}
		}
	}
}

// one returns true once in n times.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

// between returns a number from lo to hi. Small numbers are more frequent.
func (g *generator) between(lo, hi int) int {
	if hi <= lo {
		return lo
	}
	span := hi - lo + 1
	bits := 0
	for s := span; s > 1; s >>= 1 {
		bits++
	}
	return lo + g.IntN(min(span, 1<<(1+g.IntN(bits+1))))
}

// ms returns a time from lo to hi milliseconds.
func (g *generator) ms(lo, hi int) time.Duration {
	return time.Duration(lo+g.IntN(hi-lo+1)) * time.Millisecond
}

func (g *generator) setup() (s Setup) {
	switch g.IntN(6) {
	case 0, 1:
	case 2:
		s.TransferSize = 4096 << g.IntN(8)
	case 3:
		s.TransferSize = 4096 << g.IntN(8)
		s.NoRDMARead = true
	case 4:
		s.TransferSize = -1
	case 5:
		s.TransferSize = 64 << 10
		s.TransferMemory = 256 << 10
		s.NoRDMARead = g.one(2)
	}
	if g.one(3) {
		s.MaxSegment = 512 << g.IntN(8)
	}
	if g.one(4) {
		s.MaxCredits = 4 + g.IntN(12)
	}
	if g.one(4) {
		s.InitialCredits = 4 + g.IntN(60)
	}
	if g.one(6) {
		s.MaxFragmentedSize = 131080
	}
	return s
}

// link makes a link that carries so many bytes in little time.
func (g *generator) link(total int) (l Link) {
	if g.one(3) {
		return l
	}
	if g.one(2) {
		l.Delay = time.Duration(g.IntN(8000)) * time.Microsecond
	}
	if g.one(2) {
		l.Rate = max(1<<20<<g.IntN(5), total)
	}
	if g.one(5) {
		l.Faults = append(l.Faults, g.fault(Stop, total))
	}
	return l
}

// fault makes a fault at a random place.
func (g *generator) fault(do FaultKind, total int) Fault {
	f := Fault{Do: do}
	if g.one(2) {
		f.Bytes = int64(1 + g.between(0, max(1, total)))
	}
	if f.Bytes == 0 || g.one(3) {
		f.At = g.ms(1, 150)
	}
	if do == Stop {
		f.For = g.ms(20, 400)
	}
	return f
}

// size returns the length of a write.
func (g *generator) size(most int) int { return g.between(1, most) }

var writeKinds = []Kind{Write, Write, Write, Write, Writes, ReadFrom, ReadFrom, Buffers, WriteMsg, Pieces, TryMsg, Queue}

func (g *generator) writeOp(most int) Op {
	return g.writeSized(g.size(most))
}

func (g *generator) writeSized(n int) Op {
	op := Op{Do: writeKinds[g.IntN(len(writeKinds))], Size: n}
	op.Memory = g.memory(op.Do)
	switch op.Do {
	case Writes:
		op.Part = max(1, op.Size/(1+g.IntN(200)))
	case ReadFrom:
		op.Part = g.between(max(1, op.Size/64), 300<<10)
	case Buffers, Pieces, Queue:
		op.Part = max(1, op.Size/(1+g.IntN(12)))
	}
	if op.Do.message() && op.Do != Queue {
		op.Size = min(op.Size, 512<<10)
	}
	return op
}

func (g *generator) readOp(most int) Op {
	switch g.IntN(10) {
	case 0, 1:
		return Op{Do: Read, Size: g.size(most), Memory: g.memory(Read)}
	case 2, 3:
		return Op{Do: WriteTo, Size: g.size(most)}
	case 4:
		return Op{Do: ReadMsg, Size: g.size(most)}
	case 5:
		return Op{Do: ReadPiece, Size: g.size(most)}
	}
	n := g.size(most)
	return Op{Do: ReadFull, Size: n, Part: g.between(max(1, n/64), max(1, n)), Memory: g.memory(ReadFull)}
}

// memory returns the memory for an operation. That of the Go heap is the most frequent.
func (g *generator) memory(do Kind) Memory {
	switch g.IntN(24) {
	case 0, 1, 2, 3, 4, 5:
		return Own
	case 6, 7:
		return Mapped
	case 8:
		if do.mayBeCut() {
			return Cut
		}
		return Mapped
	}
	return Heap
}

// large returns the memory for an operation that is to succeed with many bytes.
func (g *generator) large() Memory {
	if g.one(2) {
		return Own
	}
	return Heap
}

// mixed is a program with operations of all kinds in both directions.
func (g *generator) mixed() {
	most := 4096 << g.IntN(9)
	for i := range 2 {
		e := g.p.end(i)
		e.Setup = g.setup()
		for range 1 + g.IntN(6) {
			e.Writing = append(e.Writing, g.writeOp(most))
			if g.one(5) {
				e.Writing = append(e.Writing, g.aside(SetWrite, ClearWrite))
			}
		}
		for range 1 + g.IntN(5) {
			e.Reading = append(e.Reading, g.readOp(most))
			if g.one(4) {
				e.Reading = append(e.Reading, g.aside(SetRead, ClearRead))
			}
		}
		for range g.IntN(4) {
			e.Control = append(e.Control, g.aside(SetBoth, ClearRead))
		}
		switch g.IntN(12) {
		case 0, 1:
			e.Control = append(e.Control, Op{Do: AwaitRead, Size: g.between(1, most)}, Op{Do: Close})
		case 2:
			e.Control = append(e.Control, Op{Do: AwaitTaken, Size: g.between(1, 2*most)}, Op{Do: Close})
		case 3:
			e.Control = append(e.Control, Op{Do: AwaitTaken, Size: g.between(1, 2*most)}, Op{Do: CloseWrite})
		case 4:
			// Bytes that come after CloseRead may be dropped or not. So the end is
			// closed soon.
			e.Control = append(e.Control, Op{Do: AwaitRead, Size: g.between(1, most)}, Op{Do: CloseRead},
				Op{Do: Pause, Wait: g.ms(1, 20)}, Op{Do: Close})
		}
	}
	if g.one(3) {
		for id := range 1 + g.IntN(2) {
			for _, l := range g.p.lanes() {
				if g.one(2) {
					at := g.IntN(len(*l) + 1)
					*l = append((*l)[:at:at], append([]Op{{Do: Meet, Size: id + 1}}, (*l)[at:]...)...)
				}
			}
		}
		g.orderMeetings()
	}
	g.p.Link = g.link(int(g.p.bytes()))
}

// orderMeetings makes each lane come to the meetings in the same order.
func (g *generator) orderMeetings() {
	for _, l := range g.p.lanes() {
		next := 0
		var ids []int
		for _, op := range *l {
			if op.Do == Meet {
				ids = append(ids, op.Size)
			}
		}
		if len(ids) == 2 && ids[0] > ids[1] {
			ids[0], ids[1] = ids[1], ids[0]
		}
		for i := range *l {
			if (*l)[i].Do == Meet {
				(*l)[i].Size = ids[next]
				next++
			}
		}
	}
}

// aside is a pause, or an operation that sets or clears a deadline.
func (g *generator) aside(set, unset Kind) Op {
	switch g.IntN(5) {
	case 0, 1:
		return Op{Do: Pause, Wait: g.ms(1, 60)}
	case 2:
		return Op{Do: unset}
	case 3:
		return Op{Do: set, Wait: -time.Millisecond}
	}
	return Op{Do: set, Wait: time.Duration(g.between(1, 100_000)) * time.Microsecond}
}

// burst is a program in which one end writes and closes at once, and the other end reads at
// some pace. In half of these programs the other end writes all the time.
func (g *generator) burst() {
	if g.one(4) {
		g.crossing()
		return
	}
	first, other := &g.p.First, &g.p.Other
	if g.one(2) {
		first.Setup = g.setup()
	}
	if g.one(2) {
		other.Setup = g.setup()
	}
	total := 0
	for range 1 + g.IntN(3) {
		op := g.writeOp(2 << 20)
		if g.one(3) {
			op = g.writeSized(400<<10 + g.IntN(500<<10))
		}
		total += op.Size
		first.Writing = append(first.Writing, op)
	}
	if g.one(8) {
		first.Writing = append(first.Writing, Op{Do: CloseWrite})
	}
	first.Writing = append(first.Writing, Op{Do: Close})
	switch g.IntN(4) {
	case 0: // The end reads as fast as it can.
	case 1:
		other.Reading = append(other.Reading, Op{Do: Pause, Wait: g.ms(1, 300)})
	case 2:
		for range 2 + g.IntN(4) {
			other.Reading = append(other.Reading, Op{Do: ReadFull, Size: max(1, total/8), Part: g.between(1000, 100<<10)},
				Op{Do: Pause, Wait: g.ms(1, 60)})
		}
	case 3:
		other.Reading = append(other.Reading, g.readOp(1<<20), g.readOp(1<<20))
	}
	if g.one(2) {
		for range 4 + g.IntN(40) {
			op := Op{Do: Write, Size: g.between(1<<10, 64<<10)}
			other.Writing = append(other.Writing, op)
			if g.one(8) {
				other.Writing = append(other.Writing, Op{Do: Pause, Wait: g.ms(1, 5)})
			}
		}
		if g.one(3) {
			// The bytes are unread when the end is closed.
			first.Reading = append(first.Reading, Op{Do: Meet, Size: 9})
			first.Writing = append(first.Writing, Op{Do: Meet, Size: 9})
		}
	}
	if g.one(3) {
		g.p.Link = g.link(total)
		for _, f := range g.p.Link.Faults {
			total += int(f.For)
		}
	}
}

// crossing is a program in which one end writes over a slow link and closes at once. The
// other end streams to it, so that credits are due when it closes.
func (g *generator) crossing() {
	first, other := &g.p.First, &g.p.Other
	if !g.one(4) {
		first.Setup.InitialCredits, other.Setup.InitialCredits = 64, 64
	}
	total := 500<<10 + g.IntN(1500<<10)
	first.Writing = []Op{{Do: Write, Size: total}, {Do: Close}}
	if g.one(2) {
		first.Reading = []Op{{Do: Pause, Wait: 300 * time.Millisecond}} // The end does not read meanwhile.
	}
	for range 10 + g.IntN(60) {
		other.Writing = append(other.Writing, Op{Do: Write, Size: 32 << 10})
	}
	if !g.one(4) {
		g.p.Link.Rate = 2 << 20 << g.IntN(4)
	}
}

// unread is a program in which one end writes for a while and ends its direction, and the
// other end reads nothing before that.
func (g *generator) unread() {
	first, other := &g.p.First, &g.p.Other
	first.Setup, other.Setup = g.setup(), g.setup()
	if !g.one(4) {
		other.Setup.MaxCredits = g.between(4, 32) // The first end runs out of credits.
	}
	first.Writing = []Op{{Do: SetWrite, Wait: g.ms(10, 60)}}
	most := 16 << 10 >> g.IntN(6)
	for range 20 + g.IntN(100) {
		op := Op{Do: Write, Size: 1 + g.IntN(most)}
		if g.one(20) {
			op = g.writeOp(64 << 10)
		}
		first.Writing = append(first.Writing, op)
	}
	first.Writing = append(first.Writing, Op{Do: CloseWrite}, Op{Do: Meet, Size: 1})
	other.Reading = []Op{{Do: Meet, Size: 1}}
	if g.one(2) {
		other.Reading = append(other.Reading, g.readOp(64<<10))
	}
	if g.one(3) {
		other.Writing = append(other.Writing, g.writeOp(64<<10))
	}
}

// silent is a program whose link carries nothing any more, as when the peer's process is
// stopped. An end is closed, or its calls have deadlines, or keep-alive finds the silence
// where the peer's process has to answer.
func (g *generator) silent() {
	for i := range 2 {
		e := g.p.end(i)
		if g.one(2) {
			e.Setup = g.setup()
		}
		if g.one(3) {
			e.Setup.KeepAlive = g.ms(300, 600)
		}
		for range 1 + g.IntN(3) {
			e.Writing = append(e.Writing, g.writeOp(1<<20))
		}
		if g.one(3) {
			e.Writing = append([]Op{{Do: SetWrite, Wait: g.ms(50, 400)}}, e.Writing...)
		}
		for range g.IntN(3) {
			e.Reading = append(e.Reading, g.readOp(1<<20))
		}
		if g.one(3) {
			e.Reading = append([]Op{{Do: SetRead, Wait: g.ms(50, 400)}}, e.Reading...)
		}
		if !g.one(3) {
			e.Control = append(e.Control, Op{Do: Pause, Wait: g.ms(60, 500)}, Op{Do: Close})
		}
	}
	f := Fault{Do: Freeze, At: g.ms(1, 60)}
	if g.one(2) {
		f.Bytes = int64(g.between(100, 1<<20))
	}
	g.p.Link.Faults = []Fault{f}
	if g.one(3) {
		g.p.Link.Delay = g.ms(1, 8)
	}
}

// slow is a program whose link is slow for its data, with a short keep-alive interval.
func (g *generator) slow() {
	keepAlive := g.ms(500, 700)
	for i := range 2 {
		e := g.p.end(i)
		e.Setup = Setup{KeepAlive: keepAlive, TransferSize: 64 << 10 << g.IntN(5)}
		if g.one(4) {
			e.Setup.TransferSize = -1
		}
		if g.one(4) {
			e.Setup.NoRDMARead = true
		}
	}
	total := 2<<20 + g.IntN(1<<20)
	if a, b := &g.p.First.Setup, &g.p.Other.Setup; a.TransferSize < 0 || b.TransferSize < 0 {
		// The device takes all segments at once, and the link needs seconds for them. The
		// end that wrote them stays meanwhile, and no grant shows it that its peer lives.
		a.InitialCredits, b.InitialCredits = 64, 64
		g.p.First.Control = []Op{{Do: Pause, Wait: 3 * time.Second}}
	}
	g.p.First.Writing = []Op{{Do: Write, Size: total, Memory: g.large()}}
	if g.one(3) {
		g.p.Other.Writing = []Op{{Do: Write, Size: g.size(1 << 20)}}
	}
	if !g.one(3) {
		g.p.Other.Reading = []Op{{Do: ReadFull, Size: total, Part: total}}
	}
	g.p.Link.Rate = bulkRate
	if g.one(3) {
		g.p.Link.Delay = g.ms(1, 8)
	}
}

// timed is a program of calls with deadlines, and Close, on a slow link.
func (g *generator) timed() {
	g.p.Link.Rate = bulkRate << g.IntN(3)
	if g.one(3) {
		g.p.Link.Delay = g.ms(1, 8)
	}
	transfer := 64 << 10 << g.IntN(5)
	for i := range 2 {
		e := g.p.end(i)
		if !g.one(4) {
			e.Setup.TransferSize = transfer
		}
		if g.one(4) {
			e.Setup.NoRDMARead = true
		}
	}
	total := 1<<20 + g.IntN(2<<20)
	write := func(n int) Op {
		op := Op{Do: Write, Size: n, Memory: g.large()}
		switch g.IntN(6) {
		case 0:
			op.Do, op.Part = ReadFrom, 256<<10
		case 1:
			op.Do, op.Part = Queue, n
		}
		return op
	}
	first, other := &g.p.First, &g.p.Other
	if g.one(2) {
		first.Writing = append(first.Writing, Op{Do: SetWrite, Wait: g.ms(50, 500)}, write(total), Op{Do: ClearWrite})
	} else {
		first.Writing = append(first.Writing, write(total))
	}
	if g.one(3) {
		first.Writing = append(first.Writing, write(64<<10))
	}
	for range 1 + g.IntN(2) {
		n := total / (1 + g.IntN(3))
		if g.one(2) {
			other.Reading = append(other.Reading, Op{Do: SetRead, Wait: g.ms(50, 500)})
		}
		other.Reading = append(other.Reading, Op{Do: ReadFull, Size: n, Part: n, Memory: g.large()}, Op{Do: ClearRead})
	}
	if g.one(3) {
		other.Writing = append(other.Writing, write(g.size(1<<20)))
	}
	switch g.IntN(5) {
	case 0:
		first.Control = append(first.Control, Op{Do: Pause, Wait: g.ms(50, 600)}, Op{Do: Close})
	case 1:
		other.Control = append(other.Control, Op{Do: Pause, Wait: g.ms(50, 600)}, Op{Do: Close})
	case 2:
		other.Control = append(other.Control, Op{Do: Pause, Wait: g.ms(50, 300)}, Op{Do: SetRead, Wait: -time.Second},
			Op{Do: Pause, Wait: g.ms(50, 300)}, Op{Do: ClearRead})
	}
}

// plainWrites returns the operations of a peer that is not rdmanet.
func (g *generator) plainWrites(e *End, most int) {
	for range 1 + g.IntN(5) {
		e.Writing = append(e.Writing, Op{Do: Write, Size: g.size(most)})
		if g.one(4) {
			e.Writing = append(e.Writing, Op{Do: Pause, Wait: g.ms(1, 30)})
		}
	}
}

// plain is a program with an SMB Direct peer that is not rdmanet.
func (g *generator) plain() {
	g.p.Peer = Plain
	most := 4096 << g.IntN(8)
	e := &g.p.First
	e.Setup = g.setup()
	e.Setup.MaxSegment = 0
	for range 1 + g.IntN(6) {
		op := g.writeOp(most)
		for op.Do == Pieces || op.Do == TryMsg {
			op = g.writeOp(most)
		}
		e.Writing = append(e.Writing, op)
		if g.one(5) {
			e.Writing = append(e.Writing, g.aside(SetWrite, ClearWrite))
		}
	}
	for range 1 + g.IntN(5) {
		e.Reading = append(e.Reading, g.readOp(most))
		if g.one(5) {
			e.Reading = append(e.Reading, g.aside(SetRead, ClearRead))
		}
	}
	g.plainWrites(&g.p.Other, most)
	if g.one(3) {
		g.p.Other.Reading = []Op{{Do: Pause, Wait: g.ms(1, 100)}}
	}
	if g.one(4) {
		e.Control = append(e.Control, Op{Do: AwaitTaken, Size: g.size(2 * most)}, Op{Do: Close})
	}
	g.p.Link = g.link(int(g.p.bytes()))
}

// breaking is a program whose peer sends a malformed message in the middle.
func (g *generator) breaking() {
	g.p.Peer = Breaking
	most := 4096 << g.IntN(6)
	e := &g.p.First
	e.Setup = g.setup()
	e.Setup.MaxSegment = 0
	for range g.IntN(4) {
		e.Writing = append(e.Writing, Op{Do: Write, Size: g.size(most)})
	}
	for range g.IntN(4) {
		op := g.readOp(most)
		if op.Do == ReadMsg || op.Do == ReadPiece {
			op.Do = Read
		}
		e.Reading = append(e.Reading, op)
	}
	if g.one(2) {
		g.plainWrites(&g.p.Other, most)
	}
	g.p.Other.Writing = append(g.p.Other.Writing, Op{Do: Malformed, Size: g.IntN(breaches)})
	if g.one(3) {
		g.p.Link = g.link(most)
	}
}

// exiting is a program in which the process of one end ends without Close, most often as soon as
// its writes have returned.
func (g *generator) exiting() {
	g.p.Apart = true
	first, other := &g.p.First, &g.p.Other
	if g.one(3) {
		first.Setup, other.Setup = g.setup(), g.setup()
	}
	most := 4096 << g.IntN(11)
	// late is set if the kernel of the process has much to send when the other end ends its stream.
	late := g.one(4)
	if late {
		most = 4 << 20
	}
	for range 1 + g.IntN(4) {
		other.Writing = append(other.Writing, g.writeOp(most))
		if g.one(8) {
			other.Writing = append(other.Writing, g.aside(SetWrite, ClearWrite))
		}
	}
	switch g.IntN(8) {
	case 0:
		other.Control = []Op{{Do: Pause, Wait: g.ms(1, 60)}, {Do: Exit}}
	case 1:
		other.Control = []Op{{Do: AwaitTaken, Size: g.between(1, most)}, {Do: Exit}}
	case 2:
		other.Writing = append(other.Writing, Op{Do: CloseWrite}, Op{Do: Exit})
	default:
		other.Writing = append(other.Writing, Op{Do: Exit})
	}
	if g.one(4) {
		first.Writing = append(first.Writing, g.writeOp(most))
		if g.one(2) {
			other.Reading = append(other.Reading, g.readOp(most))
		} else {
			other.Reading = append(other.Reading, Op{Do: Pause, Wait: time.Second}) // Nothing is read.
		}
	}
	// The CloseWrite that follows may meet a process that has ended.
	switch {
	case late:
		first.Writing = append(first.Writing, Op{Do: Pause, Wait: g.ms(20, 100)})
		first.Reading = append(first.Reading, Op{Do: Pause, Wait: g.ms(100, 200)})
	case g.one(4):
		first.Writing = append(first.Writing, Op{Do: AwaitEnd})
	}
	switch g.IntN(3) {
	case 0:
		first.Reading = append(first.Reading, Op{Do: Pause, Wait: g.ms(1, 300)})
	case 1:
		first.Reading = append(first.Reading, g.readOp(most), Op{Do: Pause, Wait: g.ms(1, 60)}, g.readOp(most))
	}
	if g.one(3) {
		g.p.Link = g.link(int(other.bytes()))
	}
}

// ahead is a program whose ends write everything before they read anything, as pipelines of
// requests do. TCP has room for that.
func (g *generator) ahead() {
	const most, writes = 3200 << 10, 10_000
	transfer := 0
	switch g.IntN(4) {
	case 0:
		transfer = -1
	case 1:
		transfer = 64 << 10 << g.IntN(5)
	}
	for i := range 2 {
		e := g.p.end(i)
		e.Setup.TransferSize = transfer
		if i == 1 && g.one(4) {
			continue
		}
		each := 1 + g.IntN(2<<g.IntN(17))
		left := min(most, writes*each)
		if transfer > 0 && each >= transfer {
			left = 1 << 20
		}
		for range 1 + g.IntN(3) {
			if n := min(left, each*(1+g.IntN(left/each))); n > 0 {
				e.Writing = append(e.Writing, Op{Do: Writes, Size: n, Part: each})
				left -= n
			}
			if left < each {
				break
			}
		}
		e.Reading = []Op{{Do: AwaitWrote}}
		if g.one(2) {
			e.Reading = append(e.Reading, g.readOp(most))
		}
	}
}

// suspended is a program in which the process of one end is stopped for longer than keep-alive
// waits, and goes on.
func (g *generator) suspended() {
	g.p.Apart = true
	for i := range 2 {
		e := g.p.end(i)
		e.Setup.KeepAlive = g.ms(300, 600)
		if g.one(4) {
			e.Setup.TransferSize = 64 << 10 << g.IntN(5)
		}
		for range 1 + g.IntN(3) {
			e.Writing = append(e.Writing, g.writeOp(1<<20))
			if g.one(2) {
				e.Writing = append(e.Writing, Op{Do: Pause, Wait: g.ms(1, 800)})
			}
		}
		for range g.IntN(3) {
			e.Reading = append(e.Reading, g.readOp(1<<20))
		}
		if g.one(6) {
			e.Control = []Op{{Do: Pause, Wait: g.ms(100, 800)}, {Do: SetWrite, Wait: g.ms(1, 100)}}
		}
		if i == 0 && g.one(6) {
			e.Control = append(e.Control, Op{Do: Pause, Wait: g.ms(60, 500)}, Op{Do: Close})
		}
	}
	g.p.Suspends = []Span{{g.ms(1, 150), g.ms(700, 2500)}}
}

// severed is a program whose connection is reset in the middle.
func (g *generator) severed() {
	g.mixed()
	g.p.Link.Faults = append(g.p.Link.Faults, g.fault(Reset, int(g.p.bytes())))
}
