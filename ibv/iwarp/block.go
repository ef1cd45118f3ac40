package iwarp

import "sync"

// Memory that the device needs only while bytes are under way comes from pools, so that an
// idle queue pair has none.

const stagingSize = 16 << 10 // stagingSize is how many bytes are read ahead of the frame in progress.

var (
	stagingPool = sync.Pool{New: func() any { b := make([]byte, stagingSize); return &b }}

	// These are for copies of inline data, by size class.
	blockSizes = [...]int{4 << 10, 64 << 10, 256 << 10, maxInline}
	blockPools [len(blockSizes)]sync.Pool
)

// getBlock returns a block of n bytes or more, at most maxInline from a pool.
func getBlock(n int) *[]byte {
	for i, size := range blockSizes {
		if n > size {
			continue
		}
		if b, ok := blockPools[i].Get().(*[]byte); ok {
			return b
		}
		b := make([]byte, size)
		return &b
	}
	b := make([]byte, n)
	return &b
}

// putBlock returns a block to its pool. nil is allowed.
func putBlock(b *[]byte) {
	if b == nil {
		return
	}
	for i, size := range blockSizes {
		if len(*b) == size {
			blockPools[i].Put(b)
		}
	}
}
