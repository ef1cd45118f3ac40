//go:build unix

package rdmanet

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
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

// badMemory returns size bytes of which those from good on cannot be accessed. They begin in
// front of a page.
type badMemory struct {
	name string
	make func(t testing.TB, good, size int) []byte
}

var badMemories = []badMemory{{"protected", protectedMemory}, {"cut", cutFile}}

// protectedMemory is badMemory of which one page is protected.
func protectedMemory(t testing.TB, good, size int) []byte {
	t.Helper()
	mem, bad := mapped(t, -1, unix.MAP_ANON|unix.MAP_PRIVATE, good, size)
	require.NoError(t, unix.Mprotect(mem[bad:][:page], unix.PROT_NONE))
	return mem[bad-good:][:size]
}

// cutFile is badMemory of a mapped file that has been cut short.
func cutFile(t testing.TB, good, size int) []byte {
	t.Helper()
	p, cut := wholeFile(t, good, size)
	cut()
	return p
}

// wholeFile returns the memory of a file before it is cut.
func wholeFile(t testing.TB, good, size int) (p []byte, cut func()) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, f.Truncate(int64(roundUp(good)+roundUp(size)+page)))
	mem, bad := mapped(t, int(f.Fd()), unix.MAP_SHARED, good, size)
	return mem[bad-good:][:size], func() { require.NoError(t, f.Truncate(int64(bad))) }
}

// mapped returns memory with a pattern, and where the first bad page is to be.
func mapped(t testing.TB, fd, flags, good, size int) (mem []byte, bad int) {
	t.Helper()
	mem, err := unix.Mmap(fd, 0, roundUp(good)+roundUp(size)+page, unix.PROT_READ|unix.PROT_WRITE, flags)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mem)) })
	copy(mem, pattern(9, len(mem)))
	return mem, roundUp(good)
}

func roundUp(n int) int { return (n + page - 1) / page * page }

// badAt are how many bytes are good of so many.
var badAt = []struct{ good, size int }{
	{0, 1}, {0, 100}, {50, 100}, {99, 100}, {0, 3000}, {2999, 3000}, {0, 8192}, {100, 8192}, {4096, 8192},
	{0, 64 << 10}, {4095, 64 << 10}, {32 << 10, 64 << 10}, {60 << 10, 64 << 10},
	{0, 1 << 20}, {512<<10 + 1, 1 << 20}, {1020 << 10, 1 << 20}, {2 << 20, 3 << 20},
}

// eachBadMemory runs f for each kind of memory and each of badAt.
func eachBadMemory(t *testing.T, f func(name string, p []byte, good int)) {
	for _, kind := range badMemories {
		for _, at := range badAt {
			f(fmt.Sprintf("%s, %d of %d bytes good", kind.name, at.good, at.size), kind.make(t, at.good, at.size), at.good)
		}
	}
}

// requireBadAddress checks the error of a call that was given bad memory.
func requireBadAddress(t testing.TB, tr transport, err error, op, name string) {
	t.Helper()
	require.ErrorIs(t, err, errno.EFAULT, name)
	requireConnError(t, tr, err, op)
}

// arriving is what b reads until the end of the stream.
func arriving(b io.Reader) chan []byte {
	all := make(chan []byte, 1)
	go func() {
		got, err := io.ReadAll(b)
		if err != nil {
			got = append(got, err.Error()...)
		}
		all <- got
	}()
	return all
}

// A Write from bad memory sends no more than the bytes in front of it, and says how many. The
// connection goes on.
func TestWriteBadMemory(t *testing.T) {
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
			checkLeaks(t)
			eachBadMemory(t, func(name string, p []byte, good int) {
				a, b := tr.pair(t)
				write(t, tr, a, b, name, p, good)
			})
		})
	}
	eachBadWay(t, func(t *testing.T, cfg Config) {
		eachBadMemory(t, func(name string, p []byte, good int) {
			a, b := pipeOn(t, cfg)
			write(t, transports[0], a, b, name, p, good)
		})
	})
}

