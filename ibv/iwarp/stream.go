package iwarp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// stream is the RDMAP stream of a queue pair (RFC 5040), over a link. transmit.go is
// the way out, under the send queue's lock; receive.go the way in, for whoever
// holds the receiving role. This file has its life: who receives, and the end.
type stream struct {
	qp     *qp
	link   link
	notify func(ibv.Event)

	crc      bool // CRC32C in use, both ways
	ord, ird int  // RDMA Reads at a time, ours and the peer's

	// role is the right and duty to receive; seat tells how long nobody had it.
	role    sync.Mutex
	seat    vacancy.Seat
	wanted  atomic.Bool // somebody waits and would rather receive itself
	closing atomic.Bool // abort was called, or the end has come
	rtrDue  atomic.Bool // the peer waits for our RTR, which our first send takes along
	reset   atomic.Bool // abort was called for a reset

	// Below role.
	rx    receiver
	cur   *cq  // the queue whose event the receiver returns for
	told  bool // it has got one from this receiver
	once  bool
	ended bool

	// hangUp asks for the link to be closed once the role is given up, as a step of
	// read must not close it.
	hangUp bool

	tx transmitter // below qp.sq.mu
}

var (
	errAborted  = errors.New("iwarp: queue pair closed by this side")
	errPeerQuit = fmt.Errorf("iwarp: connection ended inside a message: %w", io.ErrUnexpectedEOF)
)

// startStream brings the queue pair up over a connection whose MPA start-up is done.
// It takes conn over: on error conn is closed.
func startStream(q *qp, conn net.Conn, s setup, notify func(ibv.Event)) error {
	link, err := q.dev.open(conn, &s)
	if err != nil {
		conn.Close()
		return err
	}
	st := &stream{qp: q, link: link, notify: notify, crc: s.crc, ord: s.ord, ird: s.ird}
	st.tx.hold, st.tx.rtr, st.rx.eatSend, st.rx.eatRead = s.hold, s.rtr, s.eatSend, s.rtr == rtrRead
	st.tx.write, st.tx.flush, st.rx.pump = st.writeSome, st.flushSome, st.pump
	st.seat.Init(&q.dev.sweeper, func() { go st.background() })
	st.seat.Taken()
	st.role.Lock()

	q.sq.mu.Lock()
	if !q.state.CompareAndSwap(uint32(ibv.QPSInit), uint32(ibv.QPSRTS)) {
		q.sq.mu.Unlock()
		st.role.Unlock()
		link.close(false)
		return fmt.Errorf("%s: connect queue pair in state %s: %w", Name, q.State(), ibv.ErrState)
	}
	if !s.hold {
		st.expectFirst()
	}
	q.stream.Store(st)
	q.sq.mu.Unlock()
	st.rtrDue.Store(s.rtr != rtrNone)
	st.wanted.Store(true) // a waiter may have come before the stream
	st.leave()
	if q.closed.Load() {
		st.abort(errAborted, false) // Close came in between and saw no stream
	}
	return nil
}

// sit takes the receiving role if it is free.
func (st *stream) sit() bool {
	if st.closing.Load() {
		return false
	}
	if !st.role.TryLock() {
		st.wanted.Store(true)
		if !st.role.TryLock() { // its holder, if there still is one, sees wanted when it leaves
			return false
		}
	}
	if st.ended {
		st.role.Unlock()
		return false
	}
	st.seat.Taken()
	return true
}

// leave gives the role up, to a goroutine that wanted it if there is one.
func (st *stream) leave() {
	if !st.ended {
		st.seat.Vacant()
	}
	st.release()
	if st.wanted.Swap(false) {
		st.qp.recvCQ.reconsider()
		if st.qp.sendCQ != st.qp.recvCQ {
			st.qp.sendCQ.reconsider()
		}
	}
}

// release unlocks the role, and closes the link if that was left to do.
func (st *stream) release() {
	hangUp := st.hangUp
	st.hangUp = false
	st.role.Unlock()
	if hangUp {
		st.link.close(st.reset.Load())
	}
}

// receive moves what arrives until c has an event, or for ever when c is nil.
// The caller holds the role.
func (st *stream) receive(c *cq) {
	if st.rtrDue.Load() && st.rtrDue.Swap(false) {
		st.qp.sq.mu.Lock()
		st.push()
		st.qp.sq.mu.Unlock()
	}
	st.cur, st.told = c, false
	var err error
	if st.once {
		err = st.link.poll(st.rx.pump)
	} else {
		err = st.link.read(st.rx.pump)
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !st.closing.Load() {
		st.end(err, nil, ibv.WCFlushErr)
	}
	st.cur = nil
}

// background receives while nobody else does.
func (st *stream) background() {
	if !st.sit() {
		return
	}
	st.link.setReadDeadline(time.Time{})
	for !st.ended && !st.closing.Load() && !st.wanted.Load() {
		st.receive(nil)
		st.link.setReadDeadline(time.Time{})
	}
	st.leave()
}

// ensureReceiver sees to it that somebody receives, without delay.
func (st *stream) ensureReceiver() { go st.background() }

// poll receives what is there already.
func (st *stream) poll() {
	if !st.sit() {
		return
	}
	st.once = true
	st.receive(nil)
	st.once = false
	st.leave()
}

// stop reports whether the receiver has done what it came for.
func (st *stream) stop() bool {
	return st.told || st.cur == nil && st.wanted.Load()
}

// disconnect ends the connection once everything posted has been handed over.
// The other direction stays until the peer has ended it too.
func (st *stream) disconnect() {
	st.qp.sq.mu.Lock()
	st.tx.draining = true
	st.push() // the RTR may still be due
	st.qp.sq.mu.Unlock()
	st.ensureReceiver()
}

// abort ends the stream from outside: with a reset when rst is set, else as the link
// does on close. When it returns no posted buffer is in use.
func (st *stream) abort(cause error, rst bool) {
	if !st.closing.Swap(true) {
		st.reset.Store(rst)
		st.link.interrupt()
	}
	st.role.Lock()
	st.end(cause, nil, ibv.WCFlushErr)
	st.release()
}

// end is the end of the stream, for any reason, once. The caller holds the role.
// cause is nil when the peer closed in an orderly way; term, if not nil, is
// told to the peer; culprit is how the oldest unfinished send failed.
func (st *stream) end(cause error, term *iwarpwire.TermMsg, culprit ibv.WCStatus) {
	if st.ended {
		return
	}
	st.ended = true
	st.closing.Store(true) // an abort from now on leaves the last words in peace
	st.seat.Taken()
	st.rx.release()

	q := st.qp
	q.sq.mu.Lock()
	words := st.lastWords(term)
	st.stopTransmit()
	q.sq.mu.Unlock()

	st.rx.abandon(st)
	q.fail(culprit, st)
	if len(words) > 0 {
		go st.link.closeAfter(words)
	} else {
		st.hangUp = true
	}
	st.notify(ibv.Event{Kind: ibv.EventDisconnected, Err: cause})
}
