//go:build unix

package rdmanet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
)

var page = os.Getpagesize()

// badMemory is a kind of memory that cannot be accessed from some byte on.
type badMemory struct {
	name string
	make func(t testing.TB, at badAt) []byte
	made map[badAt][]byte // made has what of has returned.
}

// badAt says how many bytes are good of so many.
type badAt struct{ good, size int }

var badMemories = []badMemory{
	{"protected", protectedMemory, make(map[badAt][]byte)},
	{"cut", cutFile, make(map[badAt][]byte)},
}

// of returns memory of this kind, whose bad bytes begin with a page. It stays until the process
// ends, because to make it takes longer than most of what the tests do with it. So tests change
// nothing but its contents.
func (m badMemory) of(t testing.TB, at badAt) []byte {
	t.Helper()
	p, ok := m.made[at]
	if !ok {
		p = m.make(t, at)
		m.made[at] = p
	}
	return p
}

// protectedMemory makes memory of which one page is protected.
func protectedMemory(t testing.TB, at badAt) []byte {
	t.Helper()
	mem := mapping(t, -1, unix.MAP_ANON|unix.MAP_PRIVATE, at)
	copy(mem, pattern(9, len(mem)))
	require.NoError(t, unix.Mprotect(mem[at.bad():][:page], unix.PROT_NONE))
	return at.of(mem)
}

// cutFile makes memory of a mapped file that has been cut short.
func cutFile(t testing.TB, at badAt) []byte {
	t.Helper()
	f := emptyFile(t, at)
	defer f.Close()
	mem := mapping(t, int(f.Fd()), unix.MAP_SHARED, at)
	copy(mem, pattern(9, at.bad()))
	require.NoError(t, f.Truncate(int64(at.bad())))
	return at.of(mem)
}

// bytesToProtect returns whole pages, which a test protects itself. They go with the test.
func bytesToProtect(t testing.TB, size int) []byte {
	t.Helper()
	p, err := unix.Mmap(-1, 0, roundUp(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(p)) })
	return p[:size]
}

// fileToCut is a mapped file of zeros that can be cut short at any time. It goes with the test.
type fileToCut struct {
	t     testing.TB
	f     *os.File
	mem   []byte
	first int // first is how many bytes are left when it is cut.
}

func newFileToCut(t testing.TB, size int) *fileToCut {
	t.Helper()
	at := badAt{page, size}
	f := emptyFile(t, at)
	t.Cleanup(func() { f.Close() })
	mem := mapping(t, int(f.Fd()), unix.MAP_SHARED, at)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mem)) })
	return &fileToCut{t, f, mem[:size], at.bad()}
}

func (c *fileToCut) cut() { require.NoError(c.t, c.f.Truncate(int64(c.first))) }

// mend makes the file as long as it was.
func (c *fileToCut) mend() { require.NoError(c.t, c.f.Truncate(int64(len(c.mem)))) }

// emptyFile returns a file that is long enough, and that is gone when it is closed and nobody has
// mapped it.
func emptyFile(t testing.TB, at badAt) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	require.NoError(t, os.Remove(f.Name()))
	require.NoError(t, f.Truncate(int64(at.mapped())))
	return f
}

// mapping maps memory for such bytes.
func mapping(t testing.TB, fd, flags int, at badAt) []byte {
	t.Helper()
	mem, err := unix.Mmap(fd, 0, at.mapped(), unix.PROT_READ|unix.PROT_WRITE, flags)
	require.NoError(t, err)
	return mem
}

// mapped is how many bytes of memory there are to be, with the pages around them.
func (at badAt) mapped() int { return at.bad() + roundUp(at.size) + page }

// bad is where in them the first bad page is.
func (at badAt) bad() int { return roundUp(at.good) }

// of returns the bytes that are good and then bad.
func (at badAt) of(mem []byte) []byte { return mem[at.bad()-at.good:][:at.size] }

func roundUp(n int) int { return (n + page - 1) / page * page }

