package rdmanet

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// Registered memory: slabs, which are stretches of memory outside the Go heap
// (whose freed pages the runtime would give back to the kernel behind the
// device's back), each registered once with a protection domain and cut into
// buffers of one size. What a slab's buffers hold is not cleared between uses,
// so a buffer is never longer for its user than the bytes that the device has
// put there.
//
// Where a key can belong to one queue pair (ibv.CapQPRegion) all connections of
// a device share one domain. Elsewhere every key of a domain is open to the peers
// of all queue pairs in it, and a guess is enough for a neighbour; so there each
// connection has a domain to itself.

// domain is a protection domain and the memory registered with it.
type domain struct {
	dev ibv.Device
	pd  ibv.PD

	private   bool // of one connection
	lasting   bool // stays for domainIdle
	unchecked bool // peers may read all that is registered: ibv.Quirks.ReadsUnchecked

	users int    // below domains.mu
	epoch uint64 // and this: how often it was acquired or freed

	windows *receiveBudget // of the device

	mu     sync.Mutex
	pools  map[int]*pool        // by buffer size
	cached map[*Buffer]struct{} // that have a registration here: see alloc.go
}

// pool holds buffers of one size.
type pool struct {
	dom  *domain
	size int

	mu     sync.Mutex
	free   []*buffer // last in, first out: the warmest memory is used first
	least  int       // of them there were since trim has looked
	slabs  []*slab
	timer  *time.Timer // for trim, while there may be something to give back
	rounds uint16      // that trim has looked
	closed bool

	refused error     // why it could not grow,
	again   time.Time // and when to try again
}

// slab is a registered stretch of memory.
type slab struct {
	pool    *pool
	mem     []byte
	mr      ibv.MR
	buffers []buffer
	used    int // of them; below pool.mu
}

// buffer is a piece of a slab.
type buffer struct {
	b    []byte
	slab *slab
	next *buffer // in buffers
	lkey uint32

	stale bool // its pages may have been in memory when it was handed out

	// Below pool.mu. It was last given back in that round of trim's, and since then, or
	// since it was handed out, its pages may be in memory.
	round uint16
	dirty bool
}

func (b *buffer) pool() *pool { return b.slab.pool }

// buffers is a stack of them, for what a send or its completion takes several of.
type buffers struct{ top *buffer }

func (s *buffers) push(b *buffer) { b.next, s.top = s.top, b }

// pop returns nil where none is left.
func (s *buffers) pop() *buffer {
	b := s.top
	if b != nil {
		s.top, b.next = b.next, nil
	}
	return b
}

func (b *buffer) sge(n int) ibv.SGE { return ibv.SGE{Buf: b.b[:n], LKey: b.lkey} }

const (
	pageSize    = 4096
	slabBytes   = 1 << 20 // about; pinned memory comes in smaller steps
	pinnedSlab  = 256 << 10
	slabBuffers = 128 // at most

	// A private domain begins with what an idle connection takes: its receives,
	// one more to grant, something to send from and to read into. It grows by privateSlab,
	// in steps that are small, so that what it does not need any more can be given back.
	firstBuffers = 7
	privateSlab  = 64 << 10

	// A pool that could not grow does not try again for growAgain: it is asked
	// with every message, and to ask the kernel in vain is dear.
	growAgain = 50 * time.Millisecond

	// How many slabs and buffers trim gives back before it lets others have the pool.
	trimSlabs   = 64
	trimBuffers = 64
)

// trimEvery is how often a pool looks for memory that was not needed since it has looked
// last: what is given back goes to the system within twice that.
var trimEvery atomic.Int64

func init() { trimEvery.Store(int64(time.Second)) }

var domains struct {
	mu     sync.Mutex
	shared map[ibv.Device]*domain
	live   int // the private ones, too
}

// acquireDomain returns a domain for a connection of the device, to be released
// once. lasting says that a new one, if it is shared, stays for domainIdle.
func acquireDomain(dev ibv.Device, lasting bool) (*domain, error) {
	if !dev.Attr().Caps.Has(ibv.CapQPRegion) {
		d, err := newDomain(dev)
		if err != nil {
			return nil, err
		}
		d.private, d.users = true, 1
		domains.mu.Lock()
		domains.live++
		domains.mu.Unlock()
		return d, nil
	}
	domains.mu.Lock()
	defer domains.mu.Unlock()
	d := domains.shared[dev]
	if d == nil {
		var err error
		if d, err = newDomain(dev); err != nil {
			return nil, err
		}
		d.lasting = lasting
		if domains.shared == nil {
			domains.shared = make(map[ibv.Device]*domain)
		}
		domains.shared[dev] = d
		domains.live++
	}
	d.users++
	d.epoch++
	return d, nil
}

