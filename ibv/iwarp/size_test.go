package iwarp

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// Requests may name memory more often than there is: their size is told to be
// too much, whatever an int holds.
func TestSizeOfRequests(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		c, err := s.p.dev.CreateCQ(1)
		require.NoError(t, err)
		p := dialRaw(t, s.ln.Addr())
		p.send(request(false))
		id := s.accept()
		q, err := id.CreateQP(mem.pd, ibv.QPInit{SendCQ: c, RecvCQ: c,
			Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: maxSGE, MaxRecvSGE: maxSGE}})
		require.NoError(t, err)
		require.NoError(t, id.Accept(t.Context(), depths))
		huge := make([]byte, (maxMsgSize/maxSGE)+1)
		mr, err := mem.pd.RegMR(huge, ibv.AccessLocalWrite)
		require.NoError(t, err)
		var sgl []ibv.SGE
		for range maxSGE {
			sgl = append(sgl, ibv.SGE{Buf: huge, LKey: mr.LKey()})
		}
		for _, flags := range []ibv.SendFlags{0, ibv.SendInline} {
			_, err = q.PostSend([]ibv.SendWR{{Flags: flags, SGL: sgl}})
			require.ErrorIs(t, err, ibv.ErrLimit)
		}
		require.NoError(t, q.Close())
		require.NoError(t, c.Close())
		require.NoError(t, id.Close())
		require.NoError(t, mr.Close())
		mem.close()
		p.drain()
	})
}

// The largest message is cut into frames of every size.
func TestSegmentSizeOfLargest(t *testing.T) {
	st := new(stream)
	for _, limit := range []int{110, 1440, 65517, 65521} {
		n := st.segmentSize(math.MaxInt32, limit)
		require.Positive(t, n, "limit %d", limit)
		require.LessOrEqual(t, n, limit)
	}
}
