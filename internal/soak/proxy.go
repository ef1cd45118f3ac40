//go:build linux

package main

import (
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// proxy is a link to home that now and then stops for a while, or is cut.
type proxy struct {
	ln   net.Listener
	to   string
	wg   sync.WaitGroup
	done chan struct{}
	mu   sync.Mutex
	open map[net.Conn]bool
}

func newProxy(to string, seed uint64) (*proxy, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{ln: ln, to: to, done: make(chan struct{}), open: map[net.Conn]bool{}}
	p.wg.Go(func() {
		for n := seed; ; n++ {
			c, err := ln.Accept()
			if err != nil {
				select {
				case <-p.done:
					return
				case <-time.After(10 * time.Millisecond): // There is no descriptor.
					continue
				}
			}
			p.wg.Go(func() { p.serve(c, rand.New(rand.NewPCG(n, 1))) })
		}
	})
	return p, nil
}

func (p *proxy) addr() string { return p.ln.Addr().String() }

func (p *proxy) keep(c net.Conn, on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if on {
		p.open[c] = true
	} else {
		delete(p.open, c)
		_ = c.Close()
	}
}

func (p *proxy) serve(c net.Conn, rnd *rand.Rand) {
	p.keep(c, true)
	defer p.keep(c, false)
	d, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	p.keep(d, true)
	defer p.keep(d, false)
	cut, pause := -1, -1
	switch rnd.IntN(4) {
	case 0:
		cut = rnd.IntN(1 << 20)
	case 1:
		pause = rnd.IntN(1 << 18)
	}
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{c, d}, {d, c}} {
		both.Go(func() {
			n, cut, pause := 0, cut, pause
			b := make([]byte, 32<<10)
			for {
				k, err := way[0].Read(b)
				if n += k; pause >= 0 && n > pause {
					select {
					case <-time.After(300 * time.Millisecond):
					case <-p.done:
					}
					pause = -1
				}
				if cut >= 0 && n > cut {
					_, _ = way[1].Write(b[:k/2])
					abort(c, d)
					return
				}
				if _, e := way[1].Write(b[:k]); e != nil || err != nil {
					if err == io.EOF {
						_ = way[1].(*net.TCPConn).CloseWrite()
					} else {
						abort(c, d)
					}
					return
				}
			}
		})
	}
	both.Wait()
}

func (p *proxy) close() {
	close(p.done)
	_ = p.ln.Close()
	p.mu.Lock()
	for c := range p.open {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// abort resets both connections.
func abort(conns ...net.Conn) {
	for _, c := range conns {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
}
