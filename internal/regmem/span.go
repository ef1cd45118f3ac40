package regmem

import (
	"math/bits"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"unsafe"
)

const (
	spanBytes  = 1 << 20   // spanBytes is the length of a span with several pieces.
	largePiece = 256 << 10 // A piece that is larger has a span to itself.
	hugeSpan   = 2 << 20   // A span from this length on has huge pages.
)

// span is a stretch of memory. Each Memory is one of its pieces, which have one size.
type span struct {
	mem    []byte
	size   int // size is that of a piece in bytes.
	pieces []atomic.Pointer[Memory]

	ours  bool   // ours is set for memory from Alloc.
	whole []byte // whole is the mapping to be unmapped in the end.

	// spans.mu guards these fields.
	virgin int   // virgin is the index of the first piece that was never used.
	free   []int // free has the indexes of the pieces before virgin that nobody uses.
	live   int   // live counts the pieces in use.
}

// newSpan returns a span of mem with pieces of size bytes.
func newSpan(mem []byte, size int) *span {
	return &span{mem: mem, size: size, pieces: make([]atomic.Pointer[Memory], len(mem)/size)}
}

// place makes m the first n bytes of a piece.
func (s *span) place(m *Memory, at, n int) {
	m.b, m.span, m.at = s.mem[at*s.size:][:n:n], s, at
	m.unused.L = &m.mu
	s.pieces[at].Store(m)
}

func (s *span) start() uintptr { return addressOf(s.mem) }
func (s *span) end() uintptr   { return addressOf(s.mem) + uintptr(len(s.mem)) }

// addressOf returns where b begins.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// pieceSize returns the size of a piece for n bytes: a power of two, or whole pages. The
// result is less than n if the size overflows.
func pieceSize(n int) int {
	switch {
	case n <= PageSize:
		return PageSize
	case n <= largePiece:
		return 1 << bits.Len(uint(n-1))
	}
	return roundUp(n, PageSize)
}

// spans is a set of spans.
type spans struct {
	mu    sync.Mutex
	byLen map[int][]*span // byLen has the spans with several pieces, by the size of a piece.

	// sorted is in the order of addresses. It is replaced and never changed, so that
	// lookUp takes no lock.
	sorted atomic.Pointer[[]*span]
}

// memory has the spans of all Memory of the process.
var memory spans

// take makes m a piece of size bytes, of which m has n. dirty is set if the piece was in
// use before.
func (s *spans) take(m *Memory, size, n int) (dirty bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.byLen[size] {
		if k := len(p.free); k > 0 {
			at := p.free[k-1]
			p.free = p.free[:k-1]
			p.live++
			p.place(m, at, n)
			return true, nil
		}
		if p.virgin < len(p.pieces) {
			p.virgin++
			p.live++
			p.place(m, p.virgin-1, n)
			return false, nil
		}
	}
	p, err := mapSpan(size)
	if err != nil {
		return false, err
	}
	s.insert(p)
	if len(p.pieces) > 1 {
		if s.byLen == nil {
			s.byLen = make(map[int][]*span)
		}
		s.byLen[size] = append(s.byLen[size], p)
	}
	p.virgin, p.live = 1, 1
	p.place(m, 0, n)
	return false, nil
}

// mapSpan maps a span with pieces of size bytes.
func mapSpan(size int) (*span, error) {
	var mem, whole []byte
	var err error
	switch {
	case size >= hugeSpan:
		mem, whole, err = allocLarge(size)
	case size > largePiece:
		mem, err = AllocPages(size)
		whole = mem
	default:
		mem, err = AllocPages(spanBytes)
		whole = mem
	}
	if err != nil {
		return nil, err
	}
	p := newSpan(mem, size)
	p.ours, p.whole = true, whole
	return p, nil
}

// giveBack takes the piece of m back, and unmaps the span if no piece is in use.
func (s *spans) giveBack(m *Memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := m.span
	p.pieces[m.at].Store(nil)
	p.free = append(p.free, m.at)
	if p.live--; p.live > 0 {
		return
	}
	if list := slices.DeleteFunc(s.byLen[p.size], func(o *span) bool { return o == p }); len(list) > 0 {
		s.byLen[p.size] = list
	} else {
		delete(s.byLen, p.size)
	}
	s.remove(p)
	FreePages(p.whole)
}

// forget removes the program's own memory.
func (s *spans) forget(m *Memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(m.span)
}

// insert adds a span, unless its memory belongs to another one, and reports whether it
// did. The system has given memory of Alloc's away only now, so what is there of the
// program's own memory was unmapped without Free, and is removed. The caller holds mu.
func (s *spans) insert(p *span) bool {
	list := slices.Clone(s.list())
	i := sort.Search(len(list), func(i int) bool { return list[i].end() > p.start() })
	j := i
	for ; j < len(list) && list[j].start() < p.end(); j++ {
		if !p.ours || list[j].ours {
			return false
		}
	}
	list = slices.Replace(list, i, j, p)
	s.sorted.Store(&list)
	return true
}

// remove removes a span. The caller holds mu.
func (s *spans) remove(p *span) {
	list := slices.DeleteFunc(slices.Clone(s.list()), func(o *span) bool { return o == p })
	s.sorted.Store(&list)
}

func (s *spans) list() []*span {
	if p := s.sorted.Load(); p != nil {
		return *p
	}
	return nil
}

// Find returns the Memory that all of b lies in, nil if there is none. It takes no lock.
// The Memory may be freed at any time, unless the caller borrows it.
func Find(b []byte) *Memory {
	m, _ := lookUp(b)
	return m
}

// lookUp returns the Memory that all of b lies in, nil if there is none. stale is set if
// Alloc has mapped what b begins with, and b is not of one Memory.
func lookUp(b []byte) (m *Memory, stale bool) {
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
	m = s.pieces[(start-s.start())/uintptr(s.size)].Load()
	if m == nil || start+uintptr(len(b)) > addressOf(m.b)+uintptr(len(m.b)) {
		return nil, s.ours
	}
	return m, false
}
