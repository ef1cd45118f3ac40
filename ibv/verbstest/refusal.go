package verbstest

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

var refusalTests = []subtest{
	{"Rejected", testRejected},
	{"NobodyListens", testNobodyListens},
	{"NotAcceptedInTime", testNotAcceptedInTime},
	{"ListenerClosed", testListenerClosed},
	{"RequestDropped", testRequestDropped},
	{"AcceptGivenUp", testAcceptGivenUp},
	{"ConnectCancelled", testConnectCancelled},
	{"ConnectDeadline", testConnectDeadline},
	{"ResolveContext", testResolveContext},
	{"PrivateDataTooLong", testPrivateDataTooLong},
}

func testRejected(t *testing.T, env Env) {
	l := env.listen(t)
	for _, private := range [][]byte{[]byte("come back tomorrow"), nil} {
		a := env.attempt(t, l, nil)
		must(t, "Reject", a.request.Reject(private))
		err := <-a.result
		var reject *ibv.RejectError
		if !errors.As(err, &reject) {
			t.Fatalf("Connect gave %v, want a RejectError", err)
		}
		samePrivate(t, "refusal", reject.Private, private)
		if reject.Text == "" {
			t.Error("the refusal has no text")
		}
		mustBe(t, "Connect", err, errno.ECONNREFUSED)
		must(t, "ID.Close", a.request.Close())
		must(t, "close", a.active.close())
	}
	p := env.pair(t, l, PairConfig{})
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}

// nobody returns an address where nobody listens.
func (env Env) nobody(t testing.TB) netip.AddrPort {
	t.Helper()
	l, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "Listen", err)
	must(t, "Listener.Close", l.Close())
	return l.Addr()
}

func testNobodyListens(t *testing.T, env Env) {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	e, err := env.active(ctx, env.nobody(t), PairConfig{})
	must(t, "active end", err)
	e.atEnd(t)
	mustBe(t, "Connect", e.ID.Connect(ctx, e.param), errno.ECONNREFUSED)
}

// testNotAcceptedInTime leaves a request in the listener's queue.
func testNotAcceptedInTime(t *testing.T, env Env) {
	l := env.listen(t)
	e, err := env.active(t.Context(), l.Addr(), PairConfig{})
	must(t, "active end", err)
	e.atEnd(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	mustBe(t, "Connect", e.ID.Connect(ctx, e.param), context.DeadlineExceeded)
}

// testListenerClosed closes the listener while a request is on its way or in its
// queue. Which of the two it was decides between a refusal and, for a device on
// TCP, a reset; siw forgets one that it was about to hand over.
func testListenerClosed(t *testing.T, env Env) {
	for range 20 {
		l, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
		must(t, "Listen", err)
		ctx, cancel := context.WithTimeout(t.Context(), Patience)
		e, err := env.active(ctx, l.Addr(), PairConfig{})
		must(t, "active end", err)
		e.atEnd(t)
		result := make(chan error)
		go func() { result <- e.ID.Connect(ctx, e.param) }()
		must(t, "Listener.Close", l.Close())
		allowed := []error{errno.ECONNREFUSED, errno.ECONNRESET}
		if e.Dev.Attr().Quirks.VagueErrors {
			allowed = append(allowed, syscall.ETIMEDOUT)
		}
		mustBe(t, "Connect", <-result, allowed...)
		cancel()
		must(t, "close", e.close())
	}
}

// testRequestDropped closes a request without an answer. What the active side
// is told differs, but it must not wait for ever.
func testRequestDropped(t *testing.T, env Env) {
	a := env.attempt(t, env.listen(t), nil)
	must(t, "ID.Close", a.request.Close())
	if err := <-a.result; err == nil {
		t.Fatal("Connect succeeded without an Accept")
	} else if errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Connect never heard of it: %v", err)
	}
}

// testAcceptGivenUp closes the passive side in the midst of Accept, earlier and
// later. The active side may see itself connected by then, and must be told.
func testAcceptGivenUp(t *testing.T, env Env) {
	l := env.listen(t)
	for n := range 40 {
		a := env.attempt(t, l, nil)
		p, err := newEnd(a.request, PairConfig{}, nil)
		must(t, "passive end", err)
		p.atEnd(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n)*20*time.Microsecond)
		_ = p.accept(ctx) // it may be in time
		cancel()
		must(t, "close", p.close())
		if err := <-a.result; err == nil {
			a.active.events.wait(t, ibv.EventDisconnected)
		} else if errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Connect was told nothing")
		}
		must(t, "close", a.active.close())
	}
}

// testConnectCancelled gives up while the peer thinks about the request.
func testConnectCancelled(t *testing.T, env Env) {
	l := env.listen(t)
	a := env.attempt(t, l, nil)
	a.cancel()
	mustBe(t, "Connect", <-a.result, context.Canceled)
	must(t, "close", a.active.close())
	must(t, "ID.Close", a.request.Close())
	p := env.pair(t, l, PairConfig{})
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}

func testConnectDeadline(t *testing.T, env Env) {
	l := env.listen(t)
	e, err := env.active(t.Context(), l.Addr(), PairConfig{})
	must(t, "active end", err)
	e.atEnd(t)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	mustBe(t, "Connect past its deadline", e.ID.Connect(ctx, e.param), context.DeadlineExceeded)
}

func testResolveContext(t *testing.T, env Env) {
	addr := env.listen(t).Addr()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := env.Active.Resolve(ctx, netip.AddrPort{}, addr)
	mustBe(t, "Resolve with a cancelled context", err, context.Canceled)
	ctx, cancel = context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	_, err = env.Active.Resolve(ctx, netip.AddrPort{}, addr)
	mustBe(t, "Resolve past its deadline", err, context.DeadlineExceeded)
}

func testPrivateDataTooLong(t *testing.T, env Env) {
	l := env.listen(t)
	e, err := env.active(t.Context(), l.Addr(), PairConfig{})
	must(t, "active end", err)
	e.atEnd(t)
	e.param.Private = make([]byte, e.Dev.Attr().MaxPrivateData+1)
	if err := e.ID.Connect(t.Context(), e.param); err == nil {
		t.Error("Connect took more private data than MaxPrivateData")
	}

	a := env.attempt(t, l, nil)
	p, err := newEnd(a.request, PairConfig{}, nil)
	must(t, "passive end", err)
	p.atEnd(t)
	p.param.Private = make([]byte, p.Dev.Attr().MaxPrivateData+1)
	if err := p.ID.Accept(t.Context(), p.param); err == nil {
		t.Error("Accept took more private data than MaxPrivateData")
	}
	must(t, "close", p.close())
	if err := <-a.result; err == nil {
		t.Error("Connect succeeded without an Accept")
	}
}
