//go:build amd64 || arm64

package iwarp

import (
	"context"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// controlOf returns a control socket for a link.
func controlOf(t testing.TB, conn *net.UnixConn) *controlSocket {
	t.Helper()
	c, err := newControlSocket(conn, true)
	require.NoError(t, err)
	return c
}

// plainControl returns a control socket for a peer that is a test.
func plainControl(t testing.TB, conn *net.UnixConn) *controlSocket {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	return &controlSocket{conn: conn, raw: raw}
}

// leave sends b with descriptors, which it closes. The device may have gone. If the device has closed
// them before, the last close is that of leave, and may wait in place of the device.
func leave(t testing.TB, conn *net.UnixConn, b []byte, fds ...int) {
	t.Helper()
	writeHello(conn, b, fds...)
	closeAll(fds)
}

// linkOf returns the link of a device's end.
func linkOf(v *victim) *shared { return v.qp.(*qp).stream.Load().link.(*shared) }

// A delay is how a peer has the device close a descriptor that is slow to close. It returns the
// link.
type delay struct {
	name string
	do   func(t *testing.T, s *site) *shared
}

func delays() []delay {
	// link makes a link, and has its peer do what is to be done by the control socket.
	link := func(do func(t *testing.T, control *net.UnixConn)) func(t *testing.T, s *site) *shared {
		return func(t *testing.T, s *site) *shared {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer ln.Close()
			p := newFuzzPeer(t, ln)
			t.Cleanup(p.close)
			p.l.meeting.watch.mu.Lock() // The link does not hear before everything is said.
			do(t, p.control)
			p.l.meeting.watch.mu.Unlock()
			return p.l
		}
	}
	// visit has an initiator send other descriptors with its hello, and behind it.
	visit := func(do func(t *testing.T, fds []int) (behind []int)) func(t *testing.T, s *site) *shared {
		return func(t *testing.T, s *site) *shared {
			b, a := s.guest()
			b.check()
			m := linkOf(b.v).meeting
			m.mu.Lock() // The visitor is not recognised before it has sent everything.
			conn := dialMeeting(t, a)
			fds := goodVisit(t)
			behind := do(t, fds)
			leave(t, conn, helloOf(a.Token), fds...)
			leave(t, conn, []byte{0}, behind...)
			m.mu.Unlock()
			t.Cleanup(func() {
				b.v.close()
				b.p.conn.Close()
				b.mem.close()
			})
			return linkOf(b.v)
		}
	}
	return []delay{
		{"a ring", link(func(t *testing.T, control *net.UnixConn) {
			leave(t, control, []byte{byte(offerOfFirst)}, slowToClose(t))
		})},
		{"behind a ring", link(func(t *testing.T, control *net.UnixConn) {
			leave(t, control, []byte{byte(offerOfFirst)}, ringOf(t, firstRing), slowToClose(t))
		})},
		{"with an answer", link(func(t *testing.T, control *net.UnixConn) {
			leave(t, control, []byte{byte(accepted)}, slowToClose(t))
		})},
		{"behind what is wrong", link(func(t *testing.T, control *net.UnixConn) {
			leave(t, control, []byte{255})
			leave(t, control, []byte{255}, slowToClose(t))
		})},
		{"out of band", link(func(t *testing.T, control *net.UnixConn) {
			outOfBand(t, control, slowToClose(t))
			leave(t, control, []byte{byte(offerOfFirst)})
		})},
		{"a doorbell", visit(func(t *testing.T, fds []int) []int {
			unix.Close(fds[1])
			fds[1] = slowToClose(t)
			return nil
		})},
		{"behind a doorbell that is none", visit(func(t *testing.T, fds []int) []int {
			unix.Close(fds[1])
			fds[1] = goodPage(t)
			return []int{slowToClose(t)}
		})},
		{"behind a good hello", visit(func(t *testing.T, fds []int) []int {
			return []int{slowToClose(t)}
		})},
		{"hidden in a doorbell", visit(func(t *testing.T, fds []int) []int {
			ours, theirs, err := newDoorbells()
			require.NoError(t, err)
			hide(t, ours, theirs, slowToClose(t))
			ours.close()
			closeAll(fds[1:])
			fds[1], fds[2] = theirs.woken, theirs.wakes
			return nil
		})},
		{"with the hello of a responder", func(t *testing.T, s *site) *shared {
			h := newHost(t, false)
			b := h.guest(s.p)
			for range 2 * moveAfterWrites {
				b.check()
			}
			conn := h.receive()
			leave(t, conn, make([]byte, len(helloMagic)-1))
			slow := slowToClose(t)
			go leave(t, conn, []byte{0, 0}, slow)
			t.Cleanup(func() {
				b.v.close()
				b.p.conn.Close()
				b.mem.close()
			})
			return linkOf(b.v)
		}},
	}
}

// outOfBand sends a byte out of band with a descriptor, which it closes.
func outOfBand(t testing.TB, conn *net.UnixConn, fd int) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(at uintptr) {
		err = unix.Sendmsg(int(at), []byte{0}, unix.UnixRights(fd), nil, unix.MSG_OOB)
	}))
	unix.Close(fd)
	skipWithoutOutOfBand(t, err)
}

