package verbstest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

// The tests assume that datagrams between two ends of one machine are not lost as long as a
// receive is posted.
var udTests = []subtest{
	{"Lacking", testUDLacking},
	{"BothWays", testUDBothWays},
	{"Sizes", testUDSizes},
	{"TooLong", testUDTooLong},
	{"Inline", testUDInline},
	{"Elements", testUDElements},
	{"Imm", testUDImm},
	{"Order", testUDOrder},
	{"NoReceive", testUDNoReceive},
	{"WrongKey", testUDWrongKey},
	{"NobodyThere", testUDNobodyThere},
	{"Peers", testUDPeers},
	{"Mixed", testUDMixed},
	{"Operations", testUDOperations},
	{"Handles", testUDHandles},
	{"Flush", testUDFlush},
	{"CloseOrder", testUDCloseOrder},
	{"Again", testUDAgain},
}

// hasUD reports whether the device has datagrams. If it has none, testUDLacking checks
// that.
func (env Env) hasUD(t testing.TB) bool {
	t.Helper()
	return env.device(t).Attr().Caps.Has(ibv.CapUD)
}

// udPair is two ends for datagrams that know each other. Passive's ID is one of BindUD, and
// Active's is one of ResolveUD.
type udPair struct {
	Pair
	to ibv.UDParam // to is the address of Passive.
	ah ibv.AH      // ah is Active's handle for it.
}

// udPair returns nil if the device has no datagrams.
func (env Env) udPair(t testing.TB, cfg PairConfig) *udPair {
	t.Helper()
	if !env.hasUD(t) {
		return nil
	}
	p := env.boundUD(t, cfg)
	return env.udPairWith(t, p, env.listenUD(t), cfg)
}

// boundUD returns an end with an address of its own.
func (env Env) boundUD(t testing.TB, cfg PairConfig) *End {
	t.Helper()
	id, err := env.Passive.BindUD(t.Context(), netip.AddrPortFrom(env.Addr, 0))
	must(t, "BindUD", err)
	e, err := newEnd(id, cfg, nil)
	must(t, "bound end", err)
	return e.atEnd(t)
}

// listenUD returns a listener on a free port, closed at the end of the test.
func (env Env) listenUD(t testing.TB) ibv.Listener {
	t.Helper()
	l, err := env.Passive.ListenUD(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "ListenUD", err)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("Listener.Close: %v", err)
		}
	})
	return l
}

// udPairWith makes a new end that sends a request to l, which replies with p's queue pair.
func (env Env) udPairWith(t testing.TB, p *End, l ibv.Listener, cfg PairConfig) *udPair {
	t.Helper()
	a := env.attemptUD(t, l, cfg, nil)
	must(t, "Accept", a.request.Accept(t.Context(), ibv.ConnParam{QPN: p.QP.QPN()}))
	must(t, "ID.Close", a.request.Close())
	must(t, "Connect", <-a.result)
	u := &udPair{Pair: Pair{a.active, p}, to: a.active.ID.UDParam()}
	if u.to.QPN != p.QP.QPN() || u.to.QKey != ibv.QKeyUDP {
		t.Fatalf("told of queue pair %d with key %#x, want %d with %#x", u.to.QPN, u.to.QKey, p.QP.QPN(), ibv.QKeyUDP)
	}
	var err error
	u.ah, err = a.active.PD.CreateAH(u.to.AH)
	must(t, "CreateAH", err)
	t.Cleanup(func() { // It runs before the cleanups of the end.
		if u.ah != nil {
			must(t, "AH.Close", u.ah.Close())
		}
	})
	return u
}

// attemptUD is attempt for datagrams.
func (env Env) attemptUD(t testing.TB, l ibv.Listener, cfg PairConfig, private []byte) *attempt {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	id, err := env.Active.ResolveUD(ctx, netip.AddrPort{}, l.Addr())
	must(t, "ResolveUD", err)
	e, err := newEnd(id, cfg, nil)
	must(t, "active end", err)
	e.atEnd(t)
	a := &attempt{active: e, cancel: cancel, result: make(chan error, 1)}
	go func() { a.result <- id.Connect(ctx, ibv.ConnParam{Private: private}) }()
	a.request, err = l.Accept(ctx)
	must(t, "Listener.Accept", err)
	return a
}

