package verbstest

import (
	"errors"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var receiveTests = []subtest{
	{"TooShort", testReceiveTooShort},
	{"TooShortByFar", testReceiveTooShortByFar},
	{"UnknownKey", testReceiveUnknownKey},
	{"PastEnd", testReceivePastEnd},
	{"ReadOnly", testReceiveReadOnly},
	{"ClosedRegion", testReceiveClosedRegion},
	{"NonePosted", testNonePosted},
}

// spoiled sends size bytes into the receive recv, which cannot take them. It
// ends with one of the statuses, and the connection is over.
//
// Soft-RoCE reports in the receive what it tells the peer, a request that is
// invalid or cannot be done, instead of what went wrong with its own buffer, and
// a message that is too long is to it one that cannot be done.
func spoiled(t testing.TB, p *Pair, recv uint64, size int, status, nak ibv.WCStatus) {
	t.Helper()
	src := p.Active.Register(t, pattern(size, 1), 0)
	p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Passive.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, size, 1)})
	wc := next(t, p.Active.SendCQ)
	if p.Active.iwarp() {
		// The Send was complete when TCP had it, unless the peer was faster.
		ended(t, p.Active, wc, 2, p.Active.cutOff(ibv.WCSuccess, ibv.WCRemOpErr, ibv.WCRemInvReqErr)...)
		allowed := []ibv.WCStatus{status}
		if status == ibv.WCLocProtErr && p.Passive.Dev.Attr().Quirks.VagueErrors {
			allowed = append(allowed, ibv.WCGeneralErr)
		}
		ended(t, p.Passive, next(t, p.Passive.RecvCQ), recv, allowed...)
	} else {
		ended(t, p.Active, wc, 2, nak, ibv.WCRemOpErr)
		ended(t, p.Passive, next(t, p.Passive.RecvCQ), recv, status, nak, ibv.WCLocQPOpErr)
	}
	broken(t, p)
}

// forbidden is spoiled for an element that the device must not use at all. It
// may find that out when a message comes, or refuse the post at once: then the
// queue is as it was before.
func forbidden(t testing.TB, p *Pair, sge ibv.SGE) {
	t.Helper()
	before := p.Passive.Register(t, guarded(4), localWrite)
	n, err := p.Passive.QP.PostRecv([]ibv.RecvWR{{ID: 8, SGL: before.SGL(0, 4, 1)}, {ID: 9, SGL: []ibv.SGE{sge}}})
	first := p.Active.Register(t, pattern(4, 1), 0)
	p.Active.Send(t, ibv.SendWR{ID: 7, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: first.SGL(0, 4, 1)})
	succeeded(t, p.Active, next(t, p.Active.SendCQ), 7, ibv.WCSend)
	succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 8, ibv.WCRecv)
	sameBytes(t, "message before", before.Buf, first.Buf)
	if err != nil {
		if n != 1 || errors.Is(err, ibv.ErrQueueFull) {
			t.Fatalf("PostRecv took %d, error %v; want it to refuse the second", n, err)
		}
		p.Active.transfer(t, p.Passive, pattern(100, 2))
		return
	}
	spoiled(t, p, 9, len(sge.Buf), ibv.WCLocProtErr, ibv.WCRemOpErr)
}

// testReceiveTooShort sends one byte more than fits.
func testReceiveTooShort(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	dst := p.Passive.Register(t, guarded(200), localWrite)
	p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: dst.SGL(0, 100, 1)})
	spoiled(t, p, 1, 101, ibv.WCLocLenErr, ibv.WCRemInvReqErr)
	untouched(t, "behind the receive", dst.Buf[100:])
}

// testReceiveTooShortByFar overflows in a later packet of the message.
func testReceiveTooShortByFar(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	dst := p.Passive.Register(t, guarded(200000), localWrite)
	p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: dst.SGL(0, 100000, 1)})
	spoiled(t, p, 1, 200000, ibv.WCLocLenErr, ibv.WCRemInvReqErr)
	untouched(t, "behind the receive", dst.Buf[100000:])
}

func testReceiveUnknownKey(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	dst := p.Passive.Register(t, guarded(100), localWrite)
	sge := dst.SGE(0, 100)
	sge.LKey ^= 0x7FFF0000
	forbidden(t, p, sge)
	untouched(t, "buffer", dst.Buf)
}

// testReceivePastEnd posts a buffer that only begins in the region. What lies
// within it may have been filled.
func testReceivePastEnd(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	buf := guarded(200)
	dst := p.Passive.Register(t, buf[:100], localWrite)
	sge := ibv.SGE{Buf: buf[50:150], LKey: dst.MR.LKey()}
	forbidden(t, p, sge)
	untouched(t, "behind the region", buf[100:])
}

func testReceiveReadOnly(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	dst := p.Passive.Register(t, guarded(100), 0)
	forbidden(t, p, dst.SGE(0, 100))
	untouched(t, "buffer", dst.Buf)
}

// testReceiveClosedRegion takes the memory of a posted receive away. The receive
// fails when a message comes, and the memory stays as it is.
func testReceiveClosedRegion(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, pattern(100, 1), 0)
	dst := p.Passive.Register(t, guarded(100), localWrite)
	p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
	p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: dst.SGL(0, 100, 1)}, ibv.RecvWR{ID: recvBeforeBreak})
	dst.Close(t)
	p.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, 100, 1)})
	if wc := next(t, p.Passive.RecvCQ); wc.ID != 1 || wc.Status == ibv.WCSuccess {
		t.Errorf("completion %+v, want the receive to fail", wc)
	}
	if wc := next(t, p.Active.SendCQ); wc.ID != 2 {
		t.Errorf("completion %+v, want that of the send", wc)
	}
	broken(t, p)
	untouched(t, "memory of the closed region", dst.Buf)
}

// testNonePosted sends without a receive. On iWARP that ends the connection
// (RFC 5041, section 7). On InfiniBand the peer is told to try again, and how
// often it does is the device's or the program's choice: a receive that is
// posted late gets the message, or the send has failed by then.
func testNonePosted(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, pattern(100, 1), 0)
	dst := p.Passive.Register(t, guarded(100), localWrite)
	send := ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, 100, 1)}
	if p.Active.iwarp() {
		p.Active.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
		p.Active.Send(t, send)
		ended(t, p.Active, next(t, p.Active.SendCQ), 2, p.Active.cutOff(ibv.WCSuccess, ibv.WCRemOpErr, ibv.WCRemInvReqErr)...)
		p.Passive.events.wait(t, ibv.EventDisconnected)
		p.Passive.Recv(t, ibv.RecvWR{ID: recvBeforeBreak})
		broken(t, p)
		return
	}
	p.Active.Send(t, send)
	p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: dst.SGL(0, 100, 1)})
	wc := next(t, p.Active.SendCQ)
	ended(t, p.Active, wc, 2, ibv.WCSuccess, ibv.WCRNRRetryExcErr)
	if wc.Status == ibv.WCSuccess {
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), 1, ibv.WCRecv)
		sameBytes(t, "message", dst.Buf, src.Buf)
	}
}
