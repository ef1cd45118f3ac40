//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet"
)

// This file has streams that one end closes right after what it wrote, and checks how they
// arrive.

// receive reads a stream of N bytes. The stream may be cut, but not without an error. Write
// fails only if the connection does, or after patience. So an end of the stream that comes
// early means that bytes were lost.
func (h *header) receive(c *rdmanet.Conn) error {
	got := &check{seed: h.Seed}
	_, err := c.WriteTo(got)
	switch {
	case errors.Is(err, errWrong):
		return err
	case got.off < int(h.N) && err == nil && h.Mortal:
		return fmt.Errorf("a stream of %d has ended after %d: %w", h.N, got.off, io.ErrUnexpectedEOF)
	case got.off > int(h.N), got.off < int(h.N) && err == nil:
		return fmt.Errorf("%w: a stream of %d, not %d, then %v", errWrong, got.off, h.N, err)
	case err != nil:
		return fmt.Errorf("a stream of %d has ended after %d: %w", h.N, got.off, err)
	}
	return nil
}

// arrivals passes the results of receive to the ends that have closed their streams, if
// both ends are in one process.
type arrivals struct {
	mu      sync.Mutex
	waiting map[uint64]chan error
}

// expect returns the channel for the result of the stream of that seed.
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

// tell sends the result, once, if an end waits for it.
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

// writeAndClose writes the stream and closes at once, by CloseContext if it is to be sure.
// It returns an error if that fails. It returns errLost if the stream has not arrived
// whole, and this process knows that. The caller decides whether there was a reason. There
// is none if CloseContext has reported that everything arrived. If CloseContext gives up
// after LingerTimeout, that is no error: the other end may have got no processor.
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
		case errors.Is(err, syscall.ETIMEDOUT) && givenUp() > before: // It is counted by now.
			e.excuses.take(before, givenUp()) // What was counted excuses nothing else then.
			return nil
		case err != nil:
			return err
		}
	} else if err := c.Close(); err != nil {
		return err
	}
	if !t.own || t.killed && (!sure || t.relayed) {
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
