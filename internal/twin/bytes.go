package twin

import (
	"bytes"
	"fmt"
	"math/rand/v2"
)

// period is after how many bytes a stream repeats itself. It is a prime, so no block that
// is lost or doubled is a multiple of it.
const period = 4194301

// noise has the bytes of all streams. Its beginning is repeated at its end, so that a slice
// of up to that length can be compared at once.
var noiseBytes = func() []byte {
	b := make([]byte, period+64<<10)
	rand.NewChaCha8([32]byte{'t', 'w', 'i', 'n'}).Read(b[:period])
	copy(b[period:], b)
	return b
}()

// A stream is what one end sends. Its bytes depend on the seed, the direction and the
// offset.
type stream struct{ start int64 }

func newStream(seed uint64, end int) stream {
	r := rand.New(rand.NewPCG(seed, uint64(end)))
	return stream{r.Int64N(period)}
}

// fill writes the bytes that begin at offset off into p.
func (s stream) fill(p []byte, off int64) {
	for len(p) > 0 {
		at := (s.start + off) % period
		n := copy(p, noiseBytes[at:])
		p, off = p[n:], off+int64(n)
	}
}

// differ returns what is wrong with p, which should be the bytes at off; empty if nothing is.
func (s stream) differ(p []byte, off int64) string {
	for len(p) > 0 {
		at := (s.start + off) % period
		want := noiseBytes[at:]
		n := min(len(p), len(want))
		if !bytes.Equal(p[:n], want[:n]) {
			i := 0
			for p[i] == want[i] {
				i++
			}
			return fmt.Sprintf("wrong byte at offset %d%s", off+int64(i), s.place(p[i:n], off+int64(i)))
		}
		p, off = p[n:], off+int64(n)
	}
	return ""
}

// place finds the place in the stream that the bytes in p belong to. They were received at
// off.
func (s stream) place(p []byte, off int64) string {
	if len(p) < 12 {
		return ""
	}
	p = p[:min(len(p), 64)]
	at := bytes.Index(noiseBytes, p)
	if at < 0 {
		return ", which occurs nowhere in the stream"
	}
	d := (int64(at) - s.start - off) % period
	if d > period/2 {
		d -= period
	} else if d < -period/2 {
		d += period
	}
	return fmt.Sprintf(", where bytes come that belong %+d bytes away", d)
}
