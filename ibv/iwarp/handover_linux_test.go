//go:build amd64 || arm64

package iwarp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
	"github.com/rdmanet/rdmanet/internal/shmring"
)

// nothingLeft fails the test if goroutines, descriptors or shared memory are left in the end.
func nothingLeft(t testing.TB) {
	t.Helper()
	before, ends := sharedMappings(t), sharers.Load()
	leaktest.Check(t)
	t.Cleanup(func() {
		t.Helper()
		requireMappings(t, before)
		require.Eventually(t, func() bool { return sharers.Load() == ends }, patience, time.Millisecond,
			"ends with shared memory are counted that have gone")
	})
}

// requireMappings waits until there are as many mappings of shared memory as before. Who unmaps may do
// so a moment after the test has seen the end of its connection.
func requireMappings(t testing.TB, before int) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		now := sharedMappings(t)
		if now == before {
			return
		}
		if time.Now().After(deadline) {
			defect.Leak(t, "%d mappings of shared memory, and %d before", now, before)
			return
		}
	}
}

// sharedMappings counts the mappings of shared memory in this process.
func sharedMappings(t testing.TB) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return strings.Count(string(maps), "memfd:")
}

// sharedRequest is the MPA Request of a raw peer, with an offer that the device on the other
// end of the connection accepts.
func (s *site) sharedRequest(p *rawPeer, now bool) []byte {
	s.t.Helper()
	host, err := s.p.dev.sharedHost(p.conn, false)
	require.NoError(s.t, err)
	offer := iwarpwire.SameHostOffer{Host: host, Now: now}
	start := iwarpwire.Start{Enhanced: true, Rev: 2, IRD: 4, ORD: 4, P2P: true, RTRWrite: true, Private: offer.Append(nil)}
	b, err := start.Append(nil)
	require.NoError(s.t, err)
	return b
}

// invite makes a connection whose initiator is a raw peer that has got an answer. It has not
// sent anything behind its Request.
func (s *site) invite(mem *memory, now bool, recvs int) (*victim, *rawPeer, iwarpwire.SameHostAnswer) {
	s.t.Helper()
	p := dialRaw(s.t, s.ln.Addr())
	p.send(s.sharedRequest(p, now))
	v := newVictim(s.t, s.accept(), mem, recvs)
	require.NoError(s.t, v.id.Accept(context.Background(), depths))
	reply := p.start(true)
	_, a, ok := iwarpwire.CutSameHostAnswer(reply.Private)
	require.True(s.t, ok, "the device has not accepted the offer")
	return v, p, a
}

// guest makes a connection whose initiator is a raw peer that has got an answer. It has sent its RTR.
func (s *site) guest() (*bystander, iwarpwire.SameHostAnswer) {
	s.t.Helper()
	mem := newMemory(s.t, s.p)
	v, p, a := s.invite(mem, false, 1)
	p.send(rtrFrame(false))
	return &bystander{v: v, p: p, mem: mem}, a
}

// dialMeeting connects to the Unix socket of an answer.
func dialMeeting(t testing.TB, a iwarpwire.SameHostAnswer) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: socketName(a.Name)})
	require.NoError(t, err)
	conn.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { conn.Close() })
	return conn
}

func helloOf(token [16]byte) []byte { return append([]byte(helloMagic), token[:]...) }

// sendHello sends b with descriptors, which it closes.
func sendHello(t testing.TB, conn *net.UnixConn, b []byte, fds ...int) {
	t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := conn.WriteMsgUnix(b, oob, nil)
	for _, fd := range fds {
		unix.Close(fd)
	}
	require.NoError(t, err)
}

// requireEnd requires that the device closes a Unix socket, and sends nothing by it.
func requireEnd(t testing.TB, conn *net.UnixConn) {
	t.Helper()
	n, err := conn.Read(make([]byte, 1))
	require.Zero(t, n)
	// The device may leave bytes unread, so the end may be a reset.
	require.True(t, err == io.EOF || isReset(err), "%v", err)
}

