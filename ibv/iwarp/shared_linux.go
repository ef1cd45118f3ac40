//go:build amd64 || arm64

package iwarp

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/shmring"
)

// shared is a link between two processes of a host. It begins as the link over TCP. Each
// direction moves to a ring in shared memory by itself, once handover_linux.go has made
// both ends ready. TCP stays open, for the addresses and for the peer's end.
//
// An end moves its direction between two writes. It stores in its page how many bytes it has
// sent by TCP, and sends one byte more, the mark. All that follows is in the ring. The peer
// reads up to the mark, which is not a part of the stream.
type shared struct {
	tcp
	meeting *meeting
	agreed  handover

	in  sharedIn
	out sharedOut

	bell     atomic.Pointer[doorbell] // bell is set by install.
	control  *controlSocket           // control is set by install, before the watch knows the link.
	watched  uint64                   // watched is the number of the control socket in the watch.
	gone     atomic.Bool              // gone is set when the control socket's stream has ended, or by wrong.
	fault    atomic.Pointer[error]    // fault is what the peer has done wrong by the control socket.
	closed   atomic.Bool
	begun    chan struct{} // begun is closed when this end may move or never will, if it must not write by TCP before.
	deciding sync.Once
	limited  atomic.Bool // limited is set while there is a read deadline.

	mu       sync.Mutex     // mu guards what follows. After it only the watch's is taken.
	deadline time.Time      // deadline is that of read.
	visiting *controlSocket // visiting is the control socket before install.
	why      error          // why is the reason for which the link is still with TCP.
}

// openShared is an opener.
func openShared(conn net.Conn, s *setup) (link, error) {
	if s.handover == nil {
		return openTCP(conn, s)
	}
	l := &shared{meeting: s.meeting, agreed: *s.handover, why: errSharedEarly}
	if err := l.tcp.init(conn); err != nil {
		return nil, err
	}
	if l.agreed.Now {
		l.begun = make(chan struct{})
	}
	switch {
	case l.agreed.passive:
		l.meeting.expect(l)
	case l.agreed.Now:
		l.out.moving = true
		if err := l.moveNow(); err != nil {
			l.close(false)
			return nil, fmt.Errorf("shared memory is required, but %w", err)
		}
	}
	return l, nil
}

// probeHost asks nobody: the peer is on this host. The end of its process ends the control
// socket's stream and the TCP connection.
func (l *shared) probeHost(idle, patience time.Duration) bool { return true }

func (l *shared) hostHeard() (ago time.Duration, owes bool) { return 0, false }

// visit notes the initiator's Unix socket, so that close ends the way. It returns false if
// the link was closed.
func (l *shared) visit(control *controlSocket) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		control.close()
		return false
	}
	l.visiting = control
	return true
}

// install makes this end ready for the peer to move. It takes its arguments over. refuse must be
// called after an error. A peer whose doorbell it is can have it wait, before it takes a lock.
func (l *shared) install(control *controlSocket, fds doorbellFDs, ours, theirs []byte) error {
	bell, err := newDoorbell(fds)
	l.in.Lock()
	l.out.Lock()
	defer l.in.Unlock()
	defer l.out.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.closed.Load() {
		err = net.ErrClosed
	}
	if err != nil {
		if bell != nil {
			aside(bell.close)
		}
		control.close()
		shmring.Release(ours)
		shmring.Release(theirs)
		return err
	}
	l.visiting = nil
	l.in.mapped, l.in.page = theirs, shmring.NewPage(theirs)
	l.out.mapped, l.out.page = ours, shmring.NewPage(ours)
	l.in.ring = shmring.NewReader(l.out.page, l.in.page)
	l.out.ring = shmring.NewWriter(l.out.page, l.in.page)
	if l.out.ended {
		l.out.ring.End(shmring.Finished) // See cutOff.
	}
	bell.waitRead, bell.waitWrite = l.nothingToWaitFor, l.noNeedToWait
	l.out.poller = cqwait.NewPoller(l.out.pollPays)
	l.control = control
	l.bell.Store(bell)
	l.in.perhaps.Store(true)
	l.watched, err = l.meeting.watch.add(l, control)
	return err
}

// mayBegin lets this end move.
func (l *shared) mayBegin() {
	l.out.Lock()
	l.out.may = true
	l.out.Unlock()
	if l.agreed.Now { // Nothing goes by TCP.
		l.nowSharing()
	}
	l.decided()
}

// decided lets a writer go on that must not write by TCP.
func (l *shared) decided() {
	if l.begun != nil {
		l.deciding.Do(func() { close(l.begun) })
	}
}

// undecided reports whether a writer must wait for decided.
func (l *shared) undecided() bool {
	if l.begun == nil {
		return false
	}
	select {
	case <-l.begun:
		return false
	default:
		return true
	}
}

// refuse ends the way to shared memory. The link stays with TCP.
func (l *shared) refuse(err error) {
	l.mu.Lock()
	if l.why = err; l.visiting != nil {
		l.visiting.close()
		l.visiting = nil
	}
	l.mu.Unlock()
	l.in.perhaps.Store(false)
	l.unmap()
	l.decided()
}

// unmap gives back the shared memory.
func (l *shared) unmap() {
	bell := l.bell.Load()
	if bell == nil {
		return
	}
	l.meeting.watch.remove(l.watched)
	l.control.close()
	defer aside(bell.close)
	defer bell.wake() // Whoever sleeps finds no ring.
	l.in.Lock()
	l.out.Lock()
	defer l.in.Unlock()
	defer l.out.Unlock()
	for _, mem := range [][]byte{l.in.mapped, l.in.mem, l.in.next, l.out.mapped} {
		shmring.Release(mem)
	}
	l.dropRing(l.out.mem, len(l.out.mem))
	l.dropRing(l.out.offered, len(l.out.offered))
	l.in.mapped, l.in.mem, l.in.next = nil, nil, nil
	l.out.mapped, l.out.mem, l.out.offered = nil, nil, nil
	l.in.ring, l.out.ring = nil, nil
}

