package fabric

import "github.com/rdmanet/rdmanet/ibv"

// sizeOf returns the number of bytes in a list of elements, or false for more than limit.
func sizeOf(sgl []ibv.SGE, limit int) (n int, ok bool) {
	for i := range sgl {
		if len(sgl[i].Buf) > limit-n { // the sum may be more than an int holds
			return 0, false
		}
		n += len(sgl[i].Buf)
	}
	return n, true
}

// move copies the bytes of src into those of dst, which has room for them.
func move(dst, src []ibv.SGE) {
	var to []byte
	for i := range src {
		for from := src[i].Buf; len(from) > 0; {
			for len(to) == 0 {
				to, dst = dst[0].Buf, dst[1:]
			}
			n := copy(to, from)
			to, from = to[n:], from[n:]
		}
	}
}
