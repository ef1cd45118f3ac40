package udconn

import (
	"net/netip"

	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// inbox holds the datagrams that wait for a reader, oldest first, in a ring of bytes. It
// allocates nothing once it has grown to what is used of it. Its owner's lock guards it.
type inbox struct {
	limit int // limit is in bytes. Each datagram counts Charge bytes more.

	mem     []byte
	head, n int                // head is where the oldest byte is, n the number of bytes.
	list    ring.Ring[waiting] // list has an entry for each datagram.
}

// waiting is one datagram of an inbox.
type waiting struct {
	from netip.AddrPort
	n    int
}

const (
	// Charge is what a datagram counts beside its bytes, so that empty ones are bounded
	// too.
	Charge = 128

	inboxStart = 4 << 10
)

func (q *inbox) len() int { return q.list.Len() }

// push appends a copy of b, or reports that there is no room for it. There is always room
// for one datagram.
func (q *inbox) push(from netip.AddrPort, b []byte) bool {
	if q.len() > 0 && q.n+len(b)+(q.len()+1)*Charge > q.limit {
		return false
	}
	if q.n+len(b) > len(q.mem) {
		q.grow(q.n + len(b))
	}
	q.list.Push(waiting{from, len(b)})
	at := q.at(q.n)
	copy(q.mem, b[copy(q.mem[at:], b):])
	q.n += len(b)
	return true
}

// pop removes the oldest datagram, which must exist, and copies as much of it as fits. It is lost
// if b cannot be written, as with UDP, and the error is errno.EFAULT then.
func (q *inbox) pop(b []byte) (n int, from netip.AddrPort, err error) {
	l := q.list.Pop()
	b = b[:min(len(b), l.n)]
	n, err = fault.Copy(b, q.mem[q.head:])
	if err == nil {
		_, err = fault.Copy(b[n:], q.mem)
	}
	q.head = q.at(l.n)
	if q.n -= l.n; q.n == 0 {
		q.head = 0 // The start of the memory is in the caches.
	}
	if err != nil {
		return 0, l.from, err
	}
	return len(b), l.from, nil
}

// at returns the place of the i-th byte.
func (q *inbox) at(i int) int {
	i += q.head
	if i >= len(q.mem) {
		i -= len(q.mem)
	}
	return i
}

func (q *inbox) grow(n int) {
	mem := make([]byte, max(inboxStart, 2*len(q.mem), n))
	k := copy(mem[:q.n], q.mem[q.head:])
	copy(mem[k:q.n], q.mem)
	q.mem, q.head = mem, 0
}