// nowSharing notes that the link uses shared memory.
func (l *shared) nowSharing() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.why = nil
}

// sharing reports whether the link uses shared memory, or why it does not.
func (l *shared) sharing() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.why
}

// A tcpStep is a step on the socket, which ends the wait also when the direction has moved.
type tcpStep struct {
	step  func(at uintptr) bool
	moved *atomic.Bool
	once  bool // once is set if the wait ends after a step in any case.
	done  bool // done is the result of step.
	f     func(at uintptr) bool
}

// tcpWaits has the tcpStep of a direction while nobody uses it, so that waits for TCP
// allocate nothing.
type tcpWaits struct{ spare atomic.Pointer[tcpStep] }

// steps calls step by way of wait, which is the socket's Read or Write, and returns its last
// result.
func (w *tcpWaits) steps(wait func(func(at uintptr) bool) error, step func(at uintptr) bool, moved *atomic.Bool, once bool) (done bool, err error) {
	s := w.spare.Swap(nil)
	if s == nil {
		s = new(tcpStep)
		s.f = func(at uintptr) bool {
			s.done = s.step(at)
			return s.done || s.once || s.moved.Load()
		}
	}
	s.step, s.moved, s.once, s.done = step, moved, once, false
	err = wait(s.f)
	done = s.done
	s.step, s.moved = nil, nil
	if !moved.Load() {
		w.spare.Store(s)
	}
	return done, err
}

// peerGone notes that the peer has closed the control socket, and wakes the goroutines that wait for
// it. An initiator that does so before it has moved may have given up the way to shared memory
// only, and goes on with TCP. Any other peer has gone.
func (l *shared) peerGone() {
	l.control.close() // The peer may have sent its own sockets, by which its end would not be told.
	if !l.gone.Swap(true) {
		l.bell.Load().wake()
		switch {
		case l.in.on.Load():
		case l.agreed.passive:
			l.initiatorGone()
		default:
			l.endTCP(0)
		}
	}
}

// initiatorGone notes why the link stays with TCP, if the initiator has given up the way to shared
// memory rather than moved or closed.
func (l *shared) initiatorGone() {
	l.in.Lock()
	defer l.in.Unlock()
	if l.in.ring == nil || l.in.page.Gone() || l.in.page.Start() != 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why == errSharedEarly {
		l.why = errSharedGivenUp
	}
}

// endTCP ends the reading of TCP in some time when the peer has gone and has left TCP open, which no
// honest peer does. A peer that has closed may have bytes in its socket that wait for this end to
// read. So nothing must have come for some time. empty counts how often that was so.
func (l *shared) endTCP(empty int) {
	time.AfterFunc(lastWordsTimeout/2, func() {
		switch {
		case l.closed.Load() || l.in.on.Load() && l.out.on.Load():
		case l.unreadInTCP() > 0:
			l.endTCP(0)
		case empty < 2:
			l.endTCP(empty + 1)
		default:
			l.conn.CloseRead()
		}
	})
}

// unreadInTCP returns how many bytes of TCP this end has not read.
func (l *shared) unreadInTCP() (n int) {
	l.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	return n
}

func (l *shared) close(reset bool) error {
	l.mu.Lock()
	if l.closed.Swap(true) {
		l.mu.Unlock()
		return net.ErrClosed
	}
	if l.visiting != nil {
		l.visiting.close()
		l.visiting = nil
	}
	l.mu.Unlock()
	l.decided()
	if l.agreed.passive {
		l.meeting.forget(l.agreed.Token)
	}
	unread := l.hasUnread()
	l.out.Lock()
	l.out.closed = true
	if l.out.ring != nil {
		switch {
		case reset, unread && !l.out.ended:
			l.out.ring.End(shmring.Reset)
		case !l.out.ended:
			l.out.ring.End(shmring.Finished)
		}
		l.out.page.SetGone()
	}
	l.out.Unlock()
	err := l.tcp.close(reset)
	l.unmap()
	return err
}

func (l *shared) closeAfter(words []byte) {
	var said atomic.Bool // An end without the words could be taken for an orderly one.
	defer func() { l.close(!said.Load()) }()
	defer time.AfterFunc(2*lastWordsTimeout, func() { l.close(!said.Load()) }).Stop()
	until := time.Now().Add(lastWordsTimeout)
	limit := func() {
		l.conn.SetWriteDeadline(until)
		if l.out.on.Load() {
			l.bell.Load().woken.SetWriteDeadline(until)
		}
	}
	// A write under way ends by then too, and one that was interrupted at once.
	if !l.out.interrupted.Load() {
		limit()
	}
	l.out.turn.Lock()
	l.out.interrupted.Store(false)
	limit()
	l.out.turn.Unlock()
	var err error
	if werr := l.write(func(at uintptr) bool {
		for len(words) > 0 && err == nil {
			var n int
			var wait bool
			n, wait, err = l.writev(at, [][]byte{words})
			words = words[n:]
			if wait {
				return !time.Now().Before(until)
			}
		}
		return true
	}); werr != nil || err != nil || len(words) > 0 || l.closeWrite() != nil {
		return
	}
	said.Store(true)
	l.setReadDeadline(until)
	rest := stagingPool.Get().(*[]byte)
	defer stagingPool.Put(rest)
	l.read(func(at uintptr) bool {
		for range pumpReads {
			if n, wait, _ := l.readv(at, [][]byte{*rest}); wait || n == 0 {
				return !wait
			}
		}
		return !time.Now().Before(until)
	})
}