func skipWithoutOutOfBand(t testing.TB, err error) {
	t.Helper()
	if err == unix.EOPNOTSUPP {
		t.Skip("this kernel has no data out of band for Unix sockets")
	}
	require.NoError(t, err)
}

// hide leaves descriptors in the socket by which theirs is woken, and closes them. Out of band a byte
// is sent and taken back, and what came with it stays.
func hide(t testing.TB, ours, theirs doorbellFDs, fds ...int) {
	t.Helper()
	err := unix.Sendmsg(ours.wakes, []byte{0}, unix.UnixRights(fds...), nil, unix.MSG_OOB)
	closeAll(fds)
	skipWithoutOutOfBand(t, err)
	_, _, err = unix.Recvfrom(theirs.woken, make([]byte, 1), unix.MSG_OOB)
	require.NoError(t, err)
}

// No peer can have Close wait, nor the watch, by descriptors that are slow to close.
func TestSlowDescriptors(t *testing.T) {
	for _, delay := range delays() {
		t.Run(delay.name, func(t *testing.T) {
			nothingLeft(t)
			s := newSite(t, Config{SameHost: SameHostOn})
			good := s.sharing(false)
			good.move()
			good.exchange()
			l := delay.do(t, s)
			time.Sleep(10 * time.Millisecond) // The device may have come to the descriptor, or not.
			require.NoError(t, soon(t, func() error {
				l.close(false)
				return nil
			}))
			good.exchange()
			good.control.Close()
			good.conn.Close()
			require.NoError(t, soon(t, func() error {
				<-good.v.events
				return nil
			}))
			good.close()
		})
	}
}

// The watch tells a link of its peer's end also while others are being closed whose peers have
// sent descriptors that are slow to close, and peers that have gone too.
func TestWatchDoesNotWait(t *testing.T) {
	nothingLeft(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	m := new(meeting)
	link := func() *fuzzPeer {
		p := newFuzzPeerAt(t, ln, m)
		t.Cleanup(p.close)
		return p
	}
	good := link()
	for range 20 {
		p := link()
		m.watch.mu.Lock()
		leave(t, p.control, []byte{byte(offerOfFirst)}, ringOf(t, firstRing), slowToClose(t))
		m.watch.mu.Unlock()
		closed := make(chan struct{})
		go func() {
			p.l.close(false)
			close(closed)
		}()
		p.control.Close()
		require.NoError(t, soon(t, func() error {
			<-closed
			return nil
		}))
	}
	good.control.Close()
	require.Eventually(t, good.l.gone.Load, patience, time.Millisecond)
}

// inClose returns how many threads of this process wait in close(2).
func inClose(t testing.TB) (n int) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	for _, task := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + task.Name() + "/syscall") // The thread may have ended.
		if strings.HasPrefix(string(b), strconv.Itoa(unix.SYS_CLOSE)+" ") {
			n++
		}
	}
	return n
}

