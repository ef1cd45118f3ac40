package rdmanet

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// A Buffer is memory for large reads and writes, from [Alloc] or
// [RegisterMemory]. What is written from there, or read into there, the device
// moves without a copy; a connection registers the memory when it first needs it.
// All methods may be called by several goroutines at once.
type Buffer struct {
	b    []byte
	span *span
	at   int // number of the piece in span

	mu    sync.Mutex
	calm  sync.Cond // uses has fallen to 0
	uses  int       // calls and transfers under way
	freed bool
	stuck bool               // a device may still use it: never to be used again
	mrs   map[*domain]ibv.MR // registrations of b as a whole, to be used again; of Alloc's memory only

	dropped bool // the application's memory is not known any more
}

// Alloc returns a Buffer of n bytes, all zero, outside the Go heap, where the
// garbage collector neither counts nor frees it: Free must be called. From 2 MiB
// on the system's huge pages are used if there are any. n below 1 matches
// syscall.EINVAL, memory that the system refuses syscall.ENOMEM.
func Alloc(n int) (*Buffer, error) {
	size := pieceSize(n)
	if n < 1 || size < n {
		return nil, fmt.Errorf("rdmanet: Alloc of %d bytes: %w", n, syscall.EINVAL)
	}
	b, dirty, err := memory.take(size, n)
	if err != nil {
		return nil, fmt.Errorf("rdmanet: Alloc of %d bytes: %w", n, err)
	}
	if dirty {
		clear(b.b)
	}
	return b, nil
}

// RegisterMemory returns a Buffer of memory that the application owns, a mapped
// file for instance. It must stay mapped until Free has returned, and must not
// have bytes in common with another Buffer (syscall.EINVAL).
func RegisterMemory(b []byte) (*Buffer, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("rdmanet: RegisterMemory of no bytes: %w", syscall.EINVAL)
	}
	s := &span{mem: b[:len(b):len(b)], size: len(b), pieces: make([]atomic.Pointer[Buffer], 1)}
	memory.mu.Lock()
	defer memory.mu.Unlock()
	if !memory.insert(s) {
		return nil, fmt.Errorf("rdmanet: RegisterMemory of %d bytes that are in part a Buffer already: %w", len(b), syscall.EINVAL)
	}
	return s.newBuffer(0, len(b)), nil
}

// Bytes returns the memory, nil after Free.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.freed {
		return nil
	}
	return b.b
}

// Free gives the memory up. The slices of Bytes must not be used any more. What
// came from Alloc goes back to the system when every call, and every queued send,
// that is still at work there has ended; the application's own memory it may unmap
// when Free returns, for which Free waits for those. Free may be called more than
// once.
//
// A call of a Conn or PacketConn that is given the memory after Free fails with an
// error that matches errno.EFAULT, for as long as the package knows the memory.
func (b *Buffer) Free() {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := !b.freed
	b.freed = true
	for !b.span.ours && b.uses > 0 {
		b.calm.Wait()
	}
	if !b.span.ours && !b.dropped {
		b.dropped = true
		memory.drop(b) // not to be found from now on
	}
	if first && b.uses == 0 {
		b.discard()
	}
}

// errFreed says that a call was given memory that is nobody's.
var errFreed = fmt.Errorf("memory of a Buffer after Free: %w", errno.EFAULT)

// borrow holds the Buffer that p lies in for a call, which gives it back by unhold
// in the end. Ordinary memory belongs to none: that is nil.
func borrow(p []byte) (*Buffer, error) {
	b, stale := lookUp(p)
	switch {
	case stale, b != nil && !b.hold():
		return nil, errFreed
	}
	return b, nil
}

// hold keeps the memory where it is until unhold. It is false after Free.
func (b *Buffer) hold() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.freed {
		return false
	}
	b.uses++
	return true
}

// share is hold for a part of a call that holds the memory already: it goes on after
// Free too.
func (b *Buffer) share() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.freed && b.uses == 0 {
		return false
	}
	b.uses++
	return true
}

