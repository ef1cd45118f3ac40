package rdmanet

import (
	"io"
	"sync"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// readFrom writes what r yields until its end. rerr is r's error, and err is why the
// connection cannot be written to.
func (c *conn) readFrom(r io.Reader) (total int64, rerr, err error) {
	for rerr == nil && err == nil {
		var n int64
		n, rerr, err = c.copyLittle(r)
		total += n
		for more := true; more && rerr == nil && err == nil; total += n {
			n, more, rerr, err = c.copyMuch(r)
		}
	}
	if rerr == io.EOF {
		rerr = nil
	}
	return total, rerr, err
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
func (c *conn) copyLittle(r io.Reader) (total int64, rerr, err error) {
	b := littlePool.Get().(*[littleBytes]byte)
	defer littlePool.Put(b)
	for n, w := 0, 0; n < len(b) && rerr == nil && err == nil; total += int64(w) {
		n, rerr = r.Read(b[:])
		w, err = c.writeCopied(b[:n])
	}
	return total, rerr, err
}

// copyMuch writes what one read with much room yields. more says that there was not enough.
func (c *conn) copyMuch(r io.Reader) (written int64, more bool, rerr, err error) {
	if c.tx.mode != TransferNone && c.set.readFromTransferMin <= regmem.ChunkSize {
		if s := c.dom.GetChunk(c.set.transferMemory); s != nil {
			return c.transferChunk(s, r)
		}
	}
	b := copyPool.Get().(*[copyBytes]byte)
	defer copyPool.Put(b)
	n, rerr := r.Read(b[:])
	w, err := c.writeCopied(b[:n])
	return int64(w), n == len(b), rerr, err
}
