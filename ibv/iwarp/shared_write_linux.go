//go:build amd64 || arm64

package iwarp

import (
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/processor"
	"github.com/rdmanet/rdmanet/internal/shmring"
)

// sharedOut is the direction to the peer.
type sharedOut struct {
	sync.Mutex
	on     atomic.Bool // on is set when this end has moved.
	tcp    tcpWaits
	count  uint64 // count is how many bytes TCP has taken.
	writes int    // writes is how often it has.
	ring   *shmring.Writer
	page   shmring.Page // page is this end's.
	mapped []byte
	mem    []byte
	offer
	may    bool // may is set when this end may move.
	marked bool // marked is set when the place of the mark is told.
	moving bool // moving is set when the way to shared memory was begun.
	ended  bool
	closed bool
	growth growth
	poller *cqwait.Poller
	bufs   [batchChunks][]byte // bufs is for rest.
	want   int                 // want is how many bytes the writer waits to write.

	turn        sync.Mutex  // of write; it is taken first
	interrupted atomic.Bool // no write may wait
}

// Sharing begins after so many writes of the initiator, or so many bytes. What is said when a
// connection is set up, and a request or two, are cheaper without.
const (
	moveAfterWrites = 16
	moveAfterBytes  = 64 << 10
)

func (l *shared) write(step func(at uintptr) bool) error {
	l.out.turn.Lock()
	defer l.out.turn.Unlock()
	for !l.out.on.Load() {
		waits := l.undecided()
		done, err := l.out.tcp.steps(l.raw.Write, step, &l.out.on, waits)
		if done || err != nil {
			return err
		}
		if waits {
			<-l.begun
		}
	}
	for {
		switch {
		case l.closed.Load():
			return net.ErrClosed
		case l.out.interrupted.Load():
			return os.ErrDeadlineExceeded
		}
		if step(0) {
			return nil
		}
		if err := l.sleepToWrite(); err != nil {
			return err
		}
	}
}

// sleepToWrite waits until there may be room.
func (l *shared) sleepToWrite() error {
	bell := l.bell.Load()
	if bell == nil {
		return net.ErrClosed
	}
	err := bell.awaitWrite()
	l.out.Lock()
	if l.out.ring != nil {
		l.out.ring.Awake()
		l.out.poller.Ended()
	}
	l.out.Unlock()
	return err
}

func (l *shared) interruptWrite() {
	l.out.interrupted.Store(true)
	l.tcp.interruptWrite()
	// Before this end has moved the doorbell is of use to others.
	if l.out.on.Load() {
		l.bell.Load().woken.SetWriteDeadline(time.Unix(1, 0))
	}
}

func (l *shared) resumeWrite() {
	l.out.interrupted.Store(false)
	l.tcp.resumeWrite()
	if l.out.on.Load() {
		l.bell.Load().woken.SetWriteDeadline(time.Time{})
	}
}

// noNeedToWait says that the writer sleeps, and reports whether there is a reason not to.
func (l *shared) noNeedToWait(uintptr) bool {
	l.out.Lock()
	defer l.out.Unlock()
	return l.out.ring == nil || l.out.ring.Sleep(l.out.want) || l.gone.Load()
}

func (l *shared) writev(at uintptr, bufs [][]byte) (n int, wait bool, err error) {
	l.out.Lock()
	defer l.out.Unlock()
	if l.out.closed {
		return 0, false, net.ErrClosed
	}
	if l.out.ring == nil && (l.out.may || l.out.on.Load()) {
		return 0, false, errno.ECONNRESET // The peer has moved, and refused to have this side move.
	}
	if !l.out.on.Load() {
		switch {
		case l.out.may && l.gone.Load():
			return 0, false, errno.EPIPE
		case l.out.may && !l.out.ended:
			if wait, err := l.begin(at); wait || err != nil {
				return 0, wait, err
			}
		case l.begun != nil && !l.out.ended:
			if l.undecided() {
				return 0, true, nil
			}
			return 0, false, errno.ECONNRESET // The way to shared memory has failed.
		default:
			n, wait, err = l.tcp.writev(at, bufs)
			l.out.count += uint64(max(n, 0))
			l.out.writes++
			l.perhapsMove()
			return n, wait, err
		}
	}
	return l.writeRing(bufs)
}

