package rdmanet

import "sync"

const (
	copyBreakSize  = 64 << 10  // copyBreakSize is the length of a chunk in bytes.
	copyBreakLimit = 256 << 10 // copyBreakLimit is the limit of one connection in bytes, about what TCP's buffers hold.
	copyBreakCost  = 128       // copyBreakCost is how many bytes each payload counts besides its own.
)

var copyBreakChunks = sync.Pool{New: func() any { return &copyBreakChunk{b: make([]byte, 0, copyBreakSize)} }}

// copyBreaks reports whether a payload of n bytes is to be copied out of its buffer. window
// is how many buffers the reader may hold, and size how long each is.
func (q *recvQueue) copyBreaks(n, window, size int) bool {
	return q.held >= window/2 && n <= min(size/2, copyBreakSize) && q.copyBreakBytes+copyBreakCost+n <= copyBreakLimit
}

// copyToChunk copies a payload and returns the copy, and the chunk that it lies in.
func (q *recvQueue) copyToChunk(payload []byte) ([]byte, *copyBreakChunk) {
	k := q.copyBreak
	if k == nil || cap(k.b)-len(k.b) < len(payload) {
		k = copyBreakChunks.Get().(*copyBreakChunk)
		q.copyBreak = k
	}
	at := len(k.b)
	k.b = append(k.b, payload...)
	k.refs++
	q.copyBreakBytes += copyBreakCost + len(payload)
	return k.b[at:len(k.b):len(k.b)], k
}

// releaseFromChunk notes that a payload of n bytes in k was read or dropped.
func (q *recvQueue) releaseFromChunk(k *copyBreakChunk, n int) {
	q.copyBreakBytes -= copyBreakCost + n
	if k.refs--; k.refs > 0 {
		return
	}
	k.b = k.b[:0]
	if q.copyBreak == k {
		q.copyBreak = nil
	}
	copyBreakChunks.Put(k)
}