// badEverywhere are all places that tests try.
var badEverywhere = []badAt{
	{0, 1}, {0, 100}, {50, 100}, {99, 100}, {0, 3000}, {2999, 3000}, {0, 8192}, {100, 8192}, {4096, 8192},
	{0, 64 << 10}, {4095, 64 << 10}, {32 << 10, 64 << 10}, {60 << 10, 64 << 10},
	{0, 1 << 20}, {512<<10 + 1, 1 << 20}, {1020 << 10, 1 << 20}, {2 << 20, 3 << 20},
}

// badSomewhere are fewer, at the beginning, in the middle and a page before the end, for what takes
// long over RDMA devices.
var badSomewhere = []badAt{
	{0, 100}, {50, 100}, {0, 8192}, {4096, 8192}, {0, 64 << 10}, {32 << 10, 64 << 10}, {60 << 10, 64 << 10},
	{0, 1 << 20}, {512 << 10, 1 << 20}, {1020 << 10, 1 << 20},
}

// eachBadMemory runs f for each kind of memory and each of these places.
func eachBadMemory(t *testing.T, places []badAt, f func(name string, p []byte, good int)) {
	for _, kind := range badMemories {
		for _, at := range places {
			f(fmt.Sprintf("%s, %d of %d bytes good", kind.name, at.good, at.size), kind.of(t, at), at.good)
		}
	}
}

// requireBadAddress checks the error of a call that was given bad memory.
func requireBadAddress(t testing.TB, tr transport, err error, op, name string) {
	t.Helper()
	require.ErrorIs(t, err, errno.EFAULT, name)
	requireConnError(t, tr, err, op)
}

// A Write from bad memory sends no more than the bytes in front of it, and says how many. The
// connection goes on.
func TestWriteBadMemory(t *testing.T) {
	checkLeaks(t)
	write := func(t *testing.T, tr transport, a, b stream, name string, p []byte, good int) {
		all := arriving(b)
		n, err := a.Write(p)
		requireBadAddress(t, tr, err, "write", name)
		require.LessOrEqual(t, n, good, name)
		if tr.rdma {
			require.Equal(t, good, n, name)
		}
		_, err = a.Write([]byte("next"))
		require.NoError(t, err, name)
		require.NoError(t, a.CloseWrite(), name)
		within(t, name, func() { defect.Bytes(t, append(bytes.Clone(p[:n]), "next"...), <-all, name) })
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
	}
	for _, tr := range []transport{transports[0], transports[2]} {
		t.Run(tr.name, func(t *testing.T) {
			eachBadMemory(t, badEverywhere, func(name string, p []byte, good int) {
				a, b := tr.pair(t)
				write(t, tr, a, b, name, p, good)
			})
		})
	}
	eachBadWay(t, func(t *testing.T, cfg Config) {
		eachBadMemory(t, badEverywhere, func(name string, p []byte, good int) {
			a, b := pipeOn(t, cfg)
			write(t, transports[0], a, b, name, p, good)
		})
	})
}

// eachBadWay is eachWay, and on the software device also with a checksum over each payload, without
// the calls that return EFAULT themselves, and as over adapters, which copy to memory of their own
// what they do not send inline.
func eachBadWay(t *testing.T, f func(t *testing.T, cfg Config)) {
	checkLeaks(t) // It may wait for a tenth of a second, so the ways have it together.
	for _, w := range messageWays {
		t.Run(w.name, func(t *testing.T) { f(t, w.cfg) })
	}
	if onRDMA {
		return
	}
	for name, cfg := range map[string]Config{
		"checksums":               {Provider: iwarp.New(iwarp.Config{CRC: true})},
		"checksums and transfers": {Provider: iwarp.New(iwarp.Config{CRC: true}), TransferSize: minTransfer},
		"shared memory":           {SameHost: "on"},
		"few bytes inline":        {Provider: newModest(t, 64, 1<<14, true)},
		"no bytes inline":         {Provider: newModest(t, 0, 128, true)},
		"credits":                 withCredits(t, Config{}),
	} {
		t.Run(name, func(t *testing.T) { f(t, cfg) })
	}
}

