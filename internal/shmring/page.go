package shmring

import (
	"errors"
	"sync/atomic"
	"unsafe"
)

const (
	// PageSize is the size of a Page in bytes. It is the same on all systems, also where
	// the pages of the processor are larger.
	PageSize = 4096

	// smallSize is the size of the ring inside a Page.
	smallSize = 2048

	// MinRing and MaxRing bound the size of a ring outside the page, which is a power of
	// two.
	MinRing = 4096
	MaxRing = 1 << 20

	// piece is how many bytes are copied at most before the other end may work on them.
	piece = 32 << 10
)

// ErrCorrupt means that the peer has stored what no honest peer stores.
var ErrCorrupt = errors.New("shmring: the peer has stored impossible values in its shared memory")

// An End says how a direction has ended.
type End uint32

const (
	Open     End = iota // Open means that more bytes may come.
	Finished            // Finished means that nothing follows the bytes that are in the ring.
	Reset               // Reset means the same, by an end that has given up.
)

// Offsets of the words in a page. Words that one role writes have a pair of cache lines to
// themselves, because processors fetch lines in pairs.
const (
	offTail    = 0   // offTail has the position behind the last byte written.
	offOrigin  = 8   // offOrigin has, for two rings in turn, the position of their first byte.
	offEnd     = 24  // offEnd has an End.
	offSendCPU = 28  // offSendCPU has the processor of the writer, plus one.
	offMove    = 32  // offMove counts the moves to other rings.
	offMoveLen = 36  // offMoveLen has the size of the ring of the last move, 0 for that in the page.
	offMoveAt  = 40  // offMoveAt has the position of the first byte in that ring.
	offStart   = 48  // offStart is for the caller: see Page.SetStart.
	offHead    = 128 // offHead has the position of the next byte to read, in the ring of the peer.
	offMoved   = 136 // offMoved is the last move of the peer that the reader has followed.
	offRecvCPU = 140 // offRecvCPU has the processor of the reader, plus one.
	offGone    = 144 // offGone is set when this end neither reads nor writes any more.
	offRecvNap = 256 // offRecvNap is odd while the reader sleeps, and another number each time.
	offSendNap = 384 // offSendNap is the same for the writer.
	offSmall   = PageSize - smallSize
)

// A Page is the memory that one end shares from the beginning: its own, or that of the peer,
// which must not be written.
type Page struct{ mem []byte }

// NewPage returns the page in mem, which has PageSize bytes and is aligned to 8. A page that
// was never used is zero.
func NewPage(mem []byte) Page {
	if len(mem) != PageSize || uintptr(unsafe.Pointer(&mem[0]))%8 != 0 {
		panic("shmring: not a page")
	}
	return Page{mem}
}

func (p Page) u32(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&p.mem[off])) }
func (p Page) u64(off int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&p.mem[off])) }

// origin returns the word with the origin of the ring that a move has led to.
func (p Page) origin(move uint32) *atomic.Uint64 { return p.u64(offOrigin + 8*int(move&1)) }

func (p Page) small() []byte { return p.mem[offSmall:] }

// SetStart stores a number for the peer, once: where the bytes begin that go through the
// ring. The number must not be 0, which stands for none.
func (p Page) SetStart(n uint64) { p.u64(offStart).Store(n) }

// Start returns what the page's owner has given to SetStart, or 0.
func (p Page) Start() uint64 { return p.u64(offStart).Load() }

// SetGone tells the peer that this end neither reads nor writes any more.
func (p Page) SetGone() { p.u32(offGone).Store(1) }

// Gone reports whether the page's owner has called SetGone.
func (p Page) Gone() bool { return p.u32(offGone).Load() != 0 }

// A nap is the sleep word of one end: the owner's side of it.
type nap struct {
	word *atomic.Uint32
	n    uint32
}

// begin stores another odd number.
func (n *nap) begin() {
	n.n = (n.n + 1) | 1
	n.word.Store(n.n)
}

// end stores an even number.
func (n *nap) end() {
	if n.n&1 == 1 {
		n.n++
		n.word.Store(n.n)
	}
}

// due reports whether the other end sleeps and was not woken yet. last is the number for
// which it was woken.
func due(word *atomic.Uint32, last *uint32) bool {
	n := word.Load()
	if n&1 == 0 || n == *last {
		return false
	}
	*last = n
	return true
}
