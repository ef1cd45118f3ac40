package iwarp

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// stream is the RDMAP stream of a queue pair (RFC 5040), over a link. transmit.go sends,
// under the send queue's lock. receive.go receives, in the goroutine that holds the
// receiving role. This file decides which goroutine receives, and ends the stream.
type stream struct {
	qp     *qp
	link   link
	notify func(ibv.Event)

	unshared error // unshared is the reason for which the link never shares memory.

	crc      bool // crc is set if CRC32C is used, in both directions.
	ord, ird int  // ord and ird are how many RDMA Reads this side and the peer may have under way.

	// role is held by the goroutine that receives. seat finds out that nobody has had the
	// role for a while.
	role    sync.Mutex
	seat    vacancy.Seat
	wanted  atomic.Bool // wanted is set while a goroutine that waits wants to receive itself.
	closing atomic.Bool // closing is set when abort was called, or the stream has ended.
	rtrDue  atomic.Bool // rtrDue is set while the peer waits for the RTR, which the first send takes along.
	reset   atomic.Bool // reset is set when abort was called for a reset.
	holding atomic.Bool // nothing is received, because a Send waits for a receive; the holder of the role sets it

	// half is set when the peer has ended its direction and this side's goes on. Nothing is
	// received any more. The holder of the role sets it, with qp.sq.mu held.
	half atomic.Bool

	// The holder of the role uses these fields.
	rx    receiver
	cur   *cq  // cur is the queue whose event ends receive.
	told  bool // told is set when this receiver has raised an event of cur.
	once  bool
	ended bool

	// hangUp is set if the link must be closed when the role is released. A step of read
	// must not close it.
	hangUp bool

	tx transmitter // qp.sq.mu guards tx.

	// direct is the link if data can be sent from where it lies, and otherwise nil.
	direct directLink
}

var (
	errAborted  = errors.New("iwarp: queue pair closed by this side")
	errPeerQuit = fmt.Errorf("iwarp: connection ended inside a message: %w", io.ErrUnexpectedEOF)
)

// startStream starts the queue pair over a link whose MPA start-up is done. It takes the link
// over, and closes it on an error.
func startStream(q *qp, link link, s setup, notify func(ibv.Event)) error {
	st := &stream{qp: q, link: link, notify: notify, unshared: s.unshared, crc: s.crc, ord: s.ord, ird: s.ird}
	st.tx.awaits, st.tx.rtr, st.rx.eatSend, st.rx.eatRead = s.awaits, s.rtr, s.eatSend, s.rtr == rtrRead
	st.direct, _ = link.(directLink)
	st.tx.inPlace.free.L = &q.sq.mu
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
	if !s.awaits {
		st.expectFirst()
	}
	q.stream.Store(st)
	q.sq.mu.Unlock()
	st.rtrDue.Store(s.rtr != rtrNone)
	st.wanted.Store(true) // A goroutine may have waited before the stream started.
	st.leave()
	if q.closed.Load() {
		st.abort(errAborted, false) // Close was called meanwhile and found no stream.
	}
	return nil
}

// sit takes the receiving role if it is free.
func (st *stream) sit() bool {
	if st.closing.Load() || st.holding.Load() || st.half.Load() {
		return false
	}
	if !st.role.TryLock() {
		st.wanted.Store(true)
		if !st.role.TryLock() { // The holder, if there is one, checks wanted when it leaves.
			return false
		}
	}
	if !st.receives() {
		st.role.Unlock()
		return false
	}
	if st.holding.Load() {
		// resume may have found the role taken, and others too.
		st.seat.Vacant()
		st.role.Unlock()
		if st.wanted.Swap(false) {
			go st.reconsider() // The caller may hold the lock of a queue.
		}
		return false
	}
	st.seat.Taken()
	return true
}

// receives reports whether anything can still come. The caller holds the role.
func (st *stream) receives() bool { return !st.ended && !st.half.Load() }

// leave releases the role. If a goroutine wants it, that goroutine is woken.
func (st *stream) leave() {
	if st.receives() {
		st.seat.Vacant()
	}
	st.release()
	if st.wanted.Swap(false) {
		st.reconsider()
	}
}

// reconsider wakes the goroutines that wait for completions, for one of them to receive.
func (st *stream) reconsider() {
	st.qp.recvCQ.reconsider()
	if st.qp.sendCQ != st.qp.recvCQ {
		st.qp.sendCQ.reconsider()
	}
}

// resume has a goroutine receive again after a Send had to wait for a receive.
func (st *stream) resume() {
	if !st.holding.Swap(false) {
		return
	}
	if st.role.TryLock() {
		if st.receives() {
			st.seat.Vacant()
		}
		st.role.Unlock()
	}
	// A holder of the role that has just set holding looks again when it has left.
	st.qp.recvCQ.wakeFollower()
	if st.qp.sendCQ != st.qp.recvCQ {
		st.qp.sendCQ.wakeFollower()
	}
}

// release unlocks the role. If the link must be closed, it does that.
func (st *stream) release() {
	hangUp := st.hangUp
	st.hangUp = false
	st.role.Unlock()
	if hangUp {
		st.link.close(st.reset.Load())
	}
}

