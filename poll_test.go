package rdmanet

import (
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// setMaxPoll bounds how long c polls for answers, to which it then takes that long.
func setMaxPoll(t testing.TB, c *Conn, d time.Duration) {
	old := maxPoll
	maxPoll = d
	t.Cleanup(func() { maxPoll = old })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.poller.usual = d
}

// pollScene is a connection over a device that is worth polling, as RDMA devices are.
func pollScene(t *testing.T) (*scene, *Conn, *badPeer) {
	if runtime.GOMAXPROCS(0) == 1 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	}
	s := newSceneOn(t, newModest(t, 1<<20, 1<<14, true))
	s.cfg.LingerTimeout = -1
	c, p := s.conns(true, nil)
	requireAsleep(t, c, func() bool { return true }) // a keeper
	return s, c, p
}

// asking sends something and reads the answer.
func asking(t *testing.T, c *Conn) chan result {
	t.Helper()
	_, err := c.Write([]byte{1})
	require.NoError(t, err)
	return reading(c, make([]byte, 10))
}

func requirePolling(t *testing.T, c *Conn) {
	t.Helper()
	require.True(t, eventually(func() bool {
		return polling.taken.Load() && c.locked(func() bool { return c.leading && c.rx.reading > 0 })()
	}))
}

// Who waits for an answer polls for it, and lets others in meanwhile.
func TestPollsForAnswer(t *testing.T) {
	s, c, p := pollScene(t)
	setMaxPoll(t, c, time.Hour)
	ask := func() chan result {
		read := asking(t, c)
		requirePolling(t, c)
		return read
	}
	read := ask()
	_, err := c.Write([]byte{2})
	require.NoError(t, err)
	before := c.Stats().EmptyReceived
	p.grant(1) // is no answer
	require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > before }))
	requirePolling(t, c)
	p.data(10)
	require.Equal(t, result{10, nil}, s.await(read))
	require.False(t, polling.taken.Load())

	// Nothing is to be answered any more.
	read = reading(c, make([]byte, 10))
	requireAsleep(t, c, func() bool { return c.rx.reading > 0 })
	require.False(t, polling.taken.Load())
	p.data(10)
	require.Equal(t, result{10, nil}, s.await(read))

	read = ask()
	require.NoError(t, c.SetReadDeadline(past))
	requireTimeout(t, s.await(read).err)
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	p.data(10)
	_, err = c.Read(make([]byte, 10))
	require.NoError(t, err)

	read = ask()
	c.mu.Lock()
	c.discarding = true // as by CloseRead, while a poll was at something and heard nothing of it
	c.mu.Unlock()
	require.Equal(t, result{0, io.EOF}, s.await(read))
	c.mu.Lock()
	c.discarding = false
	c.mu.Unlock()
	p.data(10)
	_, err = c.Read(make([]byte, 10))
	require.NoError(t, err)

	read = ask()
	require.NoError(t, c.Close())
	require.ErrorIs(t, s.await(read).err, net.ErrClosed)
	require.False(t, polling.taken.Load())
	require.Zero(t, polling.served.Load())
}

// A poll ends when the processors are needed, and none begins beside another.
func TestPollsWhereThereIsRoom(t *testing.T) {
	s, c, p := pollScene(t)
	setMaxPoll(t, c, time.Hour)
	answer := func(read chan result) {
		p.data(10)
		require.Equal(t, result{10, nil}, s.await(read))
	}
	waits := func() bool { return c.rx.reading > 0 && (c.readers > 0 || !c.backgroundLeads) }

	polling.served.Add(c.poller.processors)
	read := asking(t, c)
	requireAsleep(t, c, waits)
	require.False(t, polling.taken.Load())
	answer(read)
	polling.served.Store(0)

	polling.taken.Store(true)
	read = asking(t, c)
	requireAsleep(t, c, waits)
	answer(read)
	polling.taken.Store(false)

	c.mu.Lock()
	require.Equal(t, time.Hour, c.poller.usual, "a poll has found an answer")
	c.mu.Unlock()

	read = asking(t, c)
	requirePolling(t, c)
	polling.served.Add(c.poller.processors)
	require.True(t, eventually(func() bool { return !polling.taken.Load() }))
	polling.served.Store(0)
	answer(read)

	c.mu.Lock()
	defer c.mu.Unlock()
	require.Zero(t, c.poller.rests[short].next+c.poller.rests[long].next, "none of it was in vain")
}

