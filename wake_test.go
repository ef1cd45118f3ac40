package rdmanet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// locked is f with mu held.
func (c *conn) locked(f func() bool) func() bool {
	return func() bool {
		c.mu.Lock()
		defer c.unlock()
		return f()
	}
}

// requireAsleep waits until the leader sleeps and f holds.
func requireAsleep(t testing.TB, c *Conn, f func() bool) {
	t.Helper()
	require.True(t, eventually(c.locked(func() bool { return c.wait.Sleeping() && f() })))
}

// ask sends a message that wants an answer and grants n credits.
func (p *badPeer) ask(n int) {
	p.t.Helper()
	p.await()
	p.credits--
	p.say(wireSegment(dataHeaderLen, segmentHeader{CreditsRequested: 16, CreditsGranted: uint16(n), Flags: flagResponseRequested}))
}

// fin waits for the end of the other side's stream.
func (p *badPeer) fin() {
	p.t.Helper()
	for {
		h, _, ok := p.segment()
		require.True(p.t, ok, "the connection has ended")
		if h.Flags&flagFIN != 0 {
			return
		}
	}
}

// fill has c, of which no send completes, use its send queue up to room free places
// and its credits up to left.
func (p *badPeer) fill(c *Conn, room, left int) {
	p.t.Helper()
	c.mu.Lock()
	grant := left - room + c.freeSlots() - c.credits.have
	c.unlock()
	for {
		c.mu.Lock()
		free := c.freeSlots()
		c.unlock()
		if free <= room {
			break
		}
		p.ask(grant)
		grant = 0
		require.True(p.t, eventually(c.locked(func() bool { return c.freeSlots() < free })))
	}
}

// Whoever waits for room in the send queue hears of it, although completions of sends
// wake no leader who has not asked for them.
func TestFullSendQueue(t *testing.T) {
	for _, tt := range []struct {
		name    string
		private []byte
		left    int                                     // credits
		do      func(t *testing.T, c *Conn, p *badPeer) // with a full queue
		want    func(t *testing.T, c *Conn, p *badPeer) // when there is room
	}{
		{"answer", rdmanetPrivate, 5, func(t *testing.T, c *Conn, p *badPeer) {
			p.ask(0)
			requireAsleep(t, c, func() bool { return c.send.responseDue })
		}, func(t *testing.T, c *Conn, p *badPeer) {
			require.True(t, eventually(c.locked(func() bool { return !c.send.responseDue })))
		}},
		{"CloseWrite", rdmanetPrivate, 2, func(t *testing.T, c *Conn, p *badPeer) {
			go c.CloseWrite()
			requireAsleep(t, c, func() bool { return c.queue.busy })
		}, func(t *testing.T, c *Conn, p *badPeer) { p.fin() }},
		{"Close", rdmanetPrivate, 2, func(t *testing.T, c *Conn, p *badPeer) {
			go c.Close()
			requireAsleep(t, c, func() bool { return c.queue.busy })
		}, func(t *testing.T, c *Conn, p *badPeer) { p.fin(); p.ended() }},
		{"Close, plain peer", nil, 5, func(t *testing.T, c *Conn, p *badPeer) {
			go c.Close()
			requireAsleep(t, c, func() bool { return c.queue.busy })
		}, func(t *testing.T, c *Conn, p *badPeer) { p.ended() }},
	} {
		for _, side := range sides {
			t.Run(tt.name+"/"+side.name, func(t *testing.T) {
				m := newModest(t, 1<<20, 16, false)
				s := newSceneOn(t, m)
				s.cfg.LingerTimeout = 2 * patience // passes for a hang
				c, p := s.conns(side.active, tt.private)
				c.SetDeadline(time.Time{}) // which would have everybody look
				m.setSlow(true)
				p.fill(c, 0, tt.left)
				tt.do(t, c, p)
				m.setSlow(false)
				tt.want(t, c, p)
			})
		}
	}
}

