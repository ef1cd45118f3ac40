package rdmanet

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/ring"
)

// setPace sets what the budgets of new connections start with, and their slack. With an
// hour of it budgets only grow, whatever the tests' peer takes its time for.
func setPace(t testing.TB, start int, slack time.Duration) {
	s, d := paceStart, paceSlack
	paceStart, paceSlack = start, slack
	t.Cleanup(func() { paceStart, paceSlack = s, d })
}

// A simLink is a link with a receiver that asks for as much as its pace allows, in
// simulated time: requests take half the delay to get there, bytes queue up for their
// turn, and take the other half.
type simLink struct {
	pace    pace
	fetches int                  // at a time at most
	rate    float64              // bytes a second
	delay   time.Duration        // there and back
	late    func() time.Duration // how much later a fetch is noticed, nil for not at all

	now    time.Time
	free   time.Time // when the link has sent what it has been asked for
	flying ring.Ring[simFetch]

	landed int64         // bytes
	most   time.Duration // the longest time in which the link would have sent what was under way
}

type simFetch struct {
	n, under int
	at, over time.Time
}

func newSimLink(fetches int, rate float64, delay time.Duration) *simLink {
	return &simLink{pace: newPace(fetches), fetches: fetches, rate: rate, delay: delay, now: time.Unix(1e9, 0)}
}

func (l *simLink) ask() {
	for l.flying.Len() < l.fetches {
		n := l.pace.next()
		if n == 0 {
			break
		}
		begin := l.now.Add(l.delay / 2)
		if begin.Before(l.free) {
			begin = l.free
		}
		l.free = begin.Add(time.Duration(float64(n) / l.rate * 1e9))
		f := simFetch{n: n, under: l.pace.ask(n), at: l.now, over: l.free.Add(l.delay / 2)}
		if l.late != nil {
			f.over = f.over.Add(l.late())
		}
		if k := l.flying.Len(); k > 0 && f.over.Before(l.flying.At(k-1).over) {
			f.over = l.flying.At(k - 1).over
		}
		l.flying.Push(f)
	}
	l.most = max(l.most, time.Duration(float64(l.pace.under)/l.rate*1e9))
}

// run lets time pass, and returns how many bytes a second have come, and how long the link
// would have been at what was under way at most.
func (l *simLink) run(d time.Duration) (rate float64, most time.Duration) {
	end := l.now.Add(d)
	l.landed, l.most = 0, 0
	for {
		l.ask()
		f := *l.flying.At(0)
		if f.over.After(end) {
			l.now = end
			return float64(l.landed) / d.Seconds(), l.most
		}
		l.flying.Pop()
		l.now = f.over
		l.pace.arrived(f.n, f.under, f.at, l.now)
		l.landed += int64(f.n)
	}
}

// deadlineBound is how long what is under way may take at the most on a link of a
// megabyte a second.
const deadlineBound = 250 * time.Millisecond

// The bytes under way stay within the bound, however slow the link, and fill it, however
// fast or long it is.
func TestPaceModel(t *testing.T) {
	for _, fetches := range []int{1, 2, 7, readSlots, maxTransfers} {
		for _, rate := range []float64{1e5, 1e6, 3e6, 1e7, 1e8, 1e9, 1e10} {
			for _, delay := range []time.Duration{10 * time.Microsecond, time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond} {
				t.Run(fmt.Sprintf("%d/%g/%v", fetches, rate, delay), func(t *testing.T) {
					l := newSimLink(fetches, rate, delay)
					l.run(2*time.Second + 40*delay)
					for range 3 { // with new measurements of the delay in between
						got, most := l.run(15 * time.Second)
						// A fetch is at most so long, and the next one begins when one is over.
						longest := float64(fetches*fetchSize) / (delay.Seconds() + fetchSize/rate)
						want := 0.9 * min(rate, longest)
						if fetches < paceParts { // the link is idle between them
							want = min(want, 0.75*rate*float64(fetches)*paceSlack.Seconds()/(delay+paceSlack).Seconds())
						}
						require.Greater(t, got, want)
						if rate >= 1e6 {
							require.Less(t, most, deadlineBound)
						}
						require.LessOrEqual(t, l.pace.under, l.pace.most)
					}
				})
			}
		}
	}
}

// A link that becomes slower, faster, longer or shorter is followed: the bound holds again,
// and so does the rate.
func TestPaceFollows(t *testing.T) {
	type path struct {
		rate  float64
		delay time.Duration
	}
	for _, tt := range []struct{ from, to path }{
		{path{1e9, time.Millisecond}, path{1e6, time.Millisecond}},
		{path{1e6, time.Millisecond}, path{1e9, time.Millisecond}},
		{path{1e7, time.Millisecond}, path{1e7, 100 * time.Millisecond}},
		{path{1e6, time.Millisecond}, path{1e6, 200 * time.Millisecond}},
		{path{1e8, 100 * time.Millisecond}, path{1e8, 100 * time.Microsecond}},
		{path{1e8, 100 * time.Millisecond}, path{1e6, time.Millisecond}},
	} {
		t.Run(fmt.Sprintf("%v to %v", tt.from, tt.to), func(t *testing.T) {
			l := newSimLink(readSlots, tt.from.rate, tt.from.delay)
			l.run(20 * time.Second)
			// The bytes under way at the change take as long as the new link makes them.
			under := float64(l.pace.under)
			l.rate, l.delay = tt.to.rate, tt.to.delay
			l.run(time.Duration(2*under/l.rate*1e9) + 3*paceLife)
			got, most := l.run(15 * time.Second)
			require.Greater(t, got, 0.9*l.rate)
			require.Less(t, most, max(deadlineBound, l.delay+deadlineBound))
		})
	}
}

// A processor that is busy notices what has come by bursts: the link is used all the same,
// and the bound holds.
func TestPaceNoticesLate(t *testing.T) {
	for _, rate := range []float64{1e6, 1e7, 1e8} {
		for _, delay := range []time.Duration{100 * time.Microsecond, 20 * time.Millisecond} {
			t.Run(fmt.Sprintf("%g/%v", rate, delay), func(t *testing.T) {
				l := newSimLink(readSlots, rate, delay)
				rnd := rand.New(rand.NewPCG(1, 2))
				l.late = func() time.Duration { return time.Duration(rnd.Int64N(int64(40 * time.Millisecond))) }
				l.run(5 * time.Second)
				got, most := l.run(30 * time.Second)
				require.Greater(t, got, 0.8*rate)
				require.Less(t, most, deadlineBound)
			})
		}
	}
}

// A new connection over a fast link is at the longest fetches after some of them.
func TestPaceStart(t *testing.T) {
	l := newSimLink(readSlots, 5e9, 20*time.Microsecond)
	rounds := 0
	for l.pace.next() < fetchSize {
		at := l.now
		n := l.pace.next()
		under := l.pace.ask(n)
		l.now = l.now.Add(l.delay + time.Duration(float64(n)/l.rate*1e9))
		l.pace.arrived(n, under, at, l.now)
		rounds++
	}
	require.Less(t, rounds, 40) // of which eight at a time are under way
	require.Equal(t, readSlots*fetchSize, l.pace.most)
}

// A request that is dropped leaves the budget to others, and no trace.
func TestPaceDrop(t *testing.T) {
	p := newPace(readSlots)
	was, total := p, 0
	for n := p.next(); n > 0; n = p.next() {
		p.ask(n)
		total += n
	}
	require.Equal(t, paceStart, total)
	p.drop(total)
	require.Equal(t, was, p)
}
