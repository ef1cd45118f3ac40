package verbstest

import (
	"errors"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var qpRegionTests = []subtest{
	{"Owner", testQPRegionOwner},
	{"NeighbourWrites", func(t *testing.T, env Env) { testQPRegionNeighbour(t, env, ibv.OpWrite) }},
	{"NeighbourReads", func(t *testing.T, env Env) { testQPRegionNeighbour(t, env, ibv.OpRead) }},
	{"NeighbourInvalidates", func(t *testing.T, env Env) { testQPRegionNeighbour(t, env, ibv.OpSendInv) }},
	{"NeighbourInvalidatesLocally", testQPRegionLocalInvalidate},
	{"Closed", testQPRegionClosed},
	{"Lacking", testQPRegionLacking},
}

// neighbours connects two queue pairs in the same domains, or returns nothing
// where the device has no regions of one queue pair.
func neighbours(t *testing.T, env Env) (owner, neighbour *Pair) {
	t.Helper()
	owner = NewPair(t, env, PairConfig{CQDepth: 256})
	if !owner.Passive.Dev.Attr().Caps.Has(ibv.CapQPRegion) {
		return nil, nil // testQPRegionLacking has its say
	}
	return owner, NewPair(t, env, PairConfig{Share: owner})
}

// RegisterQP is Register for a region of the end's queue pair.
func (e *End) RegisterQP(t testing.TB, buf []byte, access ibv.Access) *Mem {
	t.Helper()
	mr, err := e.QP.RegMR(buf, access)
	must(t, "QP.RegMR", err)
	m := &Mem{Buf: buf, MR: mr}
	e.mems = append(e.mems, m)
	return m
}

// works has the peer of p write to mem and read it back.
func (p *Pair) works(t *testing.T, mem *Mem, seed int) {
	t.Helper()
	n := len(mem.Buf)
	src := p.Active.Register(t, pattern(n, seed), 0)
	dst := p.Active.Register(t, make([]byte, n), localWrite)
	p.Active.Send(t,
		ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, n, 1), RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()},
		ibv.SendWR{ID: 9, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: dst.SGL(0, n, 1),
			RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()})
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 9, ibv.WCRead)
	sameBytes(t, "written", mem.Buf, src.Buf)
	sameBytes(t, "read back", dst.Buf, src.Buf)
}

// testQPRegionOwner does with a region of a queue pair what can be done with any:
// the peer writes, reads and takes the key back, and this side receives there,
// by any queue pair of the domain.
func testQPRegionOwner(t *testing.T, env Env) {
	owner, neighbour := neighbours(t, env)
	if owner == nil {
		return
	}
	mem := owner.Passive.RegisterQP(t, make([]byte, 100), allRights)
	owner.works(t, mem, 1)
	for i, p := range []*Pair{owner, neighbour} {
		src := p.Active.Register(t, pattern(100, 2+i), 0)
		p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: mem.SGL(0, 100, 1)})
		p.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, 100, 1)})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 2, ibv.WCSend)
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 1, ibv.WCRecv)
		sameBytes(t, "received", mem.Buf, src.Buf)
	}
	if mr, err := owner.Passive.QP.RegMR(nil, localWrite); err == nil {
		must(t, "MR.Close", mr.Close())
		t.Error("QP.RegMR took no bytes")
	}
	if mr, err := owner.Passive.QP.RegMR(mem.Buf, ibv.AccessRemoteWrite); err == nil {
		must(t, "MR.Close", mr.Close())
		t.Error("QP.RegMR took remote without local write")
	}
	if !owner.Active.Dev.Attr().Caps.Has(ibv.CapSendInvalidate) {
		return
	}
	key := mem.MR.RKey()
	owner.Passive.Recv(t, ibv.RecvWR{ID: 1})
	owner.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSendInv, Flags: ibv.SendSignaled, InvKey: key})
	wc := next(t, owner.Passive.RecvCQ)
	succeeded(t, owner.Passive, wc, 1, ibv.WCRecv)
	if wc.Flags != ibv.WCWithInv || wc.InvKey != key {
		t.Errorf("completion %+v, want key %#x taken back", wc, key)
	}
	succeeded(t, owner.Active, next(t, owner.Active.SendCQ), 2, ibv.WCSend)
	copy(mem.Buf, guarded(100))
	src := owner.Active.Register(t, pattern(100, 4), 0)
	denied(t, owner, ibv.SendWR{Op: ibv.OpWrite, SGL: src.SGL(0, 100, 1), RemoteAddr: mem.Addr(0), RKey: key})
	untouched(t, "region taken back", mem.Buf)
}

