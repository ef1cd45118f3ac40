package iwarp

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A reset is no orderly end, even if it is a send that meets it: systems tell of
// it once, and reads find the end of the stream afterwards.
func TestResetMetBySend(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		v, p := s.connect(mem, false, 1)
		q := v.qp.(*qp)
		st := q.stream.Load()
		p.send(seal(false, sendOf(1, 0, true, nil)))
		v.completions(1)

		st.seize(p) // nobody reads
		p.hangUp(true)
		for stopped := false; !stopped; {
			_, err := v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline}})
			if err != nil {
				require.ErrorIs(t, err, ibv.ErrQueueFull)
			}
			var wcs [16]ibv.WC
			_, err = v.cq.Poll(wcs[:])
			require.NoError(t, err)
			q.sq.mu.Lock()
			stopped = st.tx.stopped
			q.sq.mu.Unlock()
		}
		st.leave()
		require.ErrorIs(t, v.event().Err, syscall.ECONNRESET)
		v.close()
		mem.close()
	})
}

// Who closes the queue pair after a violation does not cut short the time in
// which the peer may read the Terminate: closing a socket that holds unread data
// might take it away.
func TestTerminateOutlivesQueuePair(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		v, p := s.connect(mem, false, 0)
		p.send(seal(false, sendOf(7, 0, true, nil)))
		require.Error(t, v.event().Err)
		h, _ := p.frame()
		require.Equal(t, iwarpwire.Terminate, h.Op)
		st := v.qp.(*qp).stream.Load()
		v.close()
		require.False(t, socketOf(st).dirty.Load(), "the socket has a read deadline by which its listening ends")
		p.hangUp(false)
		p.ended()
		mem.close()
	})
}
