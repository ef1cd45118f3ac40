package twin

import "github.com/rdmanet/rdmanet"

// A block is the memory of an operation.
type block struct {
	b    []byte
	good int // good is how many bytes can be accessed.
	free func()
}

// newBlock returns n bytes of a kind of memory. Where there is no memory of that kind, it is that
// of the Go heap.
func newBlock(n int, m Memory) block {
	switch m {
	case Own:
		if b, err := rdmanet.Alloc(max(1, n)); err == nil {
			return block{b.Bytes()[:n], n, b.Free}
		}
	case Mapped, Cut:
		if b, free := mapped(n, m.good(n)); b != nil {
			return block{b, m.good(n), free}
		}
	}
	return block{make([]byte, n), n, func() {}}
}

// part returns n bytes of the block from a place on.
func (k block) part(at, n int) block {
	return block{k.b[at:][:n], max(0, min(k.good-at, n)), func() {}}
}

// bad returns how many bytes cannot be accessed.
func (k block) bad() int64 { return int64(len(k.b) - k.good) }

// wipe overwrites the block.
func (k block) wipe() { clear(k.b[:k.good]) }
