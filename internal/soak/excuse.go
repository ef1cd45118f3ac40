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
	"github.com/rdmanet/rdmanet/internal/defect"
)

// Most kinds of connections have an end that closes right after its last bytes. If the
// other end gets no processor for LingerTimeout, the connection is given up, and what has
// not arrived is lost, as documented. rdmanet counts such connections, but does not say
// which they were. So each of them excuses one connection that failed, if that one had
// begun before.
type excuses struct {
	mu   sync.Mutex
	used map[uint64]bool // used has the values of the count that were used.
}

// take reports whether one of those counted between before and now is left, and uses it up.
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

// taken returns how many connections were excused.
func (e *excuses) taken() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.used)
}

// givenUp returns how many connections of the process were given up after Close.
func givenUp() uint64 { return countGivenUp(rdmanet.Lingering()) }

func countGivenUp(l rdmanet.LingerStats) uint64 { return l.Expired + l.Evicted }

// excused waits until it is known whether a connection that was given up excuses one that
// has failed. before is how many connections had been given up when the failed one began.
func (e *end) excused(before uint64) bool {
	for late := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		l := rdmanet.Lingering()
		if e.excuses.take(before, countGivenUp(l)) {
			return true
		}
		// A connection is counted when its linger ends. The other end may notice the
		// failure before that.
		if l.Now == 0 || time.Now().After(late) {
			return false
		}
	}
}

// errLost means that a stream that was closed after its last byte has not arrived.
var errLost = errors.New(defect.Prefix + "bytes lost: not arrived")

// errDial means that no connection was made.
var errDial = errors.New("dial")

// forgives reports whether err may have been caused by a connection that was given up.
// before is how many connections had been given up when the failed one began.
func (e *end) forgives(k kind, err error, before uint64) bool {
	return forgivable(k, err) && e.excused(before)
}

// forgivable reports whether err can be the consequence of an end that has given up its
// connection. Such a connection is broken or ends early. It does not fail to be made, and
// does not hang.
func forgivable(k kind, err error) bool {
	if k == datagrams || k == silent || errors.Is(err, errDial) {
		return false
	}
	broken := []error{errLost, syscall.ECONNRESET, syscall.EPIPE}
	if k == muxed { // yamux returns io.EOF for a session that has broken. Elsewhere that is an orderly end.
		broken = append(broken, io.EOF, io.ErrUnexpectedEOF, yamux.ErrSessionShutdown, yamux.ErrConnectionReset, yamux.ErrStreamClosed)
	}
	return slices.ContainsFunc(broken, func(b error) bool { return errors.Is(err, b) })
}

// tooManyExcuses reports whether so many failures were excused that missing processors
// cannot be their only cause: more than ten, and more than one for each hundred connections.
func (e *end) tooManyExcuses() bool {
	return e.excuses.taken() > max(10, int(e.made.Load()/100))
}
