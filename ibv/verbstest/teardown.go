package verbstest

import (
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var teardownTests = []subtest{
	{"CloseDropsWork", testCloseDropsWork},
	{"CloseReleasesBuffers", testCloseReleasesBuffers},
	{"CloseUnderLoad", testCloseUnderLoad},
	{"Unused", testUnused},
}

// testCloseDropsWork closes a queue pair with receives in its queue: they leave
// no completion. The one that completed before stays to be polled.
func testCloseDropsWork(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 5)
	arrive(t, p, 0)
	qpn := p.Passive.QP.QPN()
	p.Passive.CloseQP(t)
	var wcs [8]ibv.WC
	n, err := cq.Poll(wcs[:])
	must(t, "Poll", err)
	if n != 1 || wcs[0].ID != 0 || wcs[0].Status != ibv.WCSuccess || wcs[0].QPN != qpn {
		t.Fatalf("completions %+v; want the one receive that was complete", wcs[:n])
	}
	noCompletion(t, p.Passive.SendCQ)
}

// testCloseReleasesBuffers closes a queue pair while large messages come in:
// when Close returns no more bytes arrive in the buffers.
func testCloseReleasesBuffers(t *testing.T, env Env) {
	const n, size = 8, 1 << 19
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, pattern(size, 1), 0)
	dst := p.Passive.Register(t, make([]byte, n*size), localWrite)
	for i := range n {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(i*size, size, 1)})
	}
	for i := range n {
		p.Active.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, size, 1)})
	}
	succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 0, ibv.WCRecv)
	p.Passive.CloseQP(t)
	copy(dst.Buf, guarded(len(dst.Buf)))
	must(t, "close", p.Passive.close())
	p.Active.events.wait(t, ibv.EventDisconnected)
	p.Active.flushed(t)
	for i := range n {
		ended(t, p.Active, next(t, p.Active.SendCQ), uint64(i), p.Active.cutOff(ibv.WCSuccess, ibv.WCRetryExcErr)...)
	}
	untouched(t, "buffers of a closed queue pair", dst.Buf)
}

// testCloseUnderLoad closes one end, then the other, in the middle of traffic
// both ways, without a word before.
func testCloseUnderLoad(t *testing.T, env Env) {
	l := env.listen(t)
	const n, size = 8, 1 << 16
	for i := range 10 {
		p := env.pair(t, l, PairConfig{})
		a, b := p.Active, p.Passive
		for _, e := range []*End{a, b} {
			in := e.Register(t, make([]byte, size), localWrite)
			for range n {
				e.Recv(t, ibv.RecvWR{SGL: in.SGL(0, size, 1)})
			}
		}
		for _, e := range []*End{a, b} {
			out := e.Register(t, make([]byte, size), 0)
			for range n {
				e.Send(t, ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: out.SGL(0, size, 1)})
			}
		}
		if i%2 == 1 {
			a, b = b, a
		}
		must(t, "close", a.close())
		if i%3 == 0 {
			b.events.wait(t, ibv.EventDisconnected)
		}
		must(t, "close", b.close())
	}
}

// testUnused gives up IDs before they connect, at every stage.
func testUnused(t *testing.T, env Env) {
	l := env.listen(t)
	for range 10 {
		id, err := env.Active.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
		must(t, "Resolve", err)
		must(t, "ID.Close", id.Close())
		e, err := env.active(t.Context(), l.Addr(), PairConfig{})
		must(t, "active end", err)
		postReceives(t, e, 5)
		must(t, "close", e.close())
	}
}