// The answer to a grant of memory waits for room for two.
func TestFullSendQueueOfWriter(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			m := newModest(t, 1<<20, 16, false)
			s := newSceneOn(t, m)
			c, p := s.transferConns(side.active, false)
			c.SetDeadline(time.Time{})
			m.setSlow(true)
			const n = 100000
			wrote := writing(c, pattern(1, n))
			h := p.offered(false)
			addr, key := p.open(make([]byte, h.Length))
			p.fill(c, 1, 5)
			p.transfer(transferHeader{Kind: transferGrant, ID: 1, Addr: addr, Key: key, Length: h.Length})
			requireAsleep(t, c, func() bool { return c.tx.grants.Len() == 1 })
			m.setSlow(false)
			p.told(transferWritten)
			require.Equal(t, result{n, nil}, s.await(wrote))
		})
	}
}

// Close waits for what was sent before it, whatever the peer calls for meanwhile.
func TestCloseDespiteGrants(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			m := newModest(t, 1<<20, 1<<14, false)
			s := newSceneOn(t, m)
			s.cfg.LingerTimeout = 2 * patience // passes for a hang
			c, p := s.conns(side.active, rdmanetPrivate)
			m.setSlow(true)
			go c.Close()
			p.fin()
			p.ask(0)
			_, _, ok := p.segment()
			require.True(t, ok)
			m.setSlow(false)
			p.ended()
		})
	}
}

// What somebody else takes from the completion queue is not lost to a leader who
// polls.
func TestBusyPollRobbed(t *testing.T) {
	s := newScene(t)
	s.cfg.BusyPoll = time.Hour
	c, p := s.conns(true, nil)
	read := reading(c, make([]byte, 10))
	require.True(t, eventually(c.locked(func() bool { return c.wait.Leading() && c.rx.reading > 0 })))
	p.grant(1) // a keeper leaves over that
	require.True(t, eventually(c.locked(func() bool { return c.wait.Leading() && c.readers.Waiting() == 0 })))
	c.mu.Lock()
	p.data(10)
	for c.unread.Len() == 0 {
		c.poll()
	}
	c.unlock()
	require.Equal(t, result{10, nil}, s.await(read))
}

// Who waits beside the leader gives mu back, also when the completion queue cannot be
// armed any more.
func TestArmFailsBesideLeader(t *testing.T) {
	s := newScene(t)
	c, _ := s.conns(false, rdmanetPrivate)
	requireAsleep(t, c, func() bool { return c.credits.have == int(goodResponse.CreditsGranted) })
	var before int64
	within(t, "await", func() {
		c.mu.Lock()
		defer c.unlock()
		before = s.device.Calls(verbstest.Arm) // the leader arms with mu held, too
		for n := range 3 {
			s.device.FailNth(n+1, nil, verbstest.Arm)
		}
		for range 3 {
			c.wantsSendCompletion = true
			c.await(&c.writers)
		}
	})
	require.Equal(t, before+1, s.device.Calls(verbstest.Arm))
}

// A send queue that is full wakes nobody over and over: neither the writer that waits for
// room in it, nor the reader beside it, because of an answer to keep-alive that waits for
// room as well.
func TestFullQueueIsQuiet(t *testing.T) {
	checkLeaks(t)
	m := newModest(t, 1<<20, 1<<14, false)
	m.cqe = 100
	sw := newSwitch(t, m)
	cfg := Config{Provider: sw, KeepAlive: -1, InitialReceiveCredits: 255, MaxReceiveCredits: 255, LingerTimeout: 50 * time.Millisecond}
	asks := cfg
	asks.KeepAlive = 300 * time.Millisecond
	ln, err := (&ListenConfig{Config: asks}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	nc, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
	require.NoError(t, err)
	c := nc.(*Conn)
	defer c.Close()
	peer, err := ln.Accept()
	require.NoError(t, err)
	defer peer.Close()
	exchange(t, c, peer, 100)

	m.setSlow(true)
	ends := make(chan error, 2)
	go func() {
		for {
			if _, err := c.Write([]byte("message")); err != nil {
				ends <- err
				return
			}
		}
	}()
	require.True(t, eventually(func() bool { return c.Stats().QueueStalls > 0 }), "the writer waits, and leads")
	go func() { ends <- drain(c) }()
	waits := sw.Calls(verbstest.Wait)
	within(t, "Read and Write", func() { // the peer does not hear the answer
		require.Error(t, <-ends)
		require.Error(t, <-ends)
	})
	require.Less(t, sw.Calls(verbstest.Wait)-waits, int64(100))
}
