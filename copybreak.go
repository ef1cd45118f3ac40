package rdmanet

import (
	"sync"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

const (
	copyBreakSize = 64 << 10 // the length of a chunk that is shared, in bytes
	copyBreakCost = 128      // how many bytes of a chunk a payload counts besides its own

	// copyBreakLimit is how many bytes of chunks one connection has at most, unless the kernels
	// hold back what is unread. They take about as many small Writes as the buffers of TCP.
	copyBreakLimit = 4 << 20

	// copyBreakFree is how many bytes of chunks are not charged, so that a connection has them even
	// if others have used up all receive memory. None are free where the kernels, or shared memory,
	// hold what is unread.
	copyBreakFree = 256 << 10
)

// copyBreak is ordinary memory that unread payloads are copied to.
//
// A receive buffer has the size of the longest segment, whatever arrived in it. When the
// reader lags behind and payloads are small, they would use up the window with few bytes if
// each kept its buffer. Two programs that write before they read could then block each
// other, where the buffers of TCP would carry them. So such payloads are copied together,
// and their buffers posted again. Longer payloads are copied too if nobody reads (copyUnread).
type copyBreak struct {
	filling *copyBreakChunk // the chunk that the next payload is copied to, or nil
	bytes   int             // of chunks with unread payloads
	limit   int             // for bytes
	free    int             // of bytes, which are not charged
	charge  regmem.Share    // the device's budget is charged with the rest of bytes
}

// copyBreakChunk has payloads of one connection. A long payload has a chunk of its own.
type copyBreakChunk struct {
	b    []byte
	long bool // there is one payload, which is long
	size int  // in bytes, as the chunk is charged
	used int  // counts the bytes, and copyBreakCost for each payload
	refs int  // counts the payloads that are unread
}

var copyBreakChunks = sync.Pool{New: func() any { return &copyBreakChunk{b: make([]byte, 0, copyBreakSize), size: copyBreakSize} }}

// copy copies a payload. It returns the copy, and the chunk that it lies in, which is nil if no
// more may be copied.
func (c *copyBreak) copy(payload []byte) ([]byte, *copyBreakChunk) {
	n := copyBreakCost + len(payload)
	k := c.filling
	switch {
	case len(payload) > copyBreakSize/4:
		if !c.take(n) {
			return nil, nil
		}
		k = &copyBreakChunk{b: make([]byte, 0, len(payload)), long: true, size: n}
	case k == nil || k.used+n > k.size:
		if !c.take(copyBreakSize) {
			return nil, nil
		}
		k = copyBreakChunks.Get().(*copyBreakChunk)
		c.filling = k
	}
	at := len(k.b)
	k.b = append(k.b, payload...)
	k.used += n
	k.refs++
	return k.b[at:len(k.b):len(k.b)], k
}

// full reports whether no more may be copied, whatever memory other connections use.
func (c *copyBreak) full() bool { return c.bytes+copyBreakSize > c.limit }

// take charges a chunk of n bytes, and reports whether it may be used.
func (c *copyBreak) take(n int) bool {
	charged := max(c.bytes+n-c.free, 0)
	if c.bytes+n > c.limit || c.charge.Raise(charged) < charged {
		c.charge.Lower(c.bytes - c.free)
		return false
	}
	c.bytes += n
	return true
}

// release notes that a payload in k was read or dropped.
func (c *copyBreak) release(k *copyBreakChunk) {
	if k.refs--; k.refs > 0 {
		return
	}
	c.bytes -= k.size
	c.charge.Lower(c.bytes - c.free)
	if c.filling == k {
		c.filling = nil
	}
	if !k.long {
		k.b, k.used = k.b[:0], 0
		copyBreakChunks.Put(k)
	}
}
