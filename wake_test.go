package rdmanet

import (
	"fmt"
	"io"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/scripted"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// fill has c, whose end is e and of which no send completes, use its send queue up to room
// free places of size, and its credits up to left.
func fill(t testing.TB, p *smbdpeer.Raw, c *Conn, e *scripted.Endpoint, size, room, left int) {
	t.Helper()
	free := func() int { return size - e.Outstanding() }
	for grant := left - room + free() - c.Stats().SendCredits; free() > room; grant = 0 {
		before := free()
		p.RequestResponse(grant)
		require.True(t, eventually(func() bool { return free() < before }), "no answer")
	}
	require.Equal(t, room, free())
	require.True(t, eventually(func() bool { return c.Stats().SendCredits == left }))
}

// requireSettled waits until nothing is on the way any more of what conns has begun with.
func requireSettled(t testing.TB, c *Conn, e *scripted.Endpoint) {
	t.Helper()
	// The active side has spent one credit to grant some itself.
	requireSleeper(t, e, func() bool { return c.Stats().SendCredits >= int(goodResponse.CreditsGranted)-1 })
}

// sendQueueSize is how many messages a connection over m posts of which none completes.
func sendQueueSize(t *testing.T, m *modest, active bool) (size int) {
	t.Helper()
	require.True(t, t.Run("size", func(t *testing.T) {
		s := newSceneOn(t, m)
		c, p := s.conns(active, rdmanetPrivate)
		e := m.end(c)
		requireSettled(t, c, e)
		m.setSlow(true)
		defer m.setSlow(false)
		for size == 0 {
			posted, heard := e.Posted(), c.Stats().EmptyReceived
			p.RequestResponse(2)
			requireSleeper(t, e, func() bool { return c.Stats().EmptyReceived > heard })
			if e.Posted() == posted { // and credits there are
				require.Greater(t, c.Stats().SendCredits, 2)
				size = e.Outstanding()
			}
		}
	}))
	return size
}

// Whoever waits for room in the send queue hears of it, although completions of sends
// wake no leader who has not asked for them.
func TestFullSendQueue(t *testing.T) {
	// armed waits until somebody sleeps who has asked for the completions of sends.
	armed := func(t *testing.T, e *scripted.Endpoint) { requireSleeper(t, e, e.ArmedForAll) }
	for _, tt := range []struct {
		name    string
		private []byte
		left    int                                                                // credits
		do      func(t *testing.T, c *Conn, e *scripted.Endpoint, p *smbdpeer.Raw) // with a full queue
		want    func(t *testing.T, c *Conn, p *smbdpeer.Raw, sent uint64)          // when there is room; sent is EmptySent before
	}{
		{"answer", rdmanetPrivate, 5, func(t *testing.T, c *Conn, e *scripted.Endpoint, p *smbdpeer.Raw) {
			heard := c.Stats().EmptyReceived
			p.RequestResponse(0)
			require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > heard }))
			armed(t, e)
		}, func(t *testing.T, c *Conn, _ *smbdpeer.Raw, sent uint64) {
			require.True(t, eventually(func() bool { return c.Stats().EmptySent > sent }), "no answer")
		}},
		{"CloseWrite", rdmanetPrivate, 2, func(t *testing.T, c *Conn, e *scripted.Endpoint, p *smbdpeer.Raw) {
			parked(t, func() { c.CloseWrite() })
			armed(t, e)
		}, func(t *testing.T, _ *Conn, p *smbdpeer.Raw, _ uint64) { p.ExpectFIN() }},
		{"Close", rdmanetPrivate, 2, func(t *testing.T, c *Conn, e *scripted.Endpoint, p *smbdpeer.Raw) {
			c.Close() // it goes on behind that
			armed(t, e)
		}, func(t *testing.T, _ *Conn, p *smbdpeer.Raw, _ uint64) { p.ExpectFIN(); p.WaitEnd() }},
		{"Close, plain peer", nil, 5, func(t *testing.T, c *Conn, e *scripted.Endpoint, p *smbdpeer.Raw) {
			c.Close()
			armed(t, e)
		}, func(t *testing.T, _ *Conn, p *smbdpeer.Raw, _ uint64) { p.WaitEnd() }},
	} {
		for _, side := range sides {
			t.Run(tt.name+"/"+side.name, func(t *testing.T) {
				m := newModest(t, 1<<20, 16, false)
				size := sendQueueSize(t, m, side.active)
				s := newSceneOn(t, m)
				s.cfg.LingerTimeout = 2 * patience // passes for a hang
				c, p := s.conns(side.active, tt.private)
				c.SetDeadline(time.Time{}) // which would have everybody look
				e := m.end(c)
				requireSettled(t, c, e)
				m.setSlow(true)
				fill(t, p, c, e, size, 0, tt.left)
				tt.do(t, c, e, p)
				posted, sent := e.Posted(), c.Stats().EmptySent
				m.setSlow(false)
				tt.want(t, c, p, sent)
				require.GreaterOrEqual(t, e.Posted(), posted)
			})
		}
	}
}

