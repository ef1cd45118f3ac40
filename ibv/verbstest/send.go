package verbstest

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var sendTests = []subtest{
	{"Sizes", testSendSizes},
	{"Order", testReceiveOrder},
	{"PollOnly", testPollOnly},
	{"ListsAreFree", testListsAreFree},
	{"TooManyElements", testTooManyElements},
}

// messageSizes are around what devices treat differently: empty, within and
// around a word, a page less one, and several segments of any size.
var messageSizes = []int{0, 1, 7, 8, 4095, 64 << 10, 1<<20 + 3}

// elementCounts returns the numbers of scatter/gather elements to try.
func elementCounts(limit int) []int {
	limit = min(limit, 32) // some devices take any number
	switch limit {
	case 1:
		return []int{1}
	case 2:
		return []int{1, 2}
	}
	return []int{1, 2, limit}
}

// testSendSizes sends messages of all sizes from one to MaxSGE elements into one
// to MaxSGE elements. What is posted behind the message keeps its content.
func testSendSizes(t *testing.T, env Env) {
	dev := env.device(t)
	counts := elementCounts(dev.Attr().MaxSGE)
	p := NewPair(t, env, PairConfig{SGE: counts[len(counts)-1]})
	const spare = 33
	largest := messageSizes[len(messageSizes)-1]
	from, to := p.Active, p.Passive
	src := map[*End]*Mem{from: from.Register(t, pattern(largest, 1), 0), to: to.Register(t, pattern(largest, 2), 0)}
	dst := map[*End]*Mem{}
	for _, e := range []*End{from, to} {
		dst[e] = e.Register(t, guarded(largest+spare), localWrite)
	}
	id := uint64(0)
	for _, size := range messageSizes {
		for _, out := range counts {
			for _, in := range counts {
				id++
				buf := dst[to].Buf[:size+spare]
				copy(buf, guarded(len(buf)))
				to.Recv(t, ibv.RecvWR{ID: id, SGL: dst[to].SGL(0, len(buf), in)})
				from.Send(t, ibv.SendWR{ID: id, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src[from].SGL(0, size, out)})
				succeeded(t, from, next(t, from.SendCQ), id, ibv.WCSend)
				wc := next(t, to.RecvCQ)
				succeeded(t, to, wc, id, ibv.WCRecv)
				if int(wc.ByteLen) != size || wc.Flags != 0 {
					t.Fatalf("completion %+v for %d bytes", wc, size)
				}
				sameBytes(t, "message", buf[:size], src[from].Buf[:size])
				untouched(t, "behind the message", buf[size:])
				from, to = to, from
			}
		}
	}
}

// testReceiveOrder sends messages of very different sizes: they fill the
// receives in the order in which both were posted.
func testReceiveOrder(t *testing.T, env Env) {
	const rounds, each, room = 8, 16, 40000
	p := NewPair(t, env, PairConfig{SendWR: each, RecvWR: each})
	src := p.Active.Register(t, pattern(room, 1), 0)
	dst := p.Passive.Register(t, make([]byte, each*room), localWrite)
	size := func(i int) int { return (i * 7919) % room }
	for r := range rounds {
		var recvs []ibv.RecvWR
		var sends []ibv.SendWR
		for i := range each {
			id := r*each + i
			recvs = append(recvs, ibv.RecvWR{ID: uint64(id), SGL: dst.SGL(i*room, room, 1)})
			sends = append(sends, ibv.SendWR{ID: uint64(id), Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, size(id), 1)})
		}
		p.Passive.Recv(t, recvs...)
		p.Active.Send(t, sends...)
		for i := range each {
			id := r*each + i
			succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(id), ibv.WCSend)
			wc := next(t, p.Passive.RecvCQ)
			succeeded(t, p.Passive, wc, uint64(id), ibv.WCRecv)
			sameBytes(t, "message", dst.Buf[i*room:][:wc.ByteLen], src.Buf[:size(id)])
		}
	}
}

// testPollOnly never sleeps in Wait: data moves all the same.
func testPollOnly(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	from, to := p.Active, p.Passive
	for id := range uint64(100) {
		to.Recv(t, ibv.RecvWR{ID: id})
		from.Send(t, ibv.SendWR{ID: id, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		succeeded(t, to, pollNext(t, to.RecvCQ), id, ibv.WCRecv)
		succeeded(t, from, pollNext(t, from.SendCQ), id, ibv.WCSend)
		from, to = to, from
	}
}

// testListsAreFree overwrites work requests and their lists after the post.
func testListsAreFree(t *testing.T, env Env) {
	const n, size = 16, 5000
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, pattern(n*size, 1), 0)
	dst := p.Passive.Register(t, make([]byte, n*size), localWrite)
	other := make([]byte, size) // registered nowhere

	var recvs []ibv.RecvWR
	var sends []ibv.SendWR
	for i := range n {
		recvs = append(recvs, ibv.RecvWR{ID: uint64(i), SGL: dst.SGL(i*size, size, 1)})
		sends = append(sends, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(i*size, size, 1)})
	}
	p.Passive.Recv(t, recvs...)
	for i := range recvs {
		recvs[i].SGL[0] = ibv.SGE{Buf: other}
		recvs[i] = ibv.RecvWR{ID: 99}
	}
	p.Active.Send(t, sends...)
	for i := range sends {
		sends[i].SGL[0] = ibv.SGE{Buf: other}
		sends[i] = ibv.SendWR{ID: 99, Op: ibv.OpRead}
	}
	for i := range n {
		succeeded(t, p.Active, next(t, p.Active.SendCQ), uint64(i), ibv.WCSend)
		succeeded(t, p.Passive, next(t, p.Passive.RecvCQ), uint64(i), ibv.WCRecv)
	}
	sameBytes(t, "messages", dst.Buf, src.Buf)
}

// testTooManyElements posts longer lists than were granted.
func testTooManyElements(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	c := p.Active.QP.Cap()
	over := max(c.MaxSendSGE, c.MaxRecvSGE) + 1
	mem := p.Active.Register(t, make([]byte, over), allRights)
	n, err := p.Active.QP.PostSend([]ibv.SendWR{{Op: ibv.OpSend, SGL: mem.SGL(0, c.MaxSendSGE+1, c.MaxSendSGE+1)}})
	refused(t, "PostSend of too many elements", n, err)
	n, err = p.Active.QP.PostRecv([]ibv.RecvWR{{SGL: mem.SGL(0, c.MaxRecvSGE+1, c.MaxRecvSGE+1)}})
	refused(t, "PostRecv of too many elements", n, err)
	p.Active.transfer(t, p.Passive, pattern(10, 1))
	p.Passive.transfer(t, p.Active, pattern(10, 2))
}
