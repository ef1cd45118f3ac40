package verbstest

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var queueTests = []subtest{
	{"Unsignaled", testUnsignaled},
	{"SignalAll", testSignalAll},
	{"MixedOrder", testMixedOrder},
	{"LongChain", testLongChain},
	{"SendQueueFull", testSendQueueFull},
	{"ReceiveQueueFull", testReceiveQueueFull},
	{"SlotReuse", testSlotReuse},
	{"OneCQForBothQueues", testOneCQForBothQueues},
	{"OneCQForTwoQPs", testOneCQForTwoQPs},
}

// testUnsignaled signals every fourth send. Only those complete.
func testUnsignaled(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{SendWR: 16, RecvWR: 64})
	for range 64 {
		p.Passive.Recv(t, ibv.RecvWR{})
	}
	for i := range uint64(64) {
		wr := ibv.SendWR{ID: i, Op: ibv.OpSend}
		if i%4 == 3 {
			wr.Flags = ibv.SendSignaled
		}
		p.Active.Send(t, wr)
		if i%4 == 3 {
			succeeded(t, p.Active, next(t, p.Active.SendCQ), i, ibv.WCSend)
		}
	}
	for range 64 {
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 0, ibv.WCRecv)
	}
	noCompletion(t, p.Active.SendCQ)
}

func testSignalAll(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{SignalAll: true})
	for i := range uint64(16) {
		p.Passive.Recv(t, ibv.RecvWR{ID: i})
		p.Active.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend})
	}
	for i := range uint64(16) {
		succeeded(t, p.Active, next(t, p.Active.SendCQ), i, ibv.WCSend)
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), i, ibv.WCRecv)
	}
}

// testMixedOrder posts operations whose durations are very different. They complete in the
// order of the posts.
func testMixedOrder(t *testing.T, env Env) {
	const n = 24
	p := NewPair(t, env, PairConfig{SendWR: n, RecvWR: n})
	out := p.Active.Register(t, make([]byte, 1<<18), 0)
	in := p.Active.Register(t, make([]byte, 1<<18), localWrite)
	target := p.Passive.Register(t, make([]byte, 1<<18), allRights)
	source := p.Passive.Register(t, make([]byte, 1<<18), ibv.AccessRemoteRead)
	var wrs []ibv.SendWR
	var want []ibv.WCOpcode
	for i := range n {
		wr := ibv.SendWR{ID: uint64(i), Flags: ibv.SendSignaled}
		switch i % 6 {
		case 0, 4:
			wr.Op, wr.SGL = ibv.OpRead, in.SGL(0, 1+i*9999, 1)
			wr.RemoteAddr, wr.RKey = source.Addr(0), source.MR.RKey()
			want = append(want, ibv.WCRead)
		case 1, 3:
			wr.Op = ibv.OpSend
			p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i)})
			want = append(want, ibv.WCSend)
		default:
			wr.Op, wr.SGL = ibv.OpWrite, out.SGL(0, 1+i*9999, 1)
			wr.RemoteAddr, wr.RKey = target.Addr(0), target.MR.RKey()
			want = append(want, ibv.WCWrite)
		}
		wrs = append(wrs, wr)
	}
	p.Active.Send(t, p.Active.inOrder(wrs)...)
	for i := range n {
		wc := next(t, p.Active.SendCQ)
		succeeded(t, p.Active, wc, uint64(i), want[i])
		if want[i] == ibv.WCRead && wc.ByteLen != uint32(1+i*9999) {
			t.Errorf("a read of %d bytes reports %d", 1+i*9999, wc.ByteLen)
		}
	}
}

