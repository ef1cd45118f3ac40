package verbstest

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var invalidateTests = []subtest{
	{"Remote", testSendInvalidate},
	{"ForeignKey", testInvalidateForeignKey},
	{"Local", testLocalInvalidate},
}

// testSendInvalidate takes a key of the peer back with a Send. The peer learns
// which one, and it opens nothing any more; the region's other users and the
// other regions go on.
func testSendInvalidate(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	if !p.Active.Dev.Attr().Caps.Has(ibv.CapSendInvalidate) {
		return // testLacking checks that it is refused
	}
	src := p.Active.Register(t, pattern(64, 1), 0)
	in := p.Passive.Register(t, make([]byte, 64), localWrite)
	other := p.Passive.Register(t, make([]byte, 64), allRights)
	for i, flags := range []ibv.SendFlags{ibv.SendSignaled, ibv.SendSignaled | ibv.SendSolicited} {
		mem := p.Passive.Register(t, make([]byte, 64), allRights)
		key := mem.MR.RKey()
		p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: in.SGL(0, 64, 1)})
		// The Write before it still gets in.
		p.Active.Send(t,
			ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, 64, 1), RemoteAddr: mem.Addr(0), RKey: key},
			ibv.SendWR{ID: 2, Op: ibv.OpSendInv, Flags: flags, SGL: src.SGL(0, 32*i, 1), InvKey: key})
		wc := next(t, p.Passive.RecvCQ)
		succeeded(t, p.Passive, wc, 1, ibv.WCRecv)
		if wc.Flags != ibv.WCWithInv || wc.InvKey != key || int(wc.ByteLen) != 32*i {
			t.Fatalf("completion %+v, want key %#x taken back and %d bytes", wc, key, 32*i)
		}
		sameBytes(t, "message", in.Buf[:wc.ByteLen], src.Buf[:32*i])
		sameBytes(t, "written before", mem.Buf, src.Buf)
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 2, ibv.WCSend)
		mem.Close(t) // closing what was taken back is fine
	}
	p.Active.Send(t, ibv.SendWR{ID: 3, Op: ibv.OpWrite, Flags: ibv.SendSignaled, SGL: src.SGL(0, 64, 1),
		RemoteAddr: other.Addr(0), RKey: other.MR.RKey()})
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 3, ibv.WCWrite)
	p.Active.sync(t, p.Passive)
	sameBytes(t, "written to another region", other.Buf, src.Buf)

	last := p.Passive.Register(t, guarded(64), allRights)
	key := last.MR.RKey()
	p.Passive.Recv(t, ibv.RecvWR{ID: 1})
	p.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSendInv, Flags: ibv.SendSignaled, InvKey: key})
	succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 1, ibv.WCRecv)
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 2, ibv.WCSend)
	denied(t, p, ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, 64, 1), RemoteAddr: last.Addr(0), RKey: key})
	untouched(t, "region taken back", last.Buf)
}

// testInvalidateForeignKey names a key of another protection domain: the peer
// must not be able to take that back.
func testInvalidateForeignKey(t *testing.T, env Env) {
	p, other := NewPair(t, env, PairConfig{}), NewPair(t, env, PairConfig{})
	if !p.Active.Dev.Attr().Caps.Has(ibv.CapSendInvalidate) {
		return // testLacking checks that it is refused
	}
	src := other.Active.Register(t, pattern(64, 1), 0)
	mem := other.Passive.Register(t, make([]byte, 64), allRights)
	p.Passive.Recv(t, ibv.RecvWR{ID: 1})
	p.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSendInv, Flags: ibv.SendSignaled, InvKey: mem.MR.RKey()})
	wc := next(t, p.Active.SendCQ)
	if wc.ID != 2 || wc.Status == ibv.WCSuccess && !p.Active.iwarp() { // see denied
		t.Errorf("the Send completed with %+v", wc)
	}
	p.Passive.flushed(t)
	if wc := next(t, p.Passive.RecvCQ); wc.Status == ibv.WCSuccess {
		t.Errorf("the receive completed with %+v", wc)
	}
	other.Active.Send(t, ibv.SendWR{ID: 3, Op: ibv.OpWrite, Flags: ibv.SendSignaled, SGL: src.SGL(0, 64, 1),
		RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()})
	succeeded(t, other.Active, next(t, other.Active.SendCQ), 3, ibv.WCWrite)
	other.Active.sync(t, other.Passive)
	sameBytes(t, "written", mem.Buf, src.Buf)
}

// testLocalInvalidate takes a key of the own side back by a work request.
func testLocalInvalidate(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	if !p.Passive.Dev.Attr().Caps.Has(ibv.CapLocalInvalidate) {
		return // testLacking checks that it is refused
	}
	src := p.Active.Register(t, pattern(64, 1), 0)
	mem := p.Passive.Register(t, guarded(64), allRights)
	key := mem.MR.RKey()
	p.Passive.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpLocalInv, Flags: ibv.SendSignaled, InvKey: key})
	succeeded(t, p.Passive, next(t, p.Passive.SendCQ), 1, ibv.WCLocalInv)
	denied(t, p, ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, 64, 1), RemoteAddr: mem.Addr(0), RKey: key})
	untouched(t, "region taken back", mem.Buf)
}
