package verbstest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// How peers of datagrams find each other.
var udSetupTests = []subtest{
	{"Addresses", testUDAddresses},
	{"Unspecified", testUDUnspecified},
	{"BothFamilies", testUDBothFamilies},
	{"Ports", testUDPorts},
	{"PrivateData", testUDPrivateData},
	{"PrivateDataTooLong", testUDPrivateDataTooLong},
	{"Rejected", testUDRejected},
	{"NobodyListens", testUDNobodyListens},
	{"RequestDropped", testUDRequestDropped},
	{"Cancelled", testUDCancelled},
	{"ListenerClose", testUDListenerClose},
	{"Answers", testUDAnswers},
}

func testUDAddresses(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	p, l := env.boundUD(t, PairConfig{}), env.listenUD(t)
	if a := p.ID.LocalAddr(); a.Addr() != env.Addr || a.Port() == 0 {
		t.Errorf("bound to %v, want %v and a port", a, env.Addr)
	}
	if a := l.Addr(); a.Addr() != env.Addr || a.Port() == 0 {
		t.Errorf("the listener is at %v, want %v and a port", a, env.Addr)
	}
	a := env.attemptUD(t, l, PairConfig{}, nil)
	act, req := a.active.ID, a.request
	if act.RemoteAddr() != l.Addr() || req.LocalAddr() != l.Addr() || act.LocalAddr() != req.RemoteAddr() {
		t.Errorf("asked by %v at %v, where it is %v and %v", act.LocalAddr(), act.RemoteAddr(), req.RemoteAddr(), req.LocalAddr())
	}
	if req.Device().Name() != p.Dev.Name() || req.Port() != p.ID.Port() {
		t.Errorf("asked on %s port %d, bound to %s port %d", req.Device().Name(), req.Port(), p.Dev.Name(), p.ID.Port())
	}
	// The request may have the queue pair itself.
	e, err := newEnd(req, PairConfig{}, nil)
	must(t, "passive end", err)
	e.atEnd(t)
	must(t, "Accept", req.Accept(t.Context(), ibv.ConnParam{}))
	must(t, "Connect", <-a.result)
	if qpn := act.UDParam().QPN; qpn != e.QP.QPN() {
		t.Errorf("told of queue pair %d, want %d", qpn, e.QP.QPN())
	}
	for _, bad := range []netip.Addr{{}, netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		if _, err := env.Passive.BindUD(t.Context(), netip.AddrPortFrom(bad, 0)); err == nil {
			t.Errorf("BindUD took %v", bad)
		}
	}
}

func testUDUnspecified(t *testing.T, env Env) {
	all := netip.IPv4Unspecified()
	if env.Addr.Is6() {
		all = netip.IPv6Unspecified()
	}
	testUDWide(t, env, all)
}

func testUDBothFamilies(t *testing.T, env Env) { testUDWide(t, env, netip.Addr{}) }

func testUDWide(t *testing.T, env Env, all netip.Addr) {
	t.Helper()
	if !env.hasUD(t) {
		return
	}
	wide, err := env.Passive.ListenUD(t.Context(), netip.AddrPortFrom(all, 0), 0)
	must(t, "ListenUD", err)
	t.Cleanup(func() { must(t, "Listener.Close", wide.Close()) })
	_, err = env.Passive.ListenUD(t.Context(), netip.AddrPortFrom(all, wide.Addr().Port()), 0)
	mustBe(t, "a second ListenUD", err, errno.EADDRINUSE)
	l := relocated{wide, netip.AddrPortFrom(env.Addr, wide.Addr().Port())}
	env.udPairWith(t, env.boundUD(t, PairConfig{}), l, PairConfig{}).exchange(t, pattern(10, 1))
}

// testUDPorts takes a port twice, in the other port space too.
func testUDPorts(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	l, err := env.Passive.ListenUD(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "ListenUD", err)
	_, err = env.Passive.ListenUD(t.Context(), l.Addr(), 0)
	mustBe(t, "a second ListenUD", err, errno.EADDRINUSE)
	_, err = env.Passive.BindUD(t.Context(), l.Addr())
	mustBe(t, "BindUD of a listener's port", err, errno.EADDRINUSE)
	rc, err := env.Passive.Listen(t.Context(), l.Addr(), 0)
	must(t, "Listen for connections on the same port", err)
	must(t, "Listener.Close", rc.Close())
	must(t, "Listener.Close", l.Close())
	id, err := env.Passive.BindUD(t.Context(), l.Addr())
	must(t, "BindUD after Close", err)
	must(t, "ID.Close", id.Close())
}

// testUDPrivateData sends data with the question and with the answer.
func testUDPrivateData(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	p, l := env.boundUD(t, PairConfig{}), env.listenUD(t)
	limit := p.Dev.Attr().MaxPrivateDataUD
	for _, size := range []int{0, 1, limit / 2, limit} {
		question, answer := pattern(size, 1), pattern(size, 2)
		a := env.attemptUD(t, l, PairConfig{}, question)
		samePrivate(t, "question", a.request.PrivateData(), question)
		must(t, "Accept", a.request.Accept(t.Context(), ibv.ConnParam{QPN: p.QP.QPN(), Private: answer}))
		must(t, "ID.Close", a.request.Close())
		must(t, "Connect", <-a.result)
		samePrivate(t, "answer", a.active.ID.PrivateData(), answer)
	}
}

