package iwarp

import (
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// memoryNet opens links through rings in this process's memory, for tests. Its
// opener takes two connections for the ends of one link by their addresses.
type memoryNet struct {
	mu      sync.Mutex
	waiting map[[2]netip.AddrPort]*memoryLink // an end without a peer yet, by the dialler's addresses
}

// memoryRing is as small as a page, so that large messages fill it.
const memoryRing = 4096

// memoryLink is one end. TCP stays open and silent: it tells that the peer has gone
// without a word.
type memoryLink struct {
	of      *memoryNet
	key     [2]netip.AddrPort
	conn    net.Conn
	in, out *memoryPipe

	mu          sync.Mutex
	deadline    time.Time
	interrupted bool
	changed     chan struct{} // has a token when the two above have changed
	closed      chan struct{}
	closing     sync.Once
}

// memoryPipe is one direction.
type memoryPipe struct {
	mu       sync.Mutex
	buf      []byte
	end      error         // what the reader finds behind buf
	broken   error         // what the writer gets
	readable chan struct{} // has a token when buf or end has changed
	writable chan struct{} // has a token when buf or broken has changed
}

func newMemoryPipe() *memoryPipe {
	return &memoryPipe{readable: make(chan struct{}, 1), writable: make(chan struct{}, 1)}
}

// wake puts a token into c.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// open is an opener.
func (n *memoryNet) open(conn net.Conn, s *setup) (link, error) {
	key := [2]netip.AddrPort{unmapped(conn.LocalAddr()), unmapped(conn.RemoteAddr())}
	if s.awaits { // the responder
		key[0], key[1] = key[1], key[0]
	}
	l := &memoryLink{of: n, key: key, conn: conn, changed: make(chan struct{}, 1), closed: make(chan struct{})}
	n.mu.Lock()
	if peer := n.waiting[key]; peer != nil {
		l.in, l.out = peer.out, peer.in
		delete(n.waiting, key)
	} else {
		l.in, l.out = newMemoryPipe(), newMemoryPipe()
		if n.waiting == nil {
			n.waiting = make(map[[2]netip.AddrPort]*memoryLink)
		}
		n.waiting[key] = l
	}
	n.mu.Unlock()
	go l.watch()
	return l, nil
}

// watch waits for the end of the TCP connection.
func (l *memoryLink) watch() {
	l.conn.Read(make([]byte, 1))
	l.in.finish(errno.ECONNRESET)
	l.out.refuse(errno.ECONNRESET)
}

// finish says what the reader finds behind the bytes, unless that is known.
func (p *memoryPipe) finish(err error) {
	p.mu.Lock()
	if p.end == nil {
		p.end = err
	}
	p.mu.Unlock()
	wake(p.readable)
}

// refuse says why nothing can be written any more, unless that is known.
func (p *memoryPipe) refuse(err error) {
	p.mu.Lock()
	if p.broken == nil {
		p.broken = err
	}
	p.mu.Unlock()
	wake(p.writable)
}

func (l *memoryLink) read(step func(at uintptr) bool) error {
	for {
		l.mu.Lock()
		deadline, interrupted := l.deadline, l.interrupted
		l.mu.Unlock()
		select {
		case <-l.closed:
			return net.ErrClosed
		default:
		}
		if interrupted || !deadline.IsZero() && !time.Now().Before(deadline) {
			return os.ErrDeadlineExceeded
		}
		if step(0) {
			return nil
		}
		var due <-chan time.Time
		if !deadline.IsZero() {
			due = time.After(time.Until(deadline))
		}
		select {
		case <-l.in.readable:
		case <-l.changed:
		case <-l.closed:
		case <-due:
		}
	}
}

func (l *memoryLink) poll(step func(at uintptr) bool) error {
	l.setReadDeadline(time.Time{})
	return l.read(step)
}

func (l *memoryLink) readv(_ uintptr, bufs [][]byte) (n int, wait bool, err error) {
	p := l.in
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.buf) == 0 {
		return 0, p.end == nil, p.end
	}
	for _, b := range bufs {
		k := copy(b, p.buf)
		p.buf = p.buf[k:]
		n += k
	}
	wake(p.writable)
	return n, false, nil
}

func (l *memoryLink) setReadDeadline(t time.Time) {
	l.mu.Lock()
	l.deadline, l.interrupted = t, false
	l.mu.Unlock()
	wake(l.changed)
}

func (l *memoryLink) interrupt() {
	l.mu.Lock()
	l.interrupted = true
	l.mu.Unlock()
	wake(l.changed)
}

func (l *memoryLink) write(step func(at uintptr) bool) error {
	for {
		select {
		case <-l.closed:
			return net.ErrClosed
		default:
		}
		if step(0) {
			return nil
		}
		select {
		case <-l.out.writable:
		case <-l.closed:
		}
	}
}

func (l *memoryLink) writev(_ uintptr, bufs [][]byte) (n int, wait bool, err error) {
	p := l.out
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.broken != nil:
		return 0, false, p.broken
	case p.end != nil:
		return 0, false, errno.EPIPE
	}
	for _, b := range bufs {
		k := min(len(b), memoryRing-len(p.buf))
		p.buf = append(p.buf, b[:k]...)
		n += k
	}
	if n == 0 {
		return 0, true, nil
	}
	wake(p.readable)
	return n, false, nil
}

func (l *memoryLink) closeWrite() error {
	select {
	case <-l.closed:
		return net.ErrClosed
	default:
	}
	l.out.finish(io.EOF)
	return nil
}

func (l *memoryLink) unsent() int { return 0 }

func (l *memoryLink) close(reset bool) error {
	err := net.ErrClosed
	l.closing.Do(func() {
		close(l.closed)
		l.of.mu.Lock()
		if l.of.waiting[l.key] == l {
			delete(l.of.waiting, l.key)
		}
		l.of.mu.Unlock()
		if reset {
			l.out.finish(errno.ECONNRESET)
		}
		l.out.finish(io.EOF)
		l.in.refuse(errno.EPIPE)
		err = l.conn.Close()
	})
	return err
}

func (l *memoryLink) closeAfter(words []byte) {
	defer l.close(false)
	over := time.AfterFunc(lastWordsTimeout, func() { l.close(false) })
	defer over.Stop()
	l.setReadDeadline(time.Time{})
	err := l.write(func(at uintptr) bool {
		for len(words) > 0 {
			n, wait, err := l.writev(at, [][]byte{words})
			if err != nil || wait {
				return err != nil
			}
			words = words[n:]
		}
		return true
	})
	if err != nil || l.closeWrite() != nil {
		return
	}
	buf := make([]byte, memoryRing)
	l.read(func(at uintptr) bool {
		for {
			if _, wait, err := l.readv(at, [][]byte{buf}); wait || err != nil {
				return err != nil
			}
		}
	})
}