// A Read that has something to take does not wait for an answer, whatever it waits for.
func TestPollsForNoPieces(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	setWithdrawWithin(t, 10*time.Millisecond)
	s := newSceneOn(t, newModest(t, 1<<20, 1<<14, true))
	c, p := s.transferConns(true, false)
	setMaxPoll(t, c, time.Hour)
	p.start(false, 1<<20)
	require.True(t, eventually(c.locked(func() bool { return c.unread.Len() > 0 })))
	_, err := c.Write([]byte{1})
	require.NoError(t, err)
	reading(c, make([]byte, 1<<20))
	p.told(transferGrant)
	requireAsleep(t, c, func() bool { return c.rx.reading > 0 })
	require.False(t, polling.taken.Load())
}

// What is being served does not count any more when its connection is dead, and nobody
// has closed it yet.
func TestDeadIsNotServed(t *testing.T) {
	_, c, p := pollScene(t)
	p.data(10)
	require.True(t, eventually(c.locked(func() bool { return c.unread.Len() > 0 })))
	p.close()
	require.True(t, eventually(func() bool {
		return polling.served.Load() == 0 && c.locked(func() bool { return c.dead != nil && !c.leading })()
	}))
}

// One goroutine that asks several peers in turn polls for all of them.
func TestPollsInTurns(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	s := newSceneOn(t, newModest(t, 1<<20, 1<<14, true))
	s.cfg.LingerTimeout = -1
	var conns [3]*Conn
	var peers [3]*badPeer
	for i := range conns {
		conns[i], peers[i] = s.conns(true, nil)
		setMaxPoll(t, conns[i], time.Hour)
	}
	for range 3 {
		for i, c := range conns {
			read := asking(t, c)
			requirePolling(t, c)
			peers[i].await()
			peers[i].data(10)
			require.Equal(t, result{10, nil}, s.await(read))
		}
	}
}

// Nobody polls who is not to, or has no use for it.
func TestDoesNotPoll(t *testing.T) {
	for _, tt := range []struct {
		name       string
		busyPoll   time.Duration
		soft       bool
		processors int
		able       bool
	}{
		{name: "negative BusyPoll", busyPoll: -1, processors: 2},
		{name: "BusyPoll that says how long", busyPoll: time.Nanosecond, processors: 2},
		{name: "software device", soft: true, processors: 2},
		{name: "one processor", processors: 1},
		{name: "else", processors: 2, able: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(tt.processors))
			s := newSceneOn(t, newModest(t, 1<<20, 1<<14, !tt.soft))
			s.cfg.BusyPoll = tt.busyPoll
			c, _ := s.conns(true, nil)
			require.Equal(t, tt.able, c.poller.able())
		})
	}
}

// The same for datagrams.
func TestPacketPollsForAnswer(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		client := pn.dial(t, server.LocalAddr())
		_, err := client.Write([]byte("x"))
		require.NoError(t, err)
		readFrom(t, server)
		l := client.ud.first
		client.rmu.Lock()
		l.poller.processors = 2 // as if it were one of RDMA's
		client.rmu.Unlock()
		read := func() chan error {
			done := make(chan error, 1)
			go func() {
				_, err := client.Read(make([]byte, 10))
				done <- err
			}()
			return done
		}
		asleep := func() bool {
			client.rmu.Lock()
			defer client.rmu.Unlock()
			return l.sleeping && (client.readers > 0 || !l.kept)
		}
		answer := func() {
			_, err := server.WriteTo([]byte("y"), client.LocalAddr())
			require.NoError(t, err)
		}
		l.spoke.Store(false)
		done := read()
		require.True(t, eventually(asleep), "nothing was asked")
		answer()
		require.NoError(t, <-done)

		old := maxPoll
		defer func() { maxPoll = old }()
		client.rmu.Lock()
		maxPoll = time.Hour
		l.poller.usual, l.poller.rests = time.Hour, [2]sleepRun{}
		client.rmu.Unlock()
		for _, end := range []func(){answer, func() { client.SetReadDeadline(past) }} {
			require.True(t, eventually(func() bool { // a keeper leads
				client.rmu.Lock()
				defer client.rmu.Unlock()
				return l.kept && l.sleeping
			}))
			_, err := client.Write([]byte("x"))
			require.NoError(t, err)
			l.recvCQ.Interrupt() // and has had to look, as for a stray
			done := read()
			require.True(t, eventually(polling.taken.Load))
			require.Zero(t, l.poller.rests[short].next)
			end()
			<-done
			require.False(t, polling.taken.Load())
		}
		require.NotZero(t, l.poller.rests[l.poller.kind].next, "a deadline is no answer")
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
		require.Zero(t, polling.served.Load())
	})
}