// So does a Write of several Buffers.
func TestBuffersBadMemory(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		for _, kind := range badMemories {
			for _, good := range []int{0, 50, 8000} {
				a, b := tr.pair(t)
				all := arriving(b)
				first, last := pattern(1, 5000), pattern(2, 100)
				p := kind.of(t, badAt{good, 20000})
				bufs := net.Buffers{first, p, last}
				n, err := bufs.WriteTo(a)
				require.ErrorIs(t, err, errno.EFAULT)
				require.LessOrEqual(t, n, int64(len(first)+good))
				require.NoError(t, a.CloseWrite())
				want := append(first, p[:good]...)
				within(t, "the peer", func() { defect.Bytes(t, want[:n], <-all) })
				require.NoError(t, a.Close())
				require.NoError(t, b.Close())
			}
		}
	})
}

// Of a message from bad memory nothing is sent, however it is sent, and the next one arrives.
func TestMessageBadMemory(t *testing.T) {
	eachBadWay(t, func(t *testing.T, cfg Config) {
		a, b := messagePipe(t, cfg)
		got := make([]byte, 100)
		eachBadMemory(t, badEverywhere, func(name string, p []byte, _ int) {
			for _, flags := range []MsgFlags{0, Expedited, Partial, NonBlocking, NonBlocking | Partial} {
				n, err := a.WriteMsg(p, flags)
				require.Zero(t, n, name)
				requireBadAddress(t, transports[0], err, "write", name)
			}
			n, err := a.QueueMsg(p).Result()
			require.Zero(t, n, name)
			requireBadAddress(t, transports[0], err, "write", name)
			require.NoError(t, writeMsg(a, []byte("next")), name)
			n, err = b.ReadMsg(got)
			require.NoError(t, err, name)
			require.Equal(t, "next", string(got[:n]), name)
		})
	})
}

// A message in pieces goes on after a piece that could not be read, and after data of the stream.
func TestPieceBadMemory(t *testing.T) {
	eachBadWay(t, func(t *testing.T, cfg Config) {
		a, b := messagePipe(t, cfg)
		for _, kind := range badMemories {
			send := func(p []byte, err error, flags MsgFlags) {
				t.Helper()
				_, got := a.WriteMsg(p, flags)
				require.ErrorIs(t, got, err)
			}
			p := kind.of(t, badAt{5000, 10000})
			send([]byte("begins"), nil, Partial)
			send(p, errno.EFAULT, Partial)
			send(p, errno.EFAULT, 0)
			n, err := a.Write(p)
			require.ErrorIs(t, err, errno.EFAULT)
			require.Equal(t, 5000, n)
			send([]byte("ends"), nil, 0)
			got := make([]byte, 10000)
			n, err = b.ReadMsg(got)
			require.NoError(t, err)
			defect.Bytes(t, "begins"+string(p[:5000])+"ends", got[:n])
		}
	})
}

// A small Write from bad memory that joins others leaves them what they were.
func TestJoinBadMemory(t *testing.T) {
	for _, kind := range badMemories {
		t.Run(kind.name, func(t *testing.T) {
			s := newJoinScene(t, joinFeatures, plenty)
			s.burst()
			s.write(10)
			p := kind.of(t, badAt{50, 100})
			n, err := s.c.Write(p)
			require.ErrorIs(t, err, errno.EFAULT)
			require.Equal(t, 50, n)
			s.sent = append(s.sent, p[:n]...)
			s.write(10)
			s.grant(1) // Anything is an answer.
			s.expect(70)
		})
	}
}

// A small Write of which no byte could join others takes no buffer, which nothing would give back.
func TestJoinNothingBadMemory(t *testing.T) {
	for _, kind := range badMemories {
		t.Run(kind.name, func(t *testing.T) {
			s := newJoinScene(t, joinFeatures, plenty)
			s.burst()
			n, err := s.c.Write(kind.of(t, badAt{0, 100}))
			require.ErrorIs(t, err, errno.EFAULT)
			require.Zero(t, n)
			s.c.mu.Lock()
			kept := s.c.send.joined.buf != nil
			s.c.mu.Unlock()
			require.False(t, kept)
			s.write(10)
			s.grant(1) // Anything is an answer.
			s.expect(10)
		})
	}
}

