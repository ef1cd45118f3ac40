package iwarp

import (
	"context"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

type end struct {
	id  ibv.ID
	pd  ibv.PD
	cq  ibv.CQ
	qp  ibv.QP
	mr  ibv.MR
	buf []byte
}

func newEnd(t testing.TB, id ibv.ID, recvs, size int) *end {
	e := &end{id: id}
	var err error
	chk := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	e.pd, err = id.Device().AllocPD()
	chk()
	e.cq, err = id.Device().CreateCQ(1024)
	chk()
	e.qp, err = id.CreateQP(e.pd, ibv.QPInit{SendCQ: e.cq, RecvCQ: e.cq, Cap: ibv.QPCap{MaxSendWR: 256, MaxRecvWR: 256, MaxSendSGE: 2, MaxRecvSGE: 1}})
	chk()
	e.buf = make([]byte, recvs*size)
	e.mr, err = e.pd.RegMR(e.buf, ibv.AccessLocalWrite)
	chk()
	for i := range recvs {
		_, err = e.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: e.buf[i*size : (i+1)*size], LKey: e.mr.LKey()}}}})
		chk()
	}
	return e
}

func newPair(t testing.TB, cfg Config, recvs, size int) (*end, *end) {
	p := newOverTCP(cfg)
	ln, err := p.Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ch := make(chan *end)
	go func() {
		id, err := ln.Accept(context.Background())
		if err != nil {
			t.Error(err)
		}
		e := newEnd(t, id, recvs, size)
		if err := id.Accept(context.Background(), ibv.ConnParam{ResponderResources: 4, InitiatorDepth: 4}); err != nil {
			t.Error(err)
		}
		ch <- e
	}()
	id, err := p.Resolve(context.Background(), netip.AddrPort{}, ln.Addr())
	if err != nil {
		t.Fatal(err)
	}
	a := newEnd(t, id, recvs, size)
	if err := id.Connect(context.Background(), ibv.ConnParam{ResponderResources: 4, InitiatorDepth: 4}); err != nil {
		t.Fatal(err)
	}
	return a, <-ch
}

func (e *end) next(t testing.TB) ibv.WC {
	var wc [1]ibv.WC
	for {
		e.cq.Arm(false)
		n, err := e.cq.Poll(wc[:])
		if err != nil {
			t.Fatal(err)
		}
		if n == 1 {
			if wc[0].Status != 0 {
				t.Fatal(wc[0].Status)
			}
			return wc[0]
		}
		if err := e.cq.Wait(time.Time{}); err != nil {
			t.Fatal(err)
		}
	}
}

func BenchmarkPing(b *testing.B) {
	for _, portable := range []bool{false, true} {
		name := "raw"
		if portable {
			name = "portable"
		}
		b.Run(name, func(b *testing.B) {
			x, y := newPair(b, Config{portable: portable}, 4, 4096)
			msg := make([]byte, 64)
			go func() {
				for i := 0; i < b.N; i++ {
					wc := y.next(b)
					y.qp.PostRecv([]ibv.RecvWR{{ID: wc.ID, SGL: []ibv.SGE{{Buf: y.buf[wc.ID*4096 : (wc.ID+1)*4096], LKey: y.mr.LKey()}}}})
					y.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: msg}}}})
				}
			}()
			b.ResetTimer()
			for i := 0; i < b.N; i++ {
				x.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: msg}}}})
				wc := x.next(b)
				x.qp.PostRecv([]ibv.RecvWR{{ID: wc.ID, SGL: []ibv.SGE{{Buf: x.buf[wc.ID*4096 : (wc.ID+1)*4096], LKey: x.mr.LKey()}}}})
			}
			b.StopTimer()
			x.qp.Close()
			y.qp.Close()
		})
	}
	b.Run("tcp", func(b *testing.B) {
		ln, _ := net.Listen("tcp", "127.0.0.1:0")
		go func() {
			c, _ := ln.Accept()
			io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
		}()
		c, _ := net.Dial("tcp", ln.Addr().String())
		msg := make([]byte, 64)
		for i := 0; i < b.N; i++ {
			c.Write(msg)
			io.ReadFull(c, msg)
		}
		c.Close()
	})
}

func BenchmarkBulk(b *testing.B) {
	const size = 64 << 10
	b.Run("raw", func(b *testing.B) {
		b.SetBytes(size)
		x, y := newPair(b, Config{}, 32, size)
		msg := make([]byte, size)
		credits := make(chan struct{}, 64)
		for range 32 {
			credits <- struct{}{}
		}
		go func() {
			for i := 0; i < b.N; i++ {
				<-credits
				x.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: msg}}}})
			}
		}()
		dst := make([]byte, size)
		for i := 0; i < b.N; i++ {
			wc := y.next(b)
			copy(dst, y.buf[wc.ID*size:(wc.ID+1)*size])
			y.qp.PostRecv([]ibv.RecvWR{{ID: wc.ID, SGL: []ibv.SGE{{Buf: y.buf[wc.ID*size : (wc.ID+1)*size], LKey: y.mr.LKey()}}}})
			credits <- struct{}{}
		}
		x.qp.Close()
		y.qp.Close()
	})
	b.Run("tcp", func(b *testing.B) {
		b.SetBytes(size)
		ln, _ := net.Listen("tcp", "127.0.0.1:0")
		c, _ := net.Dial("tcp", ln.Addr().String())
		d, _ := ln.Accept()
		go func() {
			msg := make([]byte, size)
			for i := 0; i < b.N; i++ {
				c.Write(msg)
			}
			c.Close()
		}()
		dst := make([]byte, size)
		for {
			_, err := d.Read(dst)
			if err != nil {
				break
			}
		}
	})
}