func newDomain(dev ibv.Device) (*domain, error) {
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, err
	}
	return &domain{dev: dev, pd: pd, unchecked: dev.Attr().Quirks.ReadsUnchecked, windows: acquireReceiveBudget(dev), pools: make(map[int]*pool)}, nil
}

// retain takes another reference; the caller knows of one that stays meanwhile.
func (d *domain) retain() {
	domains.mu.Lock()
	d.users++
	domains.mu.Unlock()
}

// domainIdle is how long a shared domain outlives its last user, so that a
// program that connects again and again does not map and register memory each
// time. A provider that the program has brought (Config.Provider) is the
// program's to dispose of, and gets everything back as soon as its last connection and
// listener have been released, which goes on behind Close (Lingering counts those).
var domainIdle = time.Second

// release gives the domain up. When nobody has wanted it again for domainIdle
// all memory is freed; every buffer is back by then.
func (d *domain) release() error {
	domains.mu.Lock()
	defer domains.mu.Unlock()
	d.users--
	switch {
	case d.users > 0:
		return nil
	case d.private:
		// Nobody else knows it, so nobody need wait for its end.
		domains.mu.Unlock()
		err := d.free()
		domains.mu.Lock()
		domains.live--
		return err
	case !d.lasting:
		return d.retire()
	}
	epoch := d.epoch
	time.AfterFunc(domainIdle, func() {
		domains.mu.Lock()
		defer domains.mu.Unlock()
		if d.users == 0 && d.epoch == epoch {
			d.retire()
		}
	})
	return nil
}

// retire ends a shared domain. The caller holds domains.mu.
func (d *domain) retire() error {
	d.epoch++ // for a timer that is still to come
	delete(domains.shared, d.dev)
	domains.live--
	return d.free()
}

// free gives back all that the domain has, which nobody uses any more.
func (d *domain) free() error {
	d.windows.release(d.dev)
	errs := []error{d.forgetBuffers()}
	for _, p := range d.pools {
		errs = append(errs, p.close())
	}
	return errors.Join(append(errs, d.pd.Close())...)
}

func (p *pool) close() error {
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

func (s *slab) close() error {
	if err := s.mr.Close(); err != nil {
		return err // the device may still use it: better leaked than unmapped
	}
	return freePages(s.mem)
}

// pool returns the pool of buffers for at least n bytes.
func (d *domain) pool(n int) *pool {
	size := (n + 511) &^ 511
	if size > pageSize {
		size = (n + pageSize - 1) &^ (pageSize - 1) // whole pages: untouched ones cost nothing
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.pools[size]
	if p == nil {
		p = &pool{dom: d, size: size}
		d.pools[size] = p
	}
	p.mu.Lock()
	p.again = time.Time{} // for somebody new it tries at once
	p.mu.Unlock()
	return p
}

// get returns a buffer. Memory that the device cannot register matches
// syscall.ENOBUFS.
func (p *pool) get() (*buffer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		if p.refused != nil && time.Now().Before(p.again) {
			return nil, p.refused
		}
		if p.refused = p.grow(); p.refused != nil {
			p.refused = noMemory(p.dom.dev, p.size, "MaxReceiveCredits", p.refused)
			p.again = time.Now().Add(growAgain)
			return nil, p.refused
		}
	}
	b := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	p.least = min(p.least, len(p.free))
	b.slab.used++
	b.stale, b.dirty = b.dirty, true
	return b, nil
}

// older returns a buffer of the first slab in place of b, if one is free there: where
// what is in use lies close together, the other slabs can be given back.
func (p *pool) older(b *buffer) *buffer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b.pool() != p || b.slab == p.slabs[0] {
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

// scattered reports whether there is room in the first slab for some of bufs that lie
// elsewhere.
func (p *pool) scattered(bufs *ring.Ring[*buffer]) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.slabs) < 2 || p.slabs[0].used == len(p.slabs[0].buffers) {
		return false
	}
	for i := range bufs.Len() {
		if b := *bufs.At(i); b.pool() == p && b.slab != p.slabs[0] {
			return true
		}
	}
	return false
}

// release gives a buffer back, which no work request may name any more.
func (b *buffer) release() {
	p := b.slab.pool
	p.mu.Lock()
	p.free = append(p.free, b)
	b.slab.used--
	b.round = p.rounds
	p.watch()
	p.mu.Unlock()
}

// watch sets the timer for trim if there may be something for it. The first slab of a
// private domain stays. The caller holds mu.
func (p *pool) watch() {
	if p.timer == nil && !p.closed && (!p.dom.private || len(p.slabs) > 1) {
		p.timer = time.AfterFunc(time.Duration(trimEvery.Load()), p.trim)
	}
}

