package twin

import (
	"sync"
	"time"
)

// A Noise measures how late this process's goroutines run, because other programs and
// other goroutines have the processors.
type Noise struct {
	stop chan struct{}
	done chan struct{}

	mu   sync.Mutex
	late [512]lateness // late has the latest delays, in a ring.
	next int
}

type lateness struct {
	at time.Time
	by time.Duration
}

const noiseTick = 5 * time.Millisecond

// NewNoise starts the measurement. Stop ends it.
func NewNoise() *Noise {
	n := &Noise{stop: make(chan struct{}), done: make(chan struct{})}
	go n.run()
	return n
}

func (n *Noise) run() {
	defer close(n.done)
	due := time.Now().Add(noiseTick)
	t := time.NewTimer(noiseTick)
	defer t.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-t.C:
		}
		now := time.Now()
		if by := now.Sub(due); by > 2*time.Millisecond {
			n.mu.Lock()
			n.late[n.next%len(n.late)] = lateness{now, by}
			n.next++
			n.mu.Unlock()
		}
		due = now.Add(noiseTick)
		t.Reset(noiseTick)
	}
}

// Stop ends the measurement.
func (n *Noise) Stop() {
	close(n.stop)
	<-n.done
}

// Since returns the longest delay since a moment.
func (n *Noise) Since(t time.Time) (worst time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.late {
		if l.at.After(t) {
			worst = max(worst, l.by)
		}
	}
	return worst
}
