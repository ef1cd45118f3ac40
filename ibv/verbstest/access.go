package verbstest

import (
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

// accessTests has each violation, by an RDMA Write and by an RDMA Read.
var accessTests = func() []subtest {
	var tests []subtest
	for _, op := range []ibv.Opcode{ibv.OpWrite, ibv.OpRead} {
		for _, v := range violations {
			tests = append(tests, subtest{
				name: map[ibv.Opcode]string{ibv.OpWrite: "Write/", ibv.OpRead: "Read/"}[op] + v.name,
				run:  func(t *testing.T, env Env) { testViolation(t, env, op, v) },
			})
		}
	}
	return append(tests,
		subtest{"WriteOnly", testWriteOnly},
		subtest{"Edges", testEdges},
		subtest{"CloseStopsWrites", testCloseStopsWrites},
		subtest{"CloseStopsReads", testCloseStopsReads})
}()

// The region of an access test has regionLen bytes inside a larger guarded buffer. An
// access has accessLen bytes, which fit into one packet on every device.
const (
	regionOff = 1000
	regionLen = 256
	accessLen = 32
)

// A violation registers a region of buf, and names a place that op must not use.
type violation struct {
	name   string
	target func(t testing.TB, e *End, buf []byte, op ibv.Opcode) (addr uint64, key uint32)
}

// fullyOpen registers the region with all rights.
func fullyOpen(t testing.TB, e *End, buf []byte) ibv.MR {
	t.Helper()
	return e.Register(t, buf[regionOff:][:regionLen], allRights).MR
}

// at returns a violation by an address in a fully open region.
func at(addr func(mr ibv.MR) uint64) func(testing.TB, *End, []byte, ibv.Opcode) (uint64, uint32) {
	return func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		mr := fullyOpen(t, e, buf)
		return addr(mr), mr.RKey()
	}
}

var violations = []violation{
	{"UnknownKey", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		mr := fullyOpen(t, e, buf)
		return mr.Addr(), mr.RKey() ^ 0x7FFF0000
	}},
	{"WrongKeyByte", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		mr := fullyOpen(t, e, buf)
		return mr.Addr(), mr.RKey() ^ 1
	}},
	{"NoKey", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		return fullyOpen(t, e, buf).Addr(), 0
	}},
	{"OtherDomain", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		pd, err := e.Dev.AllocPD()
		must(t, "AllocPD", err)
		mr, err := pd.RegMR(buf[regionOff:][:regionLen], allRights)
		must(t, "RegMR", err)
		t.Cleanup(func() {
			must(t, "MR.Close", mr.Close())
			must(t, "PD.Close", pd.Close())
		})
		return mr.Addr(), mr.RKey()
	}},
	{"NoRight", func(t testing.TB, e *End, buf []byte, op ibv.Opcode) (uint64, uint32) {
		rights := ibv.AccessLocalWrite | ibv.AccessRemoteRead
		if op == ibv.OpRead {
			rights = ibv.AccessLocalWrite | ibv.AccessRemoteWrite
		}
		mr := e.Register(t, buf[regionOff:][:regionLen], rights).MR
		return mr.Addr(), mr.RKey()
	}},
	{"NoRemoteRight", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		mr := e.Register(t, buf[regionOff:][:regionLen], localWrite).MR
		return mr.Addr(), mr.RKey()
	}},
	{"ClosedRegion", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		mem := e.Register(t, buf[regionOff:][:regionLen], allRights)
		addr, key := mem.Addr(0), mem.MR.RKey()
		mem.Close(t)
		return addr, key
	}},
	{"ReplacedRegion", func(t testing.TB, e *End, buf []byte, _ ibv.Opcode) (uint64, uint32) {
		mem := e.Register(t, buf[regionOff:][:regionLen], allRights)
		addr, key := mem.Addr(0), mem.MR.RKey()
		mem.Close(t)
		fullyOpen(t, e, buf)
		return addr, key
	}},
	{"PastEnd", at(func(mr ibv.MR) uint64 { return mr.Addr() + regionLen - accessLen + 1 })},
	{"BehindEnd", at(func(mr ibv.MR) uint64 { return mr.Addr() + regionLen })},
	{"BeforeStart", at(func(mr ibv.MR) uint64 { return mr.Addr() - 1 })},
	{"FarAway", at(func(mr ibv.MR) uint64 { return mr.Addr() + 1<<40 })},
	{"WrapAround", at(func(ibv.MR) uint64 { return 1<<64 - accessLen/2 })},
}

