package verbstest

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var inlineTests = []subtest{
	{"Overwritten", testInlineOverwritten},
	{"Fenced", testInlineFenced},
	{"Backlog", testInlineBacklog},
	{"Write", testInlineWrite},
	{"TooLong", testInlineTooLong},
}

// inlinePair connects queue pairs that send up to n bytes inline, or fewer if the device's
// limit is lower.
func inlinePair(t testing.TB, env Env, n int) (*Pair, int) {
	t.Helper()
	attr := env.device(t).Attr()
	n = min(n, attr.MaxInline)
	return NewPair(t, env, PairConfig{SGE: min(2, attr.MaxSGE), Inline: n}), n
}

// testInlineOverwritten uses one buffer for all messages, and does not register it. The
// buffer is free when the post returns.
func testInlineOverwritten(t *testing.T, env Env) {
	const rounds = 16
	p, size := inlinePair(t, env, 200)
	parts := min(p.Active.QP.Cap().MaxSendSGE, 2)
	dst := p.Passive.Register(t, guarded(rounds*(size+1)), localWrite)
	buf := Mem{Buf: make([]byte, size), MR: noMR{}}
	for i := range rounds {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(i*(size+1), size+1, 1)})
	}
	for i := range rounds {
		copy(buf.Buf, pattern(size, i))
		p.Active.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendInline,
			SGL: buf.SGL(0, size, 1+i%parts)})
		clear(buf.Buf)
	}
	for i := range rounds {
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCSend)
		wc := next(t, p.Passive.RecvCQ)
		succeeded(t, p.Passive, wc, uint64(i), ibv.WCRecv)
		got := dst.Buf[i*(size+1):][:size+1]
		sameBytes(t, "message", got[:wc.ByteLen], pattern(size, i))
		untouched(t, "behind the message", got[size:])
	}
}

// noMR is used for memory that is not registered.
type noMR struct{ ibv.MR }

func (noMR) LKey() uint32 { return 0 }

// testInlineFenced makes an inline send wait for an RDMA Read by a fence. So the device has
// to keep the bytes.
func testInlineFenced(t *testing.T, env Env) {
	const rounds, bulk = 10, 1 << 20
	p, size := inlinePair(t, env, 100)
	far := p.Passive.Register(t, make([]byte, bulk), ibv.AccessRemoteRead)
	here := p.Active.Register(t, make([]byte, bulk), localWrite)
	dst := p.Passive.Register(t, make([]byte, size+1), localWrite)
	buf := Mem{Buf: make([]byte, size), MR: noMR{}}
	for i := range rounds {
		p.Passive.Recv(t, ibv.RecvWR{ID: 1, SGL: dst.SGL(0, size+1, 1)})
		copy(buf.Buf, pattern(size, i))
		p.Active.Send(t,
			ibv.SendWR{Op: ibv.OpRead, SGL: here.SGL(0, bulk, 1), RemoteAddr: far.Addr(0), RKey: far.MR.RKey()},
			ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendInline | ibv.SendFence, SGL: buf.SGL(0, size, 1)})
		clear(buf.Buf)
		wc := next(t, p.Passive.RecvCQ)
		succeeded(t, p.Passive, wc, 1, ibv.WCRecv)
		sameBytes(t, "message", dst.Buf[:wc.ByteLen], pattern(size, i))
		succeeded(t, p.Active, next(t, p.Active.SendCQ), 2, ibv.WCSend)
	}
}

// testInlineBacklog posts more inline data than can be under way, if the device accepts
// that much.
func testInlineBacklog(t *testing.T, env Env) {
	const n = 32
	p, size := inlinePair(t, env, 1<<18)
	dst := p.Passive.Register(t, make([]byte, n*size+1), localWrite)
	buf := Mem{Buf: make([]byte, size), MR: noMR{}}
	for i := range n {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(i*size, size, 1)})
	}
	for i := range n {
		copy(buf.Buf, pattern(size, i))
		p.Active.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendInline, SGL: buf.SGL(0, size, 1)})
		clear(buf.Buf)
	}
	for i := range n {
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCSend)
		wc := next(t, p.Passive.RecvCQ)
		succeeded(t, p.Passive, wc, uint64(i), ibv.WCRecv)
		sameBytes(t, "message", dst.Buf[i*size:][:wc.ByteLen], pattern(size, i))
	}
}

func testInlineWrite(t *testing.T, env Env) {
	p, size := inlinePair(t, env, 64)
	const rounds = 8
	dst := p.Passive.Register(t, guarded(rounds*size+1), allRights)
	buf := Mem{Buf: make([]byte, size), MR: noMR{}}
	for i := range rounds {
		copy(buf.Buf, pattern(size, i))
		p.Active.Send(t, ibv.SendWR{ID: uint64(i), Op: ibv.OpWrite, Flags: ibv.SendInline,
			SGL: buf.SGL(0, size, 1), RemoteAddr: dst.Addr(i * size), RKey: dst.MR.RKey()})
		clear(buf.Buf)
	}
	p.Active.sync(t, p.Passive)
	for i := range rounds {
		sameBytes(t, "written", dst.Buf[i*size:][:size], pattern(size, i))
	}
	untouched(t, "behind", dst.Buf[rounds*size:])
}

// testInlineTooLong sends one byte more inline than the queue pair was granted.
func testInlineTooLong(t *testing.T, env Env) {
	p, _ := inlinePair(t, env, 64)
	over := p.Active.QP.Cap().MaxInline + 1
	if over > 64<<20 {
		t.Logf("not tried: the device takes %d bytes inline", over-1)
		return
	}
	mem := p.Active.Register(t, make([]byte, over), 0)
	n, err := p.Active.QP.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: mem.SGL(0, over, 1)}})
	refused(t, "PostSend of too much inline", n, err)
	p.Active.transfer(t, p.Passive, pattern(10, 1))
}
