package rdmanet

import (
	"bytes"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// A peer that never takes what it is offered: the deadline ends the Write, and
// as the peer does not let go of the memory either, the connection.
func TestTransferWriteDeadline(t *testing.T) {
	setWithdrawWithin(t, 100*time.Millisecond)
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		buf := alloc(t, breachWrite)
		wrote := writing(c, buf.Bytes())
		h := p.ExpectBegin(reads)
		c.SetWriteDeadline(time.Now())
		if reads {
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Withdraw, ID: 1}, p.ExpectTransfer(smbdpeer.Withdraw))
		} else {
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Written, Flags: smbdpeer.TransferEnd, ID: 1}, p.ExpectTransfer(smbdpeer.Written))
		}
		r := s.await(wrote)
		require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
		require.Zero(t, r.n)
		st := c.Stats()
		require.Zero(t, st.TransferBytesSent)
		require.Zero(t, st.BytesSent)
		c.SetWriteDeadline(time.Now().Add(patience))
		if !reads { // it was this side that would have moved it
			wrote := writing(c, buf.Bytes())
			require.EqualValues(t, 2, p.ExpectBegin(reads).ID)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: 1, Key: bogus, Length: 10}) // it crossed
			addr, key := p.Register(make([]byte, breachWrite))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 2, Addr: addr, Key: key, Length: breachWrite})
			require.Equal(t, result{breachWrite, nil}, s.await(wrote))
			return
		}
		require.ErrorIs(t, s.logged(), errTransferHeld)
		_, err := c.Write([]byte("x"))
		require.ErrorIs(t, err, errTransferHeld)
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		p.WaitEnd()
		require.NotZero(t, h.Key)
		require.NoError(t, c.Close())
		mem := buf.Bytes()
		buf.Free()
		require.Nil(t, regmem.Find(mem), "it is given back")
	})
}

// A transfer that the peer has taken in part when it is given up counts so far.
func TestTransferWriteDeadlinePartlyMoved(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		buf := alloc(t, breachWrite)
		copy(buf.Bytes(), pattern(1, breachWrite))
		wrote := writing(c, buf.Bytes())
		h := p.ExpectBegin(reads)
		got := make([]byte, 1000)
		if reads {
			require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, h.Addr, h.Key))
		} else {
			addr, key := p.Register(got)
			var written atomic.Bool
			s.end(c).OnPolled(func(wcs []ibv.WC) {
				if slices.ContainsFunc(wcs, func(wc ibv.WC) bool { return wc.Op == ibv.WCWrite }) {
					written.Store(true)
				}
			})
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: 1000})
			p.ExpectTransfer(smbdpeer.Written)
			require.True(t, eventually(written.Load), "the RDMA Write has not completed")
		}
		c.SetWriteDeadline(time.Unix(1, 0))
		if reads {
			p.ExpectTransfer(smbdpeer.Withdraw)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: 1000})
		}
		r := s.await(wrote)
		require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
		require.Equal(t, 1000, r.n)
		require.Equal(t, pattern(1, breachWrite)[:1000], got)
		st := c.Stats()
		require.EqualValues(t, 1000, st.TransferBytesSent)
		require.EqualValues(t, 1000, st.BytesSent)

		// The stream goes on from there.
		c.SetWriteDeadline(time.Now().Add(patience))
		_, err := c.Write([]byte("onwards"))
		require.NoError(t, err)
		for {
			_, payload, ok := p.ReceiveData()
			require.True(t, ok)
			if len(payload) > 0 {
				require.Equal(t, "onwards", string(payload))
				break
			}
		}
	})
}

// A message of more than one transfer, of which the first was withdrawn as a whole,
// has never been: what is sent next is not in the middle of it.
func TestTransferWriteDeadlineWholeMessage(t *testing.T) {
	if onRDMA {
		return // a GiB would have to be pinned
	}
	s := newScene(t)
	c, p := s.transferConns(true, true)
	long := alloc(t, transferCeiling+minTransfer).Bytes()
	cut := make(chan error, 1)
	go func() { cut <- writeMsg(c, long) }()
	p.ExpectBegin(true)
	require.NoError(t, c.SetWriteDeadline(past))
	h := p.ExpectTransfer(smbdpeer.Withdraw)
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: h.ID})
	requireTimeout(t, <-cut)
	requireTimeout(t, writeMsg(c, []byte("late")))
	require.NoError(t, c.SetWriteDeadline(time.Time{}))
	require.NoError(t, writeMsg(c, []byte("message")))
}

