package udconn

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/deadline"
)

// receiver is the receive side of a Conn: the datagrams that have arrived, and the
// goroutines that wait for one.
//
//  1. A reader that finds the inbox empty becomes the leader of the first queue pair, or
//     waits for the reader that leads (package cqwait).
//  2. Every other queue pair, and the UDP socket, has a goroutine that waits all the time.
//     What that goroutine delivers wakes readers.
//  3. While nobody reads, a goroutine in the background leads the first queue pair. So the
//     device always finds a receive, and what the inbox has no room for is counted.
type receiver struct {
	*shared

	discardOwn atomic.Bool // discardOwn drops datagrams to groups that this Conn has sent.

	mu      sync.Mutex
	readers cqwait.Group
	in      inbox
	due     deadline.Deadline
	pending error // pending is returned by the next read, once.
	lost    error // lost is returned by every read from now on: nothing will arrive any more.
	first   source
	sources []source // sources has the first one too.
}

// source is the receive queue of a queue pair as the receiver uses it. receiver.mu is held
// in all calls.
type source interface {
	// poll delivers the datagrams that are there and returns the number of completions.
	poll() int

	// over reports whether the queue pair is of no use any more.
	over() bool

	// answerDue reports whether something was sent since a datagram has arrived.
	answerDue() bool

	// waiter returns the wait for completions.
	waiter() *cqwait.Waiter
}

func (r *receiver) init(s *shared) {
	r.shared = s
	r.in.limit = defaultInbox
	r.readers.Init(&r.mu, true)
	r.due.Init(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.due.Check() {
			r.wakeAll()
		}
	})
}

const (
	// defaultInbox is the limit of the inbox in bytes until SetReadBuffer is called, about
	// what Linux gives a socket.
	defaultInbox = 256 << 10
	maxInbox     = 1 << 30
)

// add takes a source into use. The first one is led by readers. The caller holds mu.
func (r *receiver) add(s source) {
	r.sources = append(r.sources, s)
	if r.first == nil {
		r.first = s
	}
}

// remove ends the use of a source. The caller holds mu.
func (r *receiver) remove(s source) {
	if i := slices.Index(r.sources, s); i >= 0 {
		r.sources = slices.Delete(r.sources, i, i+1)
	}
	if r.first == s {
		r.first = nil
	}
}

// await waits until a datagram is there. The caller holds mu.
func (r *receiver) await() error {
	for {
		switch {
		case r.closed.Load():
			return net.ErrClosed
		case r.due.Expired():
			return os.ErrDeadlineExceeded
		case r.in.len() > 0:
			return nil
		case r.pending != nil:
			err := r.pending
			r.pending = nil
			return err
		case r.lost != nil:
			return r.lost
		}
		r.wait()
	}
}

// wait waits until something may have changed. The caller holds mu.
func (r *receiver) wait() {
	switch s := r.first; {
	case s == nil || s.over():
		r.readers.Wait()
	case !s.waiter().Leading() && s.poll() > 0:
		r.readers.Wake() // Another reader leads next.
	default:
		s.waiter().Await(&r.readers, s.answerDue() && r.idle())
	}
}

// idle reports whether a reader has nothing to return with. The caller holds mu.
func (r *receiver) idle() bool {
	return !r.closed.Load() && !r.due.Expired() && r.in.len() == 0 && r.pending == nil && r.lost == nil
}

// take takes a datagram that is there. The caller holds mu.
func (r *receiver) take(b []byte) (n int, from netip.AddrPort, err error) {
	if n, from, err = r.in.pop(b); err != nil {
		return 0, from, err
	}
	r.datagramsReceived.Add(1)
	r.bytesReceived.Add(uint64(n))
	return n, from, nil
}

// deliver puts a datagram into the inbox. own is set if this Conn has sent it to a group. The
// caller holds mu, and calls wakeReaders.
func (r *receiver) deliver(from netip.AddrPort, own bool, payload []byte) {
	switch {
	case own && r.discardOwn.Load():
		r.looped.Add(1)
	case r.connected() && from != r.remote:
		r.strays.Add(1)
	case !r.in.push(from, payload):
		r.overruns.Add(1)
	}
}

// wakeReaders wakes as many readers as there are datagrams: those that wait for others, and,
// if they are too few, the one that leads the first queue pair. The caller holds mu.
func (r *receiver) wakeReaders() {
	n := r.in.len()
	switch {
	case min(n, r.readers.Waiting()) > 1:
		r.readers.WakeAll()
	case min(n, r.readers.Waiting()) == 1:
		r.readers.Wake()
	}
	if s := r.first; s != nil && n > r.readers.Waiting() && !s.waiter().InBackground() {
		s.waiter().Interrupt()
	}
}

// wakeAll wakes all readers, and all goroutines that lead. The caller holds mu.
func (r *receiver) wakeAll() {
	r.readers.WakeAll()
	for _, s := range r.sources {
		s.waiter().Interrupt()
	}
}

// report leaves an error to the next read of a connected Conn, as a socket does when nobody
// serves the peer's port.
func (r *receiver) report(err error) {
	if !r.connected() || r.closed.Load() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = err
	r.wakeAll()
}

// lose has all reads fail once the inbox is empty.
func (r *receiver) lose(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost = err
	r.wakeAll()
}
