package iwarp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// eachHolding runs a test with a queue pair that holds Sends and has one receive.
func eachHolding(t *testing.T, run func(t *testing.T, v *victim, p *rawPeer)) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		v, p := s.connectHolding(mem, 1)
		run(t, v, p)
		v.close()
		mem.close()
		p.drain()
	})
}

// sends has n Sends of eight bytes each, which have their number in the first one.
func sends(n int) (frames [][]byte) {
	for i := range n {
		frames = append(frames, seal(false, sendOf(uint32(i+1), 0, true, []byte{byte(i), 1, 2, 3, 4, 5, 6, 7})))
	}
	return frames
}

// holding waits until a Send waits for a receive.
func (v *victim) holding() {
	v.t.Helper()
	require.Eventually(v.t, v.qp.(*qp).stream.Load().holding.Load, patience, time.Millisecond)
}

// Sends that find no receive wait until there is one, whoever waits for them and whenever
// receives are posted, and come in order.
func TestSendsWaitForReceives(t *testing.T) {
	for _, polls := range []bool{false, true} {
		eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
			const n = 20
			p.send(sends(n)...)
			require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
			for i := 1; i < n; i++ {
				require.EqualValues(t, i-1, v.mem.region(0)[0])
				if i%3 == 0 {
					v.holding() // nobody waits for a completion
				}
				var waited chan struct{}
				if i%3 == 1 && !polls {
					waited = make(chan struct{})
					require.NoError(t, v.cq.Arm(false))
					go func() {
						defer close(waited)
						v.cq.Wait(time.Now().Add(patience))
					}()
					v.holding()
				}
				v.receive(0)
				if waited != nil {
					<-waited
				}
				if !polls {
					require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
					continue
				}
				var wcs [4]ibv.WC
				require.Eventually(t, func() bool {
					k, err := v.cq.Poll(wcs[:])
					require.NoError(t, err)
					return k == 1
				}, patience, 100*time.Microsecond)
			}
			defect.Bytes(t, []byte{n - 1, 1, 2, 3, 4, 5, 6, 7}, v.mem.region(0)[:8])
		})
	}
}

// A deadline ends a wait while a Send is held, and the wait after that gets it.
func TestWaitWhileSendIsHeld(t *testing.T) {
	eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
		p.send(sends(2)...)
		v.completions(1)
		v.holding()
		require.NoError(t, v.cq.Arm(false))
		require.Error(t, v.cq.Wait(time.Now().Add(10*time.Millisecond)))
		v.receive(0)
		require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
	})
}

// Without the property a Send that finds no receive ends the connection, also one that has
// waited.
func TestStopHolding(t *testing.T) {
	for _, before := range []bool{false, true} {
		eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
			if before {
				v.qp.(ibv.HoldingQP).StopHolding()
			}
			p.send(sends(2)...)
			v.completions(1)
			if !before {
				v.holding()
				v.qp.(ibv.HoldingQP).StopHolding()
			}
			require.ErrorContains(t, v.event().Err, "protocol")
			p.terminate()
		})
	}
}

// After a disconnect what finds no receive is dropped, of whatever size, and the end of the
// peer's stream is found behind it.
func TestHeldSendsAreDroppedAfterDisconnect(t *testing.T) {
	for _, held := range []bool{false, true} {
		eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
			frames := sends(3)
			big := make([]byte, 3*recvLen)
			frames = append(frames, seal(false, sendOf(4, 0, false, big)), seal(false, sendOf(4, uint32(len(big)), true, big)))
			if held {
				p.send(frames...)
				v.completions(1)
				v.holding()
			}
			require.NoError(t, v.id.Disconnect())
			if !held {
				p.send(frames...)
			}
			p.hangUp(false)
			require.NoError(t, v.event().Err)
		})
	}
}

// A connection with a Send that waits can be closed, and broken.
func TestCloseWhileSendIsHeld(t *testing.T) {
	for _, aborts := range []bool{false, true} {
		eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
			p.send(sends(2)...)
			v.completions(1)
			v.holding()
			if aborts {
				require.NoError(t, v.qp.SetError())
				v.event()
			}
		})
	}
}

// What was not ended in an orderly way ends with a reset: for a peer that has no other sign, the
// end of the link is the end of the data.
func TestAbortResets(t *testing.T) {
	eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
		require.NoError(t, v.qp.SetError())
		_, err := p.conn.Read(make([]byte, 1))
		require.True(t, isReset(err) && err.Error() != "EOF", "%v", err)
	})
}
