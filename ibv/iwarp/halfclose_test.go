package iwarp

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// sendsClosed waits for the end of the peer's direction alone.
func (v *victim) sendsClosed() {
	v.t.Helper()
	select {
	case e := <-v.events:
		require.Equal(v.t, ibv.Event{Kind: ibv.EventSendsClosed}, e)
	case <-time.After(patience):
		require.FailNow(v.t, "the peer's direction did not end")
	}
}

// say has the victim send text, and hears it at the peer.
func (v *victim) say(p *rawPeer, text string) {
	v.t.Helper()
	_, err := v.qp.PostSend(inline([]byte(text)))
	require.NoError(v.t, err)
	defect.Bytes(v.t, text, p.message())
}

// acknowledged requires what the device says of what the peer's host has got. The link that is
// portable cannot tell.
func (v *victim) acknowledged(want ibv.Ack) {
	v.t.Helper()
	if v.qp.(*qp).stream.Load().direct == nil || !haveHeard {
		want = ibv.AckUnknown
	}
	require.Eventually(v.t, func() bool { return v.id.(ibv.Acknowledger).Acknowledged() == want }, patience, time.Millisecond)
}

// closeSends ends the victim's direction, and finds the end at the peer.
func (v *victim) closeSends(p *rawPeer) {
	v.t.Helper()
	require.NoError(v.t, v.qp.(ibv.HoldingQP).CloseSends())
	if _, err := v.qp.PostSend(inline([]byte("late"))); err == nil {
		require.Equal(v.t, ibv.QPSError, v.qp.State()) // Both directions have ended, and the request is flushed.
	} else {
		require.ErrorIs(v.t, err, ibv.ErrState)
	}
	p.ended()
}

// Either side ends its direction first, and the other direction goes on. The connection ends
// when both have ended.
func TestCloseSends(t *testing.T) {
	for _, peerFirst := range []bool{false, true} {
		eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
			frames := sends(3)
			p.send(frames[0])
			v.completions(1)
			v.say(p, "before")
			if peerFirst {
				p.send(frames[1]) // It waits for a receive, and the end waits behind it.
				p.hangUp(false)
				v.holding()
				v.say(p, "while a Send waits")
				v.receive(0)
				require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
				v.sendsClosed()
				v.receive(0)
				v.say(p, "after the peer's end")
				v.acknowledged(ibv.AckPending)
				v.closeSends(p)
				require.NoError(t, v.event().Err)
				require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCFlushErr}, v.completions(1))
			} else {
				v.closeSends(p)
				v.acknowledged(ibv.AckAll)
				p.send(frames[1], frames[2])
				for range 2 { // They are not dropped.
					v.holding()
					v.receive(0)
					require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
				}
				p.hangUp(false)
				require.NoError(t, v.event().Err)
			}
			require.Equal(t, ibv.QPSError, v.qp.State())
			v.acknowledged(ibv.AckAll)
		})
	}
}

// CloseSends ends the direction behind everything that was posted, however little room the peer has.
func TestCloseSendsBehindData(t *testing.T) {
	eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
		require.NoError(t, p.conn.SetReadBuffer(1<<16))
		require.NoError(t, socketOf(v.qp.(*qp).stream.Load()).conn.SetWriteBuffer(1<<16))
		text := make([]byte, inPlaceSize)
		_, err := v.qp.PostSend(inline(text))
		require.NoError(t, err)
		require.NoError(t, v.qp.(ibv.HoldingQP).CloseSends())
		require.Positive(t, v.id.(ibv.Unsender).Unsent())
		v.acknowledged(ibv.AckPending)
		defect.Bytes(t, text, p.message())
		p.ended()
		v.acknowledged(ibv.AckAll)
	})
}

// The end of the peer's direction ends the connection if the peer closes, whatever is known
// first, and if the peer's queue pair holds no Sends.
func TestEndWithPeer(t *testing.T) {
	for _, tell := range []func(q ibv.HoldingQP){ibv.HoldingQP.PeerCloses, ibv.HoldingQP.StopHolding} {
		for _, before := range []bool{false, true} {
			eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
				if before {
					tell(v.qp.(ibv.HoldingQP))
				}
				p.hangUp(false)
				if !before {
					v.sendsClosed()
					v.say(p, "still there")
					tell(v.qp.(ibv.HoldingQP))
				}
				require.NoError(t, v.event().Err)
				p.ended()
			})
		}
	}
}

// A peer that ends its direction and closes is found by the next sends, as with TCP, since nothing
// is received any more. It is no error of this side.
func TestPeerClosesBehindItsSends(t *testing.T) {
	eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
		p.hangUp(false)
		v.sendsClosed()
		require.NoError(t, p.conn.Close())
		require.Eventually(t, func() bool {
			v.qp.PostSend(inline([]byte("anybody there?")))
			return v.qp.State() == ibv.QPSError
		}, patience, time.Millisecond)
		require.NoError(t, v.event().Err)
	})
}

// A peer that goes without having taken everything and its end is found out.
func TestNeverAcknowledged(t *testing.T) {
	eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
		require.NoError(t, p.conn.SetReadBuffer(1<<16))
		p.hangUp(false)
		v.sendsClosed()
		_, err := v.qp.PostSend(inline(make([]byte, inPlaceSize/4)))
		require.NoError(t, err)
		require.NoError(t, v.qp.(ibv.HoldingQP).CloseSends())
		require.Eventually(t, func() bool { return v.qp.State() == ibv.QPSError }, patience, time.Millisecond)
		require.NoError(t, v.event().Err)
		v.acknowledged(ibv.AckPending)
		p.hangUp(true)
		v.acknowledged(ibv.AckNever)
	})
}

// The end of the peer's direction inside a message ends the connection, and so does a reset.
func TestSendsCutShort(t *testing.T) {
	for _, reset := range []bool{false, true} {
		eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
			if !reset {
				p.send(sends(1)[0][:10])
			}
			p.hangUp(reset)
			err := v.event().Err
			if reset {
				require.ErrorIs(t, err, syscall.ECONNRESET)
			} else {
				require.Equal(t, errPeerQuit, err)
			}
		})
	}
}

// A connection of which one direction has ended, or both, can be closed and broken.
func TestCloseAfterHalf(t *testing.T) {
	for _, which := range []string{"ours", "theirs", "both"} {
		for _, aborts := range []bool{false, true} {
			eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
				if which != "ours" {
					p.hangUp(false)
					v.sendsClosed()
				}
				if which != "theirs" {
					v.closeSends(p)
				}
				if which == "both" {
					require.NoError(t, v.event().Err)
				}
				if aborts {
					require.NoError(t, v.qp.SetError())
					if which != "both" {
						require.Error(t, v.event().Err)
					}
				}
			})
		}
	}
}
