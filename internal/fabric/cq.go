package fabric

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
	f     *Fabric
	depth int

	mu          sync.Mutex
	wcs         ring.Ring[ibv.WC]
	armed       armState
	event       bool // the event that Arm asked for has come, and no Wait has taken it
	interrupted bool // Interrupt was called, and no Wait has returned for it
	overrun     bool // a completion was lost
	closed      bool
	users       int  // queues that complete here
	waiting     bool // a goroutine is in Wait

	wake  chan struct{} // makes the goroutine in Wait look again
	timer *time.Timer   // belongs to the goroutine in Wait
}

type armState uint8

const (
	unarmed armState = iota
	armedSolicited
	armedAny
)

func (d *device) CreateCQ(depth int) (ibv.CQ, error) {
	if depth < 1 || depth > maxCQE {
		return nil, fmt.Errorf("%s: completion queue of %d entries (limit %d): %w", deviceName, depth, maxCQE, ibv.ErrLimit)
	}
	return &cq{f: d.f, depth: depth, wake: make(chan struct{}, 1)}, nil
}

func (c *cq) Depth() int { return c.depth }

// add appends a completion and reports whether there was room. solicited is set for a
// receive whose send was solicited.
func (c *cq) add(wc *ibv.WC, solicited bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wcs.Len() == c.depth {
		c.overrun = true
		c.raise()
		return false
	}
	*c.wcs.Next() = *wc
	if c.armed == armedAny || c.armed == armedSolicited && (solicited || wc.Status != ibv.WCSuccess) {
		c.raise()
	}
	return true
}

// raise makes the event pending. The caller holds mu.
func (c *cq) raise() {
	c.armed = unarmed
	c.event = true
	c.rouse()
}

// rouse makes the goroutine in Wait look again. The caller holds mu.
func (c *cq) rouse() {
	if !c.waiting {
		return
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *cq) Poll(wcs []ibv.WC) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(wcs), c.wcs.Len())
	for i := range n {
		wcs[i] = *c.wcs.At(0)
		c.wcs.Drop()
	}
	switch {
	case n > 0:
		return n, nil
	case c.closed:
		return 0, net.ErrClosed
	case c.overrun:
		return 0, fmt.Errorf("%s: %w", deviceName, ibv.ErrCQOverrun)
	}
	return 0, nil
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
		c.raise()
	}
	return nil
}

func (c *cq) Interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.interrupted = true
	c.rouse()
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
		case c.interrupted:
			c.interrupted = false
			return ibv.ErrInterrupted
		case !deadline.IsZero() && !time.Now().Before(deadline):
			return os.ErrDeadlineExceeded
		}
		c.sleep(deadline)
	}
}

// sleep waits until rouse is called or the deadline has come. The caller holds mu, which is
// free meanwhile.
func (c *cq) sleep(deadline time.Time) {
	c.mu.Unlock()
	defer c.mu.Lock()
	if deadline.IsZero() {
		<-c.wake
		return
	}
	if c.timer == nil {
		c.timer = time.NewTimer(time.Until(deadline))
	} else {
		c.timer.Reset(time.Until(deadline))
	}
	defer c.timer.Stop()
	select {
	case <-c.wake:
	case <-c.timer.C:
	}
}

func (c *cq) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return net.ErrClosed
	case c.users > 0:
		return fmt.Errorf("%s: completion queue used by %d queues: %w", deviceName, c.users, ibv.ErrBusy)
	}
	c.closed = true
	c.rouse()
	return nil
}

// use counts a queue that completes here.
func (c *cq) use() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.users++
	return nil
}

func (c *cq) unuse() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users--
}
