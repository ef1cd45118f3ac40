//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet"
)

// Streams that one end closes right behind what it wrote, and how they arrive.

// receive reads a stream of N bytes. It may be cut, but not in silence: Write fails only
// where the connection does, or when patience is over, so an end of the stream that comes
// early stands for bytes that were lost.
func (h *header) receive(c *rdmanet.Conn) error {
	got := &check{seed: h.Seed}
	_, err := c.WriteTo(got)
	switch {
	case errors.Is(err, errWrong):
		return err
	case got.off > int(h.N), got.off < int(h.N) && err == nil:
		return fmt.Errorf("%w: a stream of %d, not %d, then %v", errWrong, got.off, h.N, err)
	case err != nil:
		return fmt.Errorf("a stream of %d has ended after %d: %w", h.N, got.off, err)
	}
	return nil
}

// arrivals has the word of those that receive for those that have closed, where both are
// in one process.
type arrivals struct {
	mu      sync.Mutex
	waiting map[uint64]chan error
}

// expect returns where it will be said how the stream of that seed has arrived.
func (a *arrivals) expect(seed uint64) <-chan error {
	ch := make(chan error, 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting == nil {
		a.waiting = make(map[uint64]chan error)
	}
	a.waiting[seed] = ch
	return ch
}

// tell says it, once, if somebody wants to know.
func (a *arrivals) tell(seed uint64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ch, ok := a.waiting[seed]; ok {
		ch <- err
		delete(a.waiting, seed)
	}
}

func (a *arrivals) forget(seed uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.waiting, seed)
}

// writeAndClose writes the stream and closes at once, with CloseContext if it is to be
// sure. It returns an error if that fails, and errLost if the stream has not arrived whole
// and this process can tell; whether there was a reason is the caller's to know. There is
// none where CloseContext has said that everything arrived. That CloseContext gives up when
// LingerTimeout is over is no error: the other end may have got no processor.
func (e *end) writeAndClose(c *rdmanet.Conn, t target, h header, sure bool) error {
	calm, before := e.disturbance.Load(), givenUp()
	arrived := e.arrivals.expect(h.Seed)
	defer e.arrivals.forget(h.Seed)
	p := make([]byte, h.N)
	fill(p, h.Seed, 0)
	if _, err := c.Write(p); err != nil {
		return err
	}
	if sure {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		switch err := c.CloseContext(ctx); {
		case errors.Is(err, syscall.ETIMEDOUT) && givenUp() > before: // and counted by now
			e.excuses.take(before, givenUp()) // one that was counted excuses nobody else
			return nil
		case err != nil:
			return err
		}
	} else if err := c.Close(); err != nil {
		return err
	}
	if !t.own || t.killed && !sure {
		return nil
	}
	var err error
	select {
	case err = <-arrived:
	case <-time.After(patience / 2):
		err = errors.New("it never arrived")
	}
	switch {
	case err == nil:
		return nil
	case !sure:
		return fmt.Errorf("%w: %w", errLost, err)
	case calm%2 == 0 && e.disturbance.Load() == calm:
		return fmt.Errorf("%w: CloseContext returned nil, and %w", errWrong, err)
	}
	return err
}
