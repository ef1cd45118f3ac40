package rdmanet

import (
	"bytes"
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// heldPipe is a connection between devices that hold Sends. There is none over adapters.
func heldPipe(t *testing.T) (a, b *Conn) {
	t.Helper()
	checkLeaks(t)
	return heldPipeOn(t, Config{})
}

func heldPipeOn(t *testing.T, cfg Config) (a, b *Conn) {
	t.Helper()
	a, b = pipeOn(t, cfg)
	needHeld(t, a, b)
	return a, b
}

// needHeld skips the test unless a connection is one between devices that hold Sends.
func needHeld(t *testing.T, a, b *Conn) {
	t.Helper()
	if !a.Info().Extensions.HeldSends {
		closeBoth(t, a, b)
		t.Skip("only the software device holds Sends, on Linux")
	}
}

// heldBulk is more than the kernels of both ends hold.
const heldBulk = 64 << 20

// A Write that is cut in the middle says how much was taken. The memory is the caller's then,
// the peer gets exactly that much, and the stream goes on.
func TestWriteCut(t *testing.T) {
	for name, cut := range map[string]func(c *Conn) error{
		"deadline":   func(c *Conn) error { return c.SetWriteDeadline(past) },
		"CloseWrite": func(c *Conn) error { return c.CloseWrite() },
		"Close":      func(c *Conn) error { return c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := heldPipe(t)
			want := pattern(3, heldBulk)
			p := bytes.Clone(want)
			wrote := make(chan result, 1)
			writer := start(func() {
				n, err := a.Write(p)
				clear(p)
				wrote <- result{n, err}
			})
			require.True(t, eventually(func() bool { return a.Stats().BytesSent > 1<<20 }))
			writer.park(t)
			require.NoError(t, cut(a))
			var r result
			within(t, "Write", func() { r = <-wrote })
			require.Error(t, r.err)
			require.Positive(t, r.n)
			require.Less(t, r.n, heldBulk)
			require.NoError(t, defect.ReadFull(b, want[:r.n]))
			if name == "deadline" {
				require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
				require.NoError(t, a.SetWriteDeadline(time.Time{}))
				pass(t, a, b)
				require.NoError(t, a.CloseWrite())
			}
			_, err := b.Read(p)
			require.Equal(t, io.EOF, err)
			a.Close()
			require.NoError(t, b.Close())
		})
	}
}

// A send that does not block returns at once, whatever the kernel has room for, and Writable
// tells when there is room again.
func TestNonBlockingHeld(t *testing.T) {
	a, b := heldPipe(t)
	want := pattern(4, heldBulk)
	sent := 0
	within(t, "WriteMsg", func() {
		for sent < heldBulk {
			n, err := a.WriteMsg(want[sent:], NonBlocking)
			if sent += n; errors.Is(err, syscall.EAGAIN) {
				if sent > 1<<20 {
					return
				}
				<-a.Writable() // The room in shared memory grows while nobody reads.
				continue
			}
			require.NoError(t, err)
		}
	})
	require.Less(t, sent, heldBulk)
	got := make(chan error, 1)
	go func() { got <- defect.ReadFull(b, want) }()
	within(t, "the rest", func() {
		for sent < heldBulk {
			n, err := a.WriteMsg(want[sent:], NonBlocking)
			if sent += n; errors.Is(err, syscall.EAGAIN) {
				<-a.Writable()
				continue
			}
			require.NoError(t, err)
		}
		require.NoError(t, <-got)
	})
	closeBoth(t, a, b)
}

// A peer that breaks the connection is found by the next Write although much is unread, and
// what has arrived can be read before the error.
func TestWriteToBrokenPeer(t *testing.T) {
	a, b := heldPipe(t)
	want := pattern(5, heldBulk)
	wrote := writing(a, want)
	require.True(t, eventually(func() bool { return b.Stats().BytesReceived > 0 && a.Stats().BytesSent > 1<<20 }))
	a.mu.Lock()
	require.NoError(t, a.lane.qp.SetError())
	a.mu.Unlock()
	within(t, "a's Write", func() { require.Error(t, (<-wrote).err) })
	var err error
	within(t, "b's Write", func() {
		for err == nil {
			_, err = b.Write([]byte("x"))
		}
	})
	require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, errno.EPIPE), "%v", err)
	got, err := io.ReadAll(b)
	require.ErrorIs(t, err, syscall.ECONNRESET)
	require.NotEmpty(t, got)
	defect.Bytes(t, want[:len(got)], got)
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// A message longer than MaxFragmentedSize goes in segments.
func TestLongMessageHeld(t *testing.T) {
	a, b := heldPipe(t)
	want := pattern(6, 3*defaultFragmented+1)
	wrote := make(chan error, 1)
	go func() { wrote <- writeMsg(a, want) }()
	got := make([]byte, len(want))
	n, err := b.ReadMsg(got)
	require.NoError(t, err)
	defect.Bytes(t, want, got[:n])
	require.NoError(t, <-wrote)
	closeBoth(t, a, b)
}