// badPages are the descriptors that a peer sends in place of its page. A function returns
// less than 0 if this system cannot make such a one.
func badPages() map[string]func(t testing.TB) int {
	const all = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
	memfd := func(flags, size int, allocate bool, seals int) func(t testing.TB) int {
		return func(t testing.TB) int {
			fd, err := unix.MemfdCreate("rdmanet-hostile", flags|unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			if flags&unix.MFD_HUGETLB != 0 && err != nil {
				t.Log("huge pages cannot be made here:", err)
				return -1
			}
			require.NoError(t, err)
			require.NoError(t, unix.Ftruncate(fd, int64(size)))
			if allocate {
				require.NoError(t, unix.Fallocate(fd, 0, 0, int64(size)))
			}
			if seals != 0 {
				_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
				require.NoError(t, err)
			}
			return fd
		}
	}
	return map[string]func(t testing.TB) int{
		"page without seals":           memfd(0, shmring.PageSize, true, 0),
		"page that may shrink":         memfd(0, shmring.PageSize, true, all&^unix.F_SEAL_SHRINK),
		"page that may have holes":     memfd(0, shmring.PageSize, true, all&^unix.F_SEAL_FUTURE_WRITE),
		"page that may get more seals": memfd(0, shmring.PageSize, true, all&^unix.F_SEAL_SEAL),
		"page that is not allocated":   memfd(0, shmring.PageSize, false, all),
		"empty page":                   memfd(0, 0, false, all),
		"page too small":               memfd(0, shmring.PageSize/2, true, all),
		"page too large":               memfd(0, 2*shmring.PageSize, true, all),
		"huge page":                    memfd(unix.MFD_HUGETLB, 2<<20, false, all),
		"pipe": func(t testing.TB) int {
			var fds [2]int
			require.NoError(t, unix.Pipe2(fds[:], unix.O_CLOEXEC))
			unix.Close(fds[1])
			return fds[0]
		},
		"file": func(t testing.TB) int {
			f, err := os.CreateTemp(t.TempDir(), "")
			require.NoError(t, err)
			defer f.Close()
			require.NoError(t, f.Truncate(shmring.PageSize))
			fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			require.NoError(t, err)
			return fd
		},
		"descriptor of a directory": func(t testing.TB) int {
			fd, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			require.NoError(t, err)
			return fd
		},
	}
}

// goodPage returns the descriptor of a page that any device takes.
func goodPage(t testing.TB) int {
	t.Helper()
	fd, mem, err := shmring.Create(shmring.PageSize)
	require.NoError(t, err)
	shmring.Release(mem)
	return fd
}

// badBells are descriptors that an initiator sends in place of one of the responder's doorbell.
func badBells() map[string]func(t testing.TB) int {
	socket := func(domain, kind int) func(t testing.TB) int {
		return func(t testing.TB) int {
			fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
			require.NoError(t, err)
			return fd
		}
	}
	return map[string]func(t testing.TB) int{
		"pipe for a doorbell":            badPages()["pipe"],
		"page for a doorbell":            goodPage,
		"TCP socket for a doorbell":      socket(unix.AF_INET, unix.SOCK_STREAM),
		"datagram socket for a doorbell": socket(unix.AF_UNIX, unix.SOCK_DGRAM),
	}
}

// goodBell returns the descriptors of a doorbell, of which the other end has gone.
func goodBell(t testing.TB) []int {
	t.Helper()
	ours, theirs, err := newDoorbells()
	require.NoError(t, err)
	ours.close()
	return []int{theirs.woken, theirs.wakes}
}

// goodVisit returns the descriptors of an initiator that any device takes.
func goodVisit(t testing.TB) []int {
	t.Helper()
	return append([]int{goodPage(t)}, goodBell(t)...)
}

// copyOf returns another descriptor of a connection.
func copyOf(t testing.TB, conn interface{ File() (*os.File, error) }) int {
	t.Helper()
	f, err := conn.File()
	require.NoError(t, err)
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	return fd
}

// slowToClose returns a TCP socket whose last close waits until the test is over.
func slowToClose(t testing.TB) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	conn, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	peer, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { peer.Close() })
	for err == nil { // There must be something that the peer does not take.
		require.NoError(t, conn.SetWriteDeadline(time.Now().Add(10*time.Millisecond)))
		_, err = conn.Write(make([]byte, 1<<20))
	}
	fd := copyOf(t, conn.(*net.TCPConn))
	require.NoError(t, unix.SetNonblock(fd, false))
	require.NoError(t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}))
	return fd
}