// However many visitors leave descriptors that are slow to close, and however often a device
// listens, a bounded number of threads waits for them, and connections go on.
func TestSlowVisitors(t *testing.T) {
	for _, kind := range []string{"another user", "no hello", "no doorbell"} {
		t.Run(kind, func(t *testing.T) {
			nothingLeft(t)
			s := newSite(t, Config{SameHost: SameHostOn})
			good := s.bystander()
			var closers atomic.Int32 // those of the test
			visit := func(a iwarpwire.SameHostAnswer) {
				slow := slowToClose(t)
				defer func() {
					closers.Add(1)
					go func() {
						unix.Close(slow) // the last close, if the device was faster
						closers.Add(-1)
					}()
				}()
				conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: socketName(a.Name)})
				if err != nil { // The backlog is full.
					return
				}
				t.Cleanup(func() { conn.Close() })
				if kind == "no hello" {
					leave(t, conn, make([]byte, helloLen-1))
					writeHello(conn, []byte{0, 0}, slow)
					return
				}
				page, bell := goodPage(t), goodBell(t)
				writeHello(conn, helloOf(a.Token), page, bell[0], slow)
				closeAll(append(bell, page))
			}
			for range 2 {
				b, a := s.guest()
				b.check()
				if kind == "another user" {
					requireRoot(t)
					c := startChild(t, nobody(), "leaves", socketName(a.Name))
					defer c.stop()
					require.Equal(t, "left", c.line())
				} else {
					for range maxVisitors + 20 {
						visit(a)
					}
				}
				good.check()
				b.check()
				b.close()
				require.NoError(t, s.ln.Close()) // The Unix socket goes, and comes again.
				var err error
				s.ln, err = s.p.Listen(context.Background(), loopback, 0)
				require.NoError(t, err)
			}
			time.Sleep(100 * time.Millisecond) // Threads pile up by then, if they do.
			require.LessOrEqual(t, inClose(t)-int(closers.Load()), maxVisitors+cap(waiting)/2)
			good.check()
			good.close()
		})
	}
}

// Close waits for nobody in the backlog of the Unix socket.
func TestSlowBacklog(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	b, a := s.guest()
	b.check()
	for range maxVisitors { // They say nothing, and have all places.
		dialMeeting(t, a)
	}
	slow := slowToClose(t)
	require.Eventually(t, func() bool { return len(linkOf(b.v).meeting.slots) == maxVisitors }, patience, time.Millisecond)
	conn := dialMeeting(t, a)
	leave(t, conn, []byte{0}, slow)
	conn.Close()
	require.NoError(t, soon(t, func() error {
		err := s.ln.Close()
		linkOf(b.v).close(false)
		return err
	}))
	b.v.close()
	b.p.conn.Close()
	b.mem.close()
}

// Connect does not wait for longer than the handover may take, whatever a responder that requires
// shared memory sends.
func TestSlowResponder(t *testing.T) {
	for _, kind := range []string{"page", "behind the page", "in the doorbell"} {
		t.Run(kind, func(t *testing.T) {
			nothingLeft(t)
			boundHandover(t, 500*time.Millisecond)
			p := New(Config{SameHost: SameHostOn})
			h := newHost(t, true)
			mem := newMemory(t, p)
			v, peer, result := h.connect(p, mem, 1)
			conn, page, bell := h.welcome()
			unix.Close(page)
			switch slow := slowToClose(t); kind {
			case "page":
				go leave(t, conn, []byte(helloMagic), slow)
			case "behind the page":
				go leave(t, conn, []byte(helloMagic), goodPage(t), goodPage(t), slow)
			case "in the doorbell":
				unix.Sendmsg(bell.wakes, []byte{0}, unix.UnixRights(slow), nil, 0) // The device may have given up.
				go unix.Close(slow)
				leave(t, conn, []byte(helloMagic), goodPage(t))
			}
			bell.close()
			require.Error(t, soon(t, func() error { return <-result }))
			conn.Close()
			peer.conn.Close()
			v.close()
			mem.close()
		})
	}
}

