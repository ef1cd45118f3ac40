package verbstest

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

// localTests names memory of the own side that the device must not use.
var localTests = func() []subtest {
	var tests []subtest
	for _, op := range []ibv.Opcode{ibv.OpSend, ibv.OpWrite, ibv.OpRead} {
		for _, m := range mistakes {
			tests = append(tests, subtest{
				name: map[ibv.Opcode]string{ibv.OpSend: "Send/", ibv.OpWrite: "Write/", ibv.OpRead: "Read/"}[op] + m.name,
				run:  func(t *testing.T, env Env) { testMistake(t, env, op, m.element) },
			})
		}
	}
	return append(tests, subtest{"ReadOnlyDestination", testReadOnlyDestination})
}()

// A mistake makes an element of accessLen bytes of buf that the device must not
// use.
type mistake struct {
	name    string
	element func(t testing.TB, e *End, buf []byte) ibv.SGE
}

var mistakes = []mistake{
	{"UnknownKey", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		mr := fullyOpen(t, e, buf)
		return ibv.SGE{Buf: buf[regionOff:][:accessLen], LKey: mr.LKey() ^ 0x7FFF0000}
	}},
	{"NoKey", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		fullyOpen(t, e, buf)
		return ibv.SGE{Buf: buf[regionOff:][:accessLen]}
	}},
	{"OtherDomain", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		pd, err := e.Dev.AllocPD()
		must(t, "AllocPD", err)
		mr, err := pd.RegMR(buf, allRights)
		must(t, "RegMR", err)
		t.Cleanup(func() {
			must(t, "MR.Close", mr.Close())
			must(t, "PD.Close", pd.Close())
		})
		return ibv.SGE{Buf: buf[regionOff:][:accessLen], LKey: mr.LKey()}
	}},
	{"ClosedRegion", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		mem := e.Register(t, buf, allRights)
		sge := mem.SGE(regionOff, accessLen)
		mem.Close(t)
		return sge
	}},
	{"PastEnd", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		mr := fullyOpen(t, e, buf)
		return ibv.SGE{Buf: buf[regionOff+regionLen-accessLen+1:][:accessLen], LKey: mr.LKey()}
	}},
	{"BeforeStart", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		mr := fullyOpen(t, e, buf)
		return ibv.SGE{Buf: buf[regionOff-1:][:accessLen], LKey: mr.LKey()}
	}},
	{"OtherMemory", func(t testing.TB, e *End, buf []byte) ibv.SGE {
		mr := fullyOpen(t, e, buf)
		return ibv.SGE{Buf: guarded(accessLen), LKey: mr.LKey()}
	}},
}

// testMistake posts work on such an element: it completes with a protection
// error, the peer gets nothing, and the connection is over.
func testMistake(t *testing.T, env Env, op ibv.Opcode, element func(testing.TB, *End, []byte) ibv.SGE) {
	p := NewPair(t, env, PairConfig{})
	buf := guarded(2*regionOff + regionLen)
	sge := element(t, p.Active, buf)
	target := p.Passive.Register(t, guarded(accessLen), allRights)
	if op == ibv.OpRead {
		copy(target.Buf, pattern(accessLen, 1))
	}
	protected(t, p, ibv.SendWR{Op: op, SGL: []ibv.SGE{sge}, RemoteAddr: target.Addr(0), RKey: target.MR.RKey()},
		ibv.WCLocProtErr)
	untouched(t, "memory around the element", buf)
	if op == ibv.OpWrite {
		untouched(t, "memory of the peer", target.Buf)
	}
}

// testReadOnlyDestination reads into a region without the right to write.
func testReadOnlyDestination(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	dst := p.Active.Register(t, guarded(accessLen), 0)
	src := p.Passive.Register(t, pattern(accessLen, 1), ibv.AccessRemoteRead)
	// A device that sees it when the answer comes may call it an access error.
	protected(t, p, ibv.SendWR{Op: ibv.OpRead, SGL: dst.SGL(0, accessLen, 1),
		RemoteAddr: src.Addr(0), RKey: src.MR.RKey()}, ibv.WCLocProtErr, ibv.WCLocAccessErr)
	untouched(t, "destination", dst.Buf)
}

// protected posts an unsignaled request that the own device must not do, with
// another one behind it, which the peer must not get. Behind a Read that takes a
// fence on InfiniBand, where its answer shows the mistake.
func protected(t testing.TB, p *Pair, wr ibv.SendWR, status ...ibv.WCStatus) {
	t.Helper()
	wr.ID = 1
	behind := ibv.SendWR{ID: 2, Op: ibv.OpSend}
	if wr.Op == ibv.OpRead && (!p.Active.iwarp() || p.Active.Dev.Attr().Quirks.ReadsOutOfOrder) {
		behind.Flags = ibv.SendFence
	}
	if p.Active.Dev.Attr().Quirks.VagueErrors {
		status = append(status, ibv.WCFlushErr, ibv.WCLocQPOpErr)
	}
	p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Passive.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Active.Send(t, wr, behind)
	ended(t, p.Active, next(t, p.Active.SendCQ), 1, status...)
	ended(t, p.Active, next(t, p.Active.SendCQ), 2, ibv.WCFlushErr)
	broken(t, p)
}
