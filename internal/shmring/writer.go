package shmring

import (
	"math/bits"

	"github.com/rdmanet/rdmanet/internal/fault"
)

// A Writer is the writing side of a direction. One goroutine uses it at a time, and another
// one, at the same time, may use the Reader of the same end.
type Writer struct {
	own, peer Page
	ring      []byte
	tail      uint64
	head      uint64 // head is the last of the peer's that was checked.
	base      uint64 // base is where ring begins: what was written before is in another ring.
	origin    uint64
	move      uint32
	cpu       uint32
	woken     uint32 // woken is the sleep of the peer's reader for which the doorbell was rung.
	nap       nap
}

// NewWriter returns the writer of the end whose page is own. It begins with the ring in the
// page.
func NewWriter(own, peer Page) *Writer {
	return &Writer{own: own, peer: peer, ring: own.small(), nap: nap{word: own.u32(offSendNap)}}
}

// Size is the size of the ring in bytes.
func (w *Writer) Size() int { return len(w.ring) }

// Room returns how many bytes the ring has room for.
func (w *Writer) Room() (int, error) {
	h := w.peer.u64(offHead).Load()
	if h-w.head > w.tail-w.head {
		return 0, ErrCorrupt
	}
	w.head = h
	if h < w.base {
		h = w.base
	}
	return len(w.ring) - int(w.tail-h), nil
}

// Empty reports whether the peer has read everything.
func (w *Writer) Empty() bool {
	_, err := w.Room()
	return err == nil && w.head == w.tail
}

// Write copies what there is room for, and returns how much that is. wake is set when the
// doorbell must be rung.
func (w *Writer) Write(bufs [][]byte) (n int, wake bool, err error) {
	hidden := 0 // hidden is how many bytes the peer does not see yet.
buffers:
	for _, b := range bufs {
		for len(b) > 0 {
			var room int
			if room, err = w.Room(); err != nil || room == 0 {
				break buffers // There may be room soon, but for what comes next in b.
			}
			if w.head == w.tail && w.origin != w.tail {
				// The ring is empty, so the next bytes may be at its beginning. What is
				// in the cache is used again, and a quiet connection touches few pages.
				w.origin = w.tail
				w.own.origin(w.move).Store(w.origin)
			}
			at := int(w.tail-w.origin) & (len(w.ring) - 1)
			var k int
			if k, err = fault.Copy(w.ring[at:], b[:min(len(b), room, piece-hidden)]); err != nil {
				break buffers
			}
			b = b[k:]
			n += k
			w.tail += uint64(k)
			if hidden += k; hidden == piece {
				wake = w.publish() || wake
				hidden = 0
			}
		}
	}
	if hidden > 0 {
		wake = w.publish() || wake
	}
	return n, wake, err
}

// publish lets the peer see what was written.
func (w *Writer) publish() (wake bool) {
	raceRelease()
	w.own.u64(offTail).Store(w.tail)
	return due(w.peer.u32(offRecvNap), &w.woken)
}

// End ends the direction behind all that was written. wake is set when the doorbell must be
// rung.
func (w *Writer) End(e End) (wake bool) {
	w.own.u32(offEnd).Store(uint32(e))
	return due(w.peer.u32(offRecvNap), &w.woken)
}

// CanMove reports whether the peer has followed the last move. Until then there must not be
// another one.
func (w *Writer) CanMove() bool { return w.peer.u32(offMoved).Load() == w.move }

// Move makes the bytes from now on go through another ring, which must be zero or unused and
// which the peer has been given: mem, or the ring in the page if mem is nil. CanMove must
// be true. The ring so far is not used by the Writer any more. wake is set when the doorbell
// must be rung.
func (w *Writer) Move(mem []byte) (wake bool) {
	size := len(mem)
	if mem == nil {
		mem = w.own.small()
	}
	w.move++
	w.ring, w.base, w.origin = mem, w.tail, w.tail
	w.own.origin(w.move).Store(w.origin)
	w.own.u32(offMoveLen).Store(uint32(size))
	w.own.u64(offMoveAt).Store(w.tail)
	w.own.u32(offMove).Store(w.move)
	return due(w.peer.u32(offRecvNap), &w.woken)
}

// Small reports whether the ring is that in the page.
func (w *Writer) Small() bool { return &w.ring[0] == &w.own.small()[0] }

// Sleep says that the writer will sleep until there is room for n bytes or half of the ring,
// whichever is less. It returns true if there is no need to: there is room, or the peer's
// page has impossible values, which the next call finds. Otherwise the doorbell will be
// rung, and Awake must be called after that.
func (w *Writer) Sleep(n int) (awake bool) {
	w.nap.begin()
	room, err := w.Room()
	if err == nil && room < min(n, len(w.ring)/2) && !w.peer.Gone() {
		return false
	}
	w.nap.end()
	return true
}

// Awake says that the writer does not sleep any more.
func (w *Writer) Awake() { w.nap.end() }

// SetCPU tells the peer which processor the writer runs on.
func (w *Writer) SetCPU(n uint32) {
	if w.cpu != n+1 {
		w.cpu = n + 1
		w.own.u32(offSendCPU).Store(n + 1)
	}
}

// PeerCPU returns the processor on which the peer's reader was last, if it has said so.
func (w *Writer) PeerCPU() (n uint32, ok bool) {
	n = w.peer.u32(offRecvCPU).Load()
	return n - 1, n != 0
}

// validRing reports whether a ring outside the page may have so many bytes.
func validRing(n int) bool {
	return n >= MinRing && n <= MaxRing && bits.OnesCount(uint(n)) == 1
}
