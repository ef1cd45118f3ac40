package rdmanet

import "sync"

// A receive buffer has the size of the largest segment, whatever came in it.
// When the reader lags behind and the payloads are small, keeping each in its
// buffer would use up the window with few bytes, and two programs that write
// before they read could block each other where TCP's buffers would carry them.
// So such payloads are copied together into spill memory and their buffers
// posted again.
type spill struct {
	b    []byte
	refs int // segments that lie in it
}

const (
	spillChunk = 64 << 10
	spillLimit = 256 << 10 // bytes of one connection, about TCP's default
	spillCost  = 128       // counted for each payload besides its bytes
)

var spills = sync.Pool{New: func() any { return &spill{b: make([]byte, 0, spillChunk)} }}

// spillable reports whether a payload should move out of its buffer.
func (c *conn) spillable(payload []byte) bool {
	return c.kept >= min(c.credits.window, c.credits.target)/2 &&
		len(payload) <= min(int(c.agreed.maxReceive)/2, spillChunk) &&
		c.spilled+spillCost+len(payload) <= spillLimit
}

// intoSpill copies a payload and returns where it lies now.
func (c *conn) intoSpill(payload []byte) ([]byte, *spill) {
	s := c.spill
	if s == nil || cap(s.b)-len(s.b) < len(payload) {
		s = spills.Get().(*spill)
		c.spill = s
	}
	at := len(s.b)
	s.b = append(s.b, payload...)
	s.refs++
	c.spilled += spillCost + len(payload)
	c.stats.BytesCopied += uint64(len(payload))
	return s.b[at:len(s.b):len(s.b)], s
}

// outOfSpill notes that a segment of n bytes was read or dropped.
func (c *conn) outOfSpill(s *spill, n int) {
	c.spilled -= spillCost + n
	if s.refs--; s.refs > 0 {
		return
	}
	s.b = s.b[:0]
	if c.spill == s {
		c.spill = nil
	}
	spills.Put(s)
}
