//go:build linux

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/rdmanet/rdmanet"
)

// patience bounds every call on a connection.
const patience = time.Minute

// serve handles the passive side of a connection.
func (e *end) serve(c *rdmanet.Conn) {
	e.open.Add(1)
	defer e.open.Add(-1)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	var b [headerLen]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return
	}
	h := header{kind(b[0] &^ mortal), binary.BigEndian.Uint64(b[1:]), binary.BigEndian.Uint32(b[9:]), b[0]&mortal != 0}
	if err := e.passive(c, h); errors.Is(err, errWrong) {
		e.fail(fmt.Errorf("%s of seed %#x: %w", kindNames[h.Kind], h.Seed, err))
	}
}

func (e *end) passive(c *rdmanet.Conn, h header) error {
	switch h.Kind {
	case echo, idle:
		_, err := io.Copy(c, c)
		return err
	case bulk, readFrom, halfClose, closed:
		err := h.receive(c)
		e.arrivals.tell(h.Seed, err)
		if err != nil {
			return err
		}
		_, err = io.Copy(c, &stream{seed: ^h.Seed, left: int(h.N)})
		return err
	case buffers:
		buf, err := rdmanet.Alloc(int(h.N))
		if err != nil {
			return err
		}
		defer buf.Free()
		if _, err = io.ReadFull(c, buf.Bytes()); err != nil {
			return err
		}
		if _, err = (&check{seed: h.Seed}).Write(buf.Bytes()); err == nil {
			_, err = c.Write(buf.Bytes())
		}
		return err
	case messages:
		b := make([]byte, 64<<10)
		for {
			n, err := c.ReadMsg(b)
			if err != nil {
				return err
			}
			if _, err = c.WriteMsg(b[:n]); err != nil {
				return err
			}
		}
	case httpKind:
		one := &oneListener{c: c, done: make(chan struct{})}
		srv := &http.Server{ReadHeaderTimeout: patience, ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed {
				_ = one.Close()
			}
		}, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err == nil {
				_, _ = w.Write(b)
			}
		})}
		_ = srv.Serve(one)
	case muxed:
		s, err := yamux.Server(c, quiet())
		if err != nil {
			return err
		}
		defer s.Close()
		for {
			st, err := s.Accept()
			if err != nil {
				return err
			}
			go func() {
				_, _ = io.Copy(st, st)
				_ = st.Close()
			}()
		}
	}
	return nil
}

func quiet() *yamux.Config {
	cfg := yamux.DefaultConfig()
	cfg.LogOutput = io.Discard
	// Timers of streams keep their sessions in memory that long.
	cfg.StreamCloseTimeout, cfg.StreamOpenTimeout = time.Second, 20*time.Second
	return cfg
}

// oneListener is a listener with one connection.
type oneListener struct {
	c    net.Conn
	mu   sync.Mutex
	done chan struct{}
	got  bool
}

func (l *oneListener) Accept() (net.Conn, error) {
	l.mu.Lock()
	first := !l.got
	l.got = true
	l.mu.Unlock()
	if first {
		return l.c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *oneListener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	return nil
}
func (l *oneListener) Addr() net.Addr { return l.c.LocalAddr() }
