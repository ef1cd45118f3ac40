package fabric

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// BenchmarkDevice measures the share of the device in the root package's BenchmarkFabric: a
// request is posted, with its receive if it needs one, and both ends poll their completions.
func BenchmarkDevice(b *testing.B) {
	for _, c := range []struct {
		name string
		wr   ibv.SendWR
		size int
	}{
		{"Send/size=64B", ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendInline}, 64},
		{"Send/size=4KiB", ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled}, 4 << 10},
		{"Send/size=8KiB", ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled}, 8 << 10},
		{"Read/size=1MiB", ibv.SendWR{Op: ibv.OpRead, Flags: ibv.SendSignaled}, 1 << 20},
	} {
		b.Run(c.name, func(b *testing.B) {
			p := newPair(b, verbstest.PairConfig{Inline: 64})
			src := p.Active.Register(b, make([]byte, c.size), allRights)
			dst := p.Passive.Register(b, make([]byte, c.size), allRights)
			wr := c.wr
			wr.SGL, wr.RemoteAddr, wr.RKey = src.SGL(0, c.size, 1), dst.Addr(0), dst.MR.RKey()
			sends, recvs, wcs := []ibv.SendWR{wr}, []ibv.RecvWR{{SGL: dst.SGL(0, c.size, 1)}}, make([]ibv.WC, 8)
			cqs := []ibv.CQ{p.Active.SendCQ, p.Passive.RecvCQ}
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			for b.Loop() {
				if wr.Op == ibv.OpSend {
					if _, err := p.Passive.QP.PostRecv(recvs); err != nil {
						b.Fatal(err)
					}
				}
				if _, err := p.Active.QP.PostSend(sends); err != nil {
					b.Fatal(err)
				}
				for _, cq := range cqs {
					n, err := cq.Poll(wcs)
					if err != nil || n > 0 && wcs[0].Status != ibv.WCSuccess {
						b.Fatal(err, wcs[0])
					}
				}
			}
		})
	}
}