// receive handles what arrives until c has an event, or without end if c is nil. The caller
// holds the role.
func (st *stream) receive(c *cq) {
	if st.rtrDue.Load() && st.rtrDue.Swap(false) {
		st.qp.sq.mu.Lock()
		st.push(false)
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

// background receives while no other goroutine does.
func (st *stream) background() {
	if !st.sit() {
		return
	}
	st.link.setReadDeadline(time.Time{})
	for st.receives() && !st.closing.Load() && !st.wanted.Load() && !st.holding.Load() {
		st.receive(nil)
		st.link.setReadDeadline(time.Time{})
	}
	st.leave()
}

// ensureReceiver ensures at once that a goroutine receives.
func (st *stream) ensureReceiver() { go st.background() }

// poll receives what has arrived already.
func (st *stream) poll() {
	if !st.sit() {
		return
	}
	st.once = true
	st.receive(nil)
	st.once = false
	st.leave()
}

// stop reports whether the receiver is done.
func (st *stream) stop() bool {
	return st.told || st.cur == nil && st.wanted.Load()
}

// closeSends ends this side's direction when everything that was posted has been handed to
// the link. The other direction goes on. An error says why the peer does not get the end.
func (st *stream) closeSends() error {
	st.qp.sq.mu.Lock()
	defer st.qp.sq.mu.Unlock()
	t := &st.tx
	t.draining = true
	st.push(false) // The RTR may be due.
	if t.stopped && !t.finished {
		return t.err
	}
	return nil
}

// disconnect is closeSends for the end of the connection. The other direction stays open until
// the peer ends it, but what it brings matters to nobody.
func (st *stream) disconnect() {
	st.qp.sq.mu.Lock()
	st.tx.disconnected = true
	st.qp.sq.mu.Unlock()
	st.closeSends()
	st.resume() // What finds no receive is dropped now.
	st.ensureReceiver()
}

// peerFinished handles the end of the peer's direction between two messages. It ends the
// stream, unless the peer can end one direction alone and this side has not ended its own. The
// caller holds the role.
func (st *stream) peerFinished() {
	st.qp.sq.mu.Lock()
	t := &st.tx
	half := st.qp.holds.Load() && !t.withPeer && !t.finished && !t.stopped && !t.awaits
	st.half.Store(half)
	st.qp.sq.mu.Unlock()
	if !half {
		st.end(nil, nil, ibv.WCFlushErr)
		return
	}
	st.seat.Taken()
	st.rx.release()
	st.notify(ibv.Event{Kind: ibv.EventSendsClosed})
}

// endWithPeer has the end of the peer's direction end the stream, also if that has come already.
func (st *stream) endWithPeer() {
	st.qp.sq.mu.Lock()
	st.tx.withPeer = true
	half := st.half.Load()
	st.qp.sq.mu.Unlock()
	if half {
		st.conclude()
	}
}

// conclude ends the stream in an orderly way when the peer has ended its direction.
func (st *stream) conclude() {
	st.role.Lock()
	st.end(nil, nil, ibv.WCFlushErr)
	st.release()
}

// mayWait is called for a Send that finds no receive. It reports whether the Send is to wait:
// after disconnect it is dropped.
func (st *stream) mayWait() bool {
	st.qp.sq.mu.Lock()
	defer st.qp.sq.mu.Unlock()
	if st.tx.stopped {
		st.sendsFailed()
	}
	return !st.tx.disconnected
}

// abort ends the stream from another goroutine. It resets the connection if rst is set, and
// otherwise closes the link. When it returns, no posted buffer is in use.
func (st *stream) abort(cause error, rst bool) {
	if !st.closing.Swap(true) {
		// A peer whose Sends wait takes the end of the link for that of the data.
		st.reset.Store(rst || st.qp.holds.Load() && st.unfinished())
		st.link.interrupt()
	}
	st.role.Lock()
	st.end(cause, nil, ibv.WCFlushErr)
	st.qp.sq.mu.Lock()
	st.hangUp = st.hangUp || st.tx.open
	st.tx.open = false
	st.qp.sq.mu.Unlock()
	st.release()
}

// end ends the stream, for any reason, once. The caller holds the role. cause is nil if the
// peer closed in an orderly way. term, if not nil, is sent to the peer. culprit is the
// status of the oldest unfinished send.
func (st *stream) end(cause error, term *iwarpwire.TermMsg, culprit ibv.WCStatus) {
	if st.ended {
		return
	}
	st.ended = true
	st.closing.Store(true) // An abort from now on does not interrupt the Terminate.
	st.seat.Taken()
	st.rx.release()

	q := st.qp
	q.sq.mu.Lock()
	words := st.lastWords(term)
	if q.holds.Load() && cause != nil && !st.tx.finished {
		st.reset.Store(true) // as in abort
	}
	open := cause == nil && st.tx.finished
	st.tx.open = open
	st.stopTransmit()
	q.sq.mu.Unlock()

	st.rx.abandon(st)
	q.fail(culprit, st)
	if len(words) > 0 {
		go st.link.closeAfter(words)
	} else {
		st.hangUp = !open
	}
	st.notify(ibv.Event{Kind: ibv.EventDisconnected, Err: cause})
}
