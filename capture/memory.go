package capture

import "math"

// memory counts the bytes that are kept for packets that wait and messages that
// are not complete, so that there is a bound to them.
type memory struct {
	limit, used int
	peak        int
	refused     uint64 // times that there was no room
}

// take accounts for n bytes more; it returns false, and does not, where that is
// too much.
func (m *memory) take(n int) bool {
	if m == nil {
		return true
	}
	if n > m.limit-m.used {
		m.refused++
		return false
	}
	m.used += n
	m.peak = max(m.peak, m.used)
	return true
}

func (m *memory) give(n int) {
	if m != nil {
		m.used -= n
	}
}

// buffer holds the bytes of something that is put together from pieces, which
// may come in any order and twice, and knows which of them are there. It may be
// told to keep only the beginning, or nothing: it knows then how much there was.
type buffer struct {
	have ranges
	data []byte // zero where nothing is
	keep uint64 // bytes from the start on that are kept, if they fit into mem
	mem  *memory
	full bool // something was not kept for want of memory
	fine int  // ranges in have that mem has room for, beside the free ones

	expect uint64 // bytes that there will probably be
}

const (
	grain     = 1 << 10 // least growth of a buffer in bytes
	maxExpect = 1 << 20 // most that is allocated because it was announced

	rangeCost  = 16
	freeRanges = 32 // that a buffer may have without asking

	// What is accounted for a message that waits, with what belongs to it but
	// its data, and for a segment.
	waitCost    = 768
	segmentCost = 256
)

// put adds n bytes at offset off, of which data was captured from the first on.
// What was not captured counts as missing.
func (b *buffer) put(off uint64, data []byte) {
	n := uint64(len(data))
	b.note(off, off+n)
	if off >= b.keep || len(b.have) == 0 {
		return
	}
	end := min(off+n, b.keep)
	if end > uint64(len(b.data)) && !b.grow(end) {
		b.full = true
		return
	}
	copy(b.data[off:end], data)
}

// note says that [from, to) is there. Where that makes for more gaps than there is
// memory to remember, all is given up.
func (b *buffer) note(from, to uint64) {
	b.have.add(from, to)
	if more := cap(b.have) - freeRanges - b.fine; more > 0 {
		if !b.mem.take(more * rangeCost) {
			b.have, b.full = nil, true
			return
		}
		b.fine += more
	}
}

func (b *buffer) grow(size uint64) bool {
	if size <= uint64(cap(b.data)) {
		b.data = b.data[:size]
		return true
	}
	c := max(size, min(2*uint64(cap(b.data)), b.keep), min(b.expect, b.keep, maxExpect), grain)
	if c > min(1<<40, math.MaxInt) { // an offset that came off the wire
		return false
	}
	if !b.mem.take(int(c) - cap(b.data)) {
		if c = size; !b.mem.take(int(c) - cap(b.data)) {
			return false
		}
	}
	d := make([]byte, size, c)
	copy(d, b.data)
	b.data = d
	return true
}

// clear forgets [from, to), the bytes too.
func (b *buffer) clear(from, to uint64) {
	b.have.remove(from, to)
	if n := uint64(len(b.data)); from < n {
		clear(b.data[from:min(to, n)])
	}
}

// end returns where the last bytes that are there end.
func (b *buffer) end() uint64 {
	if n := len(b.have); n > 0 {
		return b.have[n-1].To
	}
	return 0
}

// advance drops the first n bytes.
func (b *buffer) advance(n uint64) {
	b.have.advance(n)
	k := copy(b.data, b.data[min(n, uint64(len(b.data))):])
	clear(b.data[k:])
	b.data = b.data[:k]
}

// reset makes b as new, but for what can be used again.
func (b *buffer) reset(keep uint64, mem *memory) {
	clear(b.data) // what lies behind is zero
	b.have, b.data, b.keep, b.mem, b.full, b.expect = b.have[:0], b.data[:0], keep, mem, false, 0
}

// held returns how many bytes b is accounted for with.
func (b *buffer) held() int { return cap(b.data) + b.fine*rangeCost }

// release gives the memory back.
func (b *buffer) release() {
	b.mem.give(b.held())
	b.data, b.have, b.fine = nil, nil, 0
}
