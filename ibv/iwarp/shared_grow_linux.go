//go:build amd64 || arm64

package iwarp

import (
	"errors"
	"math/bits"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/shmring"
)

// Rings outside the page have one of these sizes. A larger ring is faster: two ends on one
// processor take turns less often, and two ends on two processors meet less often in the
// same cache lines.
const (
	firstRing  = 64 << 10
	secondRing = 256 << 10
	thirdRing  = 1 << 20
)

const (
	// secondAfter and thirdAfter are how often the ring before must have been full.
	secondAfter = 8
	thirdAfter  = 4

	// ringPatience is how long a larger ring is not offered after that has failed.
	ringPatience = time.Second
)

// These are variables for tests.
var (
	// thirdWithin is the longest time in which the second ring must have been full
	// thirdAfter times. If that takes longer, the peer reads so slowly that a larger ring
	// is of no use.
	thirdWithin = 100 * time.Millisecond

	// maxThirdRings is how many rings of the largest size a device makes at a time.
	maxThirdRings int32 = 64
)

// growth decides how the ring grows that this end writes to. The lock of sharedOut guards it.
type growth struct {
	full    int       // full is how often the ring was full.
	since   time.Time // since is when full was 0.
	refused time.Time // refused is when a larger ring could not be had.
}

// next notes that a ring of the given size was full, and returns the size of the ring to go
// on to, or 0. total is how many bytes are to be written.
func (g *growth) next(size, total int) int {
	g.full++
	switch size {
	case thirdRing:
		return 0
	case secondRing:
		if g.full < thirdAfter {
			return 0
		}
		took := time.Since(g.since)
		g.begin()
		if took > thirdWithin {
			return 0
		}
		return thirdRing
	case firstRing:
		if g.full < secondAfter {
			return 0
		}
		return secondRing
	}
	if total > firstRing/2 {
		return secondRing
	}
	return firstRing
}

// begin counts from now on.
func (g *growth) begin() { g.full, g.since = 0, time.Now() }

// An offer is a ring that this end has offered to the peer. The peer maps it, and answers, when it
// likes. Until then this end goes on with the ring that it has, so a peer that has no descriptor or
// no mapping left loses nothing.
type offer struct {
	offered []byte       // offered is the ring, or nil. The lock of sharedOut guards it.
	answer  atomic.Int32 // answer is a controlMessage: awaited, or what the peer has answered.
}

// grow offers the peer a larger ring if what must be written calls for it. The caller holds out.
func (l *shared) grow(total int) {
	if l.out.offered != nil {
		return
	}
	g := &l.out.growth
	size := g.next(l.out.ring.Size(), total)
	if size == 0 || !l.out.ring.CanMove() || time.Since(g.refused) < ringPatience {
		return
	}
	if err := l.offerRing(size); err != nil {
		g.refused = time.Now()
	}
}

// offerRing makes a ring and offers it to the peer. The caller holds out.
func (l *shared) offerRing(size int) error {
	if size == thirdRing && l.meeting.thirdRings.Add(1) > maxThirdRings {
		l.meeting.thirdRings.Add(-1)
		return unix.ENOBUFS
	}
	fd, mem, err := shmring.Create(size)
	if err == nil {
		l.out.answer.Store(int32(awaited))
		l.out.offered = mem
		err = l.control.send(controlMessage(bits.TrailingZeros(uint(size))), fd)
		unix.Close(fd)
	}
	if err != nil {
		l.dropRing(mem, size)
		l.out.offered = nil
	}
	return err
}

// settle does what the peer's answer to an offer calls for, once there is one. The caller holds out.
func (l *shared) settle() {
	mem := l.out.offered
	if mem == nil {
		return
	}
	switch controlMessage(l.out.answer.Load()) {
	case refused:
		l.out.offered = nil
		l.dropRing(mem, len(mem))
		l.out.growth.refused = time.Now()
	case accepted: // Since the offer nothing has moved, so the peer has followed all moves.
		l.out.offered = nil
		l.moveTo(mem)
	}
}

