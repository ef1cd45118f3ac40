package rdmanet

import (
	"io"
	"sync"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// ReadFrom implements [Conn.ReadFrom].
func (c *conn) ReadFrom(r io.Reader) (total int64, err error) {
	for err == nil {
		var n int64
		n, err = c.copyLittle(r)
		total += n
		for more := err == nil; more && err == nil; total += n {
			n, more, err = c.copyMuch(r)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return total, err
}

// littleBytes is what ReadFrom waits with for more. It is a size that Go's heap has, and
// none that a reader's blocks have: a read that fills it has left something.
const littleBytes = 4864

const copyBytes = 256 << 10

var (
	littlePool = sync.Pool{New: func() any { return new([littleBytes]byte) }}
	copyPool   = sync.Pool{New: func() any { return new([copyBytes]byte) }}
)

// copyLittle writes what r yields, up to and with a read that leaves something.
func (c *conn) copyLittle(r io.Reader) (total int64, err error) {
	b := littlePool.Get().(*[littleBytes]byte)
	defer littlePool.Put(b)
	for n := 0; n < len(b) && err == nil; {
		n, err = r.Read(b[:])
		w, werr := c.writeCopied(b[:n])
		total += int64(w)
		if werr != nil {
			err = c.opError("write", werr)
		}
	}
	return total, err
}

// copyMuch writes what one read with much room yields. more says that there was not enough.
func (c *conn) copyMuch(r io.Reader) (written int64, more bool, err error) {
	if c.tx.mode != transferNone && c.set.ofScratch <= regmem.ChunkSize {
		if s := c.dom.GetChunk(c.set.transferMemory); s != nil {
			return c.transferChunk(s, r)
		}
	}
	b := copyPool.Get().(*[copyBytes]byte)
	defer copyPool.Put(b)
	n, err := r.Read(b[:])
	w, werr := c.writeCopied(b[:n])
	if werr != nil {
		err = c.opError("write", werr)
	}
	return int64(w), n == len(b), err
}