func testUDPrivateDataTooLong(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	p, l := env.boundUD(t, PairConfig{}), env.listenUD(t)
	long := make([]byte, p.Dev.Attr().MaxPrivateDataUD+1)
	id, err := env.Active.ResolveUD(t.Context(), netip.AddrPort{}, l.Addr())
	must(t, "ResolveUD", err)
	mustBe(t, "Connect", id.Connect(t.Context(), ibv.ConnParam{Private: long}), ibv.ErrLimit)
	must(t, "ID.Close", id.Close())
	a := env.attemptUD(t, l, PairConfig{}, nil)
	mustBe(t, "Accept", a.request.Accept(t.Context(), ibv.ConnParam{QPN: p.QP.QPN(), Private: long}), ibv.ErrLimit)
	mustBe(t, "Reject", a.request.Reject(long), ibv.ErrLimit)
	must(t, "Accept", a.request.Accept(t.Context(), ibv.ConnParam{QPN: p.QP.QPN()}))
	must(t, "Connect", <-a.result)
	must(t, "ID.Close", a.request.Close())
}

func testUDRejected(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	l := env.listenUD(t)
	limit := env.device(t).Attr().MaxPrivateDataUD
	for _, private := range [][]byte{[]byte("come back tomorrow"), nil, pattern(limit, 1)} {
		a := env.attemptUD(t, l, PairConfig{}, nil)
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
	}
	env.udPairWith(t, env.boundUD(t, PairConfig{}), l, PairConfig{}).exchange(t, pattern(10, 1))
}

func testUDNobodyListens(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	l, err := env.Passive.ListenUD(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "ListenUD", err)
	must(t, "Listener.Close", l.Close())
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	id, err := env.Active.ResolveUD(ctx, netip.AddrPort{}, l.Addr())
	must(t, "ResolveUD", err)
	mustBe(t, "Connect", id.Connect(ctx, ibv.ConnParam{}), errno.ECONNREFUSED)
	must(t, "ID.Close", id.Close())
}

// testUDRequestDropped closes a request without an answer.
func testUDRequestDropped(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	a := env.attemptUD(t, env.listenUD(t), PairConfig{}, nil)
	must(t, "ID.Close", a.request.Close())
	if err := <-a.result; err == nil {
		t.Fatal("Connect succeeded without an Accept")
	} else if errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Connect never heard of it: %v", err)
	}
}

// testUDCancelled gives up while the peer thinks about the question.
func testUDCancelled(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	p, l := env.boundUD(t, PairConfig{}), env.listenUD(t)
	a := env.attemptUD(t, l, PairConfig{}, nil)
	a.cancel()
	mustBe(t, "Connect", <-a.result, context.Canceled)
	must(t, "close", a.active.close())
	must(t, "Accept of one that has gone", a.request.Accept(t.Context(), ibv.ConnParam{QPN: p.QP.QPN()}))
	must(t, "ID.Close", a.request.Close())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := env.Active.ResolveUD(ctx, netip.AddrPort{}, l.Addr())
	mustBe(t, "ResolveUD with a cancelled context", err, context.Canceled)
	_, err = env.Passive.BindUD(ctx, netip.AddrPortFrom(env.Addr, 0))
	mustBe(t, "BindUD with a cancelled context", err, context.Canceled)
	env.udPairWith(t, p, l, PairConfig{}).exchange(t, pattern(10, 1))
}

// testUDListenerClose closes a listener that is waited for and one that has a
// request.
func testUDListenerClose(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	for _, asked := range []bool{false, true} {
		l, err := env.Passive.ListenUD(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
		must(t, "ListenUD", err)
		result := make(chan error, 1)
		if asked {
			id, err := env.Active.ResolveUD(t.Context(), netip.AddrPort{}, l.Addr())
			must(t, "ResolveUD", err)
			go func() {
				err := id.Connect(t.Context(), ibv.ConnParam{})
				result <- errors.Join(err, id.Close())
			}()
			must(t, "Listener.Close", l.Close())
			mustBe(t, "Connect", <-result, errno.ECONNREFUSED)
		} else {
			go func() {
				_, err := l.Accept(t.Context())
				result <- err
			}()
			must(t, "Listener.Close", l.Close())
			mustBe(t, "Accept during Close", <-result, net.ErrClosed)
		}
	}
}

// testUDAnswers asks and answers out of turn.
func testUDAnswers(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	p, l := env.boundUD(t, PairConfig{}), env.listenUD(t)
	qpn := ibv.ConnParam{QPN: p.QP.QPN()}
	mustBe(t, "Connect of a bound ID", p.ID.Connect(t.Context(), ibv.ConnParam{}), ibv.ErrState)
	mustBe(t, "Accept of a bound ID", p.ID.Accept(t.Context(), qpn), ibv.ErrState)
	a := env.attemptUD(t, l, PairConfig{}, nil)
	mustBe(t, "Accept of the one who asks", a.active.ID.Accept(t.Context(), qpn), ibv.ErrState)
	mustBe(t, "Accept without a queue pair", a.request.Accept(t.Context(), ibv.ConnParam{}), ibv.ErrState)
	must(t, "Accept", a.request.Accept(t.Context(), qpn))
	mustBe(t, "a second Accept", a.request.Accept(t.Context(), qpn), ibv.ErrState)
	mustBe(t, "Reject after Accept", a.request.Reject(nil), ibv.ErrState)
	must(t, "Connect", <-a.result)
	mustBe(t, "a second Connect", a.active.ID.Connect(t.Context(), ibv.ConnParam{}), ibv.ErrState)
	must(t, "ID.Close", a.request.Close())
}