// wr is a request for a datagram to Passive.
func (u *udPair) wr(id uint64, sgl []ibv.SGE) ibv.SendWR {
	return ibv.SendWR{ID: id, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: sgl, AH: u.ah, RemoteQPN: u.to.QPN, RemoteQKey: u.to.QKey}
}

// mtu returns how many bytes a datagram may have.
func (e *End) mtu(t testing.TB) int {
	t.Helper()
	port, err := e.Dev.Port(e.ID.Port())
	must(t, "Port", err)
	return port.ActiveMTU
}

// receive posts a receive for any datagram and returns its buffer.
func (e *End) receive(t testing.TB, id uint64) *Mem {
	t.Helper()
	m := e.Register(t, guarded(ibv.GRHLen+e.mtu(t)), localWrite)
	e.Recv(t, ibv.RecvWR{ID: id, SGL: m.SGL(0, len(m.Buf), 1)})
	return m
}

// arrived waits for the receive and checks that it holds msg, from the end.
func (e *End) arrived(t testing.TB, id uint64, in *Mem, from *End, msg []byte) ibv.WC {
	t.Helper()
	wc := next(t, e.RecvCQ)
	succeeded(t, e, wc, id, ibv.WCRecv)
	if wc.SrcQP != from.QP.QPN() || int(wc.ByteLen) != ibv.GRHLen+len(msg) {
		t.Fatalf("completion %+v; want %d bytes behind the header, from queue pair %d", wc, len(msg), from.QP.QPN())
	}
	sameBytes(t, "datagram", in.Buf[ibv.GRHLen:wc.ByteLen], msg)
	untouched(t, "behind the datagram", in.Buf[wc.ByteLen:])
	if e.Dev.Attr().Transport == ibv.TransportRoCE {
		src, dst, ok := ibv.GRHAddrs(in.Buf)
		if !ok || wc.Flags&ibv.WCGRH == 0 || src != plain(from.ID) || dst != plain(e.ID) {
			t.Fatalf("flags %b, header %x (from %v to %v); want it from %v to %v", wc.Flags, in.Buf[:ibv.GRHLen], src, dst,
				plain(from.ID), plain(e.ID))
		}
	}
	return wc
}

// plain returns the ID's address as it is in headers.
func plain(id ibv.ID) netip.Addr { return id.LocalAddr().Addr().WithZone("") }

// exchange sends msg to Passive.
func (u *udPair) exchange(t testing.TB, msg []byte) (ibv.WC, *Mem) {
	t.Helper()
	in := u.Passive.receive(t, 1)
	var sgl []ibv.SGE
	if len(msg) > 0 { // An empty message needs no region.
		src := u.Active.Register(t, append([]byte(nil), msg...), 0)
		sgl = src.SGL(0, len(msg), 1)
	}
	u.Active.Send(t, u.wr(2, sgl))
	succeeded(t, u.Active, next(t, u.Active.SendCQ), 2, ibv.WCSend)
	return u.Passive.arrived(t, 1, in, u.Active, msg), in
}

// answer sends msg from e to the sender of a datagram.
func (e *End) answer(t testing.TB, wc ibv.WC, in *Mem, to *End, msg []byte) {
	t.Helper()
	ah, err := e.PD.CreateAHFromWC(e.ID.Port(), &wc, in.Buf)
	must(t, "CreateAHFromWC", err)
	back := to.receive(t, 3)
	src := e.Register(t, append([]byte(nil), msg...), 0)
	e.Send(t, ibv.SendWR{ID: 4, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, len(msg), 1),
		AH: ah, RemoteQPN: wc.SrcQP, RemoteQKey: ibv.QKeyUDP})
	succeeded(t, e, next(t, e.SendCQ), 4, ibv.WCSend)
	to.arrived(t, 3, back, e, msg)
	must(t, "AH.Close", ah.Close())
}