// While all goroutines of aside wait for peers, Close wakes whoever reads or writes, and the peer learns
// of it.
func TestCloseWhileAllWait(t *testing.T) {
	leaktest.Check(t)
	x, y := movedPair(t)
	for range cap(waiting) {
		waiting <- struct{}{}
	}
	defer func() {
		for range cap(waiting) {
			<-waiting
		}
	}()
	ended := make(chan error, 2)
	go func() {
		_, err := readFrom(x, make([]byte, 1))
		ended <- err
	}()
	go func() { ended <- writeTo(x, make([]byte, 2*thirdRing)) }()
	require.Eventually(t, x.writerSleeps, patience, time.Millisecond)
	require.NoError(t, x.close(false))
	for range 2 {
		require.ErrorIs(t, soon(t, func() error { return <-ended }), net.ErrClosed)
	}
	require.Eventually(t, y.gone.Load, patience, time.Millisecond)
}

// A peer that hides its own sockets in a doorbell does not hide its end.
func TestHiddenEnd(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	p := &ringPeer{mem: newMemory(t, s.p)}
	var a iwarpwire.SameHostAnswer
	p.v, p.rawPeer, a = s.invite(p.mem, false, 1)
	p.visitWith(a, func(conn *net.UnixConn, ours, theirs doorbellFDs) {
		hide(t, ours, theirs, copyOf(t, conn), copyOf(t, p.conn))
	})
	p.put(rtrFrame(false))
	p.move()
	p.exchange()
	p.exchange()
	p.control.Close()
	p.conn.Close()
	require.NoError(t, soon(t, func() error {
		<-p.v.events
		return nil
	}))
	p.close()
}

// A peer that has not moved, and hides its own sockets in the control socket, does not hide its end.
func TestHiddenBehindGivenUp(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	p := s.sharing(false)
	p.exchange()
	m := linkOf(p.v).meeting
	m.watch.mu.Lock() // The watch does not look before everything is done.
	leave(t, p.control, []byte{byte(refused)}, copyOf(t, p.control), copyOf(t, p.conn))
	require.NoError(t, p.control.CloseWrite())
	p.control.Close()
	p.conn.Close()
	m.watch.mu.Unlock()
	require.NoError(t, soon(t, func() error {
		<-p.v.events
		return nil
	}))
	p.close()
}

// A peer that has a visitor leave its own sockets behind one that is slow to close does not hide its
// end.
func TestHiddenBehindSlow(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	p := &ringPeer{mem: newMemory(t, s.p)}
	var a iwarpwire.SameHostAnswer
	p.v, p.rawPeer, a = s.invite(p.mem, false, 1)
	p.visit(a)
	p.put(rtrFrame(false))
	p.move()
	p.exchange()
	p.exchange()
	conn := dialMeeting(t, a)
	leave(t, conn, make([]byte, helloLen-1))
	slow, control, tcp := slowToClose(t), copyOf(t, p.control), copyOf(t, p.conn)
	writeHello(conn, []byte{0, 0}, slow, control, tcp)
	closeAll([]int{control, tcp})
	go unix.Close(slow)
	p.control.Close()
	p.conn.Close()
	require.NoError(t, soon(t, func() error {
		<-p.v.events
		return nil
	}))
	p.close()
}

// A writer that waits for room learns that its peer has gone, also if the peer has filled a copy of the
// socket by which the writer is woken.
func TestWriterToldThoughFilled(t *testing.T) {
	nothingLeft(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	p := newFuzzPeer(t, ln)
	defer p.close()
	require.NoError(t, p.l.bell.Load().waiting.Control(func(fd uintptr) {
		for err = nil; err == nil; {
			err = unix.Sendmsg(int(fd), make([]byte, 1000), nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		}
	}))
	done := make(chan error, 1)
	go func() { done <- writeTo(p.l, make([]byte, 2*thirdRing)) }()
	require.Eventually(t, p.l.writerSleeps, patience, time.Millisecond)
	p.control.Close()
	require.Error(t, soon(t, func() error { return <-done }))
}
