//go:build amd64 || arm64

package iwarp

import (
	"cmp"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/processor"
	"github.com/rdmanet/rdmanet/internal/shmring"
)

// sharedIn is the direction from the peer. The lock is for the ring, which close unmaps. The
// holder of the receiving role uses the rest.
type sharedIn struct {
	sync.Mutex
	on      atomic.Bool // on is set when the peer has moved.
	tcp     tcpWaits
	count   uint64          // count is how many bytes have come by TCP.
	ring    *shmring.Reader // ring is nil before install and after close.
	page    shmring.Page    // page is the peer's.
	mapped  []byte          // mapped is the peer's page.
	mem     []byte          // mem is the ring outside that page, or nil.
	next    []byte          // next is the ring to which the peer may move, or nil.
	perhaps atomic.Bool     // perhaps is set by install: the peer may move.
	ending  bool            // endTCP was called for a peer that has moved
}

func (l *shared) read(step func(at uintptr) bool) error {
	if !l.in.on.Load() {
		done, err := l.in.tcp.steps(l.raw.Read, step, &l.in.on, false)
		if done || err != nil {
			return err
		}
	}
	for {
		if err := l.expired(); err != nil {
			return err
		}
		if step(0) {
			return nil
		}
		if err := l.sleepToRead(); err != nil {
			return err
		}
	}
}

func (l *shared) poll(step func(at uintptr) bool) error {
	if l.in.on.Load() {
		if l.closed.Load() {
			return net.ErrClosed
		}
		if l.nothingCame() {
			return nil
		}
		step(0)
		return nil
	}
	l.setReadDeadline(time.Time{})
	return l.raw.Read(step)
}

// nothingCame reports whether a step would find nothing.
func (l *shared) nothingCame() bool {
	l.in.Lock()
	defer l.in.Unlock()
	if l.in.ring == nil {
		return false
	}
	next, err := l.in.ring.Peek()
	return next == shmring.Nothing && err == nil && !l.gone.Load()
}

// mayShare reports whether the peer's bytes come through a ring, or may some day.
func (l *shared) mayShare() bool {
	why := l.sharing()
	return why == nil || why == errSharedEarly
}

// pollPays reports whether the peer was last on another processor than this goroutine. Where
// that is not known, what polls find decides.
func (l *shared) pollPays() bool {
	if !l.in.on.Load() || l.gone.Load() {
		return false
	}
	l.in.Lock()
	defer l.in.Unlock()
	if l.in.ring == nil {
		return false
	}
	return elsewhere(l.in.ring.PeerCPU())
}

// elsewhere reports whether the peer's processor is another one than that of the caller.
func elsewhere(peer uint32, known bool) bool {
	own, ok := processor.Current()
	return !ok || !known || own != peer
}

// expired returns the error that ends a read before its next step.
func (l *shared) expired() error {
	if l.closed.Load() {
		return net.ErrClosed
	}
	if !l.limited.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.deadline.IsZero() && !time.Now().Before(l.deadline) {
		return os.ErrDeadlineExceeded
	}
	return nil
}

// sleepToRead waits until there may be something to read.
func (l *shared) sleepToRead() error {
	bell := l.bell.Load()
	if bell == nil {
		return net.ErrClosed
	}
	if l.in.ending {
		return l.raw.Read(readable) // See endOfTCP.
	}
	err := bell.awaitRead()
	l.in.Lock()
	if l.in.ring != nil {
		l.in.ring.Awake()
	}
	l.in.Unlock()
	return err
}

// nothingToWaitFor says that the reader sleeps, and reports whether there is a reason not to.
func (l *shared) nothingToWaitFor(uintptr) bool {
	l.in.Lock()
	defer l.in.Unlock()
	return l.in.ring == nil || l.in.ring.Sleep() || l.gone.Load()
}

func (l *shared) readv(at uintptr, bufs [][]byte) (n int, wait bool, err error) {
	if !l.in.on.Load() {
		n, wait, err = l.readTCP(at, bufs)
		if !l.in.on.Load() {
			return n, wait, err
		}
		if l.agreed.passive {
			l.mayBegin() // The initiator has this side's page.
		}
		if n > 0 {
			return n, wait, err
		}
	}
	return l.readRing(bufs)
}

// readTCP reads from the socket, up to the mark.
func (l *shared) readTCP(at uintptr, bufs [][]byte) (n int, wait bool, err error) {
	n, wait, err = l.tcp.readv(at, bufs)
	if err == io.EOF {
		if fault := l.fault.Load(); fault != nil {
			return 0, false, *fault
		}
		err = cmp.Or(l.cutOff(), err)
	}
	if n <= 0 {
		return n, wait, err
	}
	l.in.count += uint64(n)
	if !l.in.perhaps.Load() {
		if l.agreed.Now {
			return 0, false, errSharedRequired
		}
		return n, false, nil
	}
	l.in.Lock()
	defer l.in.Unlock()
	if l.in.ring == nil {
		return n, false, nil
	}
	// The number that comes with the mark was stored before the mark was sent.
	mark := l.in.page.Start()
	switch {
	case mark == 0 || l.in.count < mark:
		if l.agreed.Now {
			return 0, false, errSharedRequired
		}
		return n, false, nil
	case l.in.count > mark:
		return 0, false, errSharedMark
	}
	l.mu.Lock()
	l.bell.Load().woken.SetReadDeadline(l.deadline)
	l.in.on.Store(true)
	l.mu.Unlock()
	l.nowSharing()
	return n - 1, false, nil
}

