//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/rdmanet/rdmanet"
)

// target is the address to dial.
type target struct {
	stream, packet string
	killed         bool // killed is set if the target may be killed at any time.
	own            bool // own is set if it is this process.
	relayed        bool // relayed is set if another program's kernel acknowledges for it.
}

// dialOn makes one connection after another until ctx ends.
func (e *end) dialOn(ctx context.Context, to func() target) {
	rnd := rand.New(rand.NewPCG(e.seed.Add(1), 2))
	for ctx.Err() == nil {
		t := to()
		h := header{Kind: kind(rnd.IntN(int(numKinds))), Seed: rnd.Uint64(), N: uint32(rnd.IntN(64 << 10)), Mortal: e.peer}
		if !e.possible(h.Kind, t) {
			h.Kind = echo
		}
		switch {
		case h.Kind == echo || h.Kind == messages:
			h.N %= 50
		case rnd.IntN(16) == 0 && h.Kind <= buffers:
			h.N = uint32(rnd.IntN(2 << 20))
		}
		h.N++
		calm, before := e.disturbance.Load(), givenUp()
		e.open.Add(1)
		err := e.active(ctx, t, h, rnd)
		e.open.Add(-1)
		switch {
		case err == nil:
			e.made.Add(1)
			e.byKind[h.Kind].Add(1)
		case errors.Is(err, errWrong) || !errors.Is(err, errDropped) && !e.peer && !t.killed && calm%2 == 0 && e.disturbance.Load() == calm && !e.forgives(h.Kind, err, before):
			e.fail(fmt.Errorf("%s of %d to %s, seed %#x: %w", kindNames[h.Kind], h.N, t.stream, h.Seed, err))
		default:
			e.failures.Add(1)
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(rnd.IntN(50)) * time.Millisecond):
			}
		}
	}
}

// possible reports whether there can be such a connection to t.
func (e *end) possible(k kind, t target) bool {
	switch k {
	case datagrams:
		return len(t.packet) > 1
	case silent:
		return e.cfg.Provider.Attr().TCPSockets
	}
	return true
}

// active is the active side of a connection.
func (e *end) active(ctx context.Context, t target, h header, rnd *rand.Rand) error {
	switch h.Kind {
	case datagrams:
		return e.datagrams(t, h)
	case silent:
		return sayNothing(ctx, t, rnd)
	}
	d := rdmanet.Dialer{Config: e.cfg, Timeout: patience}
	nc, err := d.Dial("rdma", t.stream)
	if err != nil {
		return fmt.Errorf("%w: %w", errDial, err)
	}
	c := nc.(*rdmanet.Conn)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(h.encode()); err != nil {
		return err
	}
	switch h.Kind {
	case idle:
		pause(ctx, time.Duration(rnd.IntN(5000))*time.Millisecond)
		h.N = 1
		return h.requests(c, rnd)
	case echo:
		return h.requests(c, rnd)
	case closed:
		return e.writeAndClose(c, t, h, rnd.IntN(2) == 0)
	case bulk, halfClose, readFrom:
		return h.upload(c)
	case buffers:
		return h.echoBuffer(c)
	case messages:
		return h.echoMessages(c, rnd)
	case httpKind:
		return h.post(c)
	case muxed:
		return h.streams(c)
	}
	return nil
}

// requests sends N small requests, each after the answer to the one before.
func (h *header) requests(c net.Conn, rnd *rand.Rand) error {
	b, want := make([]byte, 600), &check{seed: h.Seed}
	for off, left := 0, h.N; left > 0; left-- {
		p := b[:1+rnd.IntN(len(b))]
		fill(p, h.Seed, off)
		if _, err := c.Write(p); err != nil {
			return err
		}
		if _, err := io.CopyN(want, c, int64(len(p))); err != nil {
			return err
		}
		off += len(p)
	}
	return nil
}

// upload sends N bytes and the end of the stream, and reads N bytes.
func (h *header) upload(c *rdmanet.Conn) error {
	var err error
	if h.Kind == readFrom {
		_, err = c.ReadFrom(&stream{seed: h.Seed, left: int(h.N)})
	} else {
		p := make([]byte, h.N)
		fill(p, h.Seed, 0)
		_, err = c.Write(p)
	}
	if err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	_, err = io.CopyN(&check{seed: ^h.Seed}, c, int64(h.N))
	return err
}