// Of a small Write only a part may have room to join others. Of the rest, too, no more is sent than
// can be read.
func TestJoinPartBadMemory(t *testing.T) {
	for _, kind := range badMemories {
		t.Run(kind.name, func(t *testing.T) {
			s := newJoinScene(t, joinFeatures, 0)
			s.exhaust()
			s.write(s.room - 100)
			p := kind.of(t, badAt{300, 500})
			stalls := s.c.Stats().CreditStalls
			wrote := writing(s.c, p)
			require.True(t, eventually(func() bool { return s.c.Stats().CreditStalls > stalls }))
			s.grant(2)
			r := s.await(wrote)
			require.ErrorIs(t, r.err, errno.EFAULT)
			require.Equal(t, 300, r.n)
			s.sent = append(s.sent, p[:r.n]...)
			s.expect(s.room)
			s.expect(200)
			s.grant(1)
			s.write(10)
			s.expect(10)
		})
	}
}

// A Read into bad memory fails, or takes no more than there is room for in front of it. The rest
// stays for the next Read.
func TestReadBadMemory(t *testing.T) {
	tcp := transports[2]
	t.Run(tcp.name, func(t *testing.T) {
		readBad(t, tcp, func() (stream, stream) { return tcp.pair(t) })
	})
	eachBadWay(t, func(t *testing.T, cfg Config) {
		readBad(t, transports[0], func() (stream, stream) { return pipeOn(t, cfg) })
	})
}

