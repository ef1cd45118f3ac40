package verbstest

import (
	"context"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var disconnectTests = []subtest{
	{"Delivers", testDisconnectDelivers},
	{"BothSides", testDisconnectBothSides},
	{"OneEventOnly", testOneEventOnly},
	{"NotifyLate", testNotifyLate},
	{"SetError", testPeerVanishes},
	{"CloseOnly", testCloseOnly},
}

// testDisconnectDelivers disconnects as soon as the sends are complete: the peer
// gets all of them, and is told that the end was in good order. Each side has
// its turn.
func testDisconnectDelivers(t *testing.T, env Env) {
	l := env.listen(t)
	for _, swap := range []bool{false, true} {
		p := env.pair(t, l, PairConfig{})
		from, to := p.Active, p.Passive
		if swap {
			from, to = to, from
		}
		const n, size = 20, 50000
		src := from.Register(t, pattern(size, 1), 0)
		dst := to.Register(t, make([]byte, n*size), localWrite)
		for i := range n {
			to.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(i*size, size, 1)})
		}
		for i := range n {
			from.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, size-i, 1)})
		}
		for i := range n {
			succeeded(t, from, next(t, from.SendCQ), uint64(i), ibv.WCSend)
		}
		must(t, "Disconnect", from.ID.Disconnect())
		from.events.wait(t, ibv.EventDisconnected)
		if ev := to.events.wait(t, ibv.EventDisconnected); ev.Err != nil {
			t.Errorf("an orderly end was reported as %v", ev.Err)
		}
		for i := range n {
			wc := next(t, to.RecvCQ)
			succeeded(t, to, wc, uint64(i), ibv.WCRecv)
			sameBytes(t, "message", dst.Buf[i*size:][:wc.ByteLen], src.Buf[:size-i])
		}
	}
}

func testDisconnectBothSides(t *testing.T, env Env) {
	l := env.listen(t)
	for range 10 {
		p := env.pair(t, l, PairConfig{})
		// One may come too late and find the connection gone.
		results := make(chan error)
		for _, e := range []*End{p.Active, p.Passive} {
			go func() { results <- e.ID.Disconnect() }()
		}
		if a, b := <-results, <-results; a != nil && b != nil {
			t.Fatalf("both could not disconnect: %v, %v", a, b)
		}
		for _, e := range []*End{p.Active, p.Passive} {
			e.events.wait(t, ibv.EventDisconnected)
			must(t, "close", e.close())
		}
	}
}

// testOneEventOnly goes on ending a connection that has ended.
func testOneEventOnly(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	must(t, "Disconnect", p.Active.ID.Disconnect())
	for _, e := range []*End{p.Active, p.Passive} {
		e.events.wait(t, ibv.EventDisconnected)
		e.flushed(t)
		_ = e.ID.Disconnect() // refused or not, it must do no harm
	}
	for _, e := range []*End{p.Active, p.Passive} {
		must(t, "close", e.close())
		seen := make(map[ibv.EventKind]bool)
		for _, ev := range e.events.all() {
			if seen[ev.Kind] {
				t.Errorf("event %q came twice", ev.Kind)
			}
			seen[ev.Kind] = true
		}
	}
}

// testNotifyLate asks for events only when the connection has ended.
func testNotifyLate(t *testing.T, env Env) {
	l := env.listen(t)
	a := env.unconnectedTo(t, l)
	must(t, "CreateQP", a.createQP(PairConfig{}.filled()))
	result := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	go func() { result <- a.ID.Connect(ctx, a.param) }()
	p, err := passive(ctx, l, PairConfig{})
	must(t, "passive end", err)
	p.atEnd(t)
	must(t, "Accept", p.accept(ctx))
	must(t, "Connect", <-result)
	must(t, "first message", hello(a, p))
	postReceives(t, a, 1)
	must(t, "Disconnect", p.ID.Disconnect())
	p.events.wait(t, ibv.EventDisconnected)
	if a.iwarp() {
		// The flush shows that the active side knows too.
		flushedInOrder(t, a, a.RecvCQ, 1)
	}
	a.ID.Notify(a.events.add)
	a.events.wait(t, ibv.EventDisconnected)
}

// testPeerVanishes ends a connection without grace.
func testPeerVanishes(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Passive.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	must(t, "SetError", p.Passive.QP.SetError())
	broken(t, p)
}

// testCloseOnly closes one end without Disconnect: the other hears of it.
func testCloseOnly(t *testing.T, env Env) {
	l := env.listen(t)
	for _, swap := range []bool{false, true} {
		p := env.pair(t, l, PairConfig{})
		gone, left := p.Active, p.Passive
		if swap {
			gone, left = left, gone
		}
		must(t, "close", gone.close())
		left.events.wait(t, ibv.EventDisconnected)
	}
}