// readReply reads what a responder says, and returns the descriptor of its page.
func readReply(conn *net.UnixConn) (page int, err error) {
	var fds [1]int
	err = readHello(conn, make([]byte, len(helloMagic)), fds[:])
	return fds[0], err
}

// manyPipes returns as many descriptors as a message may nearly have.
func manyPipes(t testing.TB) []int {
	fds := make([]int, 100)
	for i := range fds {
		fds[i] = badPages()["pipe"](t)
	}
	return fds
}

// shortenHandover makes a peer that says nothing give up soon.
func shortenHandover(t testing.TB) { boundHandover(t, 50*time.Millisecond) }

func boundHandover(t testing.TB, d time.Duration) {
	before := handoverLimit.Swap(int64(d))
	t.Cleanup(func() { handoverLimit.Store(before) })
}

// A visit is what an initiator does at the Unix socket of an answer, in place of what it
// should do.
type visit struct {
	name  string
	short bool   // short is set if the device must wait for its time limit.
	long  bool   // long is set if it must not.
	want  string // want is a part of the reason for TCP, if the device has recognised the visitor.
	do    func(t testing.TB, a iwarpwire.SameHostAnswer)
}

func visits() []visit {
	list := []visit{
		{name: "nothing at all", do: func(testing.TB, iwarpwire.SameHostAnswer) {}},
		{name: "close at once", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			dialMeeting(t, a).Close()
		}},
		{name: "no descriptor", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token))
			requireEnd(t, conn)
		}},
		{name: "no doorbell", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), goodPage(t))
			requireEnd(t, conn)
		}},
		{name: "100 pipes", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), manyPipes(t)...)
			requireEnd(t, conn)
		}},
		{name: "100 pipes with each byte", long: true, do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			hello := helloOf(a.Token)
			for _, b := range hello[:helloLen-1] {
				fds := manyPipes(t)
				writeHello(conn, []byte{b}, fds...) // The device may have closed the socket.
				closeAll(fds)
			}
			requireEnd(t, conn) // The device does not wait for the last byte.
		}},
		{name: "wrong token", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			a.Token[15] ^= 1
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
			requireEnd(t, conn)
		}},
		{name: "hello cut short", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token)[:helloLen-1], goodVisit(t)...)
			require.NoError(t, conn.CloseWrite())
			requireEnd(t, conn)
		}},
		{name: "hello of garbage", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, bytesOf(10000), goodVisit(t)...)
			requireEnd(t, conn)
		}},
		{name: "silence", short: true, do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			requireEnd(t, dialMeeting(t, a))
		}},
		{name: "silence inside the hello", short: true, do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token)[:5], goodVisit(t)...)
			requireEnd(t, conn)
		}},
		{name: "end before the answer", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
			conn.Close()
		}},
		{name: "page refused", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
			fd, err := readReply(conn)
			require.NoError(t, err)
			unix.Close(fd)
			conn.Close()
		}},
		{name: "page taken and nothing done", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
			fd, err := readReply(conn)
			require.NoError(t, err)
			unix.Close(fd)
		}},
		{name: "token used twice", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			for i := range 3 {
				conn := dialMeeting(t, a)
				sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
				if i > 0 {
					requireEnd(t, conn)
					continue
				}
				fd, err := readReply(conn)
				require.NoError(t, err)
				unix.Close(fd)
			}
		}},
		{name: "more visitors than allowed", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			var conns []*net.UnixConn
			for range maxVisitors {
				conns = append(conns, dialMeeting(t, a))
			}
			last := dialMeeting(t, a)
			sendHello(t, last, helloOf([16]byte{}), goodVisit(t)...)
			for _, conn := range conns {
				conn.Close()
			}
			requireEnd(t, last) // It has its turn, and a token that nobody has given out.
		}},
	}
	for i, name := range []string{"its own socket for a doorbell", "its own socket to ring by"} {
		list = append(list, visit{name: name, want: "not of a pair", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			fds := goodVisit(t)
			unix.Close(fds[1+i])
			fds[1+i] = copyOf(t, conn)
			sendHello(t, conn, helloOf(a.Token), fds...)
			requireEnd(t, conn)
		}})
	}
	for i, name := range []string{"something sent by the doorbell", "something sent by what it rings by"} {
		list = append(list, visit{name: name, want: "sent something", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			ours, theirs, err := newDoorbells()
			require.NoError(t, err)
			defer ours.close()
			require.NoError(t, unix.Sendmsg([]int{ours.wakes, ours.woken}[i], []byte{0}, unix.UnixRights(0), nil, 0))
			sendHello(t, conn, helloOf(a.Token), goodPage(t), theirs.woken, theirs.wakes)
			requireEnd(t, conn)
		}})
	}
	for name, page := range badPages() {
		list = append(list, visit{name: name, do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			fd := page(t)
			if fd < 0 {
				return
			}
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), append([]int{fd}, goodBell(t)...)...)
			requireEnd(t, conn)
		}})
	}
	for name, bad := range badBells() {
		list = append(list, visit{name: name, want: "doorbell is", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			fds := goodVisit(t)
			unix.Close(fds[1])
			fds[1] = bad(t)
			sendHello(t, conn, helloOf(a.Token), fds...)
			requireEnd(t, conn)
		}}, visit{name: name + " to ring by", want: "doorbell is", do: func(t testing.TB, a iwarpwire.SameHostAnswer) {
			conn := dialMeeting(t, a)
			fds := goodVisit(t)
			unix.Close(fds[2])
			fds[2] = bad(t)
			sendHello(t, conn, helloOf(a.Token), fds...)
			requireEnd(t, conn)
		}})
	}
	return list
}

