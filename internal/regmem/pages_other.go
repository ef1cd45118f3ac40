//go:build !unix

package regmem

// AllocPages returns n bytes of the Go heap: only the software device exists on this
// system, and it needs no more.
func AllocPages(n int) ([]byte, error) { return make([]byte, n), nil }

// FreePages leaves the memory to the garbage collector.
func FreePages([]byte) error { return nil }
