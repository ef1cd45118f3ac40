package rdmanet

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// listenPackets opens a PacketConn, over the software device where the RDMA device has no
// datagrams, as siw has none.
func listenPackets(t testing.TB) *PacketConn {
	t.Helper()
	p, err := ListenPacket("udp4", local4)
	if errors.Is(err, errors.ErrUnsupported) {
		cfg := Config{Provider: iwarp.New(iwarp.Config{})}
		p, err = (&ListenConfig{Config: cfg}).ListenPacket(tctx, "udp4", "127.0.0.1:0")
	}
	require.NoError(t, err)
	return p.(*PacketConn)
}

// testBuffer is a Buffer with what a test has to know of it after Free, too.
type testBuffer struct {
	*Buffer
	mem   []byte
	alloc bool   // it is Alloc's
	free  func() // frees the Buffer, and unmaps memory that is the application's
}

// allocated is Alloc of n bytes.
func allocated(t testing.TB, n int) testBuffer {
	t.Helper()
	buf, err := Alloc(n)
	require.NoError(t, err)
	return testBuffer{buf, buf.Bytes(), true, buf.Free}
}

// buffersOfBothKinds calls f with a Buffer of Alloc's and with one of memory that the
// application owns, which is unmapped as soon as Free has returned.
func buffersOfBothKinds(t *testing.T, n int, f func(t *testing.T, buf testBuffer)) {
	t.Run("alloc", func(t *testing.T) {
		checkLeaks(t)
		f(t, allocated(t, n))
	})
	t.Run("registered", func(t *testing.T) {
		checkLeaks(t)
		mem, err := regmem.AllocPages(n)
		require.NoError(t, err)
		buf, err := RegisterMemory(mem)
		require.NoError(t, err)
		f(t, testBuffer{buf, mem, false, func() {
			buf.Free()
			if err := regmem.FreePages(mem); err != nil {
				panic(err)
			}
		}})
	})
}

// freeDuring frees buf while call is at work on its memory, lets call come to its end, and
// checks that Free has kept its promise: of the application's memory it returns only then.
func freeDuring(t *testing.T, buf testBuffer, call func() error, finish func()) {
	t.Helper()
	done, freed := make(chan error, 1), make(chan struct{})
	go func() { done <- call() }()
	require.True(t, eventually(func() bool { return buf.Buffer.mem.Uses() > 0 }), "the call does not hold the memory")
	go func() {
		defer close(freed)
		buf.free()
	}()
	require.True(t, eventually(func() bool { return buf.Bytes() == nil }))
	if buf.alloc {
		within(t, "Free", func() { <-freed })
		// Its memory belongs to nobody else yet.
		if other, err := Alloc(len(buf.mem)); err == nil {
			require.NotSame(t, &buf.mem[0], &other.Bytes()[0])
			clear(other.Bytes())
			other.Free()
		}
	} else {
		for range 100 {
			runtime.Gosched()
			select {
			case <-freed:
				t.Fatal("Free has returned while the call is at work")
			default:
			}
		}
	}
	finish()
	within(t, "the call", func() { require.NoError(t, <-done) })
	within(t, "Free", func() { <-freed })
	require.Zero(t, buf.Buffer.mem.Uses())
}

// Every call that sends holds the memory of a Buffer until it has ended, and a queued
// send until it is done: the peer gets what was in it, whenever it is freed.
func TestFreeDuringSend(t *testing.T) {
	for name, send := range map[string]func(c *Conn, p []byte) error{
		"Write":              func(c *Conn, p []byte) error { _, err := c.Write(p); return err },
		"WriteMsg":           func(c *Conn, p []byte) error { return writeMsg(c, p) },
		"WriteMsg Expedited": func(c *Conn, p []byte) error { return writeMsg(c, p, Expedited) },
		"Invalidate":         func(c *Conn, p []byte) error { return writeMsg(c, p, Invalidate(0)) },
		"QueueMsg":           func(c *Conn, p []byte) error { _, err := c.QueueMsg(p).Result(); return err },
	} {
		t.Run(name, func(t *testing.T) {
			for _, n := range []int{100 << 10, 256 << 10, 900 << 10} {
				buffersOfBothKinds(t, n, func(t *testing.T, buf testBuffer) {
					// The peer has few receives, so that all of it is far from gone when it is freed.
					a, b := pipeOn(t, withCredits(t, Config{TransferSize: -1, MaxReceiveSize: 4096, MaxReceiveCredits: minCredits}))
					want := pattern(1, n)
					copy(buf.mem, want)
					freeDuring(t, buf, func() error { return send(a, buf.mem) }, func() {
						require.NoError(t, defect.ReadFull(b, want))
					})
					closeBoth(t, a, b)
				})
			}
		})
	}
}

// Every call that reads holds it as well. What it has read is the caller's who has not
// freed it.
func TestFreeDuringRead(t *testing.T) {
	const n = 50 << 10
	for name, read := range map[string]func(c *Conn, p []byte) (int, error){
		"Read":      func(c *Conn, p []byte) (int, error) { return c.Read(p) },
		"ReadMsg":   func(c *Conn, p []byte) (int, error) { return c.ReadMsg(p) },
		"ReadPiece": func(c *Conn, p []byte) (int, error) { n, _, err := c.ReadPiece(p); return n, err },
	} {
		t.Run(name, func(t *testing.T) {
			buffersOfBothKinds(t, n, func(t *testing.T, buf testBuffer) {
				a, b := pipeOn(t, Config{TransferSize: -1})
				freeDuring(t, buf, func() error {
					k, err := read(b, buf.mem)
					if err == nil && (k == 0 || k < n && name != "Read") {
						err = fmt.Errorf("%d bytes", k)
					}
					return err
				}, func() {
					require.NoError(t, writeMsg(a, pattern(2, n)))
				})
				closeBoth(t, a, b)
			})
		})
	}
}