// echoBuffer sends a Buffer and reads it back into itself.
func (h *header) echoBuffer(c net.Conn) error {
	buf, err := rdmanet.Alloc(int(h.N))
	if err != nil {
		return err
	}
	defer buf.Free()
	fill(buf.Bytes(), h.Seed, 0)
	if _, err := c.Write(buf.Bytes()); err != nil {
		return err
	}
	clear(buf.Bytes())
	if _, err := io.ReadFull(c, buf.Bytes()); err != nil {
		return err
	}
	_, err = (&check{seed: h.Seed}).Write(buf.Bytes())
	return err
}

// echoMessages sends N messages, each after the echo of the one before.
func (h *header) echoMessages(c *rdmanet.Conn, rnd *rand.Rand) error {
	b, want := make([]byte, 32<<10), &check{seed: h.Seed}
	for off, left := 0, h.N; left > 0; left-- {
		p := b[:1+rnd.IntN(len(b))]
		fill(p, h.Seed, off)
		if _, err := c.WriteMsg(p); err != nil {
			return err
		}
		n, err := c.ReadMsg(b)
		if err != nil {
			return err
		}
		if n != len(p) {
			return fmt.Errorf("%w: a message of %d, not %d", errWrong, n, len(p))
		}
		if _, err := want.Write(p); err != nil {
			return err
		}
		off += n
	}
	return nil
}

// post makes three HTTP requests whose bodies come back.
func (h *header) post(c net.Conn) error {
	r := bufio.NewReader(c)
	for range 3 {
		req, err := http.NewRequest("POST", "http://soak/", &stream{seed: h.Seed, left: int(h.N)})
		if err != nil {
			return err
		}
		req.ContentLength = int64(h.N)
		if err := req.Write(c); err != nil {
			return err
		}
		res, err := http.ReadResponse(r, req)
		if err != nil {
			return err
		}
		n, err := io.Copy(&check{seed: h.Seed}, res.Body)
		_ = res.Body.Close()
		if err != nil {
			return err
		}
		if n != int64(h.N) {
			return fmt.Errorf("%w: an answer of %d, not %d", errWrong, n, h.N)
		}
	}
	return nil
}

// streams opens three yamux streams, one after the other, whose bytes come back.
func (h *header) streams(c net.Conn) error {
	s, err := yamux.Client(c, quiet())
	if err != nil {
		return err
	}
	defer s.Close()
	for i := range 3 {
		st, err := s.Open()
		if err != nil {
			return err
		}
		_ = st.SetDeadline(time.Now().Add(patience))
		seed := h.Seed + uint64(i)
		sent := make(chan error, 1)
		go func() {
			_, err := io.Copy(st, &stream{seed: seed, left: int(h.N)})
			sent <- err
		}()
		_, err = io.CopyN(&check{seed: seed}, st, int64(h.N))
		_ = st.Close()
		if err = errors.Join(err, <-sent); err != nil {
			return err
		}
	}
	return nil
}

// sayNothing opens a TCP connection to the port and sends nothing.
func sayNothing(ctx context.Context, t target, rnd *rand.Rand) error {
	c, err := net.Dial("tcp", t.stream)
	if err != nil {
		return err
	}
	defer c.Close()
	pause(ctx, time.Duration(rnd.IntN(1000))*time.Millisecond)
	return nil
}

// errDropped means that no datagram has come back, which is allowed.
var errDropped = errors.New("no datagram has come back")

// datagrams sends datagrams and checks those that come back.
func (e *end) datagrams(t target, h header) error {
	cfg := e.cfg
	if cfg.Provider.Attr().UDPSockets {
		cfg.Provider, cfg.Device = nil, "iwarp"
	}
	c, err := (&rdmanet.Dialer{Config: cfg}).Dial("udp", t.packet)
	if err != nil {
		return err
	}
	defer c.Close()
	p, b := make([]byte, 1+h.N%1000), make([]byte, 2048)
	fill(p, h.Seed, 0)
	result := errDropped
	for range 5 {
		if _, err := c.Write(p); err != nil {
			return result // The peer has ended.
		}
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		n, err := c.Read(b)
		switch {
		case err == nil && !bytes.Equal(b[:n], p):
			return fmt.Errorf("%w: a datagram of %d, not %d", errWrong, n, len(p))
		case err == nil:
			result = nil
		}
	}
	return result
}
