package iwarp

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// This file has the link over TCP, and makes the TCP connections that every link begins
// with.

// tcp is a link that reads and writes the socket's descriptor without blocking. The
// runtime's poller waits for it. read and write are those of RawConn, and at is the
// descriptor.
type tcp struct{ socket }

// openTCP is an opener.
func openTCP(conn net.Conn, _ *setup) (link, error) {
	t := new(tcp)
	if err := t.init(conn); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *tcp) read(step func(at uintptr) bool) error  { return t.raw.Read(step) }
func (t *tcp) write(step func(at uintptr) bool) error { return t.raw.Write(step) }

func (t *tcp) poll(step func(at uintptr) bool) error {
	t.setReadDeadline(time.Time{})
	return t.raw.Read(step)
}

func (t *tcp) interruptWrite() { t.conn.SetWriteDeadline(time.Unix(1, 0)) }

func (t *tcp) resumeWrite() { t.conn.SetWriteDeadline(time.Time{}) }

func (t *tcp) readv(at uintptr, bufs [][]byte) (n int, wait bool, err error) {
	n, wait, err = readv(at, bufs)
	if n == 0 && !wait && err == nil {
		err = io.EOF
	}
	return n, wait, err
}

func (t *tcp) writev(at uintptr, bufs [][]byte) (n int, wait bool, err error) {
	return writev(at, bufs)
}

// socket has what both links over TCP need.
type socket struct {
	conn  *net.TCPConn
	raw   syscall.RawConn
	dirty atomic.Bool // dirty is set while the socket has a read deadline.
}

func (s *socket) init(conn net.Conn) (err error) {
	s.conn = conn.(*net.TCPConn)
	s.raw, err = s.conn.SyscallConn()
	return err
}

func (s *socket) setReadDeadline(t time.Time) {
	if s.dirty.Swap(!t.IsZero()) || !t.IsZero() {
		s.conn.SetReadDeadline(t)
	}
}

func (s *socket) interrupt() {
	s.dirty.Store(true)
	s.conn.SetReadDeadline(time.Unix(1, 0))
}

// ending has the kernel send what is written from here on together with the end of this
// direction. It spares both ends a packet, and the peer a wake-up.
func (s *socket) ending() { s.raw.Control(cork) }

func (s *socket) closeWrite() error { return s.conn.CloseWrite() }

func (s *socket) unsent() (n int) {
	s.raw.Control(func(fd uintptr) { n = notSent(fd) })
	return n
}

// acknowledged tells whether the peer's kernel has everything that was written, and the end of
// this direction.
func (s *socket) acknowledged() (a ibv.Ack) {
	s.raw.Control(func(fd uintptr) { a = acknowledged(fd) })
	return a
}

// probeHost has the kernel ask a silent peer, by TCP's keep-alive probes, which the peer's
// kernel answers. The kernel counts in seconds, and sends no such probe while it has something
// to send: hostHeard is for that. TCP_USER_TIMEOUT would not do. It also counts how long the
// window of a peer is closed whose kernel answers all the time. A system that does not tell
// hostHeard waits for an answer to what was sent as long as TCP does.
func (s *socket) probeHost(idle, patience time.Duration) bool {
	if !haveHeard {
		return false
	}
	second := func(d time.Duration) time.Duration { return max(d.Truncate(time.Second), time.Second) }
	interval := second(patience / 4) // Some probes may be lost.
	err := s.conn.SetKeepAliveConfig(net.KeepAliveConfig{
		Enable: true, Idle: min(second(idle), maxProbeIdle), Interval: interval, Count: int(max(patience/interval, 1))})
	if err != nil {
		s.conn.SetKeepAlive(false)
	}
	return err == nil
}

// maxProbeIdle is the most that Linux takes.
const maxProbeIdle = 32767 * time.Second

func (s *socket) hostHeard() (ago time.Duration, owes bool) {
	s.raw.Control(func(fd uintptr) { ago, owes = heard(fd) })
	return ago, owes
}

func (s *socket) close(reset bool) error {
	if reset {
		s.conn.SetLinger(0)
	}
	return s.conn.Close()
}

// closeAfter lets the peer read the words before it closes the socket. A socket that is
// closed with unread data resets its connection, and the peer may lose the words.
func (s *socket) closeAfter(words []byte) {
	defer s.conn.Close()
	s.conn.SetDeadline(time.Now().Add(lastWordsTimeout))
	if _, err := s.conn.Write(words); err != nil {
		s.conn.SetLinger(0) // An end without the words could be taken for an orderly one.
		return
	}
	if s.conn.CloseWrite() == nil {
		io.Copy(io.Discard, s.conn)
	}
}

// dialTCP connects for MPA start-up. An invalid local address, or an unspecified one with
// port 0, means any address.
func dialTCP(ctx context.Context, local, remote netip.AddrPort, deadline time.Time) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1, Deadline: deadline}
	if local.IsValid() && (local.Addr().IsValid() && !local.Addr().IsUnspecified() || local.Port() != 0) {
		d.LocalAddr = net.TCPAddrFromAddrPort(local)
	}
	conn, err := d.DialContext(ctx, "tcp", remote.String())
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && !op.Timeout() {
			err = op.Err // the addresses are told once, by the caller
		}
		return nil, err
	}
	return conn, nil
}

// listenTCP listens for what dialTCP makes. The zero netip.Addr stands for all
// addresses of both families.
func listenTCP(ctx context.Context, local netip.AddrPort) (net.Listener, error) {
	network, address := "tcp", local.String()
	switch {
	case !local.Addr().IsValid():
		address = net.JoinHostPort("", strconv.Itoa(int(local.Port())))
	case local.Addr().Is4():
		network = "tcp4"
	case local.Addr().Is6() && !local.Addr().Is4In6():
		network = "tcp6"
	}
	lc := net.ListenConfig{KeepAlive: -1}
	ln, err := lc.Listen(ctx, network, address)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // the address is told once, by the caller
		}
		return nil, err
	}
	return ln, nil
}

// unmapped returns the address of a socket. An IPv4 address has four bytes.
func unmapped(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
