package iwarp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A responder that does not answer gets RDMA Writes of no bytes behind what was sent,
// until it does, whether it wants an RTR message or not.
func TestNudge(t *testing.T) {
	for name, words := range map[string][2]uint16{"no RTR": {2, 2}, "RTR": {0x8000 | 2, 0x8000 | 2}} {
		t.Run(name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, cfg Config) {
				leaktest.Check(t)
				v, p, result := dialingRaw(t, cfg)
				p.send(reply(words[0], words[1]))
				require.NoError(t, <-result)
				empty := iwarpwire.Header{Tagged: true, Op: iwarpwire.Write, Last: true, STag: 1}
				if words[0] != 2 {
					h, _ := p.frame()
					require.Equal(t, empty, h)
				}

				st := v.qp.(*qp).stream.Load()
				st.qp.sq.mu.Lock()
				before := st.tx.framed
				st.nudge()
				require.Equal(t, before, st.tx.framed, "nothing has been sent that could be overlooked")
				require.NotNil(t, st.tx.first)
				st.qp.sq.mu.Unlock()

				say := func(text string) {
					t.Helper()
					_, err := v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: []byte(text)}}}})
					require.NoError(t, err)
				}
				say("first")
				h, payload := p.frame()
				require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, Last: true, MSN: 1}, h)
				require.Equal(t, "first", string(payload))
				for range 3 {
					h, payload := p.frame()
					require.Equal(t, empty, h)
					require.Empty(t, payload)
				}

				p.send(seal(false, sendOf(1, 0, true, []byte("answer"))))
				require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
				st.qp.sq.mu.Lock()
				require.Nil(t, st.tx.first, "nudges go on behind the answer")
				st.qp.sq.mu.Unlock()
				say("second")
				for h, payload = p.frame(); h == empty; h, payload = p.frame() { // it was on its way when the answer came
				}
				require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, Last: true, MSN: 2}, h)
				require.Equal(t, "second", string(payload))
				p.hangUp(false)
				require.NoError(t, v.event().Err)
				v.close()
				v.mem.close()
				p.ended()
			})
		})
	}
}

// No nudge comes to a peer whose device holds Sends.
func TestNoNudgeForPeerThatHolds(t *testing.T) {
	leaktest.Check(t)
	v, p, result := dialingRaw(t, Config{})
	p.send(reply(2, 2))
	require.NoError(t, <-result)
	st := v.qp.(*qp).stream.Load()
	first := func() *time.Timer {
		st.qp.sq.mu.Lock()
		defer st.qp.sq.mu.Unlock()
		return st.tx.first
	}
	require.NotNil(t, first())
	v.qp.(ibv.HoldingQP).PeerHolds()
	require.Nil(t, first())
	p.hangUp(false)
	require.NoError(t, v.event().Err)
	v.close()
	v.mem.close()
	p.ended()
}

// No nudge comes while the socket has not taken what was sent, and none behind the end of
// a stream.
func TestNudgeNotDue(t *testing.T) {
	leaktest.Check(t)
	v, p, result := dialingRaw(t, Config{})
	p.send(reply(2, 2))
	require.NoError(t, <-result)
	big := make([]byte, maxInline)
	st := v.qp.(*qp).stream.Load()
	for full := false; !full; {
		_, err := v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: big}}}})
		require.NoError(t, err)
		st.qp.sq.mu.Lock()
		if full = st.tx.flushing; full {
			st.nudge()
			require.Equal(t, rtrNone, st.tx.rtr)
		}
		st.qp.sq.mu.Unlock()
	}
	p.hangUp(true)
	require.Error(t, v.event().Err)
	st.qp.sq.mu.Lock()
	require.Nil(t, st.tx.first)
	st.qp.sq.mu.Unlock()
	v.close()
	v.mem.close()
}
