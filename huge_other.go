//go:build !linux

package rdmanet

// allocLarge is allocPages where nothing more is known for large stretches.
func allocLarge(n int) (mem, whole []byte, err error) {
	whole, err = allocPages(n)
	return whole, whole, err
}
