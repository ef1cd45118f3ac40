package iwarp

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/internal/fault"
)

// portable is the link over TCP for systems that have only the blocking calls of package
// net. Every byte goes through a buffer of the link, so that no memory of the stream is in
// use while a call blocks. at is not used.
type portable struct {
	socket

	// The holder of the receiving role uses these.
	in   *[]byte // in is nil while it is empty.
	r, w int     // in[r:w] was received and has not been read.
	end  error   // end is the reason why nothing follows.

	// outMu guards these in write and closeAfter. A writev is never at the same time.
	out   *[]byte // out is nil while it is empty.
	used  int     // out[:used] was taken and must be written.
	outMu sync.Mutex
	taken atomic.Int64 // taken counts bytes that were taken and are not all in the socket.

	closed atomic.Bool
}

const (
	portableOut  = 64 << 10 // portableOut is the most bytes of one write.
	portablePoll = 50 * time.Microsecond
)

// openPortable is an opener.
func openPortable(conn net.Conn, _ *setup) (link, error) {
	p := new(portable)
	if err := p.init(conn); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *portable) read(step func(at uintptr) bool) error {
	for !p.closed.Load() {
		if step(0) {
			return nil
		}
		if err := p.fill(); err != nil {
			return err
		}
	}
	return net.ErrClosed
}

// poll waits for portablePoll at most, because the calls of package net cannot wait for
// less.
func (p *portable) poll(step func(at uintptr) bool) error {
	if p.closed.Load() {
		return net.ErrClosed
	}
	p.setReadDeadline(time.Now().Add(portablePoll))
	err := p.fill()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case err == nil:
		step(0)
	}
	return err
}

// fill waits until there is something to read, or the stream has ended.
func (p *portable) fill() error {
	if p.in != nil || p.end != nil {
		return nil
	}
	p.in = stagingPool.Get().(*[]byte)
	n, err := p.conn.Read(*p.in)
	p.r, p.w = 0, n
	if n > 0 {
		return nil
	}
	p.empty()
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
		return err
	}
	if p.end = err; err == nil {
		p.end = io.ErrNoProgress
	}
	return nil
}

// empty releases the buffer.
func (p *portable) empty() {
	stagingPool.Put(p.in)
	p.in = nil
}

func (p *portable) readv(_ uintptr, bufs [][]byte) (n int, wait bool, err error) {
	if p.in == nil {
		return 0, p.end == nil, p.end
	}
	for _, b := range bufs {
		k, err := fault.Copy(b, (*p.in)[p.r:p.w])
		p.r += k
		n += k
		if err != nil {
			return 0, false, err
		}
	}
	if p.r == p.w {
		p.empty()
	}
	return n, false, nil
}

// write writes what was taken before it calls step, and again before each further
// call. Nothing is left then when step returns true, and the next write does not wait
// before its step.
func (p *portable) write(step func(at uintptr) bool) error {
	for !p.closed.Load() {
		p.outMu.Lock()
		err := p.flush()
		p.outMu.Unlock()
		if err != nil {
			return err
		}
		if step(0) {
			return nil
		}
	}
	return net.ErrClosed
}

// flush writes what was taken. The caller holds outMu.
func (p *portable) flush() error {
	if p.out == nil {
		return nil
	}
	_, err := p.conn.Write((*p.out)[:p.used])
	p.taken.Add(-int64(p.used))
	putBlock(p.out)
	p.out, p.used = nil, 0
	return err
}

// writev takes what its buffer has room for. It always asks for a write that may wait,
// because that one writes the buffer.
func (p *portable) writev(_ uintptr, bufs [][]byte) (n int, wait bool, err error) {
	if p.out == nil {
		p.out = getBlock(portableOut)
	}
	for _, b := range bufs {
		k, err := fault.Copy((*p.out)[p.used:], b)
		if err != nil {
			p.used -= n
			return 0, false, err
		}
		p.used += k
		n += k
	}
	p.taken.Add(int64(n))
	return n, true, nil
}

func (p *portable) unsent() int {
	if p.closed.Load() {
		return 0
	}
	return int(p.taken.Load()) + p.socket.unsent()
}

func (p *portable) closeAfter(words []byte) {
	p.conn.SetDeadline(time.Now().Add(lastWordsTimeout)) // The deadline also ends a write under way.
	p.outMu.Lock()
	defer p.outMu.Unlock()
	p.closed.Store(true)
	if p.flush() != nil {
		p.conn.Close()
		return
	}
	p.socket.closeAfter(words)
}

func (p *portable) close(reset bool) error {
	p.closed.Store(true)
	return p.socket.close(reset)
}
