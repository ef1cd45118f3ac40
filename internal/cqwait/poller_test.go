package cqwait

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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
		p.sleeps[long].polls = 0 // none sleeps to be compared with
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

// Where others get something while one waits, nothing is polled for, as their goroutines need
// the processors. One that is alone again is polled for from its second wait on, and so are
// several that wait in turn.
func TestPollsInCrowd(t *testing.T) {
	for _, tt := range []struct {
		processors int32
		others     int
		polls      bool
	}{{2, 0, true}, {2, 1, true}, {2, 2, false}, {2, 63, false}, {16, 8, true}, {16, 9, false}} {
		conns := make([]*poller, 1+tt.others)
		for i := range conns {
			conns[i] = ages(t)
			conns[i].processors = tt.processors
		}
		first := conns[0]
		// wait is a wait of p during which the waits of others end.
		var wait func(p *poller, others ...*poller) bool
		wait = func(p *poller, others ...*poller) bool {
			p.sleeps[short].polls = 0 // None sleeps to be compared with.
			polled := p.begin(true) > 0
			if polled {
				p.polled(true, false)
			}
			for _, other := range others {
				wait(other)
			}
			p.end(true, true)
			return polled
		}
		wait(first, conns[1:]...)
		for range 100 {
			require.Equal(t, tt.polls, wait(first, conns[1:]...), tt)
		}
		wait(first)
		for range 3 {
			for _, p := range conns {
				require.True(t, wait(p), "they wait in turn")
			}
		}
	}
}
