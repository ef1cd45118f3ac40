package verbstest

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// This file tests multicast groups between ends of one machine.
var mcastTests = []subtest{
	{"Lacking", testMcastLacking},
	{"Members", testMcastMembers},
	{"SendOnly", testMcastSendOnly},
	{"Leave", testMcastLeave},
	{"Upgrade", testMcastUpgrade},
	{"Refused", testMcastRefused},
	{"Cancelled", testMcastCancelled},
	{"WrongKey", testMcastWrongKey},
	{"Attach", testMcastAttach},
	{"CloseOrder", testMcastCloseOrder},
	{"Again", testMcastAgain},
}

// mcastGroups are groups that no protocol uses (RFC 2365, section 6.1; RFC 4291, section
// 2.7). Their Ethernet addresses are different, so devices distinguish them.
func (env Env) mcastGroups() (a, b netip.Addr) {
	if env.Addr.Is6() {
		return netip.MustParseAddr("ff05::7264:6d61"), netip.MustParseAddr("ff05::7264:6d62")
	}
	return netip.MustParseAddr("239.82.68.1"), netip.MustParseAddr("239.82.68.2")
}

// hasMcast reports whether the device has multicast of the address's family. A device
// without it returns the error that [ibv.ID] names.
func (env Env) hasMcast(t testing.TB) bool {
	t.Helper()
	if !env.device(t).Attr().Caps.Has(ibv.CapMulticast) {
		return false // testMcastLacking checks that it is refused.
	}
	id, err := env.Passive.BindUD(t.Context(), netip.AddrPortFrom(env.Addr, 0))
	must(t, "BindUD", err)
	group, _ := env.mcastGroups()
	_, err = id.JoinMulticast(t.Context(), group, ibv.JoinSendOnly)
	must(t, "ID.Close", id.Close())
	if env.Addr.Is6() && errors.Is(err, errors.ErrUnsupported) {
		return false
	}
	must(t, "JoinMulticast", err)
	return true
}

// join joins a group and leaves it at the end of the test, unless it was left.
func (e *End) join(t testing.TB, group netip.Addr, how ibv.JoinFlags) ibv.UDParam {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	to, err := e.ID.JoinMulticast(ctx, group, how)
	must(t, "JoinMulticast", err)
	if to.QPN != ibv.MulticastQPN || to.QKey != ibv.QKeyUDP || to.AH.Port != e.ID.Port() {
		t.Fatalf("joined %v: %+v", group, to)
	}
	t.Cleanup(func() { // It runs before the cleanups of the end.
		if err := e.ID.LeaveMulticast(group); err != nil && !errors.Is(err, errno.EADDRNOTAVAIL) {
			t.Errorf("LeaveMulticast: %v", err)
		}
	})
	return to
}

// cast sends msg to a group that join has joined.
func (e *End) cast(t testing.TB, to ibv.UDParam, msg []byte) {
	t.Helper()
	ah, err := e.PD.CreateAH(to.AH)
	must(t, "CreateAH", err)
	src := e.Register(t, append([]byte(nil), msg...), 0)
	e.Send(t, ibv.SendWR{ID: 3, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, len(msg), 1), AH: ah,
		RemoteQPN: to.QPN, RemoteQKey: to.QKey})
	succeeded(t, e, next(t, e.SendCQ), 3, ibv.WCSend)
	must(t, "AH.Close", ah.Close())
}

// heard waits for a receive and checks that it holds msg, sent by the end to the group.
func (e *End) heard(t testing.TB, id uint64, in *Mem, from *End, group netip.Addr, msg []byte) {
	t.Helper()
	wc := next(t, e.RecvCQ)
	succeeded(t, e, wc, id, ibv.WCRecv)
	if wc.SrcQP != from.QP.QPN() || int(wc.ByteLen) != ibv.GRHLen+len(msg) {
		t.Fatalf("completion %+v; want %d bytes behind the header, from queue pair %d", wc, len(msg), from.QP.QPN())
	}
	sameBytes(t, "datagram", in.Buf[ibv.GRHLen:wc.ByteLen], msg)
	src, dst, ok := ibv.GRHAddrs(in.Buf)
	if !ok || wc.Flags&ibv.WCGRH == 0 || src != plain(from.ID) || dst != group {
		t.Fatalf("flags %b, header %x (from %v to %v); want it from %v to %v", wc.Flags, in.Buf[:ibv.GRHLen], src, dst, plain(from.ID), group)
	}
}