func TestFreeDuringPacketRead(t *testing.T) {
	for name, read := range map[string]func(p *PacketConn, b []byte) error{
		"ReadFrom": func(p *PacketConn, b []byte) error { _, _, err := p.ReadFrom(b); return err },
		"Read":     func(p *PacketConn, b []byte) error { _, err := p.Read(b); return err },
		"ReadBatch": func(p *PacketConn, b []byte) error {
			_, err := p.ReadBatch([]Datagram{{Buf: b[:100]}, {Buf: b[100:]}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			buffersOfBothKinds(t, 1000, func(t *testing.T, buf testBuffer) {
				p := listenPackets(t)
				freeDuring(t, buf, func() error { return read(p, buf.mem) }, func() {
					_, err := p.WriteTo(make([]byte, 200), p.LocalAddr())
					require.NoError(t, err)
				})
				require.NoError(t, p.Close())
			})
		})
	}
}

// Memory after Free is refused, for as long as it is known to have been a Buffer's, and
// the connection goes on.
func TestCallsAfterFree(t *testing.T) {
	checkLeaks(t)
	alloc(t, 5000) // so that the mapping stays
	spans := regmem.InUse().Spans
	buf, err := Alloc(5000)
	require.NoError(t, err)
	require.Equal(t, spans, regmem.InUse().Spans, "both lie in one mapping")
	p := buf.Bytes()
	buf.Free()

	a, b := messagePipe(t, Config{})
	pc := listenPackets(t)
	defer pc.Close()
	to := pc.LocalAddr()
	for name, call := range map[string]func() (int, error){
		"Read":              func() (int, error) { return b.Read(p) },
		"ReadMsg":           func() (int, error) { return b.ReadMsg(p[1:]) },
		"ReadPiece":         func() (int, error) { n, _, err := b.ReadPiece(p); return n, err },
		"Write":             func() (int, error) { return a.Write(p) },
		"Write of one byte": func() (int, error) { return a.Write(p[4999:]) },
		"WriteMsg":          func() (int, error) { return a.WriteMsg(p) },
		"Invalidate":        func() (int, error) { return a.WriteMsg(p, Invalidate(1)) },
		"without blocking":  func() (int, error) { return a.WriteMsg(p, NonBlocking) },
		"QueueMsg":          func() (int, error) { return a.QueueMsg(p, Expedited).Result() },
		"ReadFrom":          func() (int, error) { n, _, err := pc.ReadFrom(p); return n, err },
		"WriteTo":           func() (int, error) { return pc.WriteTo(p[:100], to) },
		"ReadBatch":         func() (int, error) { return pc.ReadBatch([]Datagram{{Buf: p}}) },
		"WriteBatch":        func() (int, error) { return pc.WriteBatch([]Datagram{{Buf: p[:10], Addr: addrPort(to)}}) },
	} {
		n, err := call()
		require.ErrorIs(t, err, syscall.EFAULT, name)
		require.ErrorContains(t, err, "after Free", name)
		require.Zero(t, n, name)
	}

	// Of a batch those before it are sent.
	n, err := pc.WriteBatch([]Datagram{{Buf: []byte("one"), Addr: addrPort(to)}, {Buf: p[:10], Addr: addrPort(to)}})
	require.Equal(t, 1, n)
	require.ErrorIs(t, err, syscall.EFAULT)
	require.NoError(t, pc.SetReadDeadline(time.Now().Add(patience)))
	n, err = pc.ReadBatch([]Datagram{{Buf: make([]byte, 10)}, {Buf: p}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	exchange(t, a, b, 10<<10)
}

// Calls that hold a Buffer allocate nothing for it.
func TestHoldingAllocatesNothing(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{})
	out, in := alloc(t, 3000), alloc(t, 3000)
	turn := func() {
		if err := writeMsg(client, out.Bytes()); err != nil {
			t.Fatal(err)
		}
		if _, err := server.ReadMsg(in.Bytes()); err != nil {
			t.Fatal(err)
		}
	}
	for range 50 {
		turn()
	}
	require.Zero(t, testing.AllocsPerRun(500, turn))
	closeBoth(t, client, server)
}

// Of a batch all Buffers are held, each until the call has ended.
func TestFreeDuringBatch(t *testing.T) {
	for i := range 3 {
		checkLeaks(t)
		pc := listenPackets(t)
		var bufs []testBuffer
		var ds []Datagram
		for range 3 {
			buf := allocated(t, 4096)
			bufs = append(bufs, buf)
			for i := range 64 {
				ds = append(ds, Datagram{Buf: buf.mem[i*64:][:64]})
			}
		}
		freeDuring(t, bufs[i], func() error { _, err := pc.ReadBatch(ds); return err }, func() {
			_, err := pc.WriteTo(make([]byte, 20), pc.LocalAddr())
			require.NoError(t, err)
		})
		for _, buf := range bufs {
			buf.Free()
		}
		require.NoError(t, pc.Close())
	}
}