// ofRights are the violations in which only a right is missing.
var ofRights = []string{"NoRight", "NoRemoteRight"}

// testViolation tries an access that the peer must refuse. Nothing may be written or read,
// and another connection still works.
func testViolation(t *testing.T, env Env, op ibv.Opcode, v violation) {
	p, beside := NewPair(t, env, PairConfig{}), NewPair(t, env, PairConfig{})
	secret := guarded(2*regionOff + regionLen)
	addr, key := v.target(t, p.Passive, secret, op)
	local := p.Active.Register(t, pattern(accessLen, 1), localWrite)
	if op == ibv.OpRead && slices.Contains(ofRights, v.name) && p.Passive.Dev.Attr().Quirks.ReadsUnchecked {
		p.Active.Send(t, ibv.SendWR{ID: 1, Op: op, Flags: ibv.SendSignaled, SGL: local.SGL(0, accessLen, 1), RemoteAddr: addr, RKey: key})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 1, ibv.WCRead)
		return // The device has the quirk.
	}
	denied(t, p, ibv.SendWR{Op: op, SGL: local.SGL(0, accessLen, 1), RemoteAddr: addr, RKey: key})
	untouched(t, "memory of the peer", secret)
	sameBytes(t, "memory of the requester", local.Buf, pattern(accessLen, 1))
	beside.Active.transfer(t, beside.Passive, pattern(100, 1))
	beside.Passive.transfer(t, beside.Active, pattern(100, 2))
}

// denied posts a request that the peer must refuse, and checks the result.
//
// On InfiniBand the peer answers with a NAK, and the request completes with a remote access
// error. On iWARP a Write has no answer. For the sender it may be complete before the peer
// ends the connection with a Terminate message. A Read waits for its answer and cannot
// succeed. A device that does not use the Terminate flushes the Read.
func denied(t testing.TB, p *Pair, wr ibv.SendWR) {
	t.Helper()
	wr.ID, wr.Flags = 1, wr.Flags|ibv.SendSignaled
	p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Passive.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Active.Send(t, wr)
	allowed := []ibv.WCStatus{ibv.WCRemAccessErr}
	if p.Active.iwarp() {
		allowed = p.Active.cutOff(ibv.WCRemAccessErr, ibv.WCRemOpErr)
		if wr.Op != ibv.OpRead {
			allowed = append(allowed, ibv.WCSuccess)
		}
	}
	ended(t, p.Active, next(t, p.Active.SendCQ), 1, allowed...)
	broken(t, p)
}

// cutOff adds the statuses of a request that meets the end of the connection.
func (e *End) cutOff(status ...ibv.WCStatus) []ibv.WCStatus {
	status = append(status, ibv.WCFlushErr)
	if e.Dev.Attr().Quirks.VagueErrors {
		status = append(status, ibv.WCLocQPOpErr)
	}
	return status
}

// recvBeforeBreak is the ID of a receive that broken expects to be flushed.
const recvBeforeBreak = 77

// broken checks a connection after a failure that both sides took part in: both get the
// event, and all work is flushed.
func broken(t testing.TB, p *Pair) {
	t.Helper()
	if !p.Active.iwarp() {
		// The connection manager does not watch the queue pairs here.
		must(t, "Disconnect", p.Active.ID.Disconnect())
	}
	for _, e := range []*End{p.Active, p.Passive} {
		e.events.wait(t, ibv.EventDisconnected)
		e.flushed(t)
		ended(t, e, next(t, e.RecvCQ), recvBeforeBreak, ibv.WCFlushErr)
		e.Send(t, ibv.SendWR{ID: 3, Op: ibv.OpSend}, ibv.SendWR{ID: 4, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		ended(t, e, next(t, e.SendCQ), 3, ibv.WCFlushErr)
		ended(t, e, next(t, e.SendCQ), 4, ibv.WCFlushErr)
	}
}

// flushed waits until the queue pair of an ended connection is in the error state. On iWARP
// it gets there by itself. On InfiniBand the connection manager does not move it, and the
// program does.
func (e *End) flushed(t testing.TB) {
	t.Helper()
	if !e.iwarp() {
		must(t, "SetError", e.QP.SetError())
	}
	if !eventually(func() bool { return e.QP.State() == ibv.QPSError }) {
		t.Fatalf("the queue pair stays in %v", e.QP.State())
	}
}

// testWriteOnly writes to a region with the right to write only, and reads from one with
// the right to read only.
func testWriteOnly(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	in := p.Passive.Register(t, make([]byte, 64), ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
	out := p.Passive.Register(t, pattern(64, 2), ibv.AccessRemoteRead)
	src := p.Active.Register(t, pattern(64, 1), 0)
	dst := p.Active.Register(t, make([]byte, 64), localWrite)
	p.Active.Send(t,
		ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, 64, 1), RemoteAddr: in.Addr(0), RKey: in.MR.RKey()},
		ibv.SendWR{ID: 1, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: dst.SGL(0, 64, 1),
			RemoteAddr: out.Addr(0), RKey: out.MR.RKey()})
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 1, ibv.WCRead)
	sameBytes(t, "written", in.Buf, src.Buf)
	sameBytes(t, "read", dst.Buf, out.Buf)
}

