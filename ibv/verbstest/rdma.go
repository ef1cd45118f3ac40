package verbstest

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var rdmaTests = []subtest{
	{"Write", testWrite},
	{"Read", testRead},
	{"ZeroLength", testZeroLength},
	{"WriteThenSend", testWriteThenSend},
	{"WriteThenRead", testWriteThenRead},
	{"ManyReads", testManyReads},
	{"LargeReads", testLargeReads},
	{"ReadsBothWays", testReadsBothWays},
	{"Fence", testFence},
	{"TooManyReadElements", testTooManyReadElements},
	{"OneSided", testOneSided},
}

// testWrite writes pieces of all sizes, from one to MaxSGE elements, to odd
// places: the bytes around stay as they are.
func testWrite(t *testing.T, env Env) {
	counts := elementCounts(env.device(t).Attr().MaxSGE)
	p := NewPair(t, env, PairConfig{SGE: counts[len(counts)-1]})
	largest := messageSizes[len(messageSizes)-1]
	src := p.Active.Register(t, pattern(largest+100, 1), 0)
	dst := p.Passive.Register(t, guarded(largest+100), allRights)
	id := uint64(0)
	for _, size := range messageSizes {
		for _, parts := range counts {
			id++
			from, to := int(id%13), int(7+id%31)
			p.Active.Send(t, ibv.SendWR{ID: id, Op: ibv.OpWrite, Flags: ibv.SendSignaled,
				SGL: src.SGL(from, size, parts), RemoteAddr: dst.Addr(to), RKey: dst.MR.RKey()})
			succeeded(t, p.Active, next(t, p.Active.SendCQ), id, ibv.WCWrite)
			p.Active.sync(t, p.Passive)
			untouched(t, "before the piece", dst.Buf[:to])
			sameBytes(t, "written", dst.Buf[to:to+size], src.Buf[from:from+size])
			untouched(t, "behind the piece", dst.Buf[to+size:])
			copy(dst.Buf[to:], guarded(size))
		}
	}
	noCompletion(t, p.Passive.RecvCQ)
	noCompletion(t, p.Passive.SendCQ)
}

// testRead reads pieces of all sizes into one to MaxSGERead elements.
func testRead(t *testing.T, env Env) {
	attr := env.device(t).Attr()
	counts := elementCounts(min(attr.MaxSGERead, attr.MaxSGE))
	p := NewPair(t, env, PairConfig{SGE: counts[len(counts)-1]})
	largest := messageSizes[len(messageSizes)-1]
	src := p.Passive.Register(t, pattern(largest+100, 1), ibv.AccessRemoteRead)
	dst := p.Active.Register(t, guarded(largest+100), localWrite)
	id := uint64(0)
	for _, size := range messageSizes {
		for _, parts := range counts {
			id++
			from, to := int(id%13), int(7+id%31)
			p.Active.Send(t, ibv.SendWR{ID: id, Op: ibv.OpRead, Flags: ibv.SendSignaled,
				SGL: dst.SGL(to, size, parts), RemoteAddr: src.Addr(from), RKey: src.MR.RKey()})
			wc := next(t, p.Active.SendCQ)
			succeeded(t, p.Active, wc, id, ibv.WCRead)
			if int(wc.ByteLen) != size {
				t.Fatalf("a read of %d bytes reports %d", size, wc.ByteLen)
			}
			untouched(t, "before the piece", dst.Buf[:to])
			sameBytes(t, "read", dst.Buf[to:to+size], src.Buf[from:from+size])
			untouched(t, "behind the piece", dst.Buf[to+size:])
			copy(dst.Buf[to:], guarded(size))
		}
	}
	noCompletion(t, p.Passive.RecvCQ)
	noCompletion(t, p.Passive.SendCQ)
}

// testZeroLength moves nothing, in order with the rest.
func testZeroLength(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	mem := p.Passive.Register(t, guarded(8), allRights)
	at := func(id uint64, op ibv.Opcode) ibv.SendWR {
		return ibv.SendWR{ID: id, Op: op, Flags: ibv.SendSignaled, RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()}
	}
	p.Active.Send(t, p.Active.inOrder([]ibv.SendWR{at(1, ibv.OpWrite), at(2, ibv.OpRead), at(3, ibv.OpWrite),
		at(4, ibv.OpRead), at(5, ibv.OpRead)})...)
	for i, op := range []ibv.WCOpcode{ibv.WCWrite, ibv.WCRead, ibv.WCWrite, ibv.WCRead, ibv.WCRead} {
		wc := next(t, p.Active.SendCQ)
		succeeded(t, p.Active, wc, uint64(i+1), op)
		if op == ibv.WCRead && wc.ByteLen != 0 {
			t.Errorf("an empty read reports %d bytes", wc.ByteLen)
		}
	}
	untouched(t, "target", mem.Buf)
}

