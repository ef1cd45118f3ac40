//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/rdmanet/rdmanet"
)

// kind is what a connection is for.
type kind uint8

const (
	echo      kind = iota // small requests and answers
	bulk                  // many bytes one way, with Write
	readFrom              // the same with ReadFrom
	buffers               // from a Buffer into a Buffer
	messages              // with boundaries
	halfClose             // an answer after the end of the request
	closed                // Write, and Close at once
	idle                  // nothing for a while
	httpKind              // HTTP/1.1 requests
	muxed                 // yamux streams
	datagrams
	silent // a TCP connection that says nothing
	numKinds
)

var kindNames = [numKinds]string{"echo", "bulk", "ReadFrom", "Buffers", "messages", "half-close", "close", "idle", "HTTP", "yamux", "datagrams", "silent"}

// header begins a connection.
type header struct {
	Kind kind
	Seed uint64
	N    uint32 // bytes, or rounds
}

const headerLen = 13

func (h *header) encode() []byte {
	b := append(make([]byte, 0, headerLen), byte(h.Kind))
	b = binary.BigEndian.AppendUint64(b, h.Seed)
	return binary.BigEndian.AppendUint32(b, h.N)
}

// fill sets b to what the stream of that seed has at off.
func fill(b []byte, seed uint64, off int) {
	for i := range b {
		at := uint64(off + i)
		x := (seed ^ at>>3) * 0x9e3779b97f4a7c15
		x ^= x >> 29
		b[i] = byte(x >> (8 * (at & 7)))
	}
}

// stream reads what the stream of that seed has.
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

var errWrong = errors.New("wrong bytes")

// check takes what a stream of that seed must have.
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

// end is home, or a peer.
type end struct {
	cfg     rdmanet.Config
	ln      net.Listener
	packets net.PacketConn // nil where the device has no datagrams
	peer    bool
	seed    atomic.Uint64
	addr    string

	made, open, failures atomic.Int64           // those made have done what they were for
	byKind               [numKinds]atomic.Int64 // of those made
	disturbance          atomic.Int64           // odd while something is refused
	arrivals             arrivals
	givenUp              uint64        // connections of the process, before the end was made
	excuses              atomic.Uint64 // streams that were lost because of such connections
	wrong                chan error
	wg                   sync.WaitGroup
}

func newEnd(cfg rdmanet.Config, addr string, seed uint64) (*end, error) {
	e := &end{cfg: cfg, addr: addr, givenUp: givenUp(rdmanet.Lingering()), wrong: make(chan error, 100)}
	e.seed.Store(seed)
	var err error
	if e.ln, err = (&rdmanet.ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", net.JoinHostPort(addr, "0")); err != nil {
		return nil, err
	}
	udp := cfg
	if onIWARP(cfg) {
		udp.Provider, udp.Device = nil, "iwarp"
	}
	e.packets, err = (&rdmanet.ListenConfig{Config: udp}).ListenPacket(context.Background(), "udp", net.JoinHostPort(addr, "0"))
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return nil, errors.Join(err, e.ln.Close())
	}
	e.wg.Go(func() {
		for {
			c, err := e.ln.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					e.fail(err)
				}
				return
			}
			e.wg.Go(func() { e.serve(c.(*rdmanet.Conn)) })
		}
	})
	if err == nil {
		e.wg.Go(func() {
			b := make([]byte, 2048)
			for {
				n, from, err := e.packets.ReadFrom(b)
				if errors.Is(err, net.ErrClosed) {
					return
				} else if err == nil {
					_, _ = e.packets.WriteTo(b[:n], from)
				}
			}
		})
	} else {
		e.packets = nil
	}
	return e, nil
}

func onIWARP(cfg rdmanet.Config) bool { return cfg.Provider.Name() == "iwarp" }

func (e *end) packetAddr() string {
	if e.packets == nil {
		return "-"
	}
	return e.packets.LocalAddr().String()
}

func (e *end) fail(err error) {
	select {
	case e.wrong <- err:
	default:
	}
}

func (e *end) close() error {
	err := e.ln.Close()
	if e.packets != nil {
		err = errors.Join(err, e.packets.Close())
	}
	if !within(2*time.Minute, e.wg.Wait) {
		err = errors.Join(err, errors.New("connections that were accepted do not end"))
	}
	return err
}

// patience is how long anything on a connection may take.
const patience = time.Minute

// serve is the passive side of a connection.
func (e *end) serve(c *rdmanet.Conn) {
	e.open.Add(1)
	defer e.open.Add(-1)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	var b [headerLen]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return
	}
	h := header{kind(b[0]), binary.BigEndian.Uint64(b[1:]), binary.BigEndian.Uint32(b[9:])}
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
			if err = c.WriteMsg(b[:n]); err != nil {
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
	// Timers of streams keep their sessions in memory as long.
	cfg.StreamCloseTimeout, cfg.StreamOpenTimeout = time.Second, 20*time.Second
	return cfg
}

// oneListener hands out one connection.
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

// target is where to dial.
type target struct {
	stream, packet string
	killed         bool // it may be gone at any time
	own            bool // it is this process
}