// testUDLacking checks that a device without datagrams refuses them.
func testUDLacking(t *testing.T, env Env) {
	e := env.unconnected(t)
	attr := e.Dev.Attr()
	if attr.Caps.Has(ibv.CapUD) {
		if attr.MaxAH < 1 || attr.MaxPrivateDataUD < 1 || attr.MaxInlineUD < 0 {
			t.Errorf("MaxAH %d, MaxPrivateDataUD %d, MaxInlineUD %d", attr.MaxAH, attr.MaxPrivateDataUD, attr.MaxInlineUD)
		}
		return
	}
	if attr.MaxAH != 0 || attr.MaxPrivateDataUD != 0 || attr.MaxInlineUD != 0 {
		t.Errorf("MaxAH %d, MaxPrivateDataUD %d, MaxInlineUD %d", attr.MaxAH, attr.MaxPrivateDataUD, attr.MaxInlineUD)
	}
	at := netip.AddrPortFrom(env.Addr, 0)
	_, err := env.Passive.BindUD(t.Context(), at)
	mustBe(t, "BindUD", err, errors.ErrUnsupported)
	_, err = env.Passive.ListenUD(t.Context(), at, 0)
	mustBe(t, "ListenUD", err, errors.ErrUnsupported)
	_, err = env.Active.ResolveUD(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(env.Addr, 4791))
	mustBe(t, "ResolveUD", err, errors.ErrUnsupported)
	_, err = e.PD.CreateAH(ibv.AHAttr{Port: 1, Global: true, GID: ibv.GIDFromAddr(env.Addr)})
	mustBe(t, "CreateAH", err, errors.ErrUnsupported)
	_, err = e.PD.CreateAHFromWC(1, &ibv.WC{Flags: ibv.WCGRH, SrcQP: 2}, make([]byte, ibv.GRHLen))
	mustBe(t, "CreateAHFromWC", err, errors.ErrUnsupported)
}

// testUDBothWays sends a datagram, and answers with what the datagram has brought.
func testUDBothWays(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	for _, e := range []*End{u.Active, u.Passive} {
		if s := e.QP.State(); s != ibv.QPSRTS {
			t.Errorf("a queue pair for datagrams is in %v", s)
		}
	}
	for i := range 3 {
		wc, in := u.exchange(t, pattern(100, i))
		u.Passive.answer(t, wc, in, u.Active, pattern(200, i))
	}
}

// testUDSizes sends datagrams of all sizes, from zero to the MTU.
func testUDSizes(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	mtu := u.Active.mtu(t)
	if n := u.Active.ID.PathMTU(); n < 256 || n > mtu {
		t.Errorf("the way takes %d bytes, the port %d", n, mtu)
	}
	for _, size := range []int{0, 1, 3, 4, 255, 256, mtu - 1, mtu} {
		u.exchange(t, pattern(size, size))
	}
}

// testUDTooLong puts a datagram that is too long in the middle of a chain. The datagrams
// before it are sent. It and the rest are not.
func testUDTooLong(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{SGE: 2})
	if u == nil {
		return
	}
	mtu := u.Active.mtu(t)
	src := u.Active.Register(t, pattern(2*mtu, 1), 0)
	for _, sgl := range [][]ibv.SGE{src.SGL(0, mtu+1, 1), src.SGL(0, mtu+2, 2), src.SGL(0, 2*mtu, 1)} {
		in := u.Passive.receive(t, 1)
		n, err := u.Active.QP.PostSend([]ibv.SendWR{u.wr(1, src.SGL(0, mtu, 1)), u.wr(2, sgl), u.wr(3, nil)})
		if n != 1 || !errors.Is(err, ibv.ErrLimit) {
			t.Fatalf("PostSend of %d bytes took %d, error %v; want 1 and ErrLimit", mtu+1, n, err)
		}
		succeeded(t, u.Active, next(t, u.Active.SendCQ), 1, ibv.WCSend)
		u.Passive.arrived(t, 1, in, u.Active, src.Buf[:mtu])
	}
	u.exchange(t, nil)
	noCompletion(t, u.Active.SendCQ)
	noCompletion(t, u.Passive.RecvCQ)
}