// perhapsMove begins the way to shared memory when that is likely to pay. The caller holds
// out.
func (l *shared) perhapsMove() {
	if l.agreed.passive || l.out.moving || l.out.writes < moveAfterWrites && l.out.count < moveAfterBytes {
		return
	}
	l.out.moving = true
	go func() {
		if err := l.move(); err != nil {
			l.refuse(err)
		}
	}()
}

// begin moves this direction to the ring. The caller holds out.
func (l *shared) begin(at uintptr) (wait bool, err error) {
	if !l.out.marked {
		l.out.page.SetStart(l.out.count + 1)
		l.out.marked = true
	}
	if _, wait, err := l.tcp.writev(at, [][]byte{{0}}); wait || err != nil {
		return wait, err
	}
	uncork(at) // The peer waits for the mark, which ending may have TCP keep.
	l.out.on.Store(true)
	l.nowSharing()
	return false, nil
}

// writeRing writes to the ring. The caller holds out.
func (l *shared) writeRing(bufs [][]byte) (n int, wait bool, err error) {
	ring := l.out.ring
	if l.out.ended {
		return 0, false, errno.EPIPE
	}
	if l.gone.Load() || l.in.page.Gone() {
		return 0, false, errno.EPIPE
	}
	total := 0
	for _, b := range bufs {
		total += len(b)
	}
	room, err := ring.Room()
	if err != nil {
		return 0, false, err
	}
	if room < total {
		l.grow(total)
	}
	if cpu, ok := processor.Current(); ok {
		ring.SetCPU(cpu)
	}
	for {
		l.settle()
		k, wake, err := ring.Write(bufs)
		if wake {
			l.bell.Load().press()
		}
		n += k
		if l.out.want = total - n; n == total || err != nil {
			clear(l.out.bufs[:]) // The memory of the caller is not referred to any more.
			return n, false, err
		}
		// A peer that reads on another processor makes room sooner than it could wake this
		// process.
		if !l.out.poller.Poll(l.out.hasRoom) {
			clear(l.out.bufs[:])
			return n, n == 0, nil
		}
		bufs = l.out.rest(bufs, k)
	}
}

// ending is of use for TCP alone: a ring has no packets.
func (l *shared) ending() {
	l.out.Lock()
	defer l.out.Unlock()
	if !l.out.on.Load() {
		l.tcp.ending()
	}
}

func (l *shared) closeWrite() error {
	l.out.Lock()
	defer l.out.Unlock()
	if l.out.closed {
		return net.ErrClosed
	}
	l.out.ended = true
	if !l.out.on.Load() {
		if l.out.ring != nil {
			l.out.ring.End(shmring.Finished) // See cutOff.
		}
		return l.tcp.closeWrite()
	}
	if l.out.ring == nil {
		return errno.ECONNRESET
	}
	if l.out.ring.End(shmring.Finished) {
		l.bell.Load().press()
	}
	return nil
}

func (l *shared) acknowledged() ibv.Ack {
	l.out.Lock()
	defer l.out.Unlock()
	if (l.gone.Load() || l.out.ring != nil && l.in.page.Gone()) && l.out.untaken() {
		return ibv.AckNever
	}
	return l.tcp.acknowledged()
}

// untaken reports whether the peer has not read all that is in the ring.
func (out *sharedOut) untaken() bool { return out.on.Load() && out.ring != nil && !out.ring.Empty() }

// rest returns what follows the first n bytes of bufs, in memory of out.
func (out *sharedOut) rest(bufs [][]byte, n int) [][]byte {
	rest := out.bufs[:0]
	for _, b := range bufs {
		k := min(n, len(b))
		n -= k
		if k < len(b) {
			rest = append(rest, b[k:])
		}
	}
	return rest
}

// hasRoom reports whether there is room for what must be written, or for a good part of it.
func (out *sharedOut) hasRoom() bool {
	room, err := out.ring.Room()
	return err != nil || room >= min(out.want, out.ring.Size()/4)
}

// pollPays is for the poller.
func (out *sharedOut) pollPays() bool { return elsewhere(out.ring.PeerCPU()) }
