package iwarp

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// goneMemory returns memory that can no longer be accessed since it was registered. It goes with
// the test.
func goneMemory(t *testing.T, m *memory, size int, access ibv.Access) ([]byte, ibv.MR) {
	t.Helper()
	gone, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(gone)) })
	mr, err := m.pd.RegMR(gone, access)
	require.NoError(t, err)
	require.NoError(t, syscall.Mprotect(gone, syscall.PROT_NONE))
	return gone, mr
}

// A write that fails for a reason of this host's own, such as memory that cannot be read,
// ends the connection at both ends, whoever in this process finds that. The peer would wait for
// ever otherwise.
func TestWriteFailsHere(t *testing.T) {
	for _, cfg := range []Config{{}, {CRC: true}, {portable: true}, {portable: true, CRC: true}} {
		for _, size := range []int{100, 3000, 30_000, 64 << 10} {
			for _, inline := range []bool{false, true} {
				for _, sends := range []int{1, 8} {
					writeFailsHere(t, cfg, size, inline, sends)
				}
			}
		}
	}
}

func writeFailsHere(t *testing.T, cfg Config, size int, inline bool, sends int) {
	leaktest.Check(t)
	s := newSite(t, cfg)
	mem := newMemory(t, s.p)
	v, p := s.connect(mem, cfg.CRC, 0)
	gone, mr := goneMemory(t, mem, size, 0)
	wr := ibv.SendWR{Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: gone, LKey: mr.LKey()}}}
	if inline {
		wr.Flags |= ibv.SendInline
	}
	var wrs []ibv.SendWR
	flushed := make(map[uint64]ibv.WCStatus)
	for range sends {
		wr.ID++
		wrs, flushed[wr.ID] = append(wrs, wr), ibv.WCFlushErr
	}
	n, err := v.qp.PostSend(wrs)
	require.Equal(t, sends, n)
	if inline {
		require.ErrorIs(t, err, syscall.EFAULT, "the poster's memory is not sent later")
	} else {
		require.NoError(t, err, "the device has copied nothing yet")
	}
	require.ErrorIs(t, v.event().Err, syscall.EFAULT)
	require.Equal(t, flushed, v.completions(sends))
	p.drain()
	v.close()
	require.NoError(t, mr.Close())
	mem.close()
}

// A message that is received into memory that cannot be written ends the connection too.
func TestReceiveFailsHere(t *testing.T) {
	for _, cfg := range []Config{{}, {CRC: true}, {portable: true}, {portable: true, CRC: true}} {
		for _, size := range []int{100, 32 << 10} {
			leaktest.Check(t)
			s := newSite(t, cfg)
			mem := newMemory(t, s.p)
			v, p := s.connect(mem, cfg.CRC, 0)
			gone, mr := goneMemory(t, mem, size, ibv.AccessLocalWrite)
			_, err := v.qp.PostRecv([]ibv.RecvWR{{ID: 1, SGL: []ibv.SGE{{Buf: gone, LKey: mr.LKey()}}}})
			require.NoError(t, err)
			p.send(seal(cfg.CRC, sendOf(1, 0, true, make([]byte, size))))
			require.ErrorIs(t, v.event().Err, syscall.EFAULT)
			p.drain()
			v.close()
			require.NoError(t, mr.Close())
			mem.close()
		}
	}
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
