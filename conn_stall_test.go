package rdmanet

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/scripted"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// Two programs that are both in Write, with more to send than fits on the way,
// go on as soon as one of them reads; the credits that are left are not used
// up by grants alone.
func TestBothEndsWriting(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			client, server := pipe(t, lb.network, lb.address, new(ListenConfig), new(Dialer))
			defer client.Close()
			defer server.Close()
			go io.Copy(struct{ io.Writer }{server}, struct{ io.Reader }{server})
			want := make([]byte, 1<<20)
			rand.Read(want)
			sent := make(chan error, 1)
			go func() {
				for rest := want; len(rest) > 0; {
					n, err := client.Write(rest[:min(1000, len(rest))])
					if rest = rest[n:]; err != nil {
						sent <- err
						return
					}
				}
				sent <- nil
			}()
			if err := defect.ReadFull(client, want); err != nil {
				t.Fatal(err)
			}
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A Write that has sent everything says so, though the connection is closed
// before it returns.
func TestWriteBeforeClose(t *testing.T) {
	for range heavy(200) {
		client, server := pipe(t, "rdma", local4, new(ListenConfig), new(Dialer))
		wrote := make(chan error, 1)
		go func() {
			n, err := client.Write([]byte("last words"))
			if n == 10 {
				wrote <- err
			} else {
				wrote <- nil
			}
		}()
		if err := defect.ReadFull(server, "last words"); err != nil {
			t.Fatal(err)
		}
		client.Close()
		server.Close()
		if err := <-wrote; err != nil {
			t.Fatalf("all was sent, and Write says %v", err)
		}
	}
}

// A stream one way takes few messages the other way, whether its reader keeps
// up or not: each wakes the writer.
func TestFewGrants(t *testing.T) {
	const size = 4 << 10
	messages := heavy(4000)
	client, server := pipe(t, "rdma", local4, new(ListenConfig), new(Dialer))
	defer client.Close()
	defer server.Close()
	sent := make(chan error, 1)
	go func() {
		p := make([]byte, size)
		for range messages {
			if _, err := client.Write(p); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	if err := defect.ReadFull(server, make([]byte, size*messages)); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if n := server.Stats().EmptySent; n > uint64(messages/8) {
		t.Fatalf("%d messages came and %d went back only to grant", messages, n)
	}
}

// What one program writes reaches the other, although it does not read itself:
// the directions do not hold each other up.
func TestOneSidedReader(t *testing.T) {
	for _, cfg := range []Config{
		{TransferSize: -1},
		{TransferSize: -1, MaxReceiveCredits: minCredits},
		{TransferSize: -1, MaxReceiveSize: 1024, MaxSendSize: 1024},
		{TransferSize: 64 << 10},
		{TransferSize: 64 << 10, NoRDMARead: true, MaxReceiveCredits: minCredits},
	} {
		a, b := pipeOn(t, withCredits(t, cfg))
		go a.Write(make([]byte, 64<<20))
		if !eventually(func() bool { return a.Stats().CreditStalls > 0 || a.Stats().TransfersSent > 0 }) {
			t.Fatal("b takes everything")
		}
		size := heavy(16 << 20)
		go b.Write(make([]byte, size))
		within(t, "read", func() {
			if err := defect.ReadFull(a, make([]byte, size)); err != nil {
				t.Error(err)
			}
		})
		a.Close()
		b.Close()
	}
}

// A request that is written and ended, left unread for a while, and answered
// before it is read: the answer arrives.
func TestAnswerBeforeReading(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, withCredits(t, Config{MaxReceiveSize: 1024, MaxSendSize: 1024, MaxReceiveCredits: 32, TransferSize: -1}))
	initial := b.Stats().ReceiveWindow
	require.True(t, eventually(func() bool {
		exchange(t, a, b, 1<<20)
		return b.Stats().ReceiveWindow == 32
	}))
	wrote := make(chan error, 1)
	stalls := a.Stats().CreditStalls
	go func() {
		for {
			if _, err := a.Write(make([]byte, 1000)); err != nil {
				wrote <- err
				return
			}
		}
	}()
	require.True(t, eventually(func() bool { return a.Stats().CreditStalls > stalls }))
	a.SetWriteDeadline(time.Unix(1, 0))
	require.Error(t, <-wrote)
	a.SetWriteDeadline(time.Time{})
	require.NoError(t, a.CloseWrite())
	// After five seconds of silence b is back at its initial size, and has heard of the end.
	require.Less(t, initial, 32)
	require.True(t, eventually(func() bool { return b.Stats().ReceiveWindow == initial }))
	const size = 1 << 20
	go b.Write(make([]byte, size))
	within(t, "read", func() {
		require.NoError(t, defect.ReadFull(a, make([]byte, size)))
	})
	a.Close()
	b.Close()
}

// A grant that was left to a waiting writer, whose deadline passes before it
// runs, is sent all the same.
func TestGrantLeftToWriter(t *testing.T) {
	for range heavy(20) {
		dev := scripted.New(newProvider(t))
		s := newSceneOn(t, dev)
		c, p := s.conns(false, nil)
		e := dev.Endpoint(c.Info().QPN)
		read := make(chan struct{}, 1)
		go func() {
			for b := make([]byte, 100); ; {
				if _, err := c.Read(b); err != nil {
					return
				}
				read <- struct{}{}
			}
		}()
		requireSettled(t, c, e)
		var err error
		write := start(func() { _, err = c.Write(make([]byte, 1<<20)) })
		stalls := uint64(0)
		stalled := func() bool { // again
			now := c.Stats().CreditStalls
			return now > stalls && write.waits() && e.Asleep()
		}
		require.True(t, eventually(stalled))
		// The peer takes what was sent and uses up all its credits but one.
		for heard := uint64(0); ; {
			for st := c.Stats(); heard < st.SegmentsSent+st.EmptySent; heard++ {
				_, _, ok := p.ReceiveData()
				require.True(t, ok)
			}
			if p.Credits <= 1 {
				break
			}
			p.Credits--
			p.Send(smbdpeer.DataTransfer{CreditsRequested: 16, DataOffset: smbdpeer.PayloadOffset, DataLength: 1}.Message(smbdpeer.PayloadOffset + 1))
			<-read
			require.True(t, eventually(stalled))
		}
		// The deadline passes when the grant has come and before the writer has heard of it.
		e.OnPolled(func([]ibv.WC) {
			e.OnPolled(nil)
			start(func() { c.SetWriteDeadline(past) }).block(t)
		})
		p.Send(smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: 8}.Message(smbdpeer.HeaderLen))
		within(t, "Write", func() { <-write.done })
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		for granted := 0; granted == 0; {
			h, _, ok := p.ReceiveData()
			require.True(t, ok)
			granted = int(h.CreditsGranted)
		}
		c.Close()
		p.Close()
	}
}

// However many messages go at once, the last credit for a plain peer goes with
// a grant.
func TestLastCreditOfABatch(t *testing.T) {
	s := newScene(t)
	c, p := s.conns(false, nil)
	credits := int(goodResponse.CreditsGranted)
	require.True(t, eventually(func() bool { return c.Stats().SendCredits == credits }))
	go c.Write(make([]byte, 1<<20))
	require.True(t, eventually(func() bool { return c.Stats().CreditStalls > 0 }))
	st := c.Stats()
	for range st.SegmentsSent + st.EmptySent {
		h, _, ok := p.ReceiveData()
		require.True(t, ok)
		require.False(t, credits == 1 && h.CreditsGranted == 0, "the last credit went without a grant")
		credits--
	}
}

// A connection that is being closed, and whose calls end one after another, is always
// looked after by one of them: whoever waits for completions and leaves is followed by
// another. Otherwise nobody would hear of the peer.
func TestLeadIsPassedOn(t *testing.T) {
	for _, side := range sides {
		for _, readerFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/readerFirst=%v", side.name, readerFirst), func(t *testing.T) {
				setWithdrawWithin(t, time.Hour)
				dev := scripted.New(newProvider(t))
				s := newSceneOn(t, dev)
				s.cfg.LingerTimeout = 2 * patience // passes for a hang
				c, p := s.transferConns(side.active, true)
				c.SetDeadline(time.Time{})
				e := dev.Endpoint(c.Info().QPN)
				e.Hold(func(wc *ibv.WC) bool { return wc.Op == ibv.WCRead })

				// A Read in the middle of a transfer, and a Write.
				const n = 1 << 20
				read := reading(c, make([]byte, n))
				addr, key := p.Register(make([]byte, n))
				p.Begin(true, 1, n, addr, key)
				require.True(t, eventually(func() bool { return e.Reading() > 0 }))
				wrote := writing(c, make([]byte, n))
				h := p.ExpectBegin(true)
				closed := make(chan error, 1)
				go func() { closed <- c.CloseContext(tctx) }()
				require.Equal(t, h.ID, p.ExpectTransfer(smbdpeer.Withdraw).ID)
				requireSleeper(t, e, func() bool { return true })

				letGo := func(reader bool) {
					t.Helper()
					if reader {
						e.Hold(nil)
						s.await(read)
						return
					}
					p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: h.ID})
					require.ErrorIs(t, s.await(wrote).err, net.ErrClosed)
				}
				letGo(readerFirst)
				requireSleeper(t, e, func() bool { return true })
				letGo(!readerFirst)
				p.ExpectFIN()
				require.True(t, eventually(func() bool { // siw ends both directions with one
					return e.Asleep() || len(closed) > 0
				}))
				p.ID.Disconnect()
				within(t, "Close", func() { <-closed })
				require.Equal(t, 1, e.MostWaiting(), "two wait for completions at a time")
			})
		}
	}
}