// testUDInline sends inline data that is changed as soon as it is posted.
func testUDInline(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	limit := env.device(t).Attr().MaxInlineUD
	u := env.udPair(t, PairConfig{Inline: limit})
	buf := make([]byte, limit)
	for _, size := range []int{0, 1, limit / 2, limit} {
		msg := pattern(size, size)
		in := u.Passive.receive(t, 1)
		copy(buf, msg)
		wr := u.wr(2, []ibv.SGE{{Buf: buf[:size]}})
		wr.Flags |= ibv.SendInline
		u.Active.Send(t, wr)
		clear(buf)
		succeeded(t, u.Active, next(t, u.Active.SendCQ), 2, ibv.WCSend)
		u.Passive.arrived(t, 1, in, u.Active, msg)
	}
	id, err := env.Passive.BindUD(t.Context(), netip.AddrPortFrom(env.Addr, 0))
	must(t, "BindUD", err)
	_, err = id.CreateQP(u.Passive.PD, ibv.QPInit{SendCQ: u.Passive.SendCQ, RecvCQ: u.Passive.RecvCQ,
		Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxInline: limit + 1}})
	mustBe(t, "CreateQP beyond MaxInlineUD", err, ibv.ErrLimit)
	must(t, "ID.Close", id.Close())
}

// testUDElements sends a datagram from several elements and receives it into several, with
// the header in one of its own.
func testUDElements(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{SGE: 3})
	if u == nil {
		return
	}
	src := u.Active.Register(t, pattern(300, 1), 0)
	dst := u.Passive.Register(t, guarded(ibv.GRHLen+300), localWrite)
	header, half := dst.SGE(0, ibv.GRHLen), ibv.GRHLen+150
	u.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: []ibv.SGE{header, dst.SGE(half, 150), dst.SGE(ibv.GRHLen, 150)}})
	u.Active.Send(t, u.wr(2, src.SGL(0, 300, 3)))
	succeeded(t, u.Active, next(t, u.Active.SendCQ), 2, ibv.WCSend)
	succeeded(t, u.Passive, next(t, u.Passive.RecvCQ), 1, ibv.WCRecv)
	sameBytes(t, "first half", dst.Buf[half:], src.Buf[:150])
	sameBytes(t, "second half", dst.Buf[ibv.GRHLen:half], src.Buf[150:])
}

// testUDImm sends immediate data with a datagram, and a datagram that has only immediate
// data.
func testUDImm(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil || !u.Active.Dev.Attr().Caps.Has(ibv.CapSendImm) {
		return
	}
	src := u.Active.Register(t, pattern(100, 1), 0)
	for _, size := range []int{100, 0} {
		in := u.Passive.receive(t, 1)
		wr := u.wr(2, src.SGL(0, size, 1))
		wr.Op, wr.Imm = ibv.OpSendImm, 0x01020304
		u.Active.Send(t, wr)
		succeeded(t, u.Active, next(t, u.Active.SendCQ), 2, ibv.WCSend)
		if wc := u.Passive.arrived(t, 1, in, u.Active, src.Buf[:size]); wc.Flags&ibv.WCWithImm == 0 || wc.Imm != wr.Imm {
			t.Errorf("completion %+v, want immediate %#x", wc, wr.Imm)
		}
	}
}

