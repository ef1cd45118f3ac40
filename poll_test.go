package rdmanet

import (
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// pollFor has every poll for an answer take d.
func pollFor(t testing.TB, d time.Duration) { t.Cleanup(cqwait.SetWindow(d)) }

func polls() bool {
	polls, _ := cqwait.Polling()
	return polls
}

func served() int {
	_, n := cqwait.Polling()
	return n
}

// pollScene is a connection over a device that is worth polling, as RDMA devices are.
func pollScene(t *testing.T) (*scene, *Conn, *smbdpeer.Raw) {
	if runtime.GOMAXPROCS(0) == 1 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	}
	s := newSceneOn(t, newModest(t, 1<<20, 1<<14, true))
	s.cfg.LingerTimeout = -1
	c, p := s.conns(true, nil)
	requireSleeper(t, s.end(c), func() bool { return true }) // a keeper
	return s, c, p
}

// A pollRead is a Read under way, which may poll.
type pollRead struct {
	*call
	ended chan result
}

func newPollRead(c *Conn, n int) pollRead {
	r := pollRead{ended: make(chan result, 1)}
	r.call = start(func() {
		n, err := io.ReadFull(c, make([]byte, n))
		r.ended <- result{n, err}
	})
	return r
}

// asking sends something and reads the answer.
func asking(t *testing.T, c *Conn) pollRead {
	t.Helper()
	_, err := c.Write([]byte{1})
	require.NoError(t, err)
	return newPollRead(c, 10)
}

// requirePolling waits until the Read polls.
func (r pollRead) requirePolling(t *testing.T, s *scene, c *Conn) {
	t.Helper()
	require.True(t, eventually(func() bool { return polls() && s.end(c).Poller() == r.goroutine }))
}

// requireAsleep waits until the Read waits for a leader that sleeps, or sleeps itself.
func (r pollRead) requireAsleep(t *testing.T, s *scene, c *Conn) {
	t.Helper()
	requireSleeper(t, s.end(c), func() bool { return !r.over() && r.waits() })
	require.False(t, polls())
}

// Who waits for an answer polls for it, and lets others in meanwhile.
func TestPollsForAnswer(t *testing.T) {
	s, c, p := pollScene(t)
	pollFor(t, time.Hour)
	ask := func() pollRead {
		read := asking(t, c)
		read.requirePolling(t, s, c)
		return read
	}
	read := ask()
	_, err := c.Write([]byte{2})
	require.NoError(t, err)
	before := c.Stats().EmptyReceived
	p.Grant(1) // is no answer
	require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > before }))
	read.requirePolling(t, s, c)
	p.Payload(10)
	require.Equal(t, result{10, nil}, s.await(read.ended))
	require.False(t, polls())

	// Nothing is to be answered any more.
	read = newPollRead(c, 10)
	read.requireAsleep(t, s, c)
	p.Payload(10)
	require.Equal(t, result{10, nil}, s.await(read.ended))

	read = ask()
	require.NoError(t, c.SetReadDeadline(past))
	requireTimeout(t, s.await(read.ended).err)
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	p.Payload(10)
	_, err = c.Read(make([]byte, 10))
	require.NoError(t, err)

	read = ask()
	require.NoError(t, c.Close())
	require.ErrorIs(t, s.await(read.ended).err, net.ErrClosed)
	require.False(t, polls())
	require.Zero(t, served())
}

// A Read that has something to take does not wait for an answer, whatever it waits for.
func TestPollsForNoPieces(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	setWithdrawWithin(t, 10*time.Millisecond)
	s := newSceneOn(t, newModest(t, 1<<20, 1<<14, true))
	c, p := s.transferConns(true, false)
	pollFor(t, time.Hour)
	before := c.Stats().EmptyReceived
	p.BeginFirst(false, 1<<20)
	require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > before }))
	_, err := c.Write([]byte{1})
	require.NoError(t, err)
	read := newPollRead(c, 1<<20)
	p.ExpectTransfer(smbdpeer.Grant)
	read.requireAsleep(t, s, c)
}

// What is being served does not count any more when its connection is dead, and nobody
// has closed it yet.
func TestDeadIsNotServed(t *testing.T) {
	s, c, p := pollScene(t)
	p.Payload(10)
	require.True(t, eventually(func() bool { return c.Stats().BytesReceived == 10 }))
	requireSleeper(t, s.end(c), func() bool { return true })
	p.Close()
	// The keeper leaves a dead connection.
	require.True(t, eventually(func() bool { return served() == 0 && running("cqwait.(*Waiter).Run(") == 0 }))
	require.False(t, s.end(c).Asleep())
}

// One goroutine that asks several peers in turn polls for all of them.
func TestPollsInTurns(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	s := newSceneOn(t, newModest(t, 1<<20, 1<<14, true))
	s.cfg.LingerTimeout = -1
	var conns [3]*Conn
	var peers [3]*smbdpeer.Raw
	for i := range conns {
		conns[i], peers[i] = s.conns(true, nil)
		pollFor(t, time.Hour)
	}
	for range 3 {
		for i, c := range conns {
			read := asking(t, c)
			read.requirePolling(t, s, c)
			peers[i].WaitCredit()
			peers[i].Payload(10)
			require.Equal(t, result{10, nil}, s.await(read.ended))
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
			s.cfg.LingerTimeout = -1
			c, _ := s.conns(true, nil)
			pollFor(t, time.Hour)
			read := asking(t, c)
			if tt.able {
				read.requirePolling(t, s, c)
			} else {
				read.requireAsleep(t, s, c)
			}
		})
	}
}
