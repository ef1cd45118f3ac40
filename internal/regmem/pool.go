package regmem

import (
	"errors"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

const (
	// PageSize is the size in bytes that memory is measured in, which is that of a page
	// on most systems.
	PageSize = 4096

	// sizeStep is what the size of a buffer below a page is a multiple of, in bytes.
	sizeStep = 512

	// growAgain is how long a pool that could not grow does not try again. A pool is
	// asked with every message, and the kernel takes long to refuse memory.
	growAgain = 50 * time.Millisecond
)

// poolKey is what the pools of a Domain differ in.
type poolKey struct {
	size int
	bulk bool
}

// keeps reports whether the pool keeps its first slab for good.
func (p *Pool) keeps() bool { return p.dom.Private && !p.bulk }

// A Pool has the buffers of one size of a [Domain].
type Pool struct {
	Size int // Size is the length in bytes of each buffer. It does not change.

	dom  *Domain
	bulk bool // bulk is set if the pool keeps nothing while nobody uses it.

	mu     sync.Mutex
	free   []*Buffer   // free has the buffers that nobody uses. The last one was used last, and is taken first.
	least  int         // least is the smallest length of free since the last round of trim.
	slabs  []*slab     // slabs is in the order in which they were made.
	timer  *time.Timer // timer calls trim while there may be something to give back.
	rounds uint16      // rounds counts those of trim.
	closed bool

	refused error     // refused is why the pool could not grow.
	again   time.Time // again is when a pool that could not grow tries again.
}

// Pool returns the pool of buffers for at least n bytes, n being 1 or more. The size is
// rounded up to a multiple of 512 bytes, and of PageSize beyond one page: pages that
// nothing touches take no memory.
func (d *Domain) Pool(n int) *Pool { return d.poolOf(n, false) }

// BulkPool is Pool for buffers that idle users do without: all of the pool's memory is given
// back when nobody uses it, in a private domain too.
func (d *Domain) BulkPool(n int) *Pool { return d.poolOf(n, true) }

func (d *Domain) poolOf(n int, bulk bool) *Pool {
	size := roundUp(n, sizeStep)
	if size > PageSize {
		size = roundUp(n, PageSize)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	key := poolKey{size, bulk}
	p := d.pools[key]
	if p == nil {
		p = &Pool{dom: d, Size: size, bulk: bulk}
		d.pools[key] = p
	}
	p.mu.Lock()
	p.again = time.Time{} // A new user tries at once.
	p.mu.Unlock()
	return p
}

// roundUp returns the smallest multiple of step that is not less than n. step is a power
// of two.
func roundUp(n, step int) int { return (n + step - 1) &^ (step - 1) }

// Get returns a buffer, which the caller gives back by [Buffer.Release]. The buffer's
// content is undefined. Where the device cannot register more memory the error matches
// syscall.ENOBUFS, and Get returns the same error for the next 50 ms.
func (p *Pool) Get() (*Buffer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		if p.refused != nil && time.Now().Before(p.again) {
			return nil, p.refused
		}
		if p.refused = p.grow(); p.refused != nil {
			p.refused = noMemory(p.dom.Dev, p.Size, p.dom.advice.Buffers, p.refused)
			p.again = time.Now().Add(growAgain)
			return nil, p.refused
		}
	}
	b := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	p.least = min(p.least, len(p.free))
	b.slab.used++
	b.Stale, b.dirty = b.dirty, true
	return b, nil
}

// Older returns a free buffer of the pool's first slab and releases b, or returns b where
// there is none or b is in that slab or of another pool. Buffers in use that lie close
// together let the pool give back other slabs.
func (p *Pool) Older(b *Buffer) *Buffer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b.Pool() != p || b.slab == p.slabs[0] {
		return b
	}
	for i, f := range p.free {
		if f.slab == p.slabs[0] {
			p.free[i] = b
			f.dirty = true
			b.slab.used--
			f.slab.used++
			b.round = p.rounds
			return f
		}
	}
	return b
}

// Scattered reports whether [Pool.Older] would replace some of the buffers. The caller
// has the ring to itself.
func (p *Pool) Scattered(bufs *ring.Ring[*Buffer]) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.slabs) < 2 || p.slabs[0].used == len(p.slabs[0].buffers) {
		return false
	}
	for i := range bufs.Len() {
		if b := *bufs.At(i); b.Pool() == p && b.slab != p.slabs[0] {
			return true
		}
	}
	return false
}

// PinsMemory reports whether memory that is registered with a device stays resident: it may
// run out then, and is paid for whether it is used or not.
func PinsMemory(dev ibv.Device) bool { return !dev.Attr().Caps.Has(ibv.CapOnDemandPaging) }

// Drops reports whether the pages of a single buffer can be given back to the system by
// [DropPages]: the system knows how, and the device does not pin them.
func (p *Pool) Drops() bool { return dropsPages && !PinsMemory(p.dom.Dev) }

// grow adds a slab. The caller holds mu.
func (p *Pool) grow() error {
	s, err := newSlab(p)
	if err != nil {
		return err
	}
	for i := range s.buffers {
		p.free = append(p.free, &s.buffers[i])
	}
	p.slabs = append(p.slabs, s)
	p.watch()
	return nil
}

// close frees all slabs. Every buffer is free.
func (p *Pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	p.closed = true
	var errs []error
	for _, s := range p.slabs {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}