// testQPRegionNeighbour has the peer of another queue pair in the same domain
// name the key. That breaks the neighbour's connection and nothing else.
func testQPRegionNeighbour(t *testing.T, env Env, op ibv.Opcode) {
	owner, neighbour := neighbours(t, env)
	if owner == nil || op == ibv.OpSendInv && !owner.Active.Dev.Attr().Caps.Has(ibv.CapSendInvalidate) {
		return
	}
	secret := guarded(2*regionOff + regionLen)
	mem := owner.Passive.RegisterQP(t, secret[regionOff:][:regionLen], allRights)
	local := neighbour.Active.Register(t, pattern(accessLen, 1), localWrite)
	wr := ibv.SendWR{Op: op, SGL: local.SGL(0, accessLen, 1), RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()}
	if op == ibv.OpSendInv {
		wr = ibv.SendWR{Op: op, InvKey: mem.MR.RKey()}
	}
	denied(t, neighbour, wr)
	untouched(t, "memory of the peer", secret)
	sameBytes(t, "memory of the requester", local.Buf, pattern(accessLen, 1))
	owner.works(t, mem, 2)
}

// testQPRegionLocalInvalidate names the key in a request on a neighbour of this
// side, which fails.
func testQPRegionLocalInvalidate(t *testing.T, env Env) {
	owner, neighbour := neighbours(t, env)
	if owner == nil || !owner.Passive.Dev.Attr().Caps.Has(ibv.CapLocalInvalidate) {
		return
	}
	mem := owner.Passive.RegisterQP(t, make([]byte, regionLen), allRights)
	neighbour.Passive.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpLocalInv, Flags: ibv.SendSignaled, InvKey: mem.MR.RKey()})
	if wc := next(t, neighbour.Passive.SendCQ); wc.ID != 1 || wc.Status == ibv.WCSuccess {
		t.Errorf("completion %+v", wc)
	}
	owner.works(t, mem, 1)
}

// testQPRegionClosed closes the queue pair before its region. The region stays,
// the domain with it, and the key opens nothing to those who are left.
func testQPRegionClosed(t *testing.T, env Env) {
	owner, neighbour := neighbours(t, env)
	if owner == nil {
		return
	}
	mem := owner.Passive.RegisterQP(t, guarded(regionLen), allRights)
	owner.Passive.CloseQP(t)
	if mr, err := owner.Passive.QP.RegMR(mem.Buf, 0); err == nil {
		must(t, "MR.Close", mr.Close())
		t.Error("QP.RegMR succeeds on a closed queue pair")
	}
	mustBe(t, "PD.Close", owner.Passive.PD.Close(), ibv.ErrBusy)
	local := neighbour.Active.Register(t, pattern(accessLen, 1), localWrite)
	denied(t, neighbour, ibv.SendWR{Op: ibv.OpWrite, SGL: local.SGL(0, accessLen, 1), RemoteAddr: mem.Addr(0), RKey: mem.MR.RKey()})
	untouched(t, "memory of the peer", mem.Buf)
	neighbour.Passive.CloseQP(t)
	mustBe(t, "PD.Close", owner.Passive.PD.Close(), ibv.ErrBusy)
}

// testQPRegionLacking has a device without such regions refuse them.
func testQPRegionLacking(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	if p.Passive.Dev.Attr().Caps.Has(ibv.CapQPRegion) {
		return
	}
	for _, access := range []ibv.Access{0, allRights} {
		mr, err := p.Passive.QP.RegMR(make([]byte, 100), access)
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("QP.RegMR: %v, want ErrUnsupported", err)
		}
		if err == nil {
			must(t, "MR.Close", mr.Close())
		}
	}
	p.Active.transfer(t, p.Passive, pattern(100, 1))
}