// A keeper leaves when others wait. Those may have got what they wait for, and go without
// having waited for completions: then another keeper comes.
func TestKeeperComesBack(t *testing.T) {
	checkLeaks(t)
	dev := scripted.New(newProvider(t))
	a, b := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{Provider: dev}})
	e := dev.Endpoint(a.Info().QPN)
	for range 20 {
		requireSleeper(t, e, func() bool { return true })
		keeper := e.Sleeper()
		var err error
		read := start(func() { _, err = a.Read(make([]byte, 1)) })
		read.park(t)
		require.False(t, read.over())
		_, werr := b.Write([]byte{1})
		require.NoError(t, werr)
		within(t, "Read", func() { <-read.done })
		require.NoError(t, err)
		require.NotEqual(t, keeper, read.goroutine)
	}
	requireSleeper(t, e, func() bool { return true })
	require.Equal(t, 1, e.MostWaiting())
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// A writer with one credit left, who waits for completions, hears of the grant that a read
// has for it to send.
func TestGrantForLeader(t *testing.T) {
	dev := scripted.New(newProvider(t))
	s := newSceneOn(t, dev)
	c, p := s.conns(false, nil)
	e := dev.Endpoint(c.Info().QPN)
	requireSettled(t, c, e)
	c.SetDeadline(time.Time{}) // which would have him look
	write := start(func() { c.Write(make([]byte, 1<<20)) })
	requireSleeper(t, e, func() bool { return c.Stats().SendCredits == 0 && c.Stats().CreditStalls > 0 && write.waits() })
	hear := func() (granted int) {
		h, _, ok := p.ReceiveData()
		require.True(t, ok)
		return int(h.CreditsGranted)
	}
	for range goodResponse.CreditsGranted {
		hear()
	}
	// The peer uses up all that it has, and the last message has a credit for the writer.
	const n = 600 // too long to be copied out of its receive while a call reads
	c.mu.Lock()
	c.rx.reading++
	c.mu.Unlock()
	for p.Credits--; p.Credits > 0; p.Credits-- {
		p.Send(smbdpeer.DataTransfer{CreditsRequested: 16, DataOffset: smbdpeer.PayloadOffset, DataLength: n}.Message(smbdpeer.PayloadOffset + n))
	}
	p.Send(smbdpeer.Segment(n, 0))
	require.True(t, eventually(func() bool { return e.Sleeper() == write.goroutine && c.Stats().SendCredits == 1 }), "the writer does not wait for completions")
	_, err := io.ReadFull(c, make([]byte, n))
	require.NoError(t, err)
	require.Positive(t, hear())
}