// The answer to a grant of memory waits for room for two.
func TestFullSendQueueOfWriter(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			m := newModest(t, 1<<20, 16, false)
			size := sendQueueSize(t, m, side.active)
			s := newSceneOn(t, m)
			c, p := s.transferConns(side.active, false)
			c.SetDeadline(time.Time{})
			e := m.end(c)
			requireSettled(t, c, e)
			m.setSlow(true)
			const n = 100000
			wrote := writing(c, pattern(1, n))
			h := p.ExpectBegin(false)
			addr, key := p.Register(make([]byte, h.Length))
			fill(t, p, c, e, size, 1, 5)
			posted, heard := e.Posted(), c.Stats().EmptyReceived
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: h.Length})
			requireSleeper(t, e, func() bool { return c.Stats().EmptyReceived > heard })
			require.Equal(t, posted, e.Posted())
			m.setSlow(false)
			p.ExpectTransfer(smbdpeer.Written)
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
			// Close reads a byte of the peer where the device fails at Reads of no bytes.
			c, p := s.connsWith(side.active, func(p *smbdpeer.Raw) []byte {
				addr, key := p.Register([]byte{0})
				return probeTargetPrivate(smbdpeer.ProbeTarget{Addr: addr, Key: key})
			})
			m.setSlow(true)
			go c.Close()
			p.ExpectFIN()
			p.RequestResponse(0)
			_, _, ok := p.ReceiveData()
			require.True(t, ok, "the connection has ended")
			m.setSlow(false)
			p.WaitEnd()
		})
	}
}

// What somebody else takes from the completion queue is not lost to a leader who
// polls.
func TestBusyPollRobbed(t *testing.T) {
	m := newModest(t, 1<<20, 16, false)
	s := newSceneOn(t, m)
	s.cfg.BusyPoll = time.Hour
	c, p := s.conns(true, nil)
	c.SetDeadline(time.Time{}) // which would have everybody look
	e := m.end(c)
	b := make([]byte, 10)
	var failed error
	read := start(func() { _, failed = io.ReadFull(c, b) })
	require.True(t, eventually(func() bool { return read.waits() || e.Poller() == read.goroutine }))
	p.Grant(16) // a keeper leaves over that
	require.True(t, eventually(func() bool { return c.Stats().SendCredits > 16 && e.Poller() == read.goroutine }), "the reader does not poll")
	// The reader finds nothing itself, and nobody finds room in the send queue.
	e.Hold(func(wc *ibv.WC) bool { return e.IsSend(wc) || scripted.Goroutine() == read.goroutine })
	var err error
	for err == nil {
		_, err = c.WriteMsg([]byte("message"), NonBlocking)
	}
	require.ErrorIs(t, err, syscall.EAGAIN)
	require.Greater(t, c.Stats().SendCredits, 2, "it is credits that are lacking")
	p.Payload(len(b))
	require.True(t, eventually(func() bool { return e.Held(func(wc *ibv.WC) bool { return !e.IsSend(wc) }) == 1 }))
	write := start(func() { c.Write([]byte("message")) }) // looks for room
	within(t, "Read", func() { <-read.done })
	require.NoError(t, failed)
	defect.Bytes(t, smbdpeer.Segment(10, 0)[smbdpeer.PayloadOffset:], b)
	e.Hold(nil)
	within(t, "Write", func() { <-write.done })
}

// Whoever posts lets others in, who may wait for completions from then on, also when the
// post fails: nobody else waits for them then.
func TestControlThatFails(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprint(fails), func(t *testing.T) {
			dev := scripted.New(newProvider(t))
			s := newSceneOn(t, dev)
			c, p := s.conns(false, rdmanetPrivate)
			e := dev.Endpoint(c.Info().QPN)
			requireSettled(t, c, e)
			open := e.Gate()
			defer open()
			p.RequestResponse(0)
			require.True(t, eventually(func() bool { return e.Blocked() == 1 }), "no answer is posted")
			var err error
			read := start(func() { _, err = c.Read(make([]byte, 1)) })
			require.True(t, eventually(read.waits), "the post keeps others out")
			c.Stats() // nor does it keep those out who wait for nothing
			if fails {
				e.OnPostSend(func([]ibv.SendWR) error { return verbstest.ErrInjected })
			}
			open()
			if fails {
				within(t, "Read", func() { <-read.done })
				require.ErrorIs(t, err, verbstest.ErrInjected)
				require.ErrorIs(t, s.logged(), verbstest.ErrInjected)
			} else {
				p.WaitCredit()
				p.Payload(1)
				within(t, "Read", func() { <-read.done })
				require.NoError(t, err)
			}
			require.Equal(t, 1, e.MostWaiting(), "two wait for completions at a time")
		})
	}
}

// Who waits beside another who sleeps lets others in, also when the completion queue cannot
// be armed any more; and does not try that over and over.
func TestArmFailsBesideLeader(t *testing.T) {
	m := newModest(t, 1<<20, 16, false)
	s := newSceneOn(t, m)
	c, p := s.conns(false, rdmanetPrivate)
	e := m.end(c)
	requireSettled(t, c, e)
	p.Grant(100)
	read := reading(c, make([]byte, 1))
	require.True(t, eventually(func() bool { return c.Stats().SendCredits > 100 }))
	requireSleeper(t, e, func() bool { return running("rdmanet.(*Conn).Read") > 0 })
	m.setSlow(true)
	var armed atomic.Int64
	e.OnArm(func(solicitedOnly bool) error {
		if solicitedOnly {
			return nil // the sleeper may wake without a cause, and sleep again
		}
		armed.Add(1)
		return verbstest.ErrInjected
	})
	within(t, "Write", func() {
		for err := error(nil); err == nil; _, err = c.WriteMsg([]byte("message")) {
		}
		require.ErrorIs(t, (<-read).err, verbstest.ErrInjected)
	})
	_, err := c.Write([]byte("message"))
	require.ErrorIs(t, err, verbstest.ErrInjected)
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, verbstest.ErrInjected)
	require.NotZero(t, c.Stats().QueueStalls, "nobody has waited for the send queue")
	require.EqualValues(t, 1, armed.Load(), "arming was tried again")
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