// dialOn makes one connection after the other until ctx ends.
func (e *end) dialOn(ctx context.Context, to func() target) {
	rnd := rand.New(rand.NewPCG(e.seed.Add(1), 2))
	for ctx.Err() == nil {
		t := to()
		h := header{Kind: kind(rnd.IntN(int(numKinds))), Seed: rnd.Uint64(), N: uint32(rnd.IntN(64 << 10))}
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
		calm := e.disturbance.Load()
		e.open.Add(1)
		err := e.active(ctx, t, h, rnd)
		e.open.Add(-1)
		switch {
		case err == nil:
			e.made.Add(1)
			e.byKind[h.Kind].Add(1)
		case errors.Is(err, errWrong) || !errors.Is(err, errDropped) && !e.peer && !t.killed && calm%2 == 0 && e.disturbance.Load() == calm:
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
		return onIWARP(e.cfg)
	}
	return true
}

// active is the active side of a connection.
func (e *end) active(ctx context.Context, t target, h header, rnd *rand.Rand) error {
	switch h.Kind {
	case datagrams:
		return e.datagrams(t, h)
	case silent:
		c, err := net.Dial("tcp", t.stream)
		if err != nil {
			return err
		}
		defer c.Close()
		pause(ctx, time.Duration(rnd.IntN(1000))*time.Millisecond)
		return nil
	}
	d := rdmanet.Dialer{Config: e.cfg, Timeout: patience}
	nc, err := d.Dial("rdma", t.stream)
	if err != nil {
		return err
	}
	c := nc.(*rdmanet.Conn)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(h.encode()); err != nil {
		return err
	}
	want := &check{seed: h.Seed}
	back := func(seed uint64, n int) error {
		w := &check{seed: seed}
		_, err := io.CopyN(w, c, int64(n))
		return err
	}
	switch h.Kind {
	case idle:
		pause(ctx, time.Duration(rnd.IntN(5000))*time.Millisecond)
		h.N = 1
		fallthrough
	case echo:
		b := make([]byte, 600)
		for off := 0; h.N > 0; h.N-- {
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
	case closed:
		return e.writeAndClose(c, t, h, rnd.IntN(2) == 0)
	case bulk, halfClose:
		p := make([]byte, h.N)
		fill(p, h.Seed, 0)
		if _, err := c.Write(p); err != nil {
			return err
		}
		if err := c.CloseWrite(); err != nil {
			return err
		}
		return back(^h.Seed, int(h.N))
	case readFrom:
		if _, err := c.ReadFrom(&stream{seed: h.Seed, left: int(h.N)}); err != nil {
			return err
		}
		if err := c.CloseWrite(); err != nil {
			return err
		}
		return back(^h.Seed, int(h.N))
	case buffers:
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
		_, err = want.Write(buf.Bytes())
		return err
	case messages:
		b := make([]byte, 32<<10)
		for off := 0; h.N > 0; h.N-- {
			p := b[:1+rnd.IntN(len(b))]
			fill(p, h.Seed, off)
			if err := c.WriteMsg(p); err != nil {
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
	case httpKind:
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
	case muxed:
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
	}
	return nil
}

// errDropped is that no datagram has come back, which may be.
var errDropped = errors.New("no datagram has come back")

// datagrams sends some and looks at those that come back.
func (e *end) datagrams(t target, h header) error {
	cfg := e.cfg
	if onIWARP(cfg) {
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
			return result // the peer is gone
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

// missing returns the kinds of which none was made, though home could have.
func (e *end) missing() (names []string) {
	for k := range numKinds {
		if e.possible(k, target{packet: e.packetAddr()}) && e.byKind[k].Load() == 0 {
			names = append(names, kindNames[k])
		}
	}
	return names
}

// overflow dials a listener that nobody accepts from, more often than it has room.
func (e *end) overflow(ctx context.Context) {
	ln, err := (&rdmanet.ListenConfig{Config: e.cfg, Backlog: 2}).Listen(ctx, "rdma", net.JoinHostPort(e.addr, "0"))
	if err != nil {
		return
	}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			c, err := (&rdmanet.Dialer{Config: e.cfg, Timeout: 2 * time.Second}).Dial("rdma", ln.Addr().String())
			if err != nil {
				return
			}
			e.made.Add(1)
			_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
			_, _ = c.Read(make([]byte, 1))
			_ = c.Close()
		})
	}
	all.Wait()
	_ = ln.Close()
}

// report prints a line.
func (e *end) report(w *os.File, at time.Duration, f *faults) {
	n := e.made.Load()
	var kinds []string
	for k, name := range kindNames {
		kinds = append(kinds, fmt.Sprintf("%s %d", name, e.byKind[k].Load()))
	}
	fmt.Fprintf(w, "%v: %d connections (%.0f/s), %d open, %d failed besides, %d peers killed, %d refusals, %d lost streams excused, %d MiB resident, %d descriptors; %s\n",
		at.Round(time.Second), n, float64(n)/at.Seconds(), e.open.Load(), e.failures.Load(), f.kills, f.refused, e.excuses.Load(), resident()>>20, descriptors(), strings.Join(kinds, ", "))
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// warmUp has a connection of each kind, one after the other.
func warmUp(cfg rdmanet.Config, addr string) error {
	e, err := newEnd(cfg, addr, 1)
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // no pauses
	var errs []error
	for k := range numKinds {
		if !e.possible(k, target{packet: e.packetAddr()}) {
			continue
		}
		err := e.active(ctx, target{stream: e.ln.Addr().String(), packet: e.packetAddr(), own: true}, header{Kind: k, Seed: 1, N: 40}, rnd)
		if err != nil && !errors.Is(err, errDropped) {
			errs = append(errs, fmt.Errorf("%s: %w", kindNames[k], err))
		}
	}
	return errors.Join(append(errs, e.close())...)
}
