package iwarp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// tcp is the link of a queue pair over a TCP connection. transmit.go is the
// way out, under the send queue's lock; receive.go the way in, for whoever
// holds the receiving role. This file has its life: who receives, and the end.
type tcp struct {
	qp     *qp
	conn   *net.TCPConn
	raw    syscall.RawConn
	notify func(ibv.Event)

	crc      bool // CRC32C in use, both ways
	ord, ird int  // RDMA Reads at a time, ours and the peer's

	// role is the right and duty to receive; seat tells how long nobody had it.
	role    sync.Mutex
	seat    vacancy.Seat
	wanted  atomic.Bool // somebody waits and would rather receive itself
	dirty   atomic.Bool // the socket has a read deadline
	closing atomic.Bool // abort was called, or the end has come
	rtrDue  atomic.Bool // the peer waits for our RTR, which our first send takes along

	// Below role.
	rx    receiver
	cur   *cq  // the queue whose event the receiver returns for
	told  bool // it has got one from this receiver
	once  bool
	ended bool

	// hangUp asks for the socket to be closed once the role is given up: from
	// inside a call of RawConn.Read, Close would wait for itself.
	hangUp bool

	tx transmitter // below qp.sq.mu
}

var (
	errAborted  = errors.New("iwarp: queue pair closed by this side")
	errPeerQuit = fmt.Errorf("iwarp: connection ended inside a message: %w", io.ErrUnexpectedEOF)
)

// lastWordsTimeout bounds how long the socket outlives its queue pair to carry
// a Terminate.
const lastWordsTimeout = time.Second

// startLink brings the queue pair up over conn, whose MPA start-up is done.
func startLink(q *qp, conn *net.TCPConn, s setup, notify func(ibv.Event)) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	l := &tcp{qp: q, conn: conn, raw: raw, notify: notify, crc: s.crc, ord: s.ord, ird: s.ird}
	l.tx.hold, l.tx.rtr, l.rx.eatSend, l.rx.eatRead = s.hold, s.rtr, s.eatSend, s.rtr == rtrRead
	l.tx.write, l.tx.flush, l.rx.pump = l.writeSome, l.flushSome, l.pump
	l.seat.Init(&q.dev.sweeper, func() { go l.background() })
	l.seat.Taken()
	l.role.Lock()

	q.sq.mu.Lock()
	if !q.state.CompareAndSwap(uint32(ibv.QPSInit), uint32(ibv.QPSRTS)) {
		q.sq.mu.Unlock()
		l.role.Unlock()
		return fmt.Errorf("%s: connect queue pair in state %s: %w", Name, q.State(), ibv.ErrState)
	}
	q.link.Store(l)
	q.sq.mu.Unlock()
	l.rtrDue.Store(s.rtr != rtrNone)
	l.wanted.Store(true) // a waiter may have come before the link
	l.leave()
	if q.closed.Load() {
		l.abort(errAborted, false) // Close came in between and saw no link
	}
	return nil
}

// sit takes the receiving role if it is free.
func (l *tcp) sit() bool {
	if l.closing.Load() {
		return false
	}
	if !l.role.TryLock() {
		l.wanted.Store(true)
		if !l.role.TryLock() { // its holder, if there still is one, sees wanted when it leaves
			return false
		}
	}
	if l.ended {
		l.role.Unlock()
		return false
	}
	l.seat.Taken()
	return true
}

// leave gives the role up, to a goroutine that wanted it if there is one.
func (l *tcp) leave() {
	if !l.ended {
		l.seat.Vacant()
	}
	l.release()
	if l.wanted.Swap(false) {
		l.qp.recvCQ.reconsider()
		if l.qp.sendCQ != l.qp.recvCQ {
			l.qp.sendCQ.reconsider()
		}
	}
}

// release unlocks the role, and closes the socket if that was left to do.
func (l *tcp) release() {
	hangUp := l.hangUp
	l.hangUp = false
	l.role.Unlock()
	if hangUp {
		l.conn.Close()
	}
}

