//go:build !linux

package regmem

// allocLarge maps n bytes as AllocPages does.
func allocLarge(n int) (mem, whole []byte, err error) {
	whole, err = AllocPages(n)
	return whole, whole, err
}