// unhold ends hold; err is why the device may have kept the memory. There may be no
// Buffer.
func (b *Buffer) unhold(err error) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stuck = b.stuck || err != nil
	b.uses--
	if b.uses > 0 {
		return
	}
	b.calm.Broadcast()
	if b.freed && b.span.ours {
		b.discard()
	}
}

// discard closes the registrations and gives the memory back to its span. The
// caller holds mu; nobody uses the buffer any more.
func (b *Buffer) discard() {
	for d, mr := range b.mrs {
		if mr.Close() != nil {
			b.stuck = true
		}
		d.mu.Lock() // only now: a domain that ends waits for those that it finds here
		delete(d.cached, b)
		d.mu.Unlock()
	}
	b.mrs = nil
	if b.span.ours && !b.stuck {
		memory.giveBack(b)
	}
}

// keyIn returns the registration of all of the buffer with the domain, which is
// made once. The caller holds the buffer, and the domain is in use.
//
// Only memory of Alloc's is registered for longer than it is used: nobody else
// can unmap it. What the application unmaps, and perhaps maps again, is
// registered anew each time, so that the device never knows pages that are no
// longer those behind the address.
func (b *Buffer) keyIn(d *domain) (ibv.MR, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if mr := b.mrs[d]; mr != nil {
		return mr, nil
	}
	mr, err := d.pd.RegMR(b.b, ibv.AccessLocalWrite)
	if err != nil {
		return nil, err
	}
	if b.mrs == nil {
		b.mrs = make(map[*domain]ibv.MR)
	}
	b.mrs[d] = mr
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cached == nil {
		d.cached = make(map[*Buffer]struct{})
	}
	d.cached[b] = struct{}{}
	return mr, nil
}

// forget closes the registration with a domain that ends.
func (b *Buffer) forget(d *domain) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	mr := b.mrs[d]
	if mr == nil {
		return nil // Free was faster, and has closed it
	}
	delete(b.mrs, d)
	err := mr.Close()
	b.stuck = b.stuck || err != nil
	return err
}

// span is a stretch of memory that Buffers are pieces of, all of one size.
type span struct {
	mem    []byte
	size   int // bytes of a piece
	pieces []atomic.Pointer[Buffer]

	ours  bool   // from Alloc
	whole []byte // the mapping

	// Below memory.mu.
	virgin int   // pieces from here on were never used
	free   []int // those before that nobody has
	live   int   // those that somebody has
}

func (s *span) newBuffer(at, n int) *Buffer {
	b := &Buffer{b: s.mem[at*s.size:][:n:n], span: s, at: at}
	b.calm.L = &b.mu
	s.pieces[at].Store(b)
	return b
}

const (
	spanBytes  = 1 << 20   // of several pieces
	largePiece = 256 << 10 // larger ones have a mapping of their own
	hugeSpan   = 2 << 20   // and from here on huge pages
)

// pieceSize is what n bytes take: a power of two, or whole pages.
func pieceSize(n int) int {
	switch {
	case n <= pageSize:
		return pageSize
	case n <= largePiece:
		return 1 << bits.Len(uint(n-1))
	}
	return (n + pageSize - 1) &^ (pageSize - 1)
}

// spans are all the memory that Buffers have.
type spans struct {
	mu    sync.Mutex
	byLen map[int][]*span // those of several pieces, by the size of a piece

	// sorted is in the order of addresses. It is replaced, never changed, so that
	// find takes no lock.
	sorted atomic.Pointer[[]*span]
}

var memory spans