// receive moves what arrives until c has an event, or for ever when c is nil.
// The caller holds the role.
func (l *tcp) receive(c *cq) {
	if l.rtrDue.Load() && l.rtrDue.Swap(false) {
		l.qp.sq.mu.Lock()
		l.push()
		l.qp.sq.mu.Unlock()
	}
	l.cur, l.told = c, false
	if l.qp.dev.cfg.portable {
		l.pumpPortable()
	} else if err := l.raw.Read(l.rx.pump); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !l.closing.Load() {
		l.end(err, nil, ibv.WCFlushErr)
	}
	l.cur = nil
}

// background receives while nobody else does.
func (l *tcp) background() {
	if !l.sit() {
		return
	}
	l.setDeadline(time.Time{})
	for !l.ended && !l.closing.Load() && !l.wanted.Load() {
		l.receive(nil)
		l.setDeadline(time.Time{})
	}
	l.leave()
}

// ensureReceiver sees to it that somebody receives, without delay.
func (l *tcp) ensureReceiver() { go l.background() }

// poll receives what is there already.
func (l *tcp) poll() {
	if !l.sit() {
		return
	}
	if l.qp.dev.cfg.portable {
		l.conn.SetReadDeadline(time.Now().Add(50 * time.Microsecond))
		l.dirty.Store(true)
	} else {
		l.setDeadline(time.Time{})
	}
	l.once = true
	l.receive(nil)
	l.once = false
	l.leave()
}

// stop reports whether the receiver has done what it came for.
func (l *tcp) stop() bool {
	return l.told || l.cur == nil && l.wanted.Load()
}

// kick makes the receiver that sits in the socket return.
func (l *tcp) kick() {
	l.dirty.Store(true)
	l.conn.SetReadDeadline(time.Unix(1, 0))
}

// setDeadline sets or clears the socket's read deadline. The caller holds the
// role.
func (l *tcp) setDeadline(t time.Time) {
	if l.dirty.Swap(!t.IsZero()) || !t.IsZero() {
		l.conn.SetReadDeadline(t)
	}
}

// disconnect ends the connection once everything posted has been handed over.
// The other direction stays until the peer has ended it too.
func (l *tcp) disconnect() {
	l.qp.sq.mu.Lock()
	l.tx.draining = true
	l.push() // the RTR may still be due
	l.qp.sq.mu.Unlock()
	l.ensureReceiver()
}

// abort ends the link from outside: with a reset when rst is set, else as TCP
// does on close. When it returns no posted buffer is in use.
func (l *tcp) abort(cause error, rst bool) {
	if !l.closing.Swap(true) {
		if rst {
			l.conn.SetLinger(0)
		}
		l.kick()
	}
	l.role.Lock()
	l.end(cause, nil, ibv.WCFlushErr)
	l.release()
}

// end is the end of the link, for any reason, once. The caller holds the role.
// cause is nil when the peer closed in an orderly way; term, if not nil, is
// told to the peer; culprit is how the oldest unfinished send failed.
func (l *tcp) end(cause error, term *iwarpwire.TermMsg, culprit ibv.WCStatus) {
	if l.ended {
		return
	}
	l.ended = true
	l.closing.Store(true) // an abort from now on leaves the last words in peace
	l.seat.Taken()
	l.rx.release()

	q := l.qp
	q.sq.mu.Lock()
	words := l.lastWords(term)
	flushing := l.tx.flushing && !q.dev.cfg.portable
	l.stopTransmit()
	q.sq.mu.Unlock()

	if flushing {
		// The sender sits in the socket; it finds the link stopped.
		l.conn.SetWriteDeadline(time.Unix(1, 0))
	}
	l.rx.abandon(l)
	q.fail(culprit, l)
	if len(words) > 0 {
		go l.speak(words)
	} else {
		l.hangUp = true
	}
	l.notify(ibv.Event{Kind: ibv.EventDisconnected, Err: cause})
}

// speak writes the last bytes and lets the peer read them: closing a socket
// that holds unread data would reset the connection and may lose them.
func (l *tcp) speak(words []byte) {
	defer l.conn.Close()
	l.conn.SetDeadline(time.Now().Add(lastWordsTimeout))
	if _, err := l.conn.Write(words); err != nil {
		return
	}
	if l.conn.CloseWrite() == nil {
		io.Copy(io.Discard, l.conn)
	}
}
