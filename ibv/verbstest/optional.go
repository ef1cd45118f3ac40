package verbstest

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var optionalTests = []subtest{
	{"SendImm", testSendImm},
	{"WriteImm", testWriteImm},
	{"Atomics", testAtomics},
	{"AtomicsTogether", testAtomicsTogether},
	{"AtomicsDenied", testAtomicsDenied},
	{"Lacking", testLacking},
}

// capsOf says what each optional operation needs.
var capsOf = map[ibv.Opcode]ibv.Caps{
	ibv.OpSendImm:  ibv.CapSendImm,
	ibv.OpSendInv:  ibv.CapSendInvalidate,
	ibv.OpWriteImm: ibv.CapWriteImm,
	ibv.OpCmpSwap:  ibv.CapAtomic,
	ibv.OpFetchAdd: ibv.CapAtomic,
	ibv.OpLocalInv: ibv.CapLocalInvalidate,
}

// testSendImm sends four bytes beside the message. Where there is no such
// thing testLacking has its say.
func testSendImm(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	if !p.Active.Dev.Attr().Caps.Has(ibv.CapSendImm) {
		return
	}
	src := p.Active.Register(t, pattern(100, 1), 0)
	dst := p.Passive.Register(t, make([]byte, 100), localWrite)
	for i, imm := range []uint32{0, 1, 0x01020304, 0xFFFFFFFF} {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(0, 100, 1)})
		p.Active.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpSendImm, Flags: ibv.SendSignaled, SGL: src.SGL(0, 25*i, 1), Imm: imm})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCSend)
		wc := next(t, p.Passive.RecvCQ)
		succeeded(t, p.Passive, wc, uint64(i), ibv.WCRecv)
		if wc.Flags != ibv.WCWithImm || wc.Imm != imm {
			t.Errorf("completion %+v, want immediate %#x", wc, imm)
		}
		sameBytes(t, "message", dst.Buf[:wc.ByteLen], src.Buf[:25*i])
	}
}

// testWriteImm writes and completes a receive of the peer, whose buffer stays
// as it is.
func testWriteImm(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	if !p.Active.Dev.Attr().Caps.Has(ibv.CapWriteImm) {
		return
	}
	src := p.Active.Register(t, pattern(5000, 1), 0)
	dst := p.Passive.Register(t, make([]byte, 5000), allRights)
	in := p.Passive.Register(t, guarded(100), localWrite)
	for i, size := range []int{0, 1, 5000} {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: in.SGL(0, 100, 1)})
		p.Active.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpWriteImm, Flags: ibv.SendSignaled, SGL: src.SGL(0, size, 1),
			Imm: uint32(i) + 7, RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCWrite)
		wc := next(t, p.Passive.RecvCQ)
		succeeded(t, p.Passive, wc, uint64(i), ibv.WCRecvWriteImm)
		if wc.Flags != ibv.WCWithImm || wc.Imm != uint32(i)+7 || int(wc.ByteLen) != size {
			t.Errorf("completion %+v for %d bytes", wc, size)
		}
		sameBytes(t, "written", dst.Buf[:size], src.Buf[:size])
		untouched(t, "receive buffer", in.Buf)
	}
}

// An atom is eight bytes at a place of the passive side that atomics may use,
// and room on the active side for what was there before.
type atom struct {
	at     *Mem
	before *Mem
}

// newAtom returns nil where the device has no atomics.
func newAtom(t testing.TB, p *Pair) *atom {
	t.Helper()
	if !p.Active.Dev.Attr().Caps.Has(ibv.CapAtomic) {
		return nil
	}
	return &atom{
		at:     p.Passive.Register(t, make([]byte, 24), ibv.AccessLocalWrite|ibv.AccessRemoteAtomic),
		before: p.Active.Register(t, guarded(24), localWrite),
	}
}

func (a *atom) wr(op ibv.Opcode, compareAdd, swap uint64) ibv.SendWR {
	return ibv.SendWR{ID: 1, Op: op, Flags: ibv.SendSignaled, SGL: a.before.SGL(8, 8, 1),
		RemoteAddr: a.at.Addr(8), RKey: a.at.MR.RKey(), CompareAdd: compareAdd, Swap: swap}
}

