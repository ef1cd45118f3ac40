package iwarp_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// Two queue pairs of one process: a receive is posted, a Send fills it. With the
// provider of ibv/rdmacore in place of this one the rest is the same.
func Example() {
	ctx := context.Background()
	p := iwarp.New(iwarp.Config{})
	ln, err := p.Listen(ctx, netip.MustParseAddrPort("127.0.0.1:0"), 0)
	check(err)
	defer ln.Close()

	accepted := make(chan *end)
	go func() {
		id, err := ln.Accept(ctx)
		check(err)
		e := newEnd(id)
		_, err = e.qp.PostRecv([]ibv.RecvWR{{ID: 1, SGL: e.sgl(len(e.buf))}}) // before the peer may send
		check(err)
		check(id.Accept(ctx, ibv.ConnParam{}))
		accepted <- e
	}()
	id, err := p.Resolve(ctx, netip.AddrPort{}, ln.Addr())
	check(err)
	active := newEnd(id)
	defer active.close()
	check(id.Connect(ctx, ibv.ConnParam{Private: []byte("who I am")}))
	passive := <-accepted
	defer passive.close()

	n := copy(active.buf, "from memory to memory")
	_, err = active.qp.PostSend([]ibv.SendWR{{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: active.sgl(n)}})
	check(err)
	sent := active.completion()
	fmt.Println(sent.Op, sent.ID)
	received := passive.completion()
	fmt.Printf("%v %d: %s\n", received.Op, received.ID, passive.buf[:received.ByteLen])
	// Output:
	// send 2
	// receive 1: from memory to memory
}

// end is one end of a connection, with one region and one completion queue.
type end struct {
	id  ibv.ID
	pd  ibv.PD
	mr  ibv.MR
	cq  ibv.CQ
	qp  ibv.QP
	buf []byte
}

func newEnd(id ibv.ID) *end {
	e := &end{id: id, buf: make([]byte, 64)}
	var err error
	e.pd, err = id.Device().AllocPD()
	check(err)
	e.mr, err = e.pd.RegMR(e.buf, ibv.AccessLocalWrite)
	check(err)
	e.cq, err = id.Device().CreateCQ(16)
	check(err)
	e.qp, err = id.CreateQP(e.pd, ibv.QPInit{SendCQ: e.cq, RecvCQ: e.cq,
		Cap: ibv.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1}})
	check(err)
	return e
}

// sgl is the first n bytes of the region.
func (e *end) sgl(n int) []ibv.SGE { return []ibv.SGE{{Buf: e.buf[:n], LKey: e.mr.LKey()}} }

// completion waits for the next one: arm, poll once more, and only then wait.
func (e *end) completion() ibv.WC {
	var wcs [1]ibv.WC
	for {
		check(e.cq.Arm(false))
		n, err := e.cq.Poll(wcs[:])
		check(err)
		if n == 1 {
			if wcs[0].Status != ibv.WCSuccess {
				log.Fatal(wcs[0].Status)
			}
			return wcs[0]
		}
		check(e.cq.Wait(time.Now().Add(10 * time.Second)))
	}
}

// close releases everything, children first.
func (e *end) close() {
	check(e.id.Disconnect())
	check(e.qp.Close())
	check(e.cq.Close())
	check(e.mr.Close())
	check(e.pd.Close())
	check(e.id.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
