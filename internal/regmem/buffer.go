package regmem

import "github.com/rdmanet/rdmanet/ibv"

// A Buffer is memory of a [Pool] that is registered for the device to write to. It has
// one user from [Pool.Get] to [Buffer.Release], and its methods are for that user.
//
// A Buffer is not cleared between two users. So a user sends or reads only those bytes
// that it, or the device, has written meanwhile.
type Buffer struct {
	B     []byte // B is the memory, Pool().Size bytes.
	LKey  uint32 // LKey is the local key of the registration.
	Stale bool   // Stale is set if pages of B may have been in memory when Get returned it.

	slab *slab
	next *Buffer // next is the one below in Buffers.

	// pool.mu guards these fields.
	round uint16 // round is that of trim in which the buffer was released.
	dirty bool   // dirty is set while pages may be in memory.
}

// Pool returns the pool that the buffer is of.
func (b *Buffer) Pool() *Pool { return b.slab.pool }

// SGE returns the element of a work request for the first n bytes.
func (b *Buffer) SGE(n int) ibv.SGE { return ibv.SGE{Buf: b.B[:n], LKey: b.LKey} }

// Expose registers the first n bytes for the peer of a queue pair of the Domain, with the
// given rights, until the region is closed. Nobody else gets a right, as with
// [Domain.Expose]. Where the device cannot register them the error matches
// syscall.ENOBUFS.
func (b *Buffer) Expose(qp ibv.QP, n int, access ibv.Access) (ibv.MR, error) {
	d := b.slab.pool.dom
	mr, err := d.regMR(qp, b.B[:n], access)
	if err != nil {
		return nil, noMemory(d.Dev, n, d.advice.Buffers, err)
	}
	return mr, nil
}

// Release gives the buffer back to its pool. No work request that the device has not
// completed may name it.
func (b *Buffer) Release() {
	p := b.slab.pool
	p.mu.Lock()
	p.free = append(p.free, b)
	b.slab.used--
	b.round = p.rounds
	p.watch()
	p.mu.Unlock()
}

// Buffers is a stack of buffers, such as those that one send takes. The zero value is
// empty. A Buffer is in one stack at most. A stack is for one goroutine at a time, and
// of its copies only one may be used.
type Buffers struct{ top *Buffer }

// Empty reports whether there are no buffers.
func (s *Buffers) Empty() bool { return s.top == nil }

// Push adds a buffer.
func (s *Buffers) Push(b *Buffer) { b.next, s.top = s.top, b }

// Pop removes the buffer that was pushed last and returns it, nil if there is none.
func (s *Buffers) Pop() *Buffer {
	b := s.top
	if b != nil {
		s.top, b.next = b.next, nil
	}
	return b
}