// testAtomics compares, swaps and adds, and looks at what was there before and
// what is there then: numbers in the byte order of the machines.
func testAtomics(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	a := newAtom(t, p)
	if a == nil {
		return
	}
	const big = 0x0102030405060708
	for _, step := range []struct {
		wr            ibv.SendWR
		op            ibv.WCOpcode
		before, after uint64
	}{
		{a.wr(ibv.OpFetchAdd, big, 0), ibv.WCFetchAdd, 0, big},
		{a.wr(ibv.OpFetchAdd, 1<<64-1, 0), ibv.WCFetchAdd, big, big - 1},
		{a.wr(ibv.OpFetchAdd, 0, 0), ibv.WCFetchAdd, big - 1, big - 1},
		{a.wr(ibv.OpCmpSwap, big, 7), ibv.WCCmpSwap, big - 1, big - 1},
		{a.wr(ibv.OpCmpSwap, big-1, 7), ibv.WCCmpSwap, big - 1, 7},
		{a.wr(ibv.OpCmpSwap, 7, 1<<63), ibv.WCCmpSwap, 7, 1 << 63},
	} {
		p.Active.Send(t, step.wr)
		wc := next(t, p.Active.SendCQ)
		succeeded(t, p.Active, wc, 1, step.op)
		before, after := binary.NativeEndian.Uint64(a.before.Buf[8:]), binary.NativeEndian.Uint64(a.at.Buf[8:])
		if before != step.before || after != step.after || wc.ByteLen != 8 {
			t.Fatalf("%v of %#x and %#x: %#x became %#x, want %#x and %#x; %+v", step.wr.Op, step.wr.CompareAdd, step.wr.Swap,
				before, after, step.before, step.after, wc)
		}
	}
	untouched(t, "before the answer", a.before.Buf[:8])
	untouched(t, "behind the answer", a.before.Buf[16:])
	sameBytes(t, "before the number", a.at.Buf[:8], make([]byte, 8))
	sameBytes(t, "behind the number", a.at.Buf[16:], make([]byte, 8))
}

// testAtomicsTogether adds from several connections at once: nothing is lost.
func testAtomicsTogether(t *testing.T, env Env) {
	const connections, rounds = 3, 50
	var pairs []*Pair
	for range connections {
		var cfg PairConfig
		if len(pairs) > 0 {
			cfg.Share = pairs[0]
		} else {
			cfg.CQDepth = 256
		}
		pairs = append(pairs, NewPair(t, env, cfg))
	}
	a := newAtom(t, pairs[0])
	if a == nil {
		return
	}
	for range rounds {
		for _, p := range pairs {
			p.Active.Send(t, a.wr(ibv.OpFetchAdd, 1, 0))
		}
		for range pairs {
			if wc := next(t, pairs[0].Active.SendCQ); wc.Status != ibv.WCSuccess {
				t.Fatalf("completion %+v (%v)", wc, wc.Status)
			}
		}
	}
	if n := binary.NativeEndian.Uint64(a.at.Buf[8:]); n != connections*rounds {
		t.Errorf("%d additions of 1 made %d", connections*rounds, n)
	}
}

// testAtomicsDenied tries them on a region without the right to, and at an
// address that is no multiple of eight.
func testAtomicsDenied(t *testing.T, env Env) {
	for _, op := range []ibv.Opcode{ibv.OpCmpSwap, ibv.OpFetchAdd} {
		for _, odd := range []bool{false, true} {
			p := NewPair(t, env, PairConfig{})
			a := newAtom(t, p)
			if a == nil {
				return
			}
			wr := a.wr(op, 0, 1)
			want := ibv.WCRemAccessErr
			if odd {
				wr.RemoteAddr += 4
				want = ibv.WCRemInvReqErr
			} else {
				closed := p.Passive.Register(t, a.at.Buf, allRights)
				wr.RKey = closed.MR.RKey()
			}
			p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
			p.Passive.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
			n, err := p.Active.QP.PostSend([]ibv.SendWR{wr})
			if odd && err != nil { // seen before it is sent
				refused(t, "PostSend of an atomic at an odd address", n, err)
				continue
			}
			must(t, "PostSend", err)
			ended(t, p.Active, next(t, p.Active.SendCQ), 1, want)
			broken(t, p)
			sameBytes(t, "number", a.at.Buf, make([]byte, 24))
			untouched(t, "answer", a.before.Buf)
		}
	}
}

// testLacking puts each operation that the device lacks in the middle of a
// chain: what stands before it is sent, it and the rest are not.
func testLacking(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	caps := p.Active.Dev.Attr().Caps
	mem := p.Passive.Register(t, guarded(8), allRights)
	src := p.Active.Register(t, make([]byte, 8), allRights)
	for op, need := range capsOf {
		if caps.Has(need) {
			continue
		}
		p.Passive.Recv(t, ibv.RecvWR{ID: 1})
		n, err := p.Active.QP.PostSend([]ibv.SendWR{
			{ID: 1, Op: ibv.OpSend, Flags: ibv.SendSignaled},
			{ID: 2, Op: op, Flags: ibv.SendSignaled, SGL: src.SGL(0, 8, 1), RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey(),
				InvKey: mem.MR.RKey()},
			{ID: 3, Op: ibv.OpSend, Flags: ibv.SendSignaled},
		})
		if n != 1 || !errors.Is(err, errors.ErrUnsupported) {
			t.Fatalf("%v: PostSend took %d, error %v; want 1 and ErrUnsupported", op, n, err)
		}
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 1, ibv.WCSend)
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 1, ibv.WCRecv)
		p.Active.sync(t, p.Passive)
		noCompletion(t, p.Active.SendCQ)
		noCompletion(t, p.Passive.RecvCQ)
		untouched(t, "target", mem.Buf)
	}
}