// testUDOrder sends chains of numbers.
func testUDOrder(t *testing.T, env Env) {
	const rounds, chain = 20, 16
	u := env.udPair(t, PairConfig{SendWR: chain, RecvWR: chain})
	if u == nil {
		return
	}
	const size = ibv.GRHLen + 4
	src := u.Active.Register(t, make([]byte, chain*4), 0)
	dst := u.Passive.Register(t, make([]byte, chain*size), localWrite)
	for round := range rounds {
		wrs := make([]ibv.SendWR, chain)
		for i := range wrs {
			u.Passive.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(i*size, size, 1)})
			binary.BigEndian.PutUint32(src.Buf[4*i:], uint32(round*chain+i))
			wrs[i] = u.wr(uint64(i), src.SGL(4*i, 4, 1))
			if i+1 < chain {
				wrs[i].Flags = 0
			}
		}
		u.Active.Send(t, wrs...)
		for i := range uint64(chain) {
			succeeded(t, u.Passive, next(t, u.Passive.RecvCQ), i, ibv.WCRecv)
			if n := binary.BigEndian.Uint32(dst.Buf[int(i)*size+ibv.GRHLen:]); n != uint32(round*chain+int(i)) {
				t.Fatalf("datagram %d came in place of %d", n, round*chain+int(i))
			}
		}
		succeeded(t, u.Active, next(t, u.Active.SendCQ), chain-1, ibv.WCSend)
	}
}

// testUDNoReceive sends while no receive is posted: the datagrams complete and are lost. A
// datagram that is still on its way when a receive is posted may arrive.
func testUDNoReceive(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	src := u.Active.Register(t, make([]byte, 4), 0)
	sent := uint32(0)
	send := func() {
		sent++
		binary.BigEndian.PutUint32(src.Buf, sent)
		u.Active.Send(t, u.wr(1, src.SGL(0, 4, 1)))
		succeeded(t, u.Active, next(t, u.Active.SendCQ), 1, ibv.WCSend)
	}
	for range 10 {
		send()
	}
	last := uint32(0)
	if !eventually(func() bool {
		in := u.Passive.receive(t, 2)
		send()
		wc := next(t, u.Passive.RecvCQ)
		succeeded(t, u.Passive, wc, 2, ibv.WCRecv)
		n := binary.BigEndian.Uint32(in.Buf[ibv.GRHLen:])
		if n <= last {
			t.Fatalf("datagram %d came behind %d", n, last)
		}
		last = n
		return n == sent
	}) {
		t.Fatalf("of %d datagrams none was dropped: the last that came is %d", sent, last)
	}
}

// testUDWrongKey sends a datagram with a wrong key before a good one. Only the good one
// arrives.
func testUDWrongKey(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	src := u.Active.Register(t, pattern(20, 1), 0)
	in := u.Passive.receive(t, 1)
	bad := u.wr(2, src.SGL(0, 10, 1))
	bad.RemoteQKey++
	u.Active.Send(t, bad, u.wr(3, src.SGL(10, 10, 1)))
	succeeded(t, u.Active, next(t, u.Active.SendCQ), 2, ibv.WCSend)
	succeeded(t, u.Active, next(t, u.Active.SendCQ), 3, ibv.WCSend)
	u.Passive.arrived(t, 1, in, u.Active, src.Buf[10:])
	noCompletion(t, u.Passive.RecvCQ)
}

// testUDNobodyThere sends to a queue pair that is closed, and to one of a connection.
func testUDNobodyThere(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	gone := env.boundUD(t, PairConfig{})
	gone.CloseQP(t)
	rc := NewPair(t, env, PairConfig{})
	rc.Passive.Recv(t, ibv.RecvWR{ID: 9})
	for _, qpn := range []uint32{gone.QP.QPN(), rc.Passive.QP.QPN()} {
		wr := u.wr(1, nil)
		wr.RemoteQPN = qpn
		u.Active.Send(t, wr)
		succeeded(t, u.Active, next(t, u.Active.SendCQ), 1, ibv.WCSend)
	}
	u.exchange(t, pattern(10, 1))
	noCompletion(t, rc.Passive.RecvCQ)
	rc.Active.Send(t, ibv.SendWR{Op: ibv.OpSend})
	succeeded(t, rc.Passive, next(t, rc.Passive.RecvCQ), 9, ibv.WCRecv)
}

