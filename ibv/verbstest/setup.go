package verbstest

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

var setupTests = []subtest{
	{"Addresses", testAddresses},
	{"Unspecified", testUnspecified},
	{"BothFamilies", testBothFamilies},
	{"SourceAddress", testSourceAddress},
	{"EphemeralPorts", testEphemeralPorts},
	{"AddressInUse", testAddressInUse},
	{"TCPPorts", testTCPPorts},
	{"PrivateData", testPrivateData},
	{"Depths", testDepths},
	{"PathMTU", testPathMTU},
	{"AcceptContext", testAcceptContext},
	{"ListenerClose", testListenerClose},
	{"ListenerCloseKeepsConnections", testListenerCloseKeepsConnections},
	{"PassiveSpeaksFirst", testPassiveSpeaksFirst},
	{"Again", testAgain},
}

// attempt is a connection that is being made: the active side connects in another
// goroutine, and the passive side has the request.
type attempt struct {
	active  *End
	request ibv.ID
	cancel  context.CancelFunc // cancel ends Connect.
	result  chan error         // result has the result of Connect.
}

// attempt starts to connect through l and waits for the request to arrive.
func (env Env) attempt(t testing.TB, l ibv.Listener, private []byte) *attempt {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	e, err := env.active(ctx, l.Addr(), PairConfig{})
	must(t, "active end", err)
	e.atEnd(t)
	e.param.Private = private
	a := &attempt{active: e, cancel: cancel, result: make(chan error, 1)}
	go func() { a.result <- e.ID.Connect(ctx, e.param) }()
	a.request, err = l.Accept(ctx)
	must(t, "Listener.Accept", err)
	return a
}

func testAddresses(t *testing.T, env Env) {
	l := env.listen(t)
	if l.Addr().Addr() != env.Addr || l.Addr().Port() == 0 {
		t.Fatalf("the listener is at %v, want %v and a port", l.Addr(), env.Addr)
	}
	p := env.pair(t, l, PairConfig{})
	a, b := p.Active.ID, p.Passive.ID
	if a.RemoteAddr() != l.Addr() || b.LocalAddr() != l.Addr() {
		t.Errorf("the passive side is at %v, the ends say %v and %v", l.Addr(), a.RemoteAddr(), b.LocalAddr())
	}
	if a.LocalAddr() != b.RemoteAddr() || a.LocalAddr().Port() == 0 {
		t.Errorf("the active side is at %v for itself and at %v for its peer", a.LocalAddr(), b.RemoteAddr())
	}
	for _, e := range []*End{p.Active, p.Passive} {
		if s := e.QP.State(); s != ibv.QPSRTS {
			t.Errorf("a connected queue pair is in %v", s)
		}
	}
}

// testUnspecified listens on all addresses of the family.
func testUnspecified(t *testing.T, env Env) {
	all := netip.IPv4Unspecified()
	if env.Addr.Is6() {
		all = netip.IPv6Unspecified()
	}
	testWide(t, env, all)
}

// testBothFamilies listens on all addresses of both families.
func testBothFamilies(t *testing.T, env Env) { testWide(t, env, netip.Addr{}) }

func testWide(t *testing.T, env Env, all netip.Addr) {
	t.Helper()
	wide, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(all, 0), 0)
	must(t, "Listen", err)
	t.Cleanup(func() { must(t, "Listener.Close", wide.Close()) })
	at := netip.AddrPortFrom(env.Addr, wide.Addr().Port())
	p := env.pair(t, relocated{wide, at}, PairConfig{})
	if got := p.Passive.ID.LocalAddr(); got != at {
		t.Errorf("the passive side is at %v, want %v", got, at)
	}
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}

// relocated is a listener with another address for those who connect.
type relocated struct {
	ibv.Listener
	at netip.AddrPort
}

func (r relocated) Addr() netip.AddrPort { return r.at }

func testSourceAddress(t *testing.T, env Env) {
	id, err := env.Active.Resolve(t.Context(), netip.AddrPortFrom(env.Addr, 0), env.listen(t).Addr())
	must(t, "Resolve", err)
	if got := id.LocalAddr().Addr(); got != env.Addr {
		t.Errorf("asked for the source %v, got %v", env.Addr, got)
	}
	must(t, "ID.Close", id.Close())
}

func testEphemeralPorts(t *testing.T, env Env) {
	ports := make(map[uint16]bool)
	for range 10 {
		port := env.listen(t).Addr().Port()
		if port == 0 || ports[port] {
			t.Fatalf("port %d is 0 or was given twice", port)
		}
		ports[port] = true
	}
}

func testAddressInUse(t *testing.T, env Env) {
	first, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "Listen", err)
	_, err = env.Passive.Listen(t.Context(), first.Addr(), 0)
	mustBe(t, "a second Listen", err, errno.EADDRINUSE)
	must(t, "Listener.Close", first.Close())
	again, err := env.Passive.Listen(t.Context(), first.Addr(), 0)
	must(t, "Listen after Close", err)
	must(t, "Listener.Close", again.Close())
}

// testTCPPorts listens by TCP on the port of a listener. If the device has ports of its
// own, another program's socket may use the first ports that are tried.
func testTCPPorts(t *testing.T, env Env) {
	devs, err := env.Passive.Devices()
	must(t, "Devices", err)
	taken := slices.ContainsFunc(devs, func(d ibv.Device) bool { return d.Attr().Caps.Has(ibv.CapTCPPorts) })
	for range 10 {
		var l net.Listener
		if l, err = net.Listen("tcp", env.listen(t).Addr().String()); err == nil {
			must(t, "close", l.Close())
		}
		if taken {
			mustBe(t, "Listen by TCP", err, errno.EADDRINUSE)
		} else if err == nil {
			return
		}
	}
	if !taken {
		t.Errorf("Listen by TCP: %v", err)
	}
}