// requireTCP requires that a connection uses TCP and says why, and passes messages each way.
func requireTCP(t testing.TB, b *bystander, why string) {
	t.Helper()
	for range 3 {
		b.check()
	}
	link, reason := b.v.id.(ibv.Linker).Link()
	require.Equal(t, "tcp", link)
	require.Contains(t, reason, why)
	require.NotEmpty(t, reason)
}

// An initiator that breaks the rules at the responder's Unix socket keeps its connection over
// TCP, and no other connection notices.
func TestVisitors(t *testing.T) {
	for _, visit := range visits() {
		t.Run(visit.name, func(t *testing.T) {
			nothingLeft(t)
			if visit.short {
				shortenHandover(t)
			}
			if visit.long {
				boundHandover(t, time.Hour)
			}
			s := newSite(t, Config{SameHost: SameHostOn})
			good := s.bystander()
			b, a := s.guest()
			b.check()
			visit.do(t, a)
			if visit.want != "" {
				requireEarlyOver(t, b.v)
			}
			requireTCP(t, b, visit.want)
			good.check()

			// The listener's Unix socket is still of use to others.
			other := s.sharing(false)
			other.move()
			other.exchange()
			other.close()
			b.close()
			good.close()
		})
	}
}

// An initiator that has the responder's page, and cannot use it, goes on with TCP for as long as it
// likes.
func TestInitiatorGivesUp(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	b, a := s.guest()
	conn := dialMeeting(t, a)
	sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
	page, err := readReply(conn)
	require.NoError(t, err)
	unix.Close(page)
	require.NoError(t, conn.Close())
	l := b.v.qp.(*qp).stream.Load().link.(*shared)
	require.Eventually(t, l.gone.Load, patience, time.Millisecond)
	time.Sleep(2 * lastWordsTimeout) // Nothing but time could end the connection now.
	requireTCP(t, b, errSharedGivenUp.Error())
	b.close()
}

