package rdmanet

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// A connection that has received much and is not idle otherwise holds no memory back from
// others: where there is a single chunk they take turns.
func TestScratchIsLeftToOthers(t *testing.T) {
	checkLeaks(t)
	for _, m := range transferPeers {
		t.Run(m.name, func(t *testing.T) {
			sw := newSwitch(t, nil)
			setScratchIdle(t, time.Hour)
			cfg := Config{Provider: sw, TransferSize: minTransfer, TransferMemory: regmem.ChunkSize, MaxReceiveSize: 1024, NoRDMARead: !m.reads}
			const size = 2 * regmem.ChunkSize
			// move returns how many regions and posts moving that much takes.
			move := func(from, to *Conn) (regions, posts int64) {
				regions, posts = sw.Calls(verbstest.RegMR), sw.Calls(verbstest.PostSend)
				data := pattern(1, size)
				wrote := make(chan error, 1)
				go func() {
					_, err := from.Write(data)
					wrote <- err
				}()
				got := make([]byte, size)
				for p := got; len(p) > 0; {
					n, err := to.Read(p[:min(1000, len(p))])
					require.NoError(t, err)
					p = p[n:]
				}
				require.NoError(t, <-wrote)
				defect.Bytes(t, data, got)
				return sw.Calls(verbstest.RegMR) - regions, sw.Calls(verbstest.PostSend) - posts
			}
			a, b := pipeOn(t, cfg)
			c, d := pipeOn(t, cfg)
			defer func() {
				setScratchIdle(t, 0)
				regmem.TrimChunks(a.dom.Dev)
			}()
			defer closeBoth(t, a, b)
			defer closeBoth(t, c, d)
			_, posts := move(a, b)
			// Receive memory that grows or shrinks takes a region now and then, too, so the
			// least of several counts.
			warm, cold := int64(math.MaxInt64), int64(math.MaxInt64)
			for range 4 {
				n, _ := move(a, b)
				warm = min(warm, n)
				move(c, d)
				n, _ = move(a, b)
				cold = min(cold, n)
			}
			if m.reads {
				require.Less(t, warm, cold, "what it gets again is registered as it was")
			}
			for range 2 {
				for _, ends := range [][2]*Conn{{c, d}, {d, c}, {b, a}, {a, b}} {
					_, others := move(ends[0], ends[1])
					require.LessOrEqual(t, others, 8*posts)
				}
			}
			require.Equal(t, 1, regmem.ChunksOf(a.dom.Dev))
		})
	}
}