// testEdges uses the first and the last byte of a region, and all of it.
func testEdges(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	buf := guarded(2*regionOff + regionLen)
	mr := fullyOpen(t, p.Passive, buf)
	src := p.Active.Register(t, pattern(regionLen, 1), 0)
	dst := p.Active.Register(t, make([]byte, regionLen), localWrite)
	for i, piece := range []struct{ off, n int }{{0, 1}, {regionLen - 1, 1}, {0, regionLen}} {
		p.Active.Send(t,
			ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(piece.off, piece.n, 1),
				RemoteAddr: mr.Addr() + uint64(piece.off), RKey: mr.RKey()},
			ibv.SendWR{ID: uint64(i), Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: dst.SGL(piece.off, piece.n, 1),
				RemoteAddr: mr.Addr() + uint64(piece.off), RKey: mr.RKey()})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCRead)
		sameBytes(t, "read back", dst.Buf[piece.off:][:piece.n], src.Buf[piece.off:][:piece.n])
	}
	untouched(t, "before the region", buf[:regionOff])
	untouched(t, "behind the region", buf[regionOff+regionLen:])
}

// testCloseStopsWrites closes a region while the peer writes to it. When Close returns, no
// more bytes arrive.
func testCloseStopsWrites(t *testing.T, env Env) {
	const size, pieces = 1 << 20, 8
	p := NewPair(t, env, PairConfig{SendWR: pieces})
	src := p.Active.Register(t, pattern(size, 1), 0)
	dst := p.Passive.Register(t, make([]byte, size), allRights)
	wr := ibv.SendWR{Op: ibv.OpWrite, Flags: ibv.SendSignaled, SGL: src.SGL(0, size, 1),
		RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()}
	for range pieces {
		p.Active.Send(t, wr)
	}
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 0, ibv.WCWrite)
	dst.Close(t)
	copy(dst.Buf, guarded(size))
	for range pieces - 1 {
		if wc := next(t, p.Active.SendCQ); wc.ID != 0 {
			t.Fatalf("completion %+v", wc)
		}
	}
	// One more request behind them fails, or the Read does. That shows that the peer has
	// handled all.
	p.Active.Send(t, wr)
	_ = next(t, p.Active.SendCQ) // Any status will do.
	if wc := p.Active.trySync(t, p.Passive); wc.Status == ibv.WCSuccess {
		t.Error("the peer wrote to a closed region without harm to itself")
	}
	untouched(t, "memory of the closed region", dst.Buf)
}

// testCloseStopsReads closes the region that RDMA Reads of this side fill. When Close
// returns, no more bytes arrive.
func testCloseStopsReads(t *testing.T, env Env) {
	const size, pieces = 1 << 20, 8
	p := NewPair(t, env, PairConfig{})
	src := p.Passive.Register(t, pattern(size, 1), ibv.AccessRemoteRead)
	dst := p.Active.Register(t, make([]byte, size), localWrite)
	for i := range uint64(pieces) {
		p.Active.Send(t, ibv.SendWR{ID: i, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: dst.SGL(0, size, 1),
			RemoteAddr: src.Addr(0), RKey: src.MR.RKey()})
	}
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 0, ibv.WCRead)
	dst.Close(t)
	copy(dst.Buf, guarded(size))
	for i := range uint64(pieces - 1) {
		if wc := next(t, p.Active.SendCQ); wc.ID != i+1 {
			t.Fatalf("completion %+v, want that of %d", wc, i+1)
		}
	}
	untouched(t, "memory of the closed region", dst.Buf)
}
