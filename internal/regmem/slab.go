package regmem

import (
	"errors"

	"github.com/rdmanet/rdmanet/ibv"
)

const (
	slabBytes   = 1 << 20   // slabBytes is about the size of a slab, in bytes.
	pinnedSlab  = 256 << 10 // pinnedSlab is the same where the device pins memory.
	slabBuffers = 128       // slabBuffers is the largest number of buffers of a slab.

	// The first slab of a private domain has what an idle connection takes: its
	// receives, one more to grant, one buffer to send from and one to read into.
	firstBuffers = 7

	// privateSlab is the size in bytes of the other slabs of a private domain. It is
	// small, so that the domain can give back what it does not need any more.
	privateSlab = 64 << 10
)

// slab is a registered stretch of memory with buffers of one pool.
type slab struct {
	mem     []byte
	mr      ibv.MR
	pool    *Pool
	buffers []Buffer
	used    int // used counts the buffers in use; pool.mu guards it.
}

// newSlab maps and registers the next slab of p. The caller holds p.mu.
func newSlab(p *Pool) (*slab, error) {
	total := p.slabSize()
	mem, err := AllocPages(total)
	if err != nil {
		return nil, err
	}
	mr, err := p.dom.PD.RegMR(mem, ibv.AccessLocalWrite)
	if err != nil {
		return nil, errors.Join(err, FreePages(mem))
	}
	s := &slab{pool: p, mem: mem, mr: mr, buffers: make([]Buffer, total/p.Size)}
	for i := range s.buffers {
		s.buffers[i] = Buffer{B: mem[i*p.Size : (i+1)*p.Size : (i+1)*p.Size], LKey: mr.LKey(), slab: s}
	}
	return s, nil
}

// slabSize returns how many bytes the next slab takes, a number of whole buffers. The
// caller holds mu.
func (p *Pool) slabSize() int {
	total := slabBytes
	switch {
	case p.keeps() && len(p.slabs) == 0:
		total = min(privateSlab, max(firstBuffers*p.Size, PageSize))
	case p.keeps():
		total = privateSlab
	case PinsMemory(p.dom.Dev):
		total = pinnedSlab
	}
	return min(max(total/p.Size, 1), slabBuffers) * p.Size
}

// close ends the registration and unmaps the slab. If the registration does not end, the
// device may still use the memory, which stays mapped for good.
func (s *slab) close() error {
	if err := s.mr.Close(); err != nil {
		return err
	}
	return FreePages(s.mem)
}
