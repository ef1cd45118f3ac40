package verbstest

import (
	"errors"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var optionalTests = []subtest{
	{"SendImm", testSendImm},
	{"WriteImm", testWriteImm},
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
