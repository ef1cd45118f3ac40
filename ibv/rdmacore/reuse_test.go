//go:build linux && cgo

package rdmacore

import (
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// guestIDs are resolved to the RDMA device of a guest.
func guestIDs(t *testing.T, n int) []ibv.ID {
	a := os.Getenv("RDMANET_VM_ADDR")
	if a == "" {
		t.Skip("RDMANET_VM_ADDR does not name the address of an RDMA device: make vm runs this where there is one")
	}
	p, err := New(Config{})
	require.NoError(t, err)
	l, err := p.Listen(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(a), 0), 0)
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	ids := make([]ibv.ID, n)
	for i := range ids {
		ids[i], err = p.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
		require.NoError(t, err)
		t.Cleanup(func() { ids[i].Close() })
	}
	return ids
}

// TestNumberReused creates queue pairs while others that complete on the same queue
// are closed: siw gives their numbers to the new ones at once, whose completions must
// not be lost. There are more threads than processors, so that some lag behind.
func TestNumberReused(t *testing.T) {
	ids := guestIDs(t, 16)
	pd, err := ids[0].Device().AllocPD()
	require.NoError(t, err)
	defer pd.Close()
	shared, err := ids[0].Device().CreateCQ(16)
	require.NoError(t, err)
	defer shared.Close()
	c := shared.(*cq)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	times := 400
	if testing.Short() {
		times = 100
	}
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			for range times {
				q, err := id.CreateQP(pd, ibv.QPInit{SendCQ: c, RecvCQ: c, Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
				if !assert.NoError(t, err) {
					return
				}
				c.mu.Lock()
				known := c.qps[q.QPN()]
				c.mu.Unlock()
				same := assert.True(t, known == q, "queue pair %d is another's, or nobody's", q.QPN())
				if !assert.NoError(t, q.Close()) || !same {
					return
				}
			}
		})
	}
	wg.Wait()
}