// testUDPeers has several peers of one queue pair. The queue pair answers each.
func testUDPeers(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	hub, l := env.boundUD(t, PairConfig{}), env.listenUD(t)
	var peers []*udPair
	for range 4 {
		peers = append(peers, env.udPairWith(t, hub, l, PairConfig{}))
	}
	for round := range 3 {
		for i, u := range peers {
			wc, in := u.exchange(t, pattern(50+i, round))
			hub.answer(t, wc, in, u.Active, pattern(60+i, round))
		}
	}
	for _, u := range peers {
		noCompletion(t, u.Active.RecvCQ)
	}
}

// testUDOperations posts operations that only connections have, and datagrams without an
// address handle.
func testUDOperations(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	mem := u.Active.Register(t, make([]byte, 8), allRights)
	for op := ibv.OpSendInv; op <= ibv.OpLocalInv; op++ {
		wr := u.wr(1, mem.SGL(0, 8, 1))
		wr.Op, wr.RemoteAddr, wr.RKey, wr.InvKey = op, mem.Addr(0), mem.MR.RKey(), mem.MR.RKey()
		n, err := u.Active.QP.PostSend([]ibv.SendWR{wr})
		refused(t, fmt.Sprintf("PostSend of %v", op), n, err)
	}
	wr := u.wr(1, nil)
	wr.AH = nil
	n, err := u.Active.QP.PostSend([]ibv.SendWR{wr})
	refused(t, "PostSend without an address handle", n, err)
	mustBe(t, "Disconnect", u.Active.ID.Disconnect(), ibv.ErrState)
	u.exchange(t, pattern(10, 1))
}

// testUDHandles closes address handles, and the objects that they depend on.
func testUDHandles(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	// A handle of another domain is refused.
	wc, in := u.exchange(t, pattern(10, 1))
	foreign, err := u.Passive.PD.CreateAHFromWC(u.Passive.ID.Port(), &wc, in.Buf)
	must(t, "CreateAHFromWC", err)
	wr := u.wr(1, nil)
	wr.AH = foreign
	n, err := u.Active.QP.PostSend([]ibv.SendWR{wr})
	refused(t, "PostSend with the handle of another domain", n, err)
	must(t, "AH.Close", foreign.Close())

	// A handle works as long as it is open, whatever happens to others.
	second, err := u.Active.PD.CreateAH(u.to.AH)
	must(t, "CreateAH", err)
	must(t, "AH.Close", second.Close())
	wr.AH = second
	n, err = u.Active.QP.PostSend([]ibv.SendWR{u.wr(7, nil), wr})
	if n != 1 || err == nil {
		t.Fatalf("PostSend with a closed handle took %d, error %v; want 1 and an error", n, err)
	}
	succeeded(t, u.Active, next(t, u.Active.SendCQ), 7, ibv.WCSend)
	u.exchange(t, pattern(20, 2))

	// An open handle keeps its domain busy.
	pd, err := u.Active.Dev.AllocPD()
	must(t, "AllocPD", err)
	own, err := pd.CreateAH(u.to.AH)
	must(t, "CreateAH", err)
	mustBe(t, "closing a PD with an AH", pd.Close(), ibv.ErrBusy)
	must(t, "AH.Close", own.Close())
	must(t, "PD.Close", pd.Close())

	// Attributes without a valid port, and a part of a header, make no handle.
	for what, attr := range map[string]ibv.AHAttr{"port 0": {}, "a port too many": {Port: u.Active.Dev.Attr().Ports + 1}} {
		attr.Global, attr.GID = true, u.to.AH.GID
		if _, err := u.Active.PD.CreateAH(attr); err == nil {
			t.Errorf("CreateAH took %s", what)
		}
	}
	if _, err := u.Passive.PD.CreateAHFromWC(u.Passive.ID.Port(), &wc, in.Buf[:10]); err == nil && wc.Flags&ibv.WCGRH != 0 {
		t.Error("CreateAHFromWC took a part of a header")
	}
}

