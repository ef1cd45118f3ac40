// Package ring has a first-in first-out queue. It grows as it is used, and allocates
// nothing once it has its size.
package ring

// A Ring is a queue. The zero value is empty and ready for use. It is for one goroutine at
// a time.
type Ring[T any] struct {
	buf  []T // The length of buf is a power of two.
	head int
	n    int
}

// Len returns the number of elements.
func (r *Ring[T]) Len() int { return r.n }

// At returns the i-th element, counted from the oldest. The pointer is valid until the next
// Push or Pop.
func (r *Ring[T]) At(i int) *T { return &r.buf[(r.head+i)&(len(r.buf)-1)] }

// Push appends an element.
func (r *Ring[T]) Push(v T) { *r.Next() = v }

// Next appends an element and returns it. The element has the content of its last use, so
// that its memory can be used again.
func (r *Ring[T]) Next() *T {
	if r.n == len(r.buf) {
		r.resize(max(4, 2*len(r.buf)))
	}
	r.n++
	return r.At(r.n - 1)
}

// Undo removes the element that the last Next has appended.
func (r *Ring[T]) Undo() { r.n-- }

// Pop removes the oldest element and returns it. There must be one.
func (r *Ring[T]) Pop() T {
	p := r.At(0)
	v := *p
	var zero T
	*p = zero
	r.Drop()
	return v
}

// Drop removes the oldest element. A later Next returns the element's memory again.
func (r *Ring[T]) Drop() {
	r.head = (r.head + 1) & (len(r.buf) - 1)
	r.n--
}

// Trim frees the memory that the present elements do not need, including the memory that
// Drop has left for a later Next.
func (r *Ring[T]) Trim() {
	size := 4
	for size < r.n {
		size *= 2
	}
	switch {
	case r.n == 0:
		r.buf, r.head = nil, 0
	case size < len(r.buf):
		r.resize(size)
	}
}

func (r *Ring[T]) resize(size int) {
	buf := make([]T, size)
	for i := range r.n {
		buf[i] = *r.At(i)
	}
	r.buf, r.head = buf, 0
}