// testLongChain posts many requests in one call. One in the middle of the second chain has
// more elements than the queue pair accepts.
func testLongChain(t *testing.T, env Env) {
	const n, size, bad = 100, 8, 70
	p := NewPair(t, env, PairConfig{SendWR: n, RecvWR: n})
	out := p.Active.Register(t, pattern(n*size, 1), 0)
	in := p.Passive.Register(t, make([]byte, n*size), localWrite)
	for good := n; good >= bad; good -= n - bad {
		clear(in.Buf)
		var sends []ibv.SendWR
		var recvs []ibv.RecvWR
		for i := range n {
			parts := 1
			if i == good {
				parts = p.Active.QP.Cap().MaxSendSGE + 1
			}
			sends = append(sends, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled,
				SGL: slices.Repeat(out.SGL(i*size, size, 1), parts)})
			recvs = append(recvs, ibv.RecvWR{ID: uint64(i), SGL: in.SGL(i*size, size, 1)})
		}
		p.Passive.Recv(t, recvs[:good]...)
		took, err := p.Active.QP.PostSend(sends)
		if took != good || (err == nil) != (good == n) {
			t.Fatalf("PostSend took %d of %d good requests: %v", took, good, err)
		}
		for i := range uint64(good) {
			succeeded(t, p.Active, next(t, p.Active.SendCQ), i, ibv.WCSend)
			succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), i, ibv.WCRecv)
		}
		sameBytes(t, "received", in.Buf[:good*size], out.Buf[:good*size])
	}
	noCompletion(t, p.Active.SendCQ)
	noCompletion(t, p.Passive.RecvCQ)
}

// testSendQueueFull posts far more in one chain than the queue holds. The requests are
// small Writes, for which the peer need not do anything. The device decides how many fit:
// some free a slot when the work is done, others when its completion is polled. But the
// granted number fits, and requests that were refused have no effect.
func testSendQueueFull(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{SendWR: 8, CQDepth: 256})
	capacity := p.Active.QP.Cap().MaxSendWR
	total := 4*capacity + 64
	src := p.Active.Register(t, make([]byte, 4*total), 0)
	dst := p.Passive.Register(t, make([]byte, 4*total), allRights)
	var wrs []ibv.SendWR
	for i := range total {
		binary.BigEndian.PutUint32(src.Buf[4*i:], uint32(i)+1)
		wr := ibv.SendWR{ID: uint64(i), Op: ibv.OpWrite, SGL: src.SGL(4*i, 4, 1), RemoteAddr: dst.Addr(4 * i), RKey: dst.MR.RKey()}
		// A queue with unsignaled work only could never be emptied.
		if i%4 == 3 {
			wr.Flags = ibv.SendSignaled
		}
		wrs = append(wrs, wr)
	}
	taken, signaled, first := 0, uint64(3), true
	for taken < total {
		// There are never more at a time than the completion queue can take.
		chain := wrs[taken:min(taken+4*200, total)]
		n, err := p.Active.QP.PostSend(chain)
		if n < len(chain) {
			mustBe(t, "PostSend into a full queue", err, ibv.ErrQueueFull)
		} else {
			must(t, "PostSend", err)
		}
		if first && n < min(capacity, len(chain)) {
			t.Fatalf("an empty queue for %d took %d", capacity, n)
		}
		first = false
		taken += n
		for signaled < uint64(taken) {
			succeeded(t, p.Active, next(t, p.Active.SendCQ), signaled, ibv.WCWrite)
			signaled += 4
		}
	}
	p.Active.sync(t, p.Passive)
	sameBytes(t, "written", dst.Buf, src.Buf)
}

