//go:build linux

package main

import (
	"errors"
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/rdmanet/rdmanet"
)

// Most kinds of connections have an end that closes right behind its last bytes. Where the
// other one gets no processor for LingerTimeout, the connection is given up and what had not
// arrived is lost, as has been promised. rdmanet counts those and does not say which they
// were, so each excuses one connection that failed, of those that had begun by then.
type excuses struct {
	mu   sync.Mutex
	used map[uint64]bool // by what the count was with it
}

// take reports whether one of those counted between before and now is left, and uses it.
func (e *excuses) take(before, now uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for n := before + 1; n <= now; n++ {
		if !e.used[n] {
			if e.used == nil {
				e.used = make(map[uint64]bool)
			}
			e.used[n] = true
			return true
		}
	}
	return false
}

// taken is how many connections have been excused.
func (e *excuses) taken() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.used)
}

// givenUp is how many connections of the process were given up after Close.
func givenUp() uint64 { return countGivenUp(rdmanet.Lingering()) }

func countGivenUp(l rdmanet.LingerStats) uint64 { return l.Expired + l.Evicted }

// excused waits until it is known whether a connection was given up that excuses one which
// has failed, and was begun when before had been given up.
func (e *end) excused(before uint64) bool {
	for late := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		l := rdmanet.Lingering()
		if e.excuses.take(before, countGivenUp(l)) {
			return true
		}
		// A connection is counted when it lingers no more, which its other end may hear first.
		if l.Now == 0 || time.Now().After(late) {
			return false
		}
	}
}

// errLost is that a stream which was closed behind its last byte has not arrived.
var errLost = errors.New("not arrived")

// errDial is that there has been no connection at all.
var errDial = errors.New("dial")

// forgives reports whether a connection that was begun when before had been given up may
// have failed with err for that reason.
func (e *end) forgives(k kind, err error, before uint64) bool {
	return forgivable(k, err) && e.excused(before)
}

// forgivable reports whether err may come of an end that has given its connection up. What
// it leaves is a connection that is broken or that ends early, not one that cannot be had, or
// that stands still.
func forgivable(k kind, err error) bool {
	if k == datagrams || k == silent || errors.Is(err, errDial) {
		return false
	}
	broken := []error{errLost, syscall.ECONNRESET, syscall.EPIPE}
	if k == muxed { // it says io.EOF of a session that has broken; elsewhere that is an orderly end
		broken = append(broken, io.EOF, io.ErrUnexpectedEOF, yamux.ErrSessionShutdown, yamux.ErrConnectionReset, yamux.ErrStreamClosed)
	}
	return slices.ContainsFunc(broken, func(b error) bool { return errors.Is(err, b) })
}

// tooManyExcuses tells when so many connections were given up that it cannot be for want of
// processors alone: more than ten, and more than one of a hundred.
func (e *end) tooManyExcuses() bool {
	return e.excuses.taken() > max(10, int(e.made.Load()/100))
}