// A visitor may come after the program has closed the connection.
func TestVisitorTooLate(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	mem := newMemory(t, s.p)
	v, p, a := s.invite(mem, false, 0)
	v.close()
	conn := dialMeeting(t, a)
	sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
	requireEnd(t, conn)
	p.conn.Close()
	mem.close()
}

// The program closes the connection while a visitor is in the middle of its hello.
func TestCloseDuringVisit(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	for n := range helloLen + 1 {
		mem := newMemory(t, s.p)
		v, p, a := s.invite(mem, false, 0)
		p.send(rtrFrame(false))
		conn := dialMeeting(t, a)
		hello := helloOf(a.Token)
		if n > 0 {
			sendHello(t, conn, hello[:n], goodVisit(t)...)
		}
		v.close()
		if n < helloLen {
			conn.Write(hello[n:])
		}
		// If the visitor was faster than Close it may get the page, and then the end.
		fd, err := readReply(conn)
		if err == nil {
			unix.Close(fd)
			requireEnd(t, conn)
		}
		conn.Close()
		p.conn.Close()
		mem.close()
	}
}

// A host is a responder that answers an offer and owns a Unix socket.
type host struct {
	t      testing.TB
	tcp    net.Listener
	unix   *net.UnixListener
	answer iwarpwire.SameHostAnswer
}

func newHost(t testing.TB, now bool) *host {
	t.Helper()
	h := &host{t: t}
	var err error
	h.tcp, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { h.tcp.Close() })
	// No two hosts of a test have the same name.
	binary.BigEndian.PutUint64(h.answer.Name[:], uint64(os.Getpid()))
	binary.BigEndian.PutUint64(h.answer.Name[8:], uint64(time.Now().UnixNano()))
	h.answer.Token = [16]byte(bytesOf(16))
	h.answer.Now = now
	h.unix, err = net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socketName(h.answer.Name)})
	require.NoError(t, err)
	h.unix.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { h.unix.Close() })
	return h
}

// connect has a device connect to the host. result is for what Connect returns.
func (h *host) connect(p *Provider, mem *memory, recvs int) (v *victim, peer *rawPeer, result chan error) {
	h.t.Helper()
	id, err := p.Resolve(context.Background(), loopback, unmapped(h.tcp.Addr()))
	require.NoError(h.t, err)
	v = newVictim(h.t, id, mem, recvs)
	result = make(chan error, 1)
	go func() { result <- id.Connect(context.Background(), depths) }()
	conn, err := h.tcp.Accept()
	require.NoError(h.t, err)
	peer = newRawPeer(h.t, conn)
	req := peer.start(false)
	_, _, ok := iwarpwire.CutSameHostOffer(req.Private)
	require.True(h.t, ok, "the device has made no offer")
	reply := iwarpwire.Start{Reply: true, Enhanced: true, Rev: 2, IRD: 4, ORD: 2, P2P: true, RTRWrite: true, Private: h.answer.Append(nil)}
	b, err := reply.Append(nil)
	require.NoError(h.t, err)
	peer.send(b)
	return v, peer, result
}

// guest has a device connect to the host, and returns the connection. Its Request had an offer, and
// nothing but the RTR has followed.
func (h *host) guest(p *Provider) *bystander {
	h.t.Helper()
	mem := newMemory(h.t, p)
	v, peer, result := h.connect(p, mem, 1)
	require.NoError(h.t, <-result)
	hdr, _ := peer.frame()
	require.Equal(h.t, iwarpwire.Write, hdr.Op, "the RTR")
	return &bystander{v: v, p: peer, mem: mem}
}

// welcome accepts a visitor, and reads its hello with the descriptors of its page and of the
// responder's doorbell.
func (h *host) welcome() (conn *net.UnixConn, page int, bell doorbellFDs) {
	h.t.Helper()
	conn, err := h.unix.AcceptUnix()
	require.NoError(h.t, err)
	h.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	var hello [helloLen]byte
	var fds [3]int
	require.NoError(h.t, readHello(conn, hello[:], fds[:]))
	require.Equal(h.t, helloOf(h.answer.Token), hello[:])
	return conn, fds[0], doorbellFDs{woken: fds[1], wakes: fds[2]}
}

