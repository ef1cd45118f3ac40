package iwarp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A key that this side has taken back opens nothing from then on, also in the
// middle of a segment that is being received.
func TestInvalidateInsideWrite(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		v, p := s.connect(mem, false, 0)
		b := seal(false, writeOf(mem.both.RKey(), mem.both.Addr(), bytesOf(100)))
		st := v.qp.(*qp).stream.Load()
		st.seize(p)
		p.send(b[:50])
		for st.once = true; !st.rx.inFrame || st.rx.left == 100; {
			st.receive(nil)
		}
		st.once = false
		st.leave()
		placed := mem.touched()
		_, err := v.qp.PostSend([]ibv.SendWR{{ID: 1, Op: ibv.OpLocalInv, Flags: ibv.SendSignaled, InvKey: mem.both.LKey()}})
		require.NoError(t, err)
		require.Equal(t, map[uint64]ibv.WCStatus{1: ibv.WCSuccess}, v.completions(1))
		p.send(b[50:])
		require.ErrorIs(t, v.event().Err, errRegionGone)
		require.Equal(t, placed, mem.touched(), "bytes placed with a key that was taken back")
		v.close()
		mem.close()
		p.drain()
	})
}

// The same for a Read Response that was asked for and has not been sent.
func TestInvalidateBeforeReadResponse(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		big := make([]byte, 16<<20) // more than the sockets on both sides hold
		mr, err := mem.pd.RegMR(big, ibv.AccessRemoteRead)
		require.NoError(t, err)
		v, p := s.connect(mem, false, 1)
		req := iwarpwire.ReadReq{SinkSTag: 1, Size: uint32(len(big)), SrcSTag: mr.RKey(), SrcTO: mr.Addr()}
		p.send(seal(false, readOf(1, req)), seal(false, readOf(2, req)), seal(false, sendOf(1, 0, true, nil)))
		require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
		_, err = v.qp.PostSend([]ibv.SendWR{{ID: 1, Op: ibv.OpLocalInv, Flags: ibv.SendSignaled, InvKey: mr.LKey()}})
		require.NoError(t, err)
		p.drain() // the first goes ahead of what was posted after it was begun
		require.ErrorIs(t, v.event().Err, errRegionGone)
		require.Equal(t, map[uint64]ibv.WCStatus{1: ibv.WCSuccess}, v.completions(1))
		v.close()
		require.NoError(t, mr.Close())
		mem.close()
	})
}

// Memory that was closed right after bytes were read into it is not looked at any
// more, not even for their CRC: it may be unmapped, or hold something else.
func TestCloseBehindRead(t *testing.T) { eachMode(t, testCloseBehindRead) }

func testCloseBehindRead(t *testing.T, cfg Config) {
	leaktest.Check(t)
	s := newSite(t, cfg)
	mem := newMemory(t, s.p)
	buf := make([]byte, 100)
	mr, err := mem.pd.RegMR(buf, ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
	require.NoError(t, err)
	v, p := s.connect(mem, true, 1)
	b := seal(true, writeOf(mr.RKey(), mr.Addr(), bytesOf(len(buf))))
	st := v.qp.(*qp).stream.Load()
	st.seize(p)
	p.send(b[:50])
	for st.once = true; !st.rx.inFrame || st.rx.left == len(buf); {
		st.receive(nil)
	}
	p.send(b[50:])
	st.link.setReadDeadline(time.Time{})
	require.NoError(t, st.link.read(func(at uintptr) bool {
		n, wait, err := st.readSome(at)
		if wait {
			return false
		}
		require.NoError(t, mr.Close())
		clear(buf)
		return st.arrived(n, err)
	}))
	st.once = false
	require.True(t, st.parse())
	st.leave()
	p.send(seal(true, sendOf(1, 0, true, nil)))
	require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
	v.close()
	mem.close()
	p.drain()
}