// testUDFlush moves a queue pair with posted receives to the error state.
func testUDFlush(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	for i := range uint64(3) {
		u.Passive.receive(t, i)
	}
	must(t, "SetError", u.Passive.QP.SetError())
	if s := u.Passive.QP.State(); s != ibv.QPSError {
		t.Errorf("the queue pair is in %v", s)
	}
	for i := range uint64(3) {
		ended(t, u.Passive, next(t, u.Passive.RecvCQ), i, ibv.WCFlushErr)
	}
	u.Passive.receive(t, 3)
	ended(t, u.Passive, next(t, u.Passive.RecvCQ), 3, ibv.WCFlushErr)
	u.Active.Send(t, u.wr(5, nil)) // The peer does not notice.
	succeeded(t, u.Active, next(t, u.Active.SendCQ), 5, ibv.WCSend)
}

// testUDCloseOrder tries to release parents before their children, and closes a queue pair
// while datagrams come.
func testUDCloseOrder(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{})
	if u == nil {
		return
	}
	p := u.Passive
	mustBe(t, "closing a PD with a QP", p.PD.Close(), ibv.ErrBusy)
	mustBe(t, "closing the CQ of a send queue", p.SendCQ.Close(), ibv.ErrBusy)
	mustBe(t, "closing the CQ of a receive queue", p.RecvCQ.Close(), ibv.ErrBusy)
	mustBe(t, "closing the ID of a QP", p.ID.Close(), ibv.ErrBusy)
	for i := range uint64(5) {
		p.receive(t, i)
		u.Active.Send(t, u.wr(i, nil))
	}
	p.CloseQP(t)
	if _, err := p.QP.PostRecv([]ibv.RecvWR{{}}); err == nil {
		t.Error("PostRecv on a closed queue pair succeeded")
	}
	must(t, "close", p.close())
	for i := range uint64(5) {
		succeeded(t, u.Active, next(t, u.Active.SendCQ), i, ibv.WCSend)
	}
}

// testUDAgain sends many requests to one listener, and closes the ends in different orders.
func testUDAgain(t *testing.T, env Env) {
	if !env.hasUD(t) {
		return
	}
	l := env.listenUD(t)
	for i := range 10 {
		p := env.boundUD(t, PairConfig{})
		u := env.udPairWith(t, p, l, PairConfig{})
		u.exchange(t, pattern(100, i))
		ah := u.ah
		u.ah = nil
		must(t, "AH.Close", ah.Close())
		ends := []*End{u.Active, u.Passive}
		if i%2 == 1 {
			ends[0], ends[1] = ends[1], ends[0]
		}
		must(t, "close", ends[0].close())
		must(t, "close", ends[1].close())
	}
}

// testUDMixed has a connection and datagrams complete on the same queues. Only the
// completions of datagrams have a source.
func testUDMixed(t *testing.T, env Env) {
	u := env.udPair(t, PairConfig{SharedCQ: true, CQDepth: 256})
	if u == nil {
		return
	}
	rc := NewPair(t, env, PairConfig{Share: &u.Pair})
	for i := range 3 {
		wc, in := u.exchange(t, pattern(30, i))
		u.Passive.answer(t, wc, in, u.Active, pattern(40, i))
		rc.Passive.Recv(t, ibv.RecvWR{ID: 5})
		rc.Active.Send(t, ibv.SendWR{Op: ibv.OpSend})
		wc = next(t, rc.Passive.RecvCQ)
		succeeded(t, rc.Passive, wc, 5, ibv.WCRecv)
		if wc.Flags != 0 || wc.SrcQP != 0 {
			t.Errorf("a connection's completion has flags %b and a source of %d", wc.Flags, wc.SrcQP)
		}
	}
}