// receive is welcome for a test that uses no descriptor.
func (h *host) receive() (conn *net.UnixConn) {
	h.t.Helper()
	conn, page, bell := h.welcome()
	unix.Close(page)
	bell.close()
	return conn
}

// A reception is what a responder does with an initiator at its Unix socket, in place of what
// it should do.
type reception struct {
	name  string
	short bool
	first bool   // first is set if it is done before the device comes.
	want  string // want is a part of the reason for TCP.
	do    func(t testing.TB, h *host)
}

func receptions() []reception {
	// greet answers the hello of the visitor, and waits for it to go.
	greet := func(b []byte, fds func(t testing.TB) []int) func(t testing.TB, h *host) {
		return func(t testing.TB, h *host) {
			conn := h.receive()
			sendHello(t, conn, b, fds(t)...)
			conn.CloseWrite()
			requireEnd(t, conn)
		}
	}
	none := func(testing.TB) []int { return nil }
	good := func(t testing.TB) []int { return []int{goodPage(t)} }
	hello := []byte(helloMagic)
	list := []reception{
		{name: "no socket", first: true, want: "refused", do: func(t testing.TB, h *host) { h.unix.Close() }},
		{name: "nobody accepts", short: true, want: "timeout", do: func(testing.TB, *host) {}},
		{name: "close at once", do: func(t testing.TB, h *host) {
			conn, err := h.unix.AcceptUnix()
			require.NoError(t, err)
			conn.Close()
		}},
		{name: "close after the hello", want: "given up", do: func(t testing.TB, h *host) {
			conn := h.receive()
			conn.Close()
		}},
		{name: "silence", short: true, want: "timeout", do: func(t testing.TB, h *host) {
			conn := h.receive()
			requireEnd(t, conn)
		}},
		{name: "silence inside the hello", short: true, want: "timeout", do: func(t testing.TB, h *host) {
			conn := h.receive()
			sendHello(t, conn, hello[:5], goodPage(t))
			requireEnd(t, conn)
		}},
		{name: "no descriptor", want: "0 descriptors and not 1", do: greet(hello, none)},
		{name: "hello cut short", want: "given up", do: greet(hello[:len(hello)-1], good)},
		{name: "hello of garbage", want: "no hello", do: greet(bytesOf(10000), good)},
		{name: "100 pipes", want: "not of shared memory", do: greet(hello, manyPipes)},
	}
	for name, page := range badPages() {
		list = append(list, reception{name: name, do: func(t testing.TB, h *host) {
			fd := page(t)
			if fd < 0 {
				h.unix.Close()
				return
			}
			greet(hello, func(testing.TB) []int { return []int{fd} })(t, h)
		}})
	}
	return list
}

// A responder that breaks the rules at its Unix socket keeps its connection over TCP.
func TestReceptions(t *testing.T) {
	for _, reception := range receptions() {
		t.Run(reception.name, func(t *testing.T) {
			nothingLeft(t)
			if reception.short {
				shortenHandover(t)
			}
			s := newSite(t, Config{SameHost: SameHostOn})
			good := s.bystander()
			h := newHost(t, false)
			b := h.guest(s.p)
			done := make(chan struct{})
			if reception.first {
				reception.do(t, h)
				close(done)
			} else {
				go func() {
					defer close(done)
					reception.do(t, h)
				}()
			}
			for range 2 * moveAfterWrites {
				b.check()
			}
			<-done
			requireEarlyOver(t, b.v)
			requireTCP(t, b, reception.want)
			good.check()
			b.close()
			good.close()
		})
	}
}

// requireEarlyOver waits until the device has tried to move a connection.
func requireEarlyOver(t testing.TB, v *victim) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, reason := v.id.(ibv.Linker).Link()
		return reason != errSharedEarly.Error()
	}, patience, time.Millisecond)
}

