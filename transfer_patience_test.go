package rdmanet

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// How long a call waits for its memory that a peer is at work on.

func TestTransferPatience(t *testing.T) {
	setWithdrawWithin(t, time.Hour)
	ago := func(minutes int) time.Time { return time.Now().Add(-time.Duration(minutes) * time.Minute) }
	for _, test := range []struct {
		since, heard, wrote int // minutes ago
		more                int
	}{
		{0, 500, 500, 60},
		{59, 500, 500, 1},
		{60, 500, 500, 0},
		{100, 101, 500, -40},
		{100, 20, 500, 40},
		{100, 500, 30, 30},
		{100, 10, 30, 50},
		{700, 0, 0, 20},
		{720, 0, 0, 0},
	} {
		c := &conn{live: liveness{lastReceived: ago(test.heard)}}
		c.tx.wrote = ago(test.wrote)
		require.InDelta(t, float64(test.more), c.remainingPatience(ago(test.since)).Minutes(), 0.1, "%+v", test)
	}
}

// keepsTalking sends messages that say nothing for as long as d, and reports whether
// the connection outlives that.
func keepsTalking(p *smbdpeer.Raw, every, d time.Duration) (alive bool) {
	for start := time.Now(); ; time.Sleep(every) {
		for p.Credits < 1 {
			if _, _, ok := p.ReceiveData(); !ok {
				return false
			}
		}
		if time.Since(start) >= d {
			return true
		}
		p.Grant(1)
	}
}

const recalledRead = 1 << 20

// recalled has a Write, or a Read, miss its deadline while the peer is at work on its
// memory.
func recalled(t *testing.T, active, write bool) (s *scene, c *Conn, p *smbdpeer.Raw, ended chan result) {
	t.Helper()
	s = newScene(t)
	c, p = s.transferConns(active, write)
	if write {
		ended = writing(c, alloc(t, breachWrite).Bytes())
		p.ExpectBegin(true)
		c.SetWriteDeadline(past)
		p.ExpectTransfer(smbdpeer.Withdraw)
		return s, c, p, ended
	}
	ended = reading(c, make([]byte, recalledRead))
	c.awaitReader(t)
	p.Begin(false, 1, recalledRead, 0, 0)
	require.EqualValues(t, recalledRead, p.ExpectTransfer(smbdpeer.Grant).Length)
	c.SetReadDeadline(past)
	return s, c, p, ended
}

// A peer that takes long over what was withdrawn, but is heard, keeps its connection.
func TestTransferPatienceSlowPeer(t *testing.T) {
	for _, side := range sides {
		t.Run("write/"+side.name, func(t *testing.T) {
			inTime(t, 100*time.Millisecond, func(d time.Duration) bool {
				setWithdrawWithin(t, d)
				s, c, p, wrote := recalled(t, side.active, true)
				if !keepsTalking(p, d/10, 3*d) {
					return false
				}
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1})
				r := s.await(wrote)
				require.Zero(t, r.n)
				require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
				c.SetWriteDeadline(time.Now().Add(patience))
				_, err := c.Write([]byte("x"))
				return err == nil // else it has been broken
			})
		})
		t.Run("read/"+side.name, func(t *testing.T) {
			inTime(t, 100*time.Millisecond, func(d time.Duration) bool {
				setWithdrawWithin(t, d)
				s, _, p, read := recalled(t, side.active, false)
				if !keepsTalking(p, d/10, 3*d) {
					return false
				}
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: recalledRead}) // it claims
				return s.await(read) == result{recalledRead, nil}
			})
		})
	}
}

// One that does nothing but talk loses it all the same.
func TestTransferPatienceEnds(t *testing.T) {
	for _, side := range sides {
		for call, write := range map[string]bool{"write": true, "read": false} {
			t.Run(call+"/"+side.name, func(t *testing.T) {
				setWithdrawWithin(t, 50*time.Millisecond)
				s, _, p, ended := recalled(t, side.active, write)
				require.False(t, keepsTalking(p, 5*time.Millisecond, patience))
				r := s.await(ended)
				require.Zero(t, r.n)
				require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
				require.ErrorIs(t, s.logged(), errTransferHeld)
			})
		}
	}
}

// postQueued posts what is queued with mu held all the time, so that no other goroutine
// handles completions meanwhile.
func (c *conn) postQueued() {
	for c.lane.queue.Len() > 0 {
		b := c.lane.queue.Pop()
		c.lane.qp.PostSend(b.wrs)
		c.lane.batchPosted(b)
	}
}

// Who is asked for a transfer back says with each RDMA Read that comes that it goes
// on, until it says that it is done.
func TestTransferWithdrawnProgress(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.transferConns(side.active, true)
			if c.rx.depth < 2 {
				return // there is one Read at a time
			}
			const n = 2 * regmem.ChunkSize
			want := pattern(3, n)
			addr, key := p.Register(want)
			c.mu.Lock()
			c.rx.reading++ // somebody is about to read, so nothing is fetched ahead
			c.unlock()
			p.Begin(true, 1, n, addr, key)
			require.True(t, eventually(func() bool {
				c.mu.Lock()
				defer c.unlock()
				c.poll()
				return c.rx.live.Len() > 0
			}))
			c.mu.Lock()
			c.readAhead()
			c.postQueued()
			flying := c.rx.inFlight.Len()
			err := c.withdrawn(&transferHeader{Kind: transferWithdraw, ID: 1})
			polled := eventually(c.pollRead)
			answers := c.send.responseDue
			c.lane.flush()
			c.unlock()
			require.NoError(t, err)
			require.Equal(t, 2, flying)
			require.True(t, polled)
			require.True(t, answers, "there is one to come")
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: n}, p.ExpectTransfer(smbdpeer.Done))
			b := make([]byte, n)
			k, err := c.Read(b)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want[:k], b[:k]))
		})
	}
}

// pollRead handles one completion, if there is one, and reports whether it was an
// RDMA Read's. The caller holds mu.
func (c *conn) pollRead() bool {
	var wc [1]ibv.WC
	if n, _ := c.lane.cq.Poll(wc[:]); n == 0 {
		return false
	}
	c.complete(&wc[0])
	return wc[0].Op == ibv.WCRead
}

// A peer withdraws a transfer as a whole while a Read lends it memory, ends its stream and
// closes, all before the Read looks again. The Read finds the end of the stream.
func TestTransferWithdrawnThenClosed(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.transferConns(side.active, false)
			read := reading(c, make([]byte, recalledRead))
			c.awaitReader(t)
			p.Begin(false, 1, 100<<10, 0, 0)
			g := p.ExpectTransfer(smbdpeer.Grant)
			c.mu.Lock()
			p.WithdrawTransfer(false, 1, 0)
			p.Send(smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen))
			there := p.RDMA(ibv.OpWrite, make([]byte, 8), g.Addr, g.Key) // with what was said before
			gone := p.ID.Disconnect()
			heard := eventually(func() bool { return c.event.Load() != nil })
			c.unlock()
			require.Equal(t, ibv.WCSuccess, there)
			require.NoError(t, gone)
			require.True(t, heard)
			var r result
			within(t, "Read", func() { r = <-read })
			require.Equal(t, result{0, io.EOF}, r)
		})
	}
}