// testMcastLacking checks that a device without multicast refuses it, and that every device
// refuses multicast on connections.
func testMcastLacking(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	group, _ := env.mcastGroups()
	_, join := p.Active.ID.JoinMulticast(t.Context(), group, ibv.JoinFullMember)
	leave := p.Active.ID.LeaveMulticast(group)
	attach := p.Active.QP.AttachMcast(ibv.GIDFromAddr(group), 0)
	detach := p.Active.QP.DetachMcast(ibv.GIDFromAddr(group), 0)
	attr := p.Active.Dev.Attr()
	if attr.Caps.Has(ibv.CapMulticast) {
		if !attr.Caps.Has(ibv.CapUD) || attr.MaxMcastGrp < 1 || attr.MaxMcastQPAttach < 1 {
			t.Errorf("multicast with the attributes %+v", attr)
		}
		mustBe(t, "JoinMulticast of a connection", join, ibv.ErrState)
		mustBe(t, "LeaveMulticast of a connection", leave, errno.EADDRNOTAVAIL)
		mustBe(t, "AttachMcast of a connection", attach, syscall.EINVAL)
		mustBe(t, "DetachMcast of a connection", detach, syscall.EINVAL)
	} else {
		if attr.MaxMcastGrp != 0 || attr.MaxMcastQPAttach != 0 {
			t.Errorf("no multicast with the attributes %+v", attr)
		}
		for what, err := range map[string]error{"JoinMulticast": join, "LeaveMulticast": leave, "AttachMcast": attach, "DetachMcast": detach} {
			mustBe(t, what+" without multicast", err, errors.ErrUnsupported)
		}
	}
	p.Active.transfer(t, p.Passive, pattern(100, 1))
}

// testMcastMembers has each of two members send to both. A third end, which is no member,
// receives nothing.
func testMcastMembers(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	a, b, stranger := env.boundUD(t, PairConfig{}), env.boundUD(t, PairConfig{}), env.boundUD(t, PairConfig{})
	to := a.join(t, group, ibv.JoinFullMember)
	b.join(t, group, ibv.JoinFullMember)
	stranger.receive(t, 9)
	for i, from := range []*End{a, b, a} {
		inA, inB := a.receive(t, 1), b.receive(t, 2)
		msg := pattern(100+i, i)
		from.cast(t, to, msg)
		a.heard(t, 1, inA, from, group, msg)
		b.heard(t, 2, inB, from, group, msg)
	}
	noCompletion(t, stranger.RecvCQ)
}

// testMcastSendOnly has a member that only sends, and receives nothing.
func testMcastSendOnly(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	a, b := env.boundUD(t, PairConfig{}), env.boundUD(t, PairConfig{})
	a.join(t, group, ibv.JoinFullMember)
	to := b.join(t, group, ibv.JoinSendOnly)
	b.receive(t, 9)
	for i := range 3 {
		in, msg := a.receive(t, 1), pattern(50, i)
		b.cast(t, to, msg)
		a.heard(t, 1, in, b, group, msg)
	}
	noCompletion(t, b.RecvCQ)
}

// testMcastLeave leaves one of two groups, and then receives the other only.
func testMcastLeave(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	first, second := env.mcastGroups()
	a, b := env.boundUD(t, PairConfig{}), env.boundUD(t, PairConfig{})
	a.join(t, first, ibv.JoinFullMember)
	a.join(t, second, ibv.JoinFullMember)
	toFirst, toSecond := b.join(t, first, ibv.JoinSendOnly), b.join(t, second, ibv.JoinSendOnly)
	in := a.receive(t, 1)
	b.cast(t, toFirst, pattern(10, 1))
	a.heard(t, 1, in, b, first, pattern(10, 1))
	must(t, "LeaveMulticast", a.ID.LeaveMulticast(first))
	mustBe(t, "a second LeaveMulticast", a.ID.LeaveMulticast(first), errno.EADDRNOTAVAIL)
	in = a.receive(t, 2)
	b.cast(t, toFirst, pattern(10, 2))
	b.cast(t, toSecond, pattern(10, 3))
	a.heard(t, 2, in, b, second, pattern(10, 3))
}

// testMcastUpgrade becomes a full member after it has sent.
func testMcastUpgrade(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	a := env.boundUD(t, PairConfig{})
	to := a.join(t, group, ibv.JoinSendOnly)
	in := a.receive(t, 1)
	a.cast(t, to, pattern(10, 1))
	must(t, "LeaveMulticast", a.ID.LeaveMulticast(group))
	to = a.join(t, group, ibv.JoinFullMember)
	a.cast(t, to, pattern(10, 2))
	a.heard(t, 1, in, a, group, pattern(10, 2))
}

func testMcastRefused(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, other := env.mcastGroups()
	a := env.boundUD(t, PairConfig{})
	for _, bad := range []netip.Addr{{}, env.Addr, netip.IPv4Unspecified(), netip.IPv6Unspecified(), netip.AddrFrom4([4]byte{255, 255, 255, 255})} {
		if _, err := a.ID.JoinMulticast(t.Context(), bad, ibv.JoinFullMember); err == nil {
			t.Errorf("JoinMulticast took %v", bad)
		}
	}
	_, err := a.ID.JoinMulticast(t.Context(), group, 7)
	mustBe(t, "JoinMulticast in no known way", err, syscall.EINVAL)
	a.join(t, group, ibv.JoinFullMember)
	for _, how := range []ibv.JoinFlags{ibv.JoinFullMember, ibv.JoinSendOnly} {
		_, err := a.ID.JoinMulticast(t.Context(), group, how)
		mustBe(t, "a second JoinMulticast", err, errno.EADDRINUSE)
	}
	mustBe(t, "LeaveMulticast of another group", a.ID.LeaveMulticast(other), errno.EADDRNOTAVAIL)
}