// A device that requires shared memory does not connect to such a responder, and says why.
func TestReceptionsRequired(t *testing.T) {
	for _, reception := range receptions() {
		t.Run(reception.name, func(t *testing.T) {
			nothingLeft(t)
			if reception.short {
				shortenHandover(t)
			}
			s := &site{t: t, p: New(Config{SameHost: SameHostRequire})}
			h := newHost(t, true)
			mem := newMemory(t, s.p)
			v, p, result := func() (*victim, *rawPeer, chan error) {
				if reception.first {
					reception.do(t, h)
				}
				return h.connect(s.p, mem, 1)
			}()
			if !reception.first {
				reception.do(t, h)
			}
			err := soon(t, func() error { return <-result })
			require.ErrorContains(t, err, "shared memory is required, but ")
			require.ErrorContains(t, err, reception.want)
			p.ended()
			v.close()
			mem.close()
		})
	}
}

// Closing a connection ends its visit, at whatever step the visit is.
func TestCloseDuringReception(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	for step := range 3 {
		h := newHost(t, false)
		b := h.guest(s.p)
		for range 2 * moveAfterWrites {
			b.check()
		}
		var conn *net.UnixConn
		switch step {
		case 1:
			var err error
			conn, err = h.unix.AcceptUnix()
			require.NoError(t, err)
		case 2:
			conn = h.receive()
		}
		b.v.close()
		if conn != nil {
			io.Copy(io.Discard, conn) // The visitor goes long before its time limit.
			conn.Close()
		}
		b.p.ended()
		b.mem.close()
		h.unix.Close()
	}
}

// A trailer that nobody has asked for is private data of the program.
func TestAnswerUnasked(t *testing.T) {
	nothingLeft(t)
	s := &site{t: t, p: New(Config{SameHost: SameHostOff})}
	mem := newMemory(t, s.p)
	h := newHost(t, false)
	id, err := s.p.Resolve(context.Background(), loopback, unmapped(h.tcp.Addr()))
	require.NoError(t, err)
	v := newVictim(t, id, mem, 1)
	result := make(chan error, 1)
	go func() { result <- id.Connect(context.Background(), depths) }()
	conn, err := h.tcp.Accept()
	require.NoError(t, err)
	p := newRawPeer(t, conn)
	require.Empty(t, p.start(false).Private)
	private := h.answer.Append([]byte("private"))
	b, err := (&iwarpwire.Start{Reply: true, Enhanced: true, Rev: 2, P2P: true, RTRWrite: true, Private: private}).Append(nil)
	require.NoError(t, err)
	p.send(b)
	require.NoError(t, <-result)
	require.Equal(t, private, id.PrivateData())
	p.frame()
	requireTCP(t, &bystander{v: v, p: p, mem: mem}, errSharedOff.Error())
	(&bystander{v: v, p: p, mem: mem}).close()
}

// An offer that comes from elsewhere is not accepted: its digest is of other addresses.
func TestOfferOfAnother(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	honest := dialRaw(t, s.ln.Addr())
	defer honest.conn.Close()
	req := s.sharedRequest(honest, false)
	p := dialRaw(t, s.ln.Addr())
	p.send(req)
	mem := newMemory(t, s.p)
	v := newVictim(t, s.accept(), mem, 1)
	require.NoError(t, v.id.Accept(context.Background(), depths))
	require.Empty(t, p.start(true).Private)
	p.send(rtrFrame(false))
	b := &bystander{v: v, p: p, mem: mem}
	requireTCP(t, b, errSharedHost.Error())
	b.close()
}