// noMemory is the error for bytes that the device does not register. limit is the
// field of Config that would make do with less.
func noMemory(dev ibv.Device, bytes int, limit string, err error) error {
	return fmt.Errorf("%w: %d bytes of registered memory on %s: %w (raise the limit on locked memory, ulimit -l, or lower Config.%s)",
		errno.ENOBUFS, bytes, dev.Name(), err, limit)
}

// slabSize is how many bytes the next slab takes, a number of whole buffers.
func (p *pool) slabSize() int {
	total := slabBytes
	switch {
	case p.dom.private && len(p.slabs) == 0:
		total = min(privateSlab, max(firstBuffers*p.size, pageSize))
	case p.dom.private:
		total = privateSlab
	case pinsMemory(p.dom.dev):
		total = pinnedSlab
	}
	return min(max(total/p.size, 1), slabBuffers) * p.size
}

func (p *pool) grow() error {
	total := p.slabSize()
	mem, err := allocPages(total)
	if err != nil {
		return err
	}
	mr, err := p.dom.pd.RegMR(mem, ibv.AccessLocalWrite)
	if err != nil {
		return errors.Join(err, freePages(mem))
	}
	s := &slab{pool: p, mem: mem, mr: mr, buffers: make([]buffer, total/p.size)}
	for i := range s.buffers {
		b := &s.buffers[i]
		*b = buffer{b: mem[i*p.size : (i+1)*p.size : (i+1)*p.size], lkey: mr.LKey(), slab: s}
		p.free = append(p.free, b)
	}
	p.slabs = append(p.slabs, s)
	p.watch()
	return nil
}

// trim gives back what was not needed since it has looked last: slabs that nobody has a
// part of, and the pages of free buffers in the others, where the device does not pin
// them. It looks again until nothing is left to be given back.
func (p *pool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer == nil {
		return // closed
	}
	whole := p.trimSlabs()
	again := p.dropFree() || whole
	if again {
		p.timer.Reset(time.Millisecond) // others have had a turn
		return
	}
	p.rounds++
	p.least = len(p.free)
	p.arrange()
	for _, b := range p.free {
		again = again || b.slab.used == 0 || b.dirty && p.drops()
	}
	if p.dom.private {
		again = len(p.slabs) > 1
	}
	if again {
		p.timer.Reset(time.Duration(trimEvery.Load()))
	} else {
		p.timer = nil
	}
}

// trimSlabs gives slabs back, and reports whether it has left some to the next time. The
// caller holds mu.
func (p *pool) trimSlabs() (more bool) {
	gone := make(map[*slab]bool)
	kept := p.slabs[:0]
	for i, s := range p.slabs {
		switch {
		case i == 0 && p.dom.private, s.used > 0, len(s.buffers) > p.least:
		case len(gone) == trimSlabs:
			more = true
		case s.mr.Close() == nil:
			freePages(s.mem) // if it fails a mapping is leaked, but no key is used that is closed
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
	p.free = slices.DeleteFunc(p.free, func(b *buffer) bool { return gone[b.slab] })
	return more
}

// arrange has get take from the slabs first of which most is in use, so that the others
// come to be free. The caller holds mu.
func (p *pool) arrange() {
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
	sorted := make([]*buffer, len(p.free))
	for _, b := range p.free {
		sorted[ends[b.slab.used]] = b
		ends[b.slab.used]++
	}
	p.free = sorted
}

// pinsMemory reports whether registered memory stays resident: it may run out then, and is
// paid for whether it is used or not.
func pinsMemory(dev ibv.Device) bool { return !dev.Attr().Caps.Has(ibv.CapOnDemandPaging) }

// drops reports whether the pages of a single buffer can be given back.
func (p *pool) drops() bool { return dropsPages && !pinsMemory(p.dom.dev) }

// dropFree gives the pages of free buffers back, and reports whether it has left some
// to the next time. The caller holds mu.
func (p *pool) dropFree() (more bool) {
	if !p.drops() {
		return false
	}
	n := 0
	for _, b := range p.free {
		switch {
		case !b.dirty || b.round == p.rounds:
		case n == trimBuffers:
			return true
		default:
			b.dropPages()
			n++
		}
	}
	return false
}

// dropPages gives the pages of a buffer back that nobody reads or writes meanwhile.
func (b *buffer) dropPages() {
	b.dirty = false
	_ = dropWhole(b.b) // if the system does not take them they stay
}

// dropWhole gives back the pages that lie in b as a whole.
func dropWhole(b []byte) error {
	from := int(-addressOf(b) & uintptr(systemPage-1))
	to := len(b) - int((addressOf(b)+uintptr(len(b)))&uintptr(systemPage-1))
	if from >= to {
		return nil
	}
	return dropPages(b[from:to])
}

var systemPage = os.Getpagesize()