// testMcastCancelled cancels a join. The ID is no member then.
func testMcastCancelled(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	a := env.boundUD(t, PairConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := a.ID.JoinMulticast(ctx, group, ibv.JoinFullMember)
	mustBe(t, "JoinMulticast with a cancelled context", err, context.Canceled)
	mustBe(t, "LeaveMulticast after that", a.ID.LeaveMulticast(group), errno.EADDRNOTAVAIL)
	for range 20 { // The join is cancelled at different moments.
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if _, err := a.ID.JoinMulticast(ctx, group, ibv.JoinFullMember); err == nil {
			must(t, "LeaveMulticast", a.ID.LeaveMulticast(group))
		} else {
			mustBe(t, "JoinMulticast that is cancelled", err, context.Canceled)
			mustBe(t, "LeaveMulticast after that", a.ID.LeaveMulticast(group), errno.EADDRNOTAVAIL)
		}
	}
	to := a.join(t, group, ibv.JoinFullMember)
	in := a.receive(t, 1)
	a.cast(t, to, pattern(10, 1))
	a.heard(t, 1, in, a, group, pattern(10, 1))
}

// testMcastWrongKey sends with another key. Members drop that, like any datagram.
func testMcastWrongKey(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	a := env.boundUD(t, PairConfig{})
	to := a.join(t, group, ibv.JoinFullMember)
	in := a.receive(t, 1)
	bad := to
	bad.QKey++
	a.cast(t, bad, pattern(10, 1))
	a.cast(t, to, pattern(10, 2))
	a.heard(t, 1, in, a, group, pattern(10, 2))
}

// testMcastAttach attaches a second queue pair by AttachMcast.
func testMcastAttach(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	gid := ibv.GIDFromAddr(group)
	a, b := env.boundUD(t, PairConfig{}), env.boundUD(t, PairConfig{})
	to := a.join(t, group, ibv.JoinFullMember)
	if err := b.QP.DetachMcast(gid, to.AH.DLID); err == nil {
		t.Error("DetachMcast of one that is not attached succeeded")
	}
	must(t, "AttachMcast", b.QP.AttachMcast(gid, to.AH.DLID))
	inA, inB := a.receive(t, 1), b.receive(t, 2)
	a.cast(t, to, pattern(10, 1))
	a.heard(t, 1, inA, a, group, pattern(10, 1))
	b.heard(t, 2, inB, a, group, pattern(10, 1))
	mustBe(t, "closing a QP that is attached", b.QP.Close(), ibv.ErrBusy)
	must(t, "DetachMcast", b.QP.DetachMcast(gid, to.AH.DLID))
	b.receive(t, 3)
	inA = a.receive(t, 4)
	a.cast(t, to, pattern(10, 2))
	a.heard(t, 4, inA, a, group, pattern(10, 2))
	noCompletion(t, b.RecvCQ)
}

// testMcastCloseOrder closes the queue pair of a member, and closes IDs without leaving
// their groups.
func testMcastCloseOrder(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, other := env.mcastGroups()
	a := env.boundUD(t, PairConfig{})
	_, err := a.ID.JoinMulticast(t.Context(), group, ibv.JoinFullMember)
	must(t, "JoinMulticast", err)
	_, err = a.ID.JoinMulticast(t.Context(), other, ibv.JoinSendOnly)
	must(t, "JoinMulticast", err)
	mustBe(t, "closing the QP of a member", a.QP.Close(), ibv.ErrBusy)
	must(t, "LeaveMulticast", a.ID.LeaveMulticast(group))
	must(t, "close", a.close()) // It still may send.
	if _, err := a.ID.JoinMulticast(t.Context(), group, ibv.JoinFullMember); err == nil {
		t.Error("JoinMulticast of a closed ID succeeded")
	}
	id, err := env.Passive.BindUD(t.Context(), netip.AddrPortFrom(env.Addr, 0))
	must(t, "BindUD", err)
	_, err = id.JoinMulticast(t.Context(), group, ibv.JoinFullMember) // The ID has no queue pair.
	must(t, "JoinMulticast", err)
	must(t, "ID.Close", id.Close())
}

// testMcastAgain joins and leaves many times while datagrams come.
func testMcastAgain(t *testing.T, env Env) {
	if !env.hasMcast(t) {
		return
	}
	group, _ := env.mcastGroups()
	a, b := env.boundUD(t, PairConfig{}), env.boundUD(t, PairConfig{})
	to := b.join(t, group, ibv.JoinSendOnly)
	for i := range 10 {
		a.join(t, group, ibv.JoinFullMember)
		in := a.receive(t, uint64(i))
		b.cast(t, to, pattern(10, i))
		a.heard(t, uint64(i), in, b, group, pattern(10, i))
		must(t, "LeaveMulticast", a.ID.LeaveMulticast(group))
		b.cast(t, to, pattern(10, i)) // No member receives it.
	}
	noCompletion(t, a.RecvCQ)
}