// ages has polls take as long as they like, so that what the machine is at besides makes
// no difference to those that take seconds, which nobody waits for.
func ages(t *testing.T) *poller {
	old := maxPoll
	maxPoll = time.Hour
	p := &poller{processors: 2, usual: time.Minute}
	t.Cleanup(func() {
		maxPoll = old
		p.end(false, true)
	})
	return p
}

// waitFor is a wait for an answer that comes after polling for so long or else sleeping
// for so long. It reports whether p has polled.
func (p *poller) waitFor(polling, sleeping time.Duration) (polled bool) {
	window, took := p.begin(true), sleeping
	if polled = window > 0; polled {
		took = polling
		p.began = p.began.Add(-min(took, window))
		p.polled(took < window, false)
		p.began = p.began.Add(min(took, window))
	}
	p.began = p.began.Add(-took)
	p.end(true, false)
	return polled
}

// What was polled for in vain is not polled for the next time, and ever more rarely.
func TestPollsInVain(t *testing.T) {
	p := ages(t)
	vain := 10 * p.window()
	require.True(t, p.waitFor(vain, vain), "the first one")
	for _, rests := range []int{0, 0, 1, 3, 7, 15, 31, 63, 63} {
		p.rests[long].polls = 0 // none sleeps to be compared with
		for range rests {
			require.False(t, p.waitFor(vain, vain))
		}
		require.True(t, p.waitFor(vain, vain))
	}
	require.Equal(t, time.Minute, p.usual)
}

// Where answers take so long that sleeping makes them hardly later they are not polled
// for; where it makes them much later they are.
func TestPollsWherePays(t *testing.T) {
	for _, tt := range []struct {
		sleeping time.Duration // what a wait takes then, of which polling takes 150 s
		pays     bool
	}{{155 * time.Second, false}, {200 * time.Second, true}} {
		p := ages(t)
		polled := 0
		for range 1000 {
			if p.waitFor(150*time.Second, tt.sleeping) {
				polled++
			}
		}
		if tt.pays {
			require.Greater(t, polled, 900)
		} else {
			require.Less(t, polled, 150)
		}
	}
}

// The answer to a call is polled for, and not the pause before the next, be they mixed
// as they are.
func TestPollsByTurns(t *testing.T) {
	p := ages(t)
	answers, pauses := 0, 0
	const calls = 1000
	for range calls {
		if p.waitFor(10*time.Second, 30*time.Second) {
			answers++
		}
		if p.waitFor(time.Hour, time.Hour) {
			pauses++
		}
	}
	require.Greater(t, answers, calls*9/10)
	require.Less(t, pauses, calls/10)
}

// How long a poll may take follows what comes in time.
func TestPollWindow(t *testing.T) {
	p := poller{usual: usualPoll}
	require.Equal(t, 200*time.Microsecond, p.window())
	p.usual = time.Microsecond
	require.Equal(t, minPoll, p.window())
	p.usual = time.Second
	require.Equal(t, maxPoll, p.window())

	q := ages(t)
	for range 100 {
		q.waitFor(10*time.Second, 30*time.Second)
	}
	require.InDelta(t, 80*time.Second, q.window(), float64(time.Second))
}

// What comes meanwhile for others, or a wait that goes on, is not taken for an answer.
func TestPollGoesOn(t *testing.T) {
	p := poller{processors: 2, usual: usualPoll}
	defer p.end(false, true)
	require.Positive(t, p.begin(true))
	p.polled(false, false) // it gave way
	began := p.began
	p.end(false, false)
	require.Zero(t, p.begin(true), "it has slept")
	p.end(false, false)
	require.Zero(t, p.begin(false), "somebody else waits")
	p.end(false, false)
	require.Equal(t, began, p.began)
	require.Zero(t, p.begin(true))
	p.end(true, false)
	require.Positive(t, p.begin(true))
	p.polled(true, false)
	p.end(true, false)
}
