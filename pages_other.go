//go:build !unix

package rdmanet

// allocPages takes n bytes from the Go heap: only the software device exists
// on this system, and it needs no more.
func allocPages(n int) ([]byte, error) { return make([]byte, n), nil }

func freePages([]byte) error { return nil }