func readBad(t *testing.T, tr transport, connect func() (stream, stream)) {
	a, b := connect()
	places := badEverywhere
	if onRDMA {
		places = badSomewhere
	}
	for _, waiting := range []int{60, 5000, 64 << 10, 600 << 10} {
		data := pattern(3, waiting)
		places := slices.DeleteFunc(slices.Clone(places), func(at badAt) bool {
			return waiting > 16*max(at.size, 400) // Most of the time would go by with the rest.
		})
		eachBadMemory(t, places, func(name string, p []byte, good int) {
			wrote := make(chan error, 1)
			go func() {
				_, err := a.Write(data)
				wrote <- err
			}()
			name = fmt.Sprintf("%s, %d waiting", name, waiting)
			n, err := b.Read(p)
			got := bytes.Clone(p[:n])
			if err != nil {
				require.Zero(t, n, name)
				requireBadAddress(t, tr, err, "read", name)
			} else {
				require.Positive(t, n, name)
				require.LessOrEqual(t, n, good, name)
			}
			if n < waiting {
				n, err := b.Read(p[good:])
				require.Zero(t, n, name)
				requireBadAddress(t, tr, err, "read", name)
			}
			rest := make([]byte, waiting-n)
			_, err = io.ReadFull(b, rest)
			require.NoError(t, err, name)
			require.NoError(t, <-wrote, name)
			defect.Bytes(t, data, append(got, rest...), name)
		})
	}
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// A message that is read into bad memory stays whole.
func TestReadMsgBadMemory(t *testing.T) {
	eachBadWay(t, func(t *testing.T, cfg Config) {
		a, b := messagePipe(t, cfg)
		eachBadMemory(t, badEverywhere, func(name string, p []byte, good int) {
			p = p[:min(len(p), a.MaxMessageSize())]
			if good >= len(p) {
				return
			}
			want := pattern(4, len(p))
			wrote := make(chan error, 1)
			go func() { wrote <- writeMsg(a, want) }()
			for range 2 {
				n, flags, err := b.ReadPiece(p)
				require.Zero(t, n, name)
				require.Zero(t, flags, name)
				requireBadAddress(t, transports[0], err, "read", name)
			}
			got := make([]byte, len(p))
			n, err := b.ReadMsg(got)
			require.NoError(t, err, name)
			require.NoError(t, <-wrote, name)
			defect.Bytes(t, want, got[:n], name)
		})
	})
}

// Memory that can only be read is as bad for a Read.
func TestReadOnlyMemory(t *testing.T) {
	eachBadWay(t, func(t *testing.T, cfg Config) {
		a, b := messagePipe(t, cfg)
		const size = 1 << 20
		p := bytesToProtect(t, size)
		copy(p, pattern(9, size))
		require.NoError(t, unix.Mprotect(p, unix.PROT_READ))
		for _, n := range []int{1, 5000, size} {
			want := pattern(5, n)
			wrote := writing(a, want)
			_, err := b.Read(p)
			requireBadAddress(t, transports[0], err, "read", "read-only")
			require.NoError(t, defect.ReadFull(b, want))
			require.NoError(t, (<-wrote).err)
		}
		// It is good for a Write.
		wrote := writing(a, p)
		require.NoError(t, defect.ReadFull(b, p))
		require.NoError(t, (<-wrote).err)
	})
}

// A file that is cut short while a Write waits for the peer makes the Write fail, unless the device
// keeps the pages. The peer reads nothing but what was in the file. The connection may break, and
// then says why. Others go on.
func TestFileCutDuringWrite(t *testing.T) {
	want := pattern(9, moreThanTaken)
	eachBadWay(t, func(t *testing.T, cfg Config) {
		c, d := messagePipe(t, cfg)
		file := newFileToCut(t, len(want))
		for range 2 {
			a, b := messagePipe(t, cfg)
			file.mend()
			p := file.mem
			copy(p, want)
			var n int
			var err error
			w := start(func() { n, err = a.Write(p) })
			w.park(t)
			file.cut()
			all := make(chan result, 1)
			got := new(bytes.Buffer)
			go func() {
				_, err := io.Copy(got, b)
				all <- result{got.Len(), err}
			}()
			within(t, "Write", func() { <-w.done })
			broken := false
			if err != nil {
				requireBadAddress(t, transports[0], err, "write", "cut")
				require.Less(t, n, len(p))
				broken = requireBrokenOrNot(t, a, err)
			}
			if !broken {
				require.NoError(t, a.CloseWrite())
			}
			var r result
			within(t, "the peer", func() { r = <-all })
			switch {
			case broken:
				require.ErrorIs(t, r.err, errno.ECONNRESET)
				defect.Bytes(t, want[:r.n], got.Bytes())
			case err != nil:
				require.NoError(t, r.err)
				defect.Bytes(t, string(want[:n])+"x", got.Bytes())
			default:
				require.NoError(t, r.err)
				defect.Bytes(t, want, got.Bytes())
			}
			a.Close()
			b.Close()
			pass(t, c, d)
		}
	})
}

// moreThanTaken is how many bytes are more than a connection takes while nobody reads.
var moreThanTaken = heavy(24 << 20)

// requireBrokenOrNot checks that the error of a Write from bad memory says whether it has broken
// the connection, and reports whether it has.
func requireBrokenOrNot(t testing.TB, c *Conn, err error) bool {
	t.Helper()
	require.ErrorIs(t, err, errno.EFAULT)
	_, next := c.Write([]byte("x"))
	if next == nil {
		require.NotErrorIs(t, err, errno.ECONNRESET, "the connection goes on")
		return false
	}
	for _, err := range []error{err, next} {
		require.ErrorIs(t, err, fault.ErrMidway)
		require.ErrorIs(t, err, errno.EFAULT)
		require.ErrorIs(t, err, errno.ECONNRESET, "the connection has broken")
	}
	return true
}

// A Write that waits for the peer while its memory goes, and that a deadline then ends, must not
// say that bytes were sent that nobody can read any more. Either the peer gets as many as it says,
// or the connection breaks. It breaks where the device has begun to send from the memory of the
// Write, unless the Write was between two batches in that moment.
func TestWriteDeadlineBadMemory(t *testing.T) {
	want := pattern(9, moreThanTaken)
	eachBadWay(t, func(t *testing.T, cfg Config) {
		c, d := messagePipe(t, cfg)
		a, b := messagePipe(t, cfg)
		p := bytesToProtect(t, len(want))
		copy(p, want)
		var n int
		var err error
		w := start(func() { n, err = a.Write(p) })
		w.park(t)
		require.NoError(t, unix.Mprotect(p, unix.PROT_NONE))
		require.NoError(t, a.SetWriteDeadline(time.Now()))
		within(t, "Write", func() { <-w.done })
		require.Less(t, n, len(p))
		require.NoError(t, a.SetWriteDeadline(time.Time{}))
		all := arriving(b)
		sent, broken := string(want[:n]), false
		if errors.Is(err, os.ErrDeadlineExceeded) {
			requireConnError(t, transports[0], err, "write")
			require.NotErrorIs(t, err, errno.EFAULT)
		} else {
			requireBadAddress(t, transports[0], err, "write", "protected")
			broken = requireBrokenOrNot(t, a, err)
			sent += "x"
		}
		if broken {
			require.NoError(t, a.Close())
			within(t, "the peer", func() { <-all })
		} else {
			require.NoError(t, a.CloseWrite())
			within(t, "the peer", func() { defect.Bytes(t, sent, <-all) })
		}
		pass(t, c, d)
	})
}

// A file that is cut short at any moment of a Write from it, or of a Read into it, ends neither
// the process nor other connections.
func TestFileCutAnyTime(t *testing.T) {
	eachBadWay(t, func(t *testing.T, cfg Config) {
		c, d := messagePipe(t, cfg)
		file, whole := newFileToCut(t, heavy(4<<20)), make([]byte, heavy(4<<20))
		for i := range repeats(12) {
			a, b := messagePipe(t, cfg)
			file.mend()
			from, into := file.mem, whole
			if i%2 == 1 {
				from, into = into, from
			}
			cutting := make(chan struct{})
			go func() {
				time.Sleep(time.Duration(i) * 100 * time.Microsecond)
				file.cut()
				close(cutting)
			}()
			read := make(chan error, 1)
			go func() {
				_, err := io.ReadFull(b, into)
				b.Close()
				read <- err
			}()
			_, err := a.Write(from)
			a.Close()
			within(t, "the peer", func() { <-cutting })
			var rerr error
			within(t, "the peer", func() { rerr = <-read })
			if i%2 == 0 && err != nil {
				require.ErrorIs(t, err, errno.EFAULT)
			}
			if i%2 == 1 && rerr != nil {
				require.ErrorIs(t, rerr, errno.EFAULT)
			}
			pass(t, c, d)
		}
	})
}

// Datagrams are treated as those of UDP: from bad memory none is sent, and one that is read into
// bad memory is lost.
func TestPacketBadMemory(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		tr := transport{rdma: true}
		for _, kind := range badMemories {
			for _, at := range []badAt{{0, 1}, {10, 20}, {100, 200}, {500, 1000}} {
				p := kind.of(t, at)
				n, err := client.Write(p)
				require.Zero(t, n)
				require.ErrorIs(t, err, errno.EFAULT)
				requireOpError(t, tr, err, "write")
				n, err = server.WriteTo(p, client.LocalAddr())
				require.Zero(t, n)
				require.ErrorIs(t, err, errno.EFAULT)
				n, err = client.WriteBatch([]Datagram{{Buf: []byte("first")}, {Buf: p}, {Buf: []byte("third")}})
				require.Equal(t, 1, n)
				require.ErrorIs(t, err, errno.EFAULT)
				got, _ := readFrom(t, server)
				require.Equal(t, "first", string(got))

				for _, b := range [][]byte{make([]byte, at.size), []byte("next")} {
					_, err = client.Write(b)
					require.NoError(t, err)
				}
				n, _, err = server.ReadFrom(p)
				require.Zero(t, n)
				require.ErrorIs(t, err, errno.EFAULT)
				requireOpError(t, tr, err, "read")
				got, _ = readFrom(t, server)
				require.Equal(t, "next", string(got))
			}
		}
	})
}
