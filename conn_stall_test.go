package rdmanet

import (
	"bytes"
	"crypto/rand"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
			got := make([]byte, len(want))
			if _, err := io.ReadFull(client, got); err != nil {
				t.Fatal(err)
			}
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Fatal("the echo differs")
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
		p := make([]byte, 10)
		if _, err := io.ReadFull(server, p); err != nil {
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
	if _, err := io.ReadFull(server, make([]byte, size*messages)); err != nil {
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
		a, b := pipeOn(t, cfg)
		go a.Write(make([]byte, 64<<20))
		if !eventually(func() bool { return a.Stats().CreditStalls > 0 || a.Stats().TransfersSent > 0 }) {
			t.Fatal("b takes everything")
		}
		size := heavy(16 << 20)
		go b.Write(make([]byte, size))
		within(t, "read", func() {
			if _, err := io.ReadFull(a, make([]byte, size)); err != nil {
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
	a, b := pipeOn(t, Config{MaxReceiveSize: 1024, MaxSendSize: 1024, MaxReceiveCredits: 32, TransferSize: -1})
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
	require.True(t, eventually(func() bool {
		b.tick() // what the timer does after five seconds of silence
		b.mu.Lock()
		defer b.unlock()
		return b.eof && b.credits.window == b.set.initial
	}))
	const size = 1 << 20
	go b.Write(make([]byte, size))
	within(t, "read", func() {
		_, err := io.ReadFull(a, make([]byte, size))
		require.NoError(t, err)
	})
	a.Close()
	b.Close()
}

// A grant that was left to a waiting writer, whose deadline passes before it
// runs, is sent all the same.
func TestGrantLeftToWriter(t *testing.T) {
	for range heavy(20) {
		s := newScene(t)
		c, p := s.conns(false, nil)
		read := make(chan struct{}, 1)
		go func() {
			for b := make([]byte, 100); ; {
				if _, err := c.Read(b); err != nil {
					return
				}
				read <- struct{}{}
			}
		}()
		locked := func(f func() bool) bool {
			c.mu.Lock()
			defer c.unlock()
			return f()
		}
		leads := func() bool { return locked(func() bool { return c.wait.Sleeping() }) }
		stalled := func() bool {
			return locked(func() bool { return c.wait.Sleeping() && c.send.wantsCredit && !c.lane.posting })
		}
		require.True(t, eventually(leads))
		wrote := make(chan error, 1)
		go func() {
			_, err := c.Write(make([]byte, 1<<20))
			wrote <- err
		}()
		require.True(t, eventually(stalled))
		// The peer takes what was sent and uses up all its credits but one.
		for heard := uint64(0); ; {
			for st := c.Stats(); heard < st.SegmentsSent+st.EmptySent; heard++ {
				_, _, ok := p.segment()
				require.True(t, ok)
			}
			if p.credits <= 1 {
				break
			}
			p.credits--
			p.say(wireSegment(dataOffset+1, segmentHeader{CreditsRequested: 16, DataOffset: dataOffset, DataLength: 1}))
			<-read
			require.True(t, eventually(stalled))
		}
		c.mu.Lock()
		before := c.stats.received()
		p.say(wireSegment(dataHeaderLen, segmentHeader{CreditsRequested: 16, CreditsGranted: 8}))
		for c.stats.received() == before { // as another goroutine in poll does
			c.poll()
		}
		c.writeDue.set(time.Unix(1, 0))
		c.wakeAll()
		c.unlock()
		require.Error(t, <-wrote)
		for granted := 0; granted == 0; {
			h, _, ok := p.segment()
			require.True(t, ok)
			granted = int(h.CreditsGranted)
		}
		c.Close()
		p.close()
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
		h, _, ok := p.segment()
		require.True(t, ok)
		require.False(t, credits == 1 && h.CreditsGranted == 0, "the last credit went without a grant")
		credits--
	}
}

// A leader that leaves a connection that is being closed is followed by one who
// waits for completions, whoever else waits: nobody else would come.
func TestLeadIsPassedOn(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, Config{})
	sleeping := func(c *Conn, writers int) func() bool {
		return func() bool {
			c.mu.Lock()
			defer c.unlock()
			return c.wait.Sleeping() && c.writers.Waiting() == writers
		}
	}
	require.True(t, eventually(sleeping(a, 0)), "no keeper")
	done := false
	var all sync.WaitGroup
	for i, wait := range []func(){a.writers.Wait, func() { a.await(&a.writers) }} {
		all.Go(func() {
			a.mu.Lock()
			defer a.unlock()
			for !done {
				wait()
			}
		})
		require.True(t, eventually(sleeping(a, i+1)))
	}
	a.mu.Lock()
	a.closed = true // so there are no keepers any more
	a.lane.cq.Interrupt()
	a.unlock()
	require.True(t, eventually(sleeping(a, 1)), "nobody waits for completions")
	a.mu.Lock()
	done, a.closed = true, false
	a.wakeAll()
	a.unlock()
	within(t, "the end", all.Wait)
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// Whoever waits for the end of a post does not look after the connection. A keeper
// that found only such a one is followed by another.
func TestKeeperComesBack(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, Config{})
	kept := a.locked(func() bool { return a.wait.Sleeping() })
	require.True(t, eventually(kept), "no keeper")
	woken, done := 0, make(chan struct{})
	go func() {
		defer close(done)
		a.mu.Lock()
		defer a.unlock()
		for ; woken < 2; woken++ { // by the keeper that leaves, and by the next
			a.writers.Wait()
		}
	}()
	require.True(t, eventually(a.locked(func() bool { return a.writers.Waiting() == 1 })))
	a.lane.cq.Interrupt()
	within(t, "the keepers", func() { <-done })
	require.True(t, eventually(kept), "nobody looks after the connection")
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// A writer with one credit left, who leads, hears of the grant that a read has for
// it to send, also while somebody else waits for the end of a post.
func TestGrantForLeader(t *testing.T) {
	s := newScene(t)
	c, p := s.conns(false, nil)
	stalled := func(have int) func() bool {
		return c.locked(func() bool {
			return c.wait.Sleeping() && c.send.wantsCredit && !c.lane.posting && c.credits.have == have
		})
	}
	require.True(t, eventually(func() bool { return c.Stats().SendCredits == int(goodResponse.CreditsGranted) }))
	c.SetDeadline(time.Time{}) // which would have him look
	go c.Write(make([]byte, 1<<20))
	require.True(t, eventually(stalled(0)))
	hear := func() (granted int) {
		h, _, ok := p.segment()
		require.True(t, ok)
		return int(h.CreditsGranted)
	}
	for range goodResponse.CreditsGranted {
		hear()
	}
	// The peer uses up all that it has, and the last message has a credit for the writer.
	const n = 600 // too long for spill memory
	for p.credits--; p.credits > 0; p.credits-- {
		p.say(wireSegment(dataOffset+n, segmentHeader{CreditsRequested: 16, DataOffset: dataOffset, DataLength: n}))
	}
	p.say(dataSegment(n, 0))
	require.True(t, eventually(stalled(1)))

	done := make(chan struct{})
	over := false
	go func() {
		defer close(done)
		c.mu.Lock()
		defer c.unlock()
		for !over {
			c.writers.Wait()
		}
	}()
	require.True(t, eventually(c.locked(func() bool { return c.writers.Waiting() == 1 })))
	_, err := io.ReadFull(c, make([]byte, n))
	require.NoError(t, err)
	require.Positive(t, hear())
	c.mu.Lock()
	over = true
	c.writers.WakeAll()
	c.unlock()
	<-done
}