// eachBadWay is eachWay, and on the software device also with a checksum over each payload, and
// without the calls that return EFAULT themselves.
func eachBadWay(t *testing.T, f func(t *testing.T, cfg Config)) {
	eachWay(t, f)
	if onRDMA {
		return
	}
	for name, cfg := range map[string]Config{
		"checksums":               {Provider: iwarp.New(iwarp.Config{CRC: true})},
		"checksums and transfers": {Provider: iwarp.New(iwarp.Config{CRC: true}), TransferSize: minTransfer},
		"shared memory":           {SameHost: "on"},
	} {
		t.Run(name, func(t *testing.T) {
			checkLeaks(t)
			f(t, cfg)
		})
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
				p := kind.make(t, good, 20000)
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
		eachBadMemory(t, func(name string, p []byte, _ int) {
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
			p := kind.make(t, 5000, 10000)
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
			p := kind.make(t, 50, 100)
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

// A Read into bad memory fails, or takes no more than there is room for in front of it. The rest
// stays for the next Read.
func TestReadBadMemory(t *testing.T) {
	for _, tr := range []transport{transports[0], transports[2]} {
		t.Run(tr.name, func(t *testing.T) {
			checkLeaks(t)
			readBad(t, tr, func() (stream, stream) { return tr.pair(t) })
		})
	}
	eachBadWay(t, func(t *testing.T, cfg Config) {
		readBad(t, transports[0], func() (stream, stream) { return pipeOn(t, cfg) })
	})
}

func readBad(t *testing.T, tr transport, connect func() (stream, stream)) {
	a, b := connect()
	for _, waiting := range []int{60, 5000, 64 << 10, 600 << 10} {
		data := pattern(3, waiting)
		eachBadMemory(t, func(name string, p []byte, good int) {
			if waiting > 16*max(len(p), 400) {
				return // Most of the time would go by with the rest.
			}
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
		eachBadMemory(t, func(name string, p []byte, good int) {
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
		p, _ := mapped(t, -1, unix.MAP_ANON|unix.MAP_PRIVATE, 0, size)
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
	eachBadWay(t, func(t *testing.T, cfg Config) {
		c, d := messagePipe(t, cfg)
		for range 2 {
			a, b := messagePipe(t, cfg)
			p, cut := wholeFile(t, page, heavy(24<<20)) // more than is taken while nobody reads
			want := bytes.Clone(p)
			var n int
			var err error
			w := start(func() { n, err = a.Write(p) })
			w.park(t)
			cut()
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
				_, err = a.Write([]byte("x"))
				broken = err != nil
			}
			if broken {
				require.ErrorIs(t, err, errno.EFAULT)
				require.ErrorIs(t, err, fault.ErrMidway)
			} else {
				require.NoError(t, a.CloseWrite())
			}
			var r result
			within(t, "the peer", func() { r = <-all })
			if broken {
				require.ErrorIs(t, r.err, errno.ECONNRESET)
				defect.Bytes(t, want[:r.n], got.Bytes())
			} else {
				require.NoError(t, r.err)
				defect.Bytes(t, want[:n], got.Bytes()[:n])
			}
			a.Close()
			b.Close()
			pass(t, c, d)
		}
	})
}

// A file that is cut short at any moment of a Write from it, or of a Read into it, ends neither
// the process nor other connections.
func TestFileCutAnyTime(t *testing.T) {
	eachBadWay(t, func(t *testing.T, cfg Config) {
		c, d := messagePipe(t, cfg)
		size := heavy(4 << 20)
		for i := range repeats(16) {
			a, b := messagePipe(t, cfg)
			p, cut := wholeFile(t, page, size)
			from, into := p, make([]byte, size)
			if i%2 == 1 {
				from, into = into, from
			}
			cutting := make(chan struct{})
			go func() {
				time.Sleep(time.Duration(i) * 100 * time.Microsecond)
				cut()
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
			for _, at := range []struct{ good, size int }{{0, 1}, {10, 20}, {100, 200}, {500, 1000}} {
				p := kind.make(t, at.good, at.size)
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