// hear takes what the peer has said by the control socket. Meanwhile the watch tells of the peer's
// end only.
func (l *shared) hear(id uint64) {
	c := l.control
	for range maxHeard {
		m, ring, ok := c.receive()
		if !ok {
			break
		}
		err := l.heard(c, m, ring)
		if err != nil {
			l.wrong(err)
		}
		if ring >= 0 {
			unix.Close(ring)
		}
		if err != nil {
			return
		}
	}
	l.meeting.watch.again(c, id, anything)
}

// heard does what a message calls for. It returns an error if no honest peer sends that.
func (l *shared) heard(c *controlSocket, m controlMessage, ring int) error {
	switch m {
	case accepted, refused:
		if ring >= 0 {
			return errSharedOffer
		}
		return l.answered(m)
	}
	answer, err := l.answerTo(m, ring)
	if err != nil {
		return err
	}
	c.send(answer) // An error is that the peer has gone, of which the watch tells.
	return nil
}

// wrong ends the connection with an error.
func (l *shared) wrong(err error) {
	l.fault.CompareAndSwap(nil, &err)
	l.conn.CloseRead()
	l.gone.Store(true)
	l.bell.Load().wake()
}

// maxHeard bounds how many messages are taken at a time, so that a peer that sends without end does
// not have a goroutine for itself.
const maxHeard = 16

// answered notes the answer to an offer. It returns an error if there is no offer to answer.
func (l *shared) answered(answer controlMessage) error {
	// A writer that finds room all the time looks at it.
	if !l.out.answer.CompareAndSwap(int32(awaited), int32(answer)) {
		return errSharedOffer
	}
	l.out.Lock()
	if l.out.ring != nil {
		l.settle()
	}
	l.out.Unlock()
	l.bell.Load().wake() // The writer may be waiting for room in the ring before.
	return nil
}

// answerTo maps a ring that the peer offers, and returns the answer. That is refused if there are too
// few descriptors, so that none came, or too little memory. There is an error for what is not an
// offer that the peer may make.
func (l *shared) answerTo(m controlMessage, ring int) (controlMessage, error) {
	size := 1 << min(m, 30)
	if size < shmring.MinRing || size > shmring.MaxRing {
		return 0, errSharedOffer
	}
	if ring < 0 {
		return refused, nil
	}
	mem, err := shmring.Map(ring, size)
	switch {
	case errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EAGAIN):
		return refused, nil
	case err != nil:
		return 0, err
	}
	l.in.Lock()
	defer l.in.Unlock()
	switch {
	case l.in.ring == nil: // after close
	case l.in.next != nil:
		err = errSharedOffer
	default:
		l.in.next = mem
		return accepted, nil
	}
	shmring.Release(mem)
	return 0, err
}

var errSharedOffer = errors.New("the peer has offered shared memory in a way that it may not")

// dropRing gives back a ring of this end.
func (l *shared) dropRing(mem []byte, size int) {
	if size == thirdRing {
		l.meeting.thirdRings.Add(-1)
	}
	shmring.Release(mem)
}

// moveTo goes on to another ring, which the peer has, or to that in the page. The caller holds
// out.
func (l *shared) moveTo(mem []byte) {
	if l.out.ring.Move(mem) {
		l.bell.Load().press()
	}
	l.dropRing(l.out.mem, len(l.out.mem))
	l.out.mem = mem
	l.out.growth.begin()
}

// trim gives back the memory of an idle connection.
func (l *shared) trim() {
	l.out.Lock()
	defer l.out.Unlock()
	ring := l.out.ring
	if ring != nil && l.out.on.Load() && !ring.Small() && ring.Empty() && ring.CanMove() && l.out.offered == nil {
		l.moveTo(nil)
	}
}
