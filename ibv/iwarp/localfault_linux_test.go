package iwarp

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A write that fails for a reason of this host's own, such as memory that cannot be read,
// ends the connection at both ends. The peer would wait for ever otherwise.
func TestWriteFailsHere(t *testing.T) {
	leaktest.Check(t)
	s := newSite(t, Config{})
	mem := newMemory(t, s.p)
	v, p := s.connect(mem, false, 0)
	const size = 64 << 10
	gone, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	defer syscall.Munmap(gone)
	mr, err := mem.pd.RegMR(gone, 0)
	require.NoError(t, err)
	require.NoError(t, syscall.Mprotect(gone, syscall.PROT_NONE))
	_, err = v.qp.PostSend([]ibv.SendWR{{ID: 1, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: gone, LKey: mr.LKey()}}}})
	require.NoError(t, err)
	require.ErrorIs(t, v.event().Err, syscall.EFAULT)
	require.Equal(t, map[uint64]ibv.WCStatus{1: ibv.WCFlushErr}, v.completions(1))
	p.drain()
	v.close()
	require.NoError(t, mr.Close())
	mem.close()
}

// Bytes that a peer does not take stay unsent, and Unsent counts them until the stream has
// failed.
func TestUnsent(t *testing.T) {
	leaktest.Check(t)
	s := newSite(t, Config{})
	mem := newMemory(t, s.p)
	v, p := s.connect(mem, false, 0)
	var id ibv.Unsender = v.id.(*id)
	require.Zero(t, id.Unsent())
	const size, sends = 1 << 20, 40 // more than both sockets hold
	var wrs []ibv.SendWR
	for range sends {
		wrs = append(wrs, ibv.SendWR{ID: 1, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: make([]byte, size)}}})
	}
	n, err := v.qp.PostSend(wrs)
	require.NoError(t, err)
	require.Equal(t, sends, n)
	require.Greater(t, id.Unsent(), size)
	require.LessOrEqual(t, id.Unsent(), sends*(size+1<<12))
	require.NoError(t, v.id.Disconnect())
	require.NotZero(t, id.Unsent())
	p.drain()
	v.event()
	require.Zero(t, id.Unsent())
	v.close()
	mem.close()
}