// testReceiveQueueFull fills the receive queue, where nothing happens until the peer sends.
// A device may accept more than it has granted, but not without end.
func testReceiveQueueFull(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{RecvWR: 10, CQDepth: 1000})
	capacity := p.Passive.QP.Cap().MaxRecvWR
	posted := 0
	chain := func() []ibv.RecvWR {
		wrs := make([]ibv.RecvWR, 7)
		for i := range wrs {
			wrs[i].ID = uint64(posted + i)
		}
		return wrs
	}
	for {
		n, err := p.Passive.QP.PostRecv(chain())
		posted += n
		if n < 7 {
			mustBe(t, "PostRecv into a full queue", err, ibv.ErrQueueFull)
			break
		}
		must(t, "PostRecv", err)
		if posted > 4*capacity+64 {
			t.Fatalf("a receive queue for %d took %d", capacity, posted)
		}
	}
	if posted < capacity {
		t.Fatalf("a receive queue for %d took only %d", capacity, posted)
	}
	n, err := p.Passive.QP.PostRecv(chain())
	mustBe(t, "PostRecv into a full queue", err, ibv.ErrQueueFull)
	if n != 0 {
		t.Fatalf("a full queue took %d", n)
	}
	for i := range posted {
		p.Active.Send(t, ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled})
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 0, ibv.WCSend)
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), uint64(i), ibv.WCRecv)
	}
	noCompletion(t, p.Passive.RecvCQ)
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}

// testSlotReuse fills and empties small queues many times.
func testSlotReuse(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{SendWR: 3, RecvWR: 5})
	send := p.Active.QP.Cap().MaxSendWR
	recv := p.Passive.QP.Cap().MaxRecvWR
	n := min(send, recv)
	for round := range 100 {
		var recvs []ibv.RecvWR
		var sends []ibv.SendWR
		for i := range n {
			id := uint64(round*n + i)
			recvs = append(recvs, ibv.RecvWR{ID: id})
			sends = append(sends, ibv.SendWR{ID: id, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		}
		p.Passive.Recv(t, recvs...)
		p.Active.Send(t, sends...)
		for i := range n {
			id := uint64(round*n + i)
			succeeded(t, p.Active, next(t, p.Active.SendCQ), id, ibv.WCSend)
			succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), id, ibv.WCRecv)
		}
	}
}

// testOneCQForBothQueues checks that each queue keeps its order, however sends and receives
// are mixed.
func testOneCQForBothQueues(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{SharedCQ: true})
	const n, recvBit = 16, 1 << 32
	for i := range uint64(n) {
		for _, e := range []*End{p.Active, p.Passive} {
			e.Recv(t, ibv.RecvWR{ID: recvBit | i})
		}
	}
	for i := range uint64(n) {
		for _, e := range []*End{p.Active, p.Passive} {
			e.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		}
	}
	for _, e := range []*End{p.Active, p.Passive} {
		var sent, received uint64
		for range 2 * n {
			wc := next(t, e.SendCQ)
			if wc.Op == ibv.WCRecv {
				succeeded(t, e, wc, recvBit|received, ibv.WCRecv)
				received++
			} else {
				succeeded(t, e, wc, sent, ibv.WCSend)
				sent++
			}
		}
		noCompletion(t, e.SendCQ)
	}
}

// testOneCQForTwoQPs distinguishes queue pairs with shared completion queues by their
// numbers.
func testOneCQForTwoQPs(t *testing.T, env Env) {
	first := NewPair(t, env, PairConfig{CQDepth: 128})
	second := NewPair(t, env, PairConfig{Share: first})
	pairs := []*Pair{first, second}
	const n = 16
	for i := range uint64(n) {
		for _, p := range pairs {
			p.Passive.Recv(t, ibv.RecvWR{ID: i})
			p.Active.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		}
	}
	collect := func(cq ibv.CQ, op ibv.WCOpcode, a, b *End) {
		seen := make(map[*End]uint64)
		for range 2 * n {
			wc := next(t, cq)
			e := a
			if wc.QPN == b.QP.QPN() {
				e = b
			}
			succeeded(t, e, wc, seen[e], op)
			seen[e]++
		}
	}
	collect(first.Active.SendCQ, ibv.WCSend, first.Active, second.Active)
	collect(first.Passive.RecvCQ, ibv.WCRecv, first.Passive, second.Passive)

	first.Active.CloseQP(t)
	mustBe(t, "closing a CQ that one of two queue pairs left", first.Active.SendCQ.Close(), ibv.ErrBusy)
	second.Active.transfer(t, second.Passive, pattern(10, 1))
}
