package regmem

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// A Memory is memory for large reads and writes of the program: it is mapped by
// [Memory.Alloc], or the program's own, from [Memory.Register]. It must not be copied. The
// zero value has no memory, and no method but these two may be called on it.
//
// Calls and transfers that are at work on the memory borrow it ([Borrow]). It stays where
// it is until all of them have returned it.
type Memory struct {
	b    []byte
	span *span
	at   int // at is the index in span.pieces.

	mu     sync.Mutex
	unused sync.Cond // unused is signalled when uses has fallen to 0.
	uses   int       // uses counts the calls and transfers that borrow the memory.
	freed  bool      // freed is set by Free.
	stuck  bool      // stuck is set when a device may still use the memory, which is then never used again.

	// mrs has the registrations of all of b that stay for later transfers. Memory from
	// Register has none.
	mrs map[*Domain]ibv.MR

	forgotten bool // forgotten is set when memory from Register is not found any more.
}

// Alloc maps n bytes, all zero, outside the Go heap, which [Memory.Free] gives back. From
// 2 MiB on the system's huge pages are used if there are any. The error is syscall.EINVAL
// for n below 1, or too large to be an address; otherwise it is the system's, such as
// syscall.ENOMEM. Only one goroutine may call it, and only on a zero Memory.
func (m *Memory) Alloc(n int) error {
	size := pieceSize(n)
	if n < 1 || size < n {
		return syscall.EINVAL
	}
	dirty, err := memory.take(m, size, n)
	if err != nil {
		return err
	}
	if dirty {
		clear(m.b)
	}
	return nil
}

// Register makes m the program's own memory b, which stays mapped until [Memory.Free] has
// returned. The error is syscall.EINVAL if b is empty, or has bytes in common with another
// Memory. Only one goroutine may call it, and only on a zero Memory.
func (m *Memory) Register(b []byte) error {
	if len(b) == 0 {
		return syscall.EINVAL
	}
	s := newSpan(b[:len(b):len(b)], len(b))
	memory.mu.Lock()
	defer memory.mu.Unlock()
	if !memory.insert(s) {
		return syscall.EINVAL
	}
	s.place(m, 0, len(b))
	return nil
}

// Bytes returns the memory, nil after Free.
func (m *Memory) Bytes() []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed {
		return nil
	}
	return m.b
}

// Len returns the length of the memory in bytes, also after Free. It takes no lock.
func (m *Memory) Len() int { return len(m.b) }

// Free gives the memory up. What Alloc has mapped goes back to the system when everybody
// who borrows it has returned it. The program's own memory is not used any more when Free
// returns, which therefore waits for those who borrow it. A second Free does no more than
// wait.
func (m *Memory) Free() {
	m.mu.Lock()
	defer m.mu.Unlock()
	first := !m.freed
	m.freed = true
	for !m.span.ours && m.uses > 0 {
		m.unused.Wait()
	}
	if !m.span.ours && !m.forgotten {
		m.forgotten = true
		memory.forget(m)
	}
	if first && m.uses == 0 {
		m.discard()
	}
}

// ErrFreed is the error for memory of a Memory after Free. It matches errno.EFAULT.
var ErrFreed = fmt.Errorf("memory of a Buffer after Free: %w", errno.EFAULT)

// Borrow returns the Memory that p lies in, which the caller gives back by
// [Memory.Return], or nil if there is none. After Free the error is [ErrFreed], for as
// long as the memory is known.
func Borrow(p []byte) (*Memory, error) {
	m, stale := lookUp(p)
	switch {
	case stale, m != nil && !m.borrow():
		return nil, ErrFreed
	}
	return m, nil
}

// borrow keeps the memory where it is until Return. It returns false after Free.
func (m *Memory) borrow() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed {
		return false
	}
	m.uses++
	return true
}

// shareMemory borrows the Memory that b lies in for a part of a call that borrows it
// already. It returns nil if there is none.
func shareMemory(b []byte) *Memory {
	if m := Find(b); m != nil && m.share() {
		return m
	}
	return nil
}

// share is borrow that works after Free too, while somebody borrows the memory.
func (m *Memory) share() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed && m.uses == 0 {
		return false
	}
	m.uses++
	return true
}

// Return gives back what [Borrow] has returned, once. An err that is not nil says that a
// device may still use the memory, which is then never used again. m may be nil.
func (m *Memory) Return(err error) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stuck = m.stuck || err != nil
	m.uses--
	if m.uses > 0 {
		return
	}
	m.unused.Broadcast()
	if m.freed && m.span.ours {
		m.discard()
	}
}

// discard closes the registrations and gives the memory back to its span. The caller
// holds mu, and nobody borrows the memory.
func (m *Memory) discard() {
	for d, mr := range m.mrs {
		if mr.Close() != nil {
			m.stuck = true
		}
		d.mu.Lock() // Only after Close: a domain that ends waits for the Memory that it finds in cached.
		delete(d.cached, m)
		d.mu.Unlock()
	}
	m.mrs = nil
	if m.span.ours && !m.stuck {
		memory.giveBack(m)
	}
}

// keepIn returns the registration of all of the memory with a domain, which is made once.
// The caller borrows the memory, and has a reference to the domain.
//
// Only what Alloc has mapped stays registered: nobody else can unmap it. Memory that the
// program unmaps, and perhaps maps again, is registered anew each time. So the device
// never uses pages that are not those at the address any more.
func (m *Memory) keepIn(d *Domain) (ibv.MR, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if mr := m.mrs[d]; mr != nil {
		return mr, nil
	}
	mr, err := d.PD.RegMR(m.b, ibv.AccessLocalWrite)
	if err != nil {
		return nil, err
	}
	if m.mrs == nil {
		m.mrs = make(map[*Domain]ibv.MR)
	}
	m.mrs[d] = mr
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cached == nil {
		d.cached = make(map[*Memory]struct{})
	}
	d.cached[m] = struct{}{}
	return mr, nil
}

// forget closes the registration with a domain that ends.
func (m *Memory) forget(d *Domain) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	mr := m.mrs[d]
	if mr == nil {
		return nil // Free was faster, and has closed it.
	}
	delete(m.mrs, d)
	err := mr.Close()
	m.stuck = m.stuck || err != nil
	return err
}