// take returns a Buffer of n bytes in a piece of size; dirty says that it was in
// use before.
func (m *spans) take(size, n int) (b *Buffer, dirty bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.byLen[size] {
		if k := len(s.free); k > 0 {
			at := s.free[k-1]
			s.free = s.free[:k-1]
			s.live++
			return s.newBuffer(at, n), true, nil
		}
		if s.virgin < len(s.pieces) {
			s.virgin++
			s.live++
			return s.newBuffer(s.virgin-1, n), false, nil
		}
	}
	s := &span{size: size, ours: true, virgin: 1, live: 1}
	switch {
	case size >= hugeSpan:
		s.mem, s.whole, err = allocLarge(size)
	case size > largePiece:
		s.mem, err = allocPages(size)
		s.whole = s.mem
	default:
		s.mem, err = allocPages(spanBytes)
		s.whole = s.mem
	}
	if err != nil {
		return nil, false, err
	}
	s.pieces = make([]atomic.Pointer[Buffer], len(s.mem)/size)
	m.insert(s)
	if len(s.pieces) > 1 {
		if m.byLen == nil {
			m.byLen = make(map[int][]*span)
		}
		m.byLen[size] = append(m.byLen[size], s)
	}
	return s.newBuffer(0, n), false, nil
}

// giveBack takes a Buffer's piece back, and unmaps the span when it was the last.
func (m *spans) giveBack(b *Buffer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := b.span
	s.pieces[b.at].Store(nil)
	s.free = append(s.free, b.at)
	if s.live--; s.live > 0 {
		return
	}
	if list := slices.DeleteFunc(m.byLen[s.size], func(o *span) bool { return o == s }); len(list) > 0 {
		m.byLen[s.size] = list
	} else {
		delete(m.byLen, s.size)
	}
	m.remove(s)
	freePages(s.whole)
}

// drop makes the application's memory unknown.
func (m *spans) drop(b *Buffer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.remove(b.span)
}

// insert makes a span known, unless its memory belongs to another one. The
// application's memory that lies where the system has just given us some was
// unmapped without Free, and is forgotten. The caller holds mu.
func (m *spans) insert(s *span) bool {
	list := slices.Clone(m.list())
	i := sort.Search(len(list), func(i int) bool { return list[i].end() > s.start() })
	j := i
	for ; j < len(list) && list[j].start() < s.end(); j++ {
		if !s.ours || list[j].ours {
			return false
		}
	}
	list = slices.Replace(list, i, j, s)
	m.sorted.Store(&list)
	return true
}

func (m *spans) remove(s *span) {
	list := slices.DeleteFunc(slices.Clone(m.list()), func(o *span) bool { return o == s })
	m.sorted.Store(&list)
}

func (m *spans) list() []*span {
	if p := m.sorted.Load(); p != nil {
		return *p
	}
	return nil
}

// findRegion returns the Buffer that all of b lies in, nil if there is none.
func findRegion(b []byte) *Buffer {
	r, _ := lookUp(b)
	return r
}

// lookUp is findRegion, and reports whether b is memory that Alloc has mapped and
// that no Buffer has, or not all of it.
func lookUp(b []byte) (r *Buffer, stale bool) {
	list := memory.list()
	if len(b) == 0 || len(list) == 0 {
		return nil, false
	}
	start := addressOf(b)
	i := sort.Search(len(list), func(i int) bool { return list[i].end() > start })
	if i == len(list) || start < list[i].start() {
		return nil, false
	}
	s := list[i]
	r = s.pieces[(start-s.start())/uintptr(s.size)].Load()
	if r == nil || start+uintptr(len(b)) > addressOf(r.b)+uintptr(len(r.b)) {
		return nil, s.ours
	}
	return r, false
}

func (s *span) start() uintptr { return addressOf(s.mem) }
func (s *span) end() uintptr   { return addressOf(s.mem) + uintptr(len(s.mem)) }

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// The cached registrations of a domain go with it.
func (d *domain) forgetBuffers() error {
	d.mu.Lock()
	bufs := make([]*Buffer, 0, len(d.cached))
	for b := range d.cached {
		bufs = append(bufs, b)
	}
	d.cached = nil
	d.mu.Unlock()
	var errs []error
	for _, b := range bufs {
		errs = append(errs, b.forget(d))
	}
	return errors.Join(errs...)
}
