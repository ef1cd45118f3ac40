package rdmanet

import "sync"

// A receive buffer has the size of the largest segment, whatever came in it.
// When the reader lags behind and the payloads are small, keeping each in its
// buffer would use up the window with few bytes, and two programs that write
// before they read could block each other where TCP's buffers would carry them.
// So such payloads are copied together into copyBreakChunk memory and their buffers
// posted again.
type copyBreakChunk struct {
	b    []byte
	refs int // segments that lie in it
}

const (
	copyBreakSize  = 64 << 10
	copyBreakLimit = 256 << 10 // bytes of one connection, about TCP's default
	copyBreakCost  = 128       // counted for each payload besides its bytes
)

var copyBreakChunks = sync.Pool{New: func() any { return &copyBreakChunk{b: make([]byte, 0, copyBreakSize)} }}

// copyBreaks reports whether a payload should move out of its buffer.
func (c *conn) copyBreaks(payload []byte) bool {
	return c.heldBuffers >= min(c.credits.window, c.credits.target)/2 &&
		len(payload) <= min(int(c.agreed.maxReceive)/2, copyBreakSize) &&
		c.copyBreakBytes+copyBreakCost+len(payload) <= copyBreakLimit
}

// copyToChunk copies a payload and returns where it lies now.
func (c *conn) copyToChunk(payload []byte) ([]byte, *copyBreakChunk) {
	s := c.copyBreak
	if s == nil || cap(s.b)-len(s.b) < len(payload) {
		s = copyBreakChunks.Get().(*copyBreakChunk)
		c.copyBreak = s
	}
	at := len(s.b)
	s.b = append(s.b, payload...)
	s.refs++
	c.copyBreakBytes += copyBreakCost + len(payload)
	c.stats.BytesCopied += uint64(len(payload))
	return s.b[at:len(s.b):len(s.b)], s
}

// releaseFromChunk notes that a segment of n bytes was read or dropped.
func (c *conn) releaseFromChunk(s *copyBreakChunk, n int) {
	c.copyBreakBytes -= copyBreakCost + n
	if s.refs--; s.refs > 0 {
		return
	}
	s.b = s.b[:0]
	if c.copyBreak == s {
		c.copyBreak = nil
	}
	copyBreakChunks.Put(s)
}
