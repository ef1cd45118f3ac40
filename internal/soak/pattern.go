//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// fill sets b to the bytes of the stream of that seed at off.
func fill(b []byte, seed uint64, off int) {
	for i := range b {
		at := uint64(off + i)
		x := (seed ^ at>>3) * 0x9e3779b97f4a7c15
		x ^= x >> 29
		b[i] = byte(x >> (8 * (at & 7)))
	}
}

// stream is a reader of the stream of that seed.
type stream struct {
	seed uint64
	off  int
	left int
}

func (s *stream) Read(b []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	n := min(len(b), s.left)
	fill(b[:n], s.seed, s.off)
	s.off, s.left = s.off+n, s.left-n
	return n, nil
}

var errWrong = errors.New(defect.Prefix + "wrong bytes, or some are lost")

// check is a writer that checks the stream of that seed.
type check struct {
	seed uint64
	off  int
	want []byte
}

func (c *check) Write(b []byte) (int, error) {
	if cap(c.want) < len(b) {
		c.want = make([]byte, len(b))
	}
	w := c.want[:len(b)]
	fill(w, c.seed, c.off)
	if !bytes.Equal(b, w) {
		return 0, fmt.Errorf("%w within %d from %d on of seed %#x", errWrong, len(b), c.off, c.seed)
	}
	c.off += len(b)
	return len(b), nil
}
