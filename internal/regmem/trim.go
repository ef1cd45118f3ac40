package regmem

import (
	"slices"
	"sync/atomic"
	"time"
)

const (
	// trimSlabs and trimBuffers are how many slabs and buffers trim gives back before it
	// lets other users have the pool.
	trimSlabs   = 64
	trimBuffers = 64
)

// trimEvery is the time between two rounds of trim. A pool gives memory back within
// twice that time after its last use.
var trimEvery atomic.Int64

func init() { trimEvery.Store(int64(time.Second)) }

// watch sets the timer for trim if there may be something to give back. The first slab of
// a private domain stays. The caller holds mu.
func (p *Pool) watch() {
	if p.timer == nil && !p.closed && (!p.keeps() || len(p.slabs) > 1) {
		p.timer = time.AfterFunc(time.Duration(trimEvery.Load()), p.trim)
	}
}

// trim gives back what nobody has needed since its last round: slabs without buffers in
// use, and the pages of free buffers in the other slabs, where the device does not pin
// them. It sets the timer again until nothing is left to give back.
func (p *Pool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer == nil {
		return // The pool is closed.
	}
	whole := p.trimSlabs()
	again := p.dropFree() || whole
	if again {
		p.timer.Reset(time.Millisecond) // Other users can lock the pool until then.
		return
	}
	p.rounds++
	p.least = len(p.free)
	p.arrange()
	for _, b := range p.free {
		again = again || b.slab.used == 0 || b.dirty && p.Drops()
	}
	if p.keeps() {
		again = len(p.slabs) > 1
	}
	if again {
		p.timer.Reset(time.Duration(trimEvery.Load()))
	} else {
		p.timer = nil
	}
}

// trimSlabs gives slabs back, and reports whether some are left for the next call. The
// caller holds mu.
func (p *Pool) trimSlabs() (more bool) {
	gone := make(map[*slab]bool)
	kept := p.slabs[:0]
	for i, s := range p.slabs {
		switch {
		case i == 0 && p.keeps(), s.used > 0, len(s.buffers) > p.least:
		case len(gone) == trimSlabs:
			more = true
		case s.mr.Close() == nil:
			FreePages(s.mem) // If it fails the mapping leaks, but nobody uses the closed key.
			gone[s] = true
			p.least -= len(s.buffers)
			continue
		}
		kept = append(kept, s)
	}
	if len(gone) == 0 {
		return more
	}
	clear(p.slabs[len(kept):])
	p.slabs = kept
	p.free = slices.DeleteFunc(p.free, func(b *Buffer) bool { return gone[b.slab] })
	return more
}

// arrange sorts the free buffers so that Get takes from the slabs with the most buffers
// in use. The other slabs become free in time. The caller holds mu.
func (p *Pool) arrange() {
	if len(p.slabs) < 2 {
		return
	}
	var ends [slabBuffers + 2]int
	for _, b := range p.free {
		ends[b.slab.used+1]++
	}
	for i := range ends[1:] {
		ends[i+1] += ends[i]
	}
	sorted := make([]*Buffer, len(p.free))
	for _, b := range p.free {
		sorted[ends[b.slab.used]] = b
		ends[b.slab.used]++
	}
	p.free = sorted
}

// dropFree gives the pages of free buffers back, and reports whether some are left for
// the next call. The caller holds mu.
func (p *Pool) dropFree() (more bool) {
	if !p.Drops() {
		return false
	}
	n := 0
	for _, b := range p.free {
		switch {
		case !b.dirty || b.round == p.rounds:
		case n == trimBuffers:
			return true
		default:
			b.dirty = false
			DropPages(b.B)
			n++
		}
	}
	return false
}
