package iwarp

import (
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// cq implements ibv.CQ: a ring that grows as it is used, up to its depth.
type cq struct {
	depth int

	mu      sync.Mutex
	ring    ring.Ring[ibv.WC]
	armed   armState
	event   bool // event is set when a completion has come that Arm asked for, until Wait takes it.
	broken  bool // broken is set when Interrupt was called, until Wait takes that.
	overrun bool
	closed  bool
	users   []*qp   // users has an entry for each use as send or receive queue.
	waiting bool    // waiting is set while a goroutine is in Wait.
	lead    *stream // lead is the stream that this goroutine receives on.
	wake    chan struct{}
}

type armState uint8

const (
	unarmed armState = iota
	armedSolicited
	armedAny
)

func (d *device) CreateCQ(depth int) (ibv.CQ, error) {
	if depth < 1 || depth > maxCQE {
		return nil, fmt.Errorf("%s: completion queue of %d entries (limit %d): %w", Name, depth, maxCQE, ibv.ErrLimit)
	}
	return &cq{depth: depth}, nil
}

func (c *cq) Depth() int { return c.depth }

func (c *cq) attach(q *qp) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.users = append(c.users, q)
	return nil
}

func (c *cq) detach(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, u := range c.users {
		if u == q {
			c.users = append(c.users[:i], c.users[i+1:]...)
			return
		}
	}
}

// single returns the stream to receive on, if the queue is used by one connected queue pair
// only. The caller holds mu.
func (c *cq) single() *stream {
	if len(c.users) == 0 {
		return nil
	}
	for _, u := range c.users[1:] {
		if u != c.users[0] {
			return nil
		}
	}
	return c.users[0].stream.Load()
}

// add appends a completion. from is the stream for which the calling goroutine receives,
// nil if it does not receive. add reports whether there was room.
func (c *cq) add(wc *ibv.WC, solicited bool, from *stream) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ring.Len() == c.depth {
		c.overrun = true
		c.raise(from)
		return false
	}
	c.ring.Push(*wc)
	if c.armed == armedAny || c.armed == armedSolicited && (solicited || wc.Status != ibv.WCSuccess) {
		c.raise(from)
	}
	return true
}

// raise sets the event and wakes the goroutine that waits. The caller holds mu.
func (c *cq) raise(from *stream) {
	c.armed = unarmed
	c.event = true
	c.rouse(from)
}

// rouse makes the goroutine that waits check its conditions again. The caller holds mu.
func (c *cq) rouse(from *stream) {
	if !c.waiting {
		return
	}
	if c.lead != nil {
		if c.lead != from {
			c.lead.link.interrupt()
		} else {
			from.told = true
		}
		return
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *cq) Poll(wcs []ibv.WC) (int, error) {
	c.mu.Lock()
	if c.ring.Len() == 0 && c.armed == unarmed && !c.waiting && !c.event {
		// A caller that polls without arming is spinning. So its time may be used to
		// receive.
		if st := c.single(); st != nil {
			c.mu.Unlock()
			st.poll()
			c.mu.Lock()
		}
	}
	n := min(len(wcs), c.ring.Len())
	for i := range n {
		wcs[i] = *c.ring.At(0)
		c.ring.Drop()
	}
	overrun := c.overrun
	c.mu.Unlock()
	if overrun && n == 0 {
		return 0, fmt.Errorf("%s: %w", Name, ibv.ErrCQOverrun)
	}
	return n, nil
}

// trim frees what the ring has grown by.
func (c *cq) trim() {
	c.mu.Lock()
	c.ring.Trim()
	c.mu.Unlock()
}

func (c *cq) Arm(solicitedOnly bool) error {
	want := armedAny
	if solicitedOnly {
		want = armedSolicited
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.armed = max(c.armed, want)
	if c.overrun {
		c.raise(nil)
	}
	return nil
}

func (c *cq) Interrupt() {
	c.mu.Lock()
	c.broken = true
	c.rouse(nil)
	c.mu.Unlock()
}

func (c *cq) Wait(deadline time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = true
	defer func() { c.waiting = false }()
	for {
		switch {
		case c.closed:
			return net.ErrClosed
		case c.event:
			c.event = false
			return nil
		case c.broken:
			c.broken = false
			return ibv.ErrInterrupted
		case !deadline.IsZero() && !time.Now().Before(deadline):
			return os.ErrDeadlineExceeded
		}
		if st := c.single(); st != nil && st.sit() {
			c.lead = st
			st.link.setReadDeadline(deadline)
			c.mu.Unlock()
			st.receive(c)
			c.mu.Lock()
			c.lead = nil // It is set before the role is released: an interruption must be for this goroutine or for none.
			c.mu.Unlock()
			st.leave()
			c.mu.Lock()
			continue
		}
		c.follow(deadline)
	}
}

// follow sleeps until it is woken, while another goroutine receives. The caller holds mu.
func (c *cq) follow(deadline time.Time) {
	if c.wake == nil {
		c.wake = make(chan struct{}, 1)
	}
	wake := c.wake
	c.mu.Unlock()
	defer c.mu.Lock()
	if deadline.IsZero() {
		<-wake
		return
	}
	t := time.NewTimer(time.Until(deadline))
	defer t.Stop()
	select {
	case <-wake:
	case <-t.C:
	}
}

// reconsider wakes the goroutine that waits, to look for a stream to receive on.
func (c *cq) reconsider() {
	c.mu.Lock()
	c.rouse(nil)
	c.mu.Unlock()
}

// wakeFollower is reconsider for a goroutine that does not receive.
func (c *cq) wakeFollower() {
	c.mu.Lock()
	if c.lead == nil {
		c.rouse(nil)
	}
	c.mu.Unlock()
}

func (c *cq) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.users) > 0 {
		return fmt.Errorf("%s: completion queue used by %d queues: %w", Name, len(c.users), ibv.ErrBusy)
	}
	if c.closed {
		return net.ErrClosed
	}
	c.closed = true
	c.rouse(nil)
	return nil
}