// Two devices with a proxy between them use TCP.
func TestProxy(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer proxy.Close()
	piped := make(chan error, 2)
	go func() {
		x, err := proxy.Accept()
		if err != nil {
			piped <- err
			piped <- err
			return
		}
		y, err := net.Dial("tcp", s.ln.Addr().String())
		if err != nil {
			x.Close()
			piped <- err
			piped <- err
			return
		}
		pipe := func(to, from net.Conn) {
			_, err := io.Copy(to, from)
			piped <- errors.Join(err, to.(*net.TCPConn).CloseWrite())
		}
		go pipe(x, y)
		go pipe(y, x)
		t.Cleanup(func() { x.Close(); y.Close() })
	}()
	there, here := newMemory(t, s.p), newMemory(t, s.p)
	id, err := s.p.Resolve(context.Background(), loopback, unmapped(proxy.Addr()))
	require.NoError(t, err)
	v := newVictim(t, id, there, 1)
	result := make(chan error, 1)
	go func() { result <- id.Connect(context.Background(), depths) }()
	w := newVictim(t, s.accept(), here, 1)
	require.NoError(t, w.id.Accept(context.Background(), depths))
	require.NoError(t, <-result)
	_, reason := v.id.(ibv.Linker).Link()
	require.Equal(t, errSharedAnswer.Error(), reason)
	_, reason = w.id.(ibv.Linker).Link()
	require.Equal(t, errSharedHost.Error(), reason)
	for i := range 2 * moveAfterWrites {
		msg := fmt.Appendf(nil, "message %d", i)
		for _, ends := range [][2]*victim{{v, w}, {w, v}} {
			_, err = ends[0].qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: msg}}}})
			require.NoError(t, err)
			require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, ends[1].completions(1))
			require.Equal(t, string(msg), string(ends[1].mem.region(0)[:len(msg)]))
			ends[1].receive(0)
		}
	}
	v.close()
	w.event()
	w.close()
	<-piped
	<-piped
	there.close()
	here.close()
}

// scarcities are states of a process in which its connections stay with TCP.
var scarcities = map[string]struct {
	make func(t testing.TB)
	want string // want is a part of the reason.
}{
	"descriptors": {useDescriptors, "file descriptors"},
	"mappings": {func(t testing.TB) {
		before := maxSharing.Swap(0)
		t.Cleanup(func() { maxSharing.Store(before) })
	}, "too many connections"},
}

// useAllDescriptors has this process have no descriptor left, until done is called.
func useAllDescriptors(t testing.TB) (done func()) {
	t.Helper()
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: before.Max}))
	return func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }
}

// useDescriptors has this process use more than a quarter of the descriptors that it may have.
func useDescriptors(t testing.TB) {
	t.Helper()
	const used = 300
	for range used {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		require.NoError(t, err)
		t.Cleanup(func() { unix.Close(fd) })
	}
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3 * used, Max: before.Max}))
	t.Cleanup(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) })
}

// A responder whose process has little left stays with TCP.
func TestScarceResponder(t *testing.T) {
	for name, scarcity := range scarcities {
		t.Run(name, func(t *testing.T) {
			nothingLeft(t)
			s := newSite(t, Config{SameHost: SameHostOn})
			b, a := s.guest()
			b.check()
			scarcity.make(t)
			conn := dialMeeting(t, a)
			sendHello(t, conn, helloOf(a.Token), goodVisit(t)...)
			requireEnd(t, conn)
			requireEarlyOver(t, b.v)
			requireTCP(t, b, scarcity.want)
			b.close()
		})
	}
}

// An initiator whose process has little left stays with TCP.
func TestScarceInitiator(t *testing.T) {
	for name, scarcity := range scarcities {
		t.Run(name, func(t *testing.T) {
			nothingLeft(t)
			s := newSite(t, Config{SameHost: SameHostOn})
			h := newHost(t, false)
			b := h.guest(s.p)
			scarcity.make(t)
			for range 2 * moveAfterWrites {
				b.check()
			}
			conn, err := h.unix.AcceptUnix()
			require.NoError(t, err)
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(patience))
			var fds [3]int
			if err := readHello(conn, make([]byte, helloLen), fds[:]); err == nil {
				closeAll(fds[:])
				page := goodPage(t)
				require.NoError(t, writeHello(conn, []byte(helloMagic), page))
				unix.Close(page)
			}
			requireEnd(t, conn)
			requireEarlyOver(t, b.v)
			requireTCP(t, b, scarcity.want)
			b.close()
		})
	}
}