// testWriteThenSend tells the peer of each Write by a Send: what the receive's
// completion announces is in place.
func testWriteThenSend(t *testing.T, env Env) {
	const rounds, size = 50, 20000
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, make([]byte, size), 0)
	dst := p.Passive.Register(t, make([]byte, size), allRights)
	for i := range rounds {
		copy(src.Buf, pattern(size, i))
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i)})
		p.Active.Send(t,
			ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, size, 1), RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()},
			ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled})
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), uint64(i), ibv.WCRecv)
		sameBytes(t, "written", dst.Buf, src.Buf)
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCSend)
	}
}

// testWriteThenRead reads back what the Write just before has written.
func testWriteThenRead(t *testing.T, env Env) {
	const rounds, size = 20, 20000
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, make([]byte, size), 0)
	back := p.Active.Register(t, make([]byte, size), localWrite)
	dst := p.Passive.Register(t, make([]byte, size), allRights)
	for i := range rounds {
		copy(src.Buf, pattern(size, i))
		p.Active.Send(t,
			ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, size, 1), RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()},
			ibv.SendWR{ID: uint64(i), Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: back.SGL(0, size, 1),
				RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCRead)
		sameBytes(t, "read back", back.Buf, src.Buf)
	}
}

// readMany posts n Reads at once from p.Active, many more than may be
// outstanding: the device holds them back, and no Read is lost.
func readMany(t testing.TB, p *Pair, n int) {
	t.Helper()
	const size = 3000
	src := p.Passive.Register(t, pattern(n*size, n), ibv.AccessRemoteRead)
	dst := p.Active.Register(t, make([]byte, n*size), localWrite)
	var wrs []ibv.SendWR
	for i := range n {
		// Backwards, so that each Read is for itself.
		at := (n - 1 - i) * size
		wrs = append(wrs, ibv.SendWR{ID: uint64(i), Op: ibv.OpRead, Flags: ibv.SendSignaled,
			SGL: dst.SGL(at, size, 1), RemoteAddr: src.Addr(at), RKey: src.MR.RKey()})
	}
	p.Active.Send(t, wrs...)
	for i := range n {
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCRead)
	}
	sameBytes(t, "read", dst.Buf, src.Buf)
}

func testManyReads(t *testing.T, env Env) {
	for _, depth := range []int{1, 3, 8} {
		p := NewPair(t, env, PairConfig{SendWR: 100, Reads: depth})
		readMany(t, p, 100)
		readMany(t, &Pair{p.Passive, p.Active}, 100)
	}
}

// testLargeReads posts Reads that take long to serve where only one may be
// outstanding.
func testLargeReads(t *testing.T, env Env) {
	const n, size = 6, 4 << 20
	p := NewPair(t, env, PairConfig{Reads: 1})
	src := p.Passive.Register(t, pattern(size, 1), ibv.AccessRemoteRead)
	dst := p.Active.Register(t, make([]byte, size), localWrite)
	for i := range uint64(n) {
		p.Active.Send(t, ibv.SendWR{ID: i, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: dst.SGL(0, size, 1),
			RemoteAddr: src.Addr(0), RKey: src.MR.RKey()})
	}
	for i := range uint64(n) {
		succeeded(t, p.Active, next(t, p.Active.SendCQ), i, ibv.WCRead)
	}
	sameBytes(t, "read", dst.Buf, src.Buf)
}