var (
	errSharedRequired = errors.New("the peer sends by TCP, although it has agreed on shared memory only")
	errSharedMark     = errors.New("the peer sends by TCP, although it has gone on to shared memory")
	errSharedRing     = errors.New("the peer goes on with shared memory that it has not offered")
)

// readRing reads from the ring.
func (l *shared) readRing(bufs [][]byte) (n int, wait bool, err error) {
	l.in.Lock()
	defer l.in.Unlock()
	ring := l.in.ring
	if ring == nil {
		return 0, false, net.ErrClosed
	}
	// A peer that goes on to another ring needs an answer before it does so again, so it
	// cannot keep the reader here.
	for range 4 {
		gone := l.gone.Load()
		next, err := ring.Peek()
		switch {
		case err != nil:
			return 0, false, err
		case next == shmring.Bytes:
			if cpu, ok := processor.Current(); ok {
				ring.SetCPU(cpu)
			}
			n, wake, err := ring.Read(bufs)
			if wake {
				l.bell.Load().press()
			}
			if n == 0 && err == nil {
				err = shmring.ErrCorrupt // The peer has taken back the bytes that Peek has found.
			}
			return n, false, err
		case next == shmring.Moved:
			if err := l.follow(); err != nil {
				return 0, false, err
			}
		case next == shmring.Ended:
			if ring.Ending() == shmring.Finished {
				return 0, false, io.EOF
			}
			return 0, false, errno.ECONNRESET
		case gone && l.fault.Load() != nil:
			return 0, false, *l.fault.Load()
		case gone && l.out.on.Load():
			if l.untakenAtEnd() {
				return 0, false, errno.ECONNRESET
			}
			return 0, false, io.EOF
		case gone:
			return l.endOfTCP(bufs)
		default:
			return 0, true, nil
		}
	}
	return 0, false, shmring.ErrCorrupt
}

// cutOff returns the error in place of the end of TCP, if the peer has not moved and has ended
// without saying so, and has left something unread in this end's ring. TCP resets a connection for
// that. A peer that ends its direction, or closes, says so in its page before it ends TCP.
func (l *shared) cutOff() error {
	l.in.Lock()
	defer l.in.Unlock()
	if l.in.ring != nil && l.in.ring.Ending() != shmring.Finished && l.untakenAtEnd() {
		return errno.ECONNRESET
	}
	return nil
}

// hasUnread reports whether the peer has sent something that this end has not read. While it uses
// TCP that may be the mark alone, which does not count.
func (l *shared) hasUnread() bool {
	l.in.Lock()
	defer l.in.Unlock()
	if l.in.ring == nil {
		return false
	}
	if !l.in.on.Load() {
		switch n := l.unreadInTCP(); {
		case n == 0:
			return false
		case n > 1 || l.in.page.Start() == 0:
			return true
		}
		// This is the mark.
	}
	for range 4 {
		next, err := l.in.ring.Peek()
		if err != nil || next != shmring.Moved {
			return err == nil && next == shmring.Bytes
		}
		if l.follow() != nil {
			return false
		}
	}
	return false
}

// untakenAtEnd reports whether the peer, which has ended, has left something in this end's ring
// unread. TCP resets a connection for that. The caller holds in.
func (l *shared) untakenAtEnd() bool {
	l.out.Lock()
	defer l.out.Unlock()
	return l.out.untaken()
}

// endOfTCP tells how the peer has ended that has moved, while this end has not: what it has left
// unread, it has left in its socket.
func (l *shared) endOfTCP(bufs [][]byte) (n int, wait bool, err error) {
	if cerr := l.raw.Control(func(fd uintptr) { n, wait, err = l.tcp.readv(fd, bufs) }); cerr != nil {
		return 0, false, cerr
	}
	if n > 0 {
		return 0, false, errSharedMark
	}
	if wait && !l.in.ending {
		l.in.ending = true
		l.endTCP(0)
	}
	return n, wait, err
}

// follow goes on to the peer's next ring. The caller holds in.
func (l *shared) follow() error {
	size, err := l.in.ring.NextRing()
	if err != nil {
		return err
	}
	var mem []byte
	if size > 0 {
		if len(l.in.next) != size {
			return errSharedRing
		}
		mem, l.in.next = l.in.next, nil
	}
	l.in.ring.Follow(mem)
	shmring.Release(l.in.mem)
	l.in.mem = mem
	return nil
}

func (l *shared) setReadDeadline(t time.Time) {
	if t.IsZero() && !l.limited.Load() {
		return
	}
	l.mu.Lock()
	l.limited.Store(!t.IsZero())
	l.setDeadline(t)
	l.mu.Unlock()
}

func (l *shared) interrupt() {
	l.mu.Lock()
	l.limited.Store(true)
	l.setDeadline(time.Unix(1, 0))
	l.mu.Unlock()
}

// setDeadline sets the read deadline of the socket that a read waits for. Before the peer
// has moved the doorbell is of use to others. The caller holds mu.
func (l *shared) setDeadline(t time.Time) {
	l.deadline = t
	l.conn.SetReadDeadline(t)
	if l.in.on.Load() {
		l.bell.Load().woken.SetReadDeadline(t)
	}
}