// slowPost is a device whose posts in place take so long that something happens meanwhile.
type slowPost struct {
	ibv.InPlaceQP
	meanwhile func()
}

func (q *slowPost) PostInPlace(wrs []ibv.SendWR) (n int, lent bool, err error) {
	n, lent, err = q.InPlaceQP.PostInPlace(wrs)
	if lent {
		q.meanwhile()
	}
	return n, lent, err
}

// A deadline, CloseWrite or Close ends a Write at whatever moment it comes, also before the Write
// waits.
func TestWriteCutBeforeItWaits(t *testing.T) {
	for name, cut := range map[string]func(c *Conn){
		"deadline":   func(c *Conn) { c.SetWriteDeadline(past) },
		"CloseWrite": func(c *Conn) { parked(t, func() { c.CloseWrite() }) },
		"Close":      func(c *Conn) { parked(t, func() { c.Close() }) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := heldPipe(t)
			a.mu.Lock()
			a.lane.inPlace = &slowPost{a.lane.inPlace, func() { cut(a) }}
			a.mu.Unlock()
			want := pattern(4, heldBulk)
			p, n := bytes.Clone(want), 0
			within(t, "Write", func() {
				var err error
				n, err = a.Write(p)
				require.Error(t, err)
			})
			clear(p) // The memory is the caller's again.
			read := arriving(b)
			a.Close()
			within(t, "the peer", func() { defect.Bytes(t, string(want[:n]), <-read) })
			b.Close()
		})
	}
}

// A connection that the peer has reset is found out by sends of every kind, although a Send of
// the peer's waits for the reader. Sends that were cut before have left something to be sent.
func TestBrokenWhileHolding(t *testing.T) {
	a, b := heldPipe(t)
	fill := func(c *Conn) {
		for {
			n, err := c.WriteMsg(make([]byte, 64<<10), NonBlocking)
			if err != nil {
				require.ErrorIs(t, err, syscall.EAGAIN)
				return
			}
			require.Positive(t, n)
		}
	}
	fill(a)
	fill(b)
	a.mu.Lock()
	require.NoError(t, a.lane.qp.SetError())
	a.mu.Unlock()
	within(t, "Writable", func() { <-b.Writable() })
	_, err := b.WriteMsg([]byte("x"), NonBlocking)
	require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, errno.EPIPE), "%v", err)
	within(t, "Write", func() { _, err = b.Write([]byte("x")) })
	require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, errno.EPIPE), "%v", err)
	_, err = io.Copy(io.Discard, b)
	require.ErrorIs(t, err, syscall.ECONNRESET)
	a.Close()
	b.Close()
}

// A Write that waits for the socket fails with EPIPE when the peer closes the connection.
func TestPeerClosesDuringWrite(t *testing.T) {
	for range 10 {
		a, b := heldPipe(t)
		wrote := make(chan error, 1)
		go func() {
			var err error
			for p := make([]byte, heldBulk); err == nil; {
				_, err = a.Write(p)
			}
			wrote <- err
		}()
		require.True(t, eventually(func() bool { return a.Stats().BytesSent > 1<<20 }))
		require.NoError(t, b.Close())
		within(t, "Write", func() { require.ErrorIs(t, <-wrote, errno.EPIPE) })
		require.NoError(t, a.Close())
	}
}

// CloseContext returns when the peer's host has everything, however slowly its program reads.
func TestCloseContextHeld(t *testing.T) {
	a, b := heldPipe(t)
	// The receives take 256 KiB. The kernel's window need not have grown for more than the rest.
	want := pattern(7, 300<<10)
	_, err := a.Write(want)
	require.NoError(t, err)
	within(t, "CloseContext", func() { require.NoError(t, a.CloseContext(tctx)) })
	require.NoError(t, defect.ReadFull(b, want))
	_, err = b.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	require.NoError(t, b.Close())
}