// testReadsBothWays lets both ends read from each other, with Sends in between:
// answers to the peer's Reads share the way with one's own requests.
func testReadsBothWays(t *testing.T, env Env) {
	const n, size = 40, 50000
	p := NewPair(t, env, PairConfig{SendWR: 2 * n, RecvWR: n})
	type side struct {
		e, peer  *End
		src, dst *Mem
	}
	sides := []*side{{e: p.Active, peer: p.Passive}, {e: p.Passive, peer: p.Active}}
	for i, s := range sides {
		s.src = s.e.Register(t, pattern(size, i), ibv.AccessRemoteRead)
		s.dst = s.e.Register(t, make([]byte, size), localWrite)
		for range n {
			s.e.Recv(t, ibv.RecvWR{ID: 1})
		}
	}
	// Where Reads stall, no more at a time than the device may have outstanding.
	batch := n
	if p.Active.Dev.Attr().Quirks.ReadsStall {
		batch = min(p.Active.ID.Param().InitiatorDepth, p.Passive.ID.Param().InitiatorDepth)
	}
	for first := 0; first < n; first += batch {
		last := min(first+batch, n)
		for i, s := range sides {
			src := sides[1-i].src
			for id := first; id < last; id++ {
				s.e.Send(t,
					ibv.SendWR{ID: uint64(id), Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: s.dst.SGL(0, size, 1),
						RemoteAddr: src.Addr(0), RKey: src.MR.RKey()},
					ibv.SendWR{ID: uint64(id), Op: ibv.OpSend, Flags: ibv.SendSignaled})
			}
		}
		for _, s := range sides {
			reads, sends := first, first
			for range 2 * (last - first) {
				wc := next(t, s.e.SendCQ)
				if wc.Op == ibv.WCRead {
					succeeded(t, s.e, wc, uint64(reads), ibv.WCRead)
					reads++
				} else {
					succeeded(t, s.e, wc, uint64(sends), ibv.WCSend)
					sends++
				}
				if !s.e.Dev.Attr().Quirks.ReadsOutOfOrder && reads != sends && reads != sends+1 {
					t.Fatalf("%d reads and %d sends have completed", reads, sends)
				}
			}
			for range last - first {
				succeeded(t, s.e, next(t, s.e.RecvCQ), 1, ibv.WCRecv)
			}
		}
	}
	for i, s := range sides {
		sameBytes(t, "read", s.dst.Buf, sides[1-i].src.Buf)
	}
}

// testFence sends on what a Read is about to bring: the fence makes the second
// operation wait for the first.
func testFence(t *testing.T, env Env) {
	const rounds, size = 20, 100000
	p := NewPair(t, env, PairConfig{})
	far := p.Passive.Register(t, make([]byte, size), ibv.AccessRemoteRead)
	here := p.Active.Register(t, make([]byte, size), localWrite)
	back := p.Passive.Register(t, make([]byte, size), allRights)
	in := p.Passive.Register(t, make([]byte, size), localWrite)
	for i := range rounds {
		copy(far.Buf, pattern(size, i))
		clear(here.Buf)
		p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: in.SGL(0, size, 1)})
		p.Active.Send(t,
			ibv.SendWR{Op: ibv.OpRead, SGL: here.SGL(0, size, 1), RemoteAddr: far.Addr(0), RKey: far.MR.RKey()},
			ibv.SendWR{Op: ibv.OpWrite, Flags: ibv.SendFence, SGL: here.SGL(0, size, 1),
				RemoteAddr: back.Addr(0), RKey: back.MR.RKey()},
			ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendFence | ibv.SendSignaled, SGL: here.SGL(0, size, 1)})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 2, ibv.WCSend)
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 1, ibv.WCRecv)
		sameBytes(t, "written behind a fence", back.Buf, far.Buf)
		sameBytes(t, "sent behind a fence", in.Buf, far.Buf)
	}
}

// testTooManyReadElements gives a Read more destinations than MaxSGERead.
func testTooManyReadElements(t *testing.T, env Env) {
	attr := env.device(t).Attr()
	over := attr.MaxSGERead + 1
	p := NewPair(t, env, PairConfig{SGE: min(over, attr.MaxSGE)})
	dst := p.Active.Register(t, guarded(over), localWrite)
	src := p.Passive.Register(t, make([]byte, over), ibv.AccessRemoteRead)
	n, err := p.Active.QP.PostSend([]ibv.SendWR{{Op: ibv.OpRead, SGL: dst.SGL(0, over, over),
		RemoteAddr: src.Addr(0), RKey: src.MR.RKey()}})
	refused(t, "PostSend of a Read into too many elements", n, err)
	untouched(t, "destination", dst.Buf)
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}

// testOneSided moves data while the program at the other end does nothing.
func testOneSided(t *testing.T, env Env) {
	const size = 1 << 20
	p := NewPair(t, env, PairConfig{})
	mem := p.Passive.Register(t, make([]byte, size), allRights)
	out := p.Active.Register(t, pattern(size, 1), 0)
	in := p.Active.Register(t, make([]byte, size), localWrite)
	for i := range uint64(8) {
		p.Active.Send(t,
			ibv.SendWR{ID: i, Op: ibv.OpWrite, Flags: ibv.SendSignaled, SGL: out.SGL(0, size, 1),
				RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()},
			ibv.SendWR{ID: i, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: in.SGL(0, size, 1),
				RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()})
		succeeded(t, p.Active, pollNext(t, p.Active.SendCQ), i, ibv.WCWrite)
		succeeded(t, p.Active, pollNext(t, p.Active.SendCQ), i, ibv.WCRead)
	}
	sameBytes(t, "read back", in.Buf, out.Buf)
}
