package iwarp

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A request that is wrong fails in its turn, also when its turn comes by the end
// of one that is done without the peer.
func TestFaultBehindLocalInvalidate(t *testing.T) {
	bad := []ibv.SGE{{Buf: make([]byte, 1), LKey: 0}}
	for _, tt := range []struct {
		name string
		wr   ibv.SendWR
		want ibv.WCStatus
	}{
		{"wrong local key", ibv.SendWR{ID: 2, Op: ibv.OpSend, SGL: bad}, ibv.WCLocProtErr},
		{"key taken back twice", ibv.SendWR{ID: 2, Op: ibv.OpLocalInv}, ibv.WCMWBindErr},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, cfg Config) {
				leaktest.Check(t)
				s := newSite(t, cfg)
				mem := newMemory(t, s.p)
				v, p := s.connect(mem, false, 0)
				tt.wr.InvKey = mem.both.LKey()
				_, err := v.qp.PostSend([]ibv.SendWR{
					{ID: 1, Op: ibv.OpLocalInv, Flags: ibv.SendSignaled, InvKey: mem.both.LKey()}, tt.wr})
				require.NoError(t, err)
				require.Equal(t, map[uint64]ibv.WCStatus{1: ibv.WCSuccess, 2: tt.want}, v.completions(2))
				v.event()
				v.close()
				mem.close()
				p.drain()
			})
		})
	}
}

// What was posted behind an RDMA Read that fails does not succeed after it, even
// if TCP has it.
func TestFlushBehindRead(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		v, p := s.connect(mem, false, 0)
		v.read(8)
		_, err := v.qp.PostSend([]ibv.SendWR{{ID: 1}, {ID: 2, Flags: ibv.SendSignaled}})
		require.NoError(t, err)
		for range 3 {
			p.frame()
		}
		require.NoError(t, v.qp.SetError())
		require.Equal(t, map[uint64]ibv.WCStatus{readID: ibv.WCFlushErr, 1: ibv.WCFlushErr, 2: ibv.WCFlushErr}, v.completions(3))
		v.close()
		mem.close()
		p.drain()
	})
}

// Receives are flushed in the order they were posted, those too that are posted
// meanwhile.
func TestReceivesFlushInOrder(t *testing.T) {
	leaktest.Check(t)
	p := newOverTCP(Config{})
	for range 100 {
		id := &id{dev: p.dev}
		pd, err := p.dev.AllocPD()
		require.NoError(t, err)
		c, err := p.dev.CreateCQ(maxQPWR)
		require.NoError(t, err)
		q, err := id.CreateQP(pd, ibv.QPInit{SendCQ: c, RecvCQ: c, Cap: ibv.QPCap{MaxRecvWR: maxQPWR}})
		require.NoError(t, err)
		const before, meanwhile = 500, 500
		post := func(i int) {
			_, err := q.PostRecv([]ibv.RecvWR{{ID: uint64(i)}})
			require.NoError(t, err)
		}
		for i := range before {
			post(i)
		}
		var posting sync.WaitGroup
		posting.Go(func() {
			for i := range meanwhile {
				post(before + i)
			}
		})
		require.NoError(t, q.SetError())
		posting.Wait()
		wcs := make([]ibv.WC, before+meanwhile+1)
		n, err := c.Poll(wcs)
		require.NoError(t, err)
		require.Equal(t, before+meanwhile, n)
		for i := range n {
			require.Equal(t, uint64(i), wcs[i].ID, "order of the flush")
		}
		require.NoError(t, q.Close())
		require.NoError(t, c.Close())
		require.NoError(t, pd.Close())
	}
}

// SetError ends the connection also when it comes while that is being set up.
func TestSetErrorWhileConnecting(t *testing.T) {
	leaktest.Check(t)
	s := newSite(t, Config{})
	for range 300 {
		p := dialRaw(t, s.ln.Addr())
		p.send(request(false))
		mem := newMemory(t, s.p)
		v := newVictim(t, s.accept(), mem, 0)
		accepted := make(chan error, 1)
		go func() { accepted <- v.id.Accept(context.Background(), depths) }()
		p.start(true)
		require.NoError(t, v.qp.SetError())
		err := <-accepted
		if err != nil {
			require.ErrorIs(t, err, ibv.ErrState)
		} else {
			v.event()
		}
		p.drain()
		v.close()
		mem.close()
	}
}
