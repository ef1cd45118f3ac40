//go:build amd64 || arm64

package iwarp

import (
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

	// ringPatience is how long a larger ring is not asked for after that has failed.
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

// grow goes on to a larger ring if what must be written calls for it. The caller holds out.
func (l *shared) grow(total int) {
	g := &l.out.growth
	size := g.next(l.out.ring.Size(), total)
	if size == 0 || !l.out.ring.CanMove() || time.Since(g.refused) < ringPatience {
		return
	}
	mem, err := l.newRing(size)
	if err != nil {
		g.refused = time.Now()
		return
	}
	l.moveTo(mem)
}

// newRing makes a ring and gives it to the peer. The caller holds out.
func (l *shared) newRing(size int) ([]byte, error) {
	if size == thirdRing && l.meeting.thirdRings.Add(1) > maxThirdRings {
		l.meeting.thirdRings.Add(-1)
		return nil, unix.ENOBUFS
	}
	fd, mem, err := shmring.Create(size)
	if err == nil {
		err = l.control.give(fd)
		unix.Close(fd)
	}
	if err != nil {
		l.dropRing(mem, size)
		return nil, err
	}
	return mem, nil
}

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
	if ring != nil && l.out.on.Load() && !ring.Small() && ring.Empty() && ring.CanMove() {
		l.moveTo(nil)
	}
}