// testPrivateData sends data with the request and with the answer.
func testPrivateData(t *testing.T, env Env) {
	l := env.listen(t)
	limit := env.device(t).Attr().MaxPrivateData
	for _, size := range []int{0, 1, limit / 2, limit} {
		question, answer := pattern(size, 1), pattern(size, 2)
		a := env.attempt(t, l, question)
		// A device may pad private data. So bytes that were not sent must be zero.
		samePrivate(t, "request", a.request.PrivateData(), question)
		p, err := newEnd(a.request, PairConfig{}, nil)
		must(t, "passive end", err)
		p.atEnd(t)
		p.param.Private = answer
		must(t, "Accept", p.accept(t.Context()))
		must(t, "Connect", <-a.result)
		samePrivate(t, "answer", a.active.ID.PrivateData(), answer)
		must(t, "first message", hello(a.active, p))
	}
}

// samePrivate compares private data that may be padded with zeros.
func samePrivate(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if !bytes.HasPrefix(got, want) {
		t.Fatalf("private data of the %s is %x, want %x", what, got, want)
	}
	if pad := got[len(want):]; len(bytes.Trim(pad, "\x00")) > 0 {
		t.Fatalf("private data of the %s is padded with %x", what, pad)
	}
}

// testDepths asks for more RDMA Reads on the active side than the passive side serves. The
// depths that both ends report must fit together.
func testDepths(t *testing.T, env Env) {
	a := env.attempt(t, env.listen(t), nil)
	p, err := newEnd(a.request, PairConfig{Reads: 2}, nil)
	must(t, "passive end", err)
	p.atEnd(t)
	must(t, "Accept", p.accept(t.Context()))
	must(t, "Connect", <-a.result)
	must(t, "first message", hello(a.active, p))
	for _, x := range []struct{ from, to *End }{{a.active, p}, {p, a.active}} {
		ord, ird := x.from.ID.Param().InitiatorDepth, x.to.ID.Param().ResponderResources
		if ord < 1 || ird < 1 || ord > ird {
			t.Errorf("one side has up to %d RDMA Reads outstanding, the other serves %d", ord, ird)
		}
	}
	readMany(t, &Pair{a.active, p}, 20)
	readMany(t, &Pair{p, a.active}, 20)
}

// testPathMTU compares the path MTU of both ends.
func testPathMTU(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	a, b := p.Active.ID.PathMTU(), p.Passive.ID.PathMTU()
	if a != b {
		t.Errorf("the path takes %d bytes one way and %d the other", a, b)
	}
	if limit := p.Active.mtu(t); a > limit || a < 256 && !p.Active.iwarp() {
		t.Errorf("the path takes %d bytes, the port %d", a, limit)
	}
}

// testAcceptContext ends waits for a request by their context. The listener still works
// afterwards.
func testAcceptContext(t *testing.T, env Env) {
	l := env.listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error)
	go func() {
		_, err := l.Accept(ctx)
		result <- err
	}()
	cancel()
	mustBe(t, "cancelled Accept", <-result, context.Canceled)
	_, err := l.Accept(ctx)
	mustBe(t, "Accept with a dead context", err, context.Canceled)

	ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = l.Accept(ctx)
	mustBe(t, "Accept past its deadline", err, context.DeadlineExceeded)

	p := env.pair(t, l, PairConfig{})
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}

func testListenerClose(t *testing.T, env Env) {
	for range 10 {
		l, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
		must(t, "Listen", err)
		const waiters = 3
		result := make(chan error)
		for range waiters {
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), Patience)
				defer cancel()
				_, err := l.Accept(ctx)
				result <- err
			}()
		}
		must(t, "Listener.Close", l.Close())
		for range waiters {
			mustBe(t, "Accept during Close", <-result, net.ErrClosed)
		}
		_, err = l.Accept(t.Context())
		mustBe(t, "Accept after Close", err, net.ErrClosed)
	}
}

func testListenerCloseKeepsConnections(t *testing.T, env Env) {
	l, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "Listen", err)
	p := env.pair(t, l, PairConfig{})
	must(t, "Listener.Close", l.Close())
	p.Active.transfer(t, p.Passive, pattern(100, 1))
	p.Passive.transfer(t, p.Active, pattern(100, 2))
}

// testPassiveSpeaksFirst lets the passive side post before the active side has sent
// anything. A device may hold the message back until then, but must not lose it.
func testPassiveSpeaksFirst(t *testing.T, env Env) {
	a := env.attempt(t, env.listen(t), nil)
	a.active.Recv(t, ibv.RecvWR{ID: 1})
	p, err := newEnd(a.request, PairConfig{}, nil)
	must(t, "passive end", err)
	p.atEnd(t)
	must(t, "Accept", p.accept(t.Context()))
	must(t, "Connect", <-a.result)
	p.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled})
	must(t, "message of the active side", hello(a.active, p))
	succeeded(t, p, next(t, p.SendCQ), 2, ibv.WCSend)
	succeeded(t, a.active, next(t, a.active.RecvCQ), 1, ibv.WCRecv)
}

// testAgain connects many times through one listener.
func testAgain(t *testing.T, env Env) {
	l := env.listen(t)
	for i := range 20 {
		p := env.pair(t, l, PairConfig{})
		p.Active.transfer(t, p.Passive, pattern(100, i))
		ends := []*End{p.Active, p.Passive}
		if i%2 == 1 {
			ends[0], ends[1] = ends[1], ends[0]
		}
		if i%4 < 2 {
			must(t, "Disconnect", ends[0].ID.Disconnect())
		}
		must(t, "close", ends[0].close())
		must(t, "close", ends[1].close())
	}
}