// A deadline that passes in the middle of a large Read and is moved before the peer has let go
// of the memory ends nothing, whether or not the Read looks again before its time is over. The
// next deadline ends the Read, and the connection when the peer does not let go in time.
func TestTransferReadDeadlineMoved(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				setWithdrawWithin(t, time.Second)
				s := newFabricScene(t)
				c, p := s.transferConns(side.active, false)
				const n = 1 << 20
				b := make([]byte, 2*n)
				move := func() {
					t.Helper()
					synctest.Wait()
					require.NoError(t, c.SetReadDeadline(past))
					synctest.Wait() // the Read waits for the peer now
					require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
				}
				for id := range uint32(2) {
					read := readingParked(t, c, b[:n])
					p.Begin(false, id+1, n, 0, 0)
					g := p.ExpectTransfer(smbdpeer.Grant)
					move()
					if id == 1 { // the Read looks again
						p.WaitCredit()
						p.Grant(1)
						synctest.Wait()
					}
					time.Sleep(2 * withdrawWithin)
					p.Answer(g, make([]byte, g.Length))
					require.Equal(t, result{n, nil}, s.await(read))
				}

				read := readingParked(t, c, b)
				p.Begin(false, 3, n, 0, 0)
				p.ExpectTransfer(smbdpeer.Grant)
				move()
				again := time.Now()
				require.NoError(t, c.SetReadDeadline(past))
				r := s.await(read)
				require.Zero(t, r.n)
				require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
				require.Equal(t, withdrawWithin, time.Since(again))
				require.ErrorIs(t, s.logged(), errTransferHeld)
			})
		})
	}
}

// A large Write that steps aside for the beginning of an expedited message, and then
// misses its deadline, leaves it begun: no other message gets inside.
func TestTransferWriteDeadlineBehindExpedited(t *testing.T) {
	for _, m := range transferPeers {
		for _, side := range sides {
			t.Run(m.name+"/"+side.name, func(t *testing.T) {
				s := newScene(t)
				s.cfg.TransferSize, s.cfg.LingerTimeout = minTransfer, -1
				private := smbdpeer.ParsePrivateData(transferPrivate(m.reads))
				private.Features |= smbdpeer.FeatureMessages
				c, p := s.conns(side.active, private.Append(nil))

				_, err := c.ReadFrom(bytes.NewReader(make([]byte, regmem.ChunkSize)))
				require.NoError(t, err)
				p.ExpectBegin(m.reads) // and nobody takes it, so the next one has to wait
				buf := alloc(t, breachWrite)
				var r result
				wrote := parked(t, func() { r.n, r.err = c.Write(buf.Bytes()) })
				_, err = c.WriteMsg([]byte("ur"), Expedited|Partial)
				require.NoError(t, err)
				require.NoError(t, c.SetWriteDeadline(past))
				within(t, "Write", func() { <-wrote })
				require.Zero(t, r.n)
				requireTimeout(t, r.err)
				require.NoError(t, c.SetWriteDeadline(time.Now().Add(patience)))
				_, err = c.WriteMsg([]byte("later"), NonBlocking)
				require.ErrorIs(t, err, syscall.EAGAIN, "it is inside the other one")
				_, err = c.WriteMsg([]byte("gent"), Expedited)
				require.NoError(t, err)
				_, err = c.WriteMsg([]byte("later"))
				require.NoError(t, err)
				var got []string
				for len(got) < 3 {
					_, payload, ok := p.ReceiveData()
					require.True(t, ok)
					if len(payload) > 0 {
						got = append(got, string(payload))
					}
				}
				require.Equal(t, []string{"ur", "gent", "later"}, got)
			})
		}
	}
}

// A Write that gives up a transfer, and waits for completions itself, hears of the end of the
// transfer also where another goroutine posts it.
func TestTransferWriteDeadlinePostedByOther(t *testing.T) {
	s := newScene(t)
	setWithdrawWithin(t, time.Hour)
	c, p := s.transferConns(false, false)
	c.SetDeadline(time.Time{}) // which would have the Write look again
	e := s.end(c)
	var r result
	buf := alloc(t, breachWrite) // nothing of it goes along
	write := start(func() { r.n, r.err = c.Write(buf.Bytes()) })
	p.ExpectBegin(false)
	write.park(t)
	say(p) // whoever has waited for completions before leaves that to the Write
	leads := func() bool { return e.Sleeper() == write.goroutine }
	requireSleeper(t, e, leads)

	// Somebody reads, and waits in the middle of posting a grant.
	const size = 600 // too long to be copied out of its receive
	sent := 0
	for ; p.Credits > 1; sent++ {
		p.Credits--
		p.Send(smbdpeer.Segment(size, 0))
	}
	require.True(t, eventually(func() bool { return c.Stats().SegmentsReceived == uint64(sent) }))
	requireSleeper(t, e, leads)
	open := e.Gate()
	defer open()
	read := reading(c, make([]byte, sent*size))
	require.True(t, eventually(func() bool { return e.Blocked() == 1 }), "nothing is posted")

	require.NoError(t, c.SetWriteDeadline(past))
	requireSleeper(t, e, leads)
	open()
	within(t, "Write", func() { <-write.done })
	require.Zero(t, r.n)
	require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
	require.Equal(t, smbdpeer.TransferEnd, p.ExpectTransfer(smbdpeer.Written).Flags)
	require.Equal(t, result{sent * size, nil}, s.await(read))
	require.NoError(t, c.Close())
}
