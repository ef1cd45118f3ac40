package rdmanet

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/scripted"
)

// One direction ends, the other goes on, and then it ends too.
func TestHalfClose(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		for _, dir := range []struct{ from, to stream }{{client, server}, {server, client}} {
			data := pattern(5, 100<<10)
			done := make(chan error, 1)
			go func() {
				_, err := dir.from.Write(data)
				done <- errors.Join(err, dir.from.CloseWrite())
			}()
			got, err := io.ReadAll(dir.to)
			require.NoError(t, err)
			defect.Bytes(t, data, got)
			require.NoError(t, <-done)
			for range 2 {
				n, err := dir.to.Read(make([]byte, 1))
				require.Zero(t, n)
				require.True(t, err == io.EOF, "the end is io.EOF itself, not %v", err)
			}
			n, err := dir.from.Write([]byte("more"))
			require.Zero(t, n)
			requireConnError(t, tr, err, "write")
			require.ErrorIs(t, err, syscall.EPIPE)
		}
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
	})
}

// An end of stream may come before any byte.
func TestCloseWriteAtOnce(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		require.NoError(t, client.CloseWrite())
		require.NoError(t, client.CloseWrite(), "again is no error")
		_, err := server.Read(make([]byte, 1))
		require.True(t, err == io.EOF)
		exchangeOneWay(t, server, client, 1<<20)
	})
}

// The writing side can end behind a deadline that has passed.
func TestCloseWriteHeedsNoDeadline(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		for _, size := range []int{0, 1, 20 << 10} {
			client, server := tr.pair(t)
			data := pattern(7, size)
			_, err := client.Write(data)
			require.NoError(t, err)
			require.NoError(t, client.SetDeadline(time.Now().Add(-time.Second)))
			_, err = client.Write([]byte("late"))
			requireTimeout(t, err)
			require.NoError(t, client.CloseWrite())
			got, err := io.ReadAll(server)
			require.NoError(t, err)
			defect.Bytes(t, data, got)
		}
	})
}

// CloseWrite does not wait for the peer's reader: it ends a Write that does, and the Writes
// behind that one. The peer reads what they say they have sent, and then the end.
func TestCloseWriteEndsWrites(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		for _, size := range []int{100, 64 << 10, 16 << 20} {
			client, server := tr.pair(t)
			const writers = 3
			data := make([]byte, size)
			var sent atomic.Int64
			errs := make(chan error, writers)
			for range writers {
				go func() {
					var err error
					for err == nil {
						var n int
						n, err = client.Write(data)
						sent.Add(int64(n))
					}
					errs <- err
				}()
			}
			// They are most likely to wait when nothing has moved for a while. CloseWrite ends
			// them in any case.
			for last := int64(-1); sent.Load() != last; time.Sleep(50 * time.Millisecond) {
				last = sent.Load()
			}
			within(t, "CloseWrite", func() { require.NoError(t, client.CloseWrite()) })
			for range writers {
				err := <-errs
				requireConnError(t, tr, err, "write")
				require.ErrorIs(t, err, syscall.EPIPE)
			}
			got, err := io.Copy(io.Discard, server)
			require.NoError(t, err)
			if got != sent.Load() {
				t.Error(defect.Lost("the peer read %d bytes, and the Writes have sent %d", got, sent.Load()))
			}
		}
	})
}

// Close behind CloseWrite loses nothing that was written, however late the peer reads. A peer that
// goes on writing is told, and not for ever ignored.
func TestCloseBehindCloseWrite(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		for _, size := range []int{0, 300 << 10} {
			for _, early := range []bool{false, true} { // The peer writes before it reads.
				client, server := tr.pair(t)
				data := pattern(8, size)
				_, err := client.Write(data)
				require.NoError(t, err)
				require.NoError(t, client.CloseWrite())
				if early && tr.rdma { // TCP is reset by bytes that were not read.
					_, err := server.Write([]byte("not read"))
					require.NoError(t, err)
				}
				require.NoError(t, client.Close())
				got, err := io.ReadAll(server)
				require.NoError(t, err)
				defect.Bytes(t, data, got)
				within(t, "write to one who is gone", func() {
					for err = nil; err == nil; {
						_, err = server.Write(make([]byte, 1000))
					}
				})
				require.True(t, errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET), "%v", err)
				n, err := server.Read(make([]byte, 1))
				require.Zero(t, n)
				require.True(t, err == io.EOF, "%v", err)
				require.NoError(t, server.Close())
			}
		}
	})
}

// A peer that writes to a connection that was closed behind CloseWrite is told at once, however
// long the other side would linger.
func TestCloseBehindCloseWriteEndsPeer(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, Config{LingerTimeout: time.Hour})
	_, err := b.Write([]byte("not read"))
	require.NoError(t, err)
	require.NoError(t, a.CloseWrite())
	require.NoError(t, a.Close())
	got, err := io.ReadAll(b)
	require.NoError(t, err)
	require.Empty(t, got)
	within(t, "write to one who is gone", func() {
		for err = nil; err == nil; {
			_, err = b.Write(make([]byte, 1000))
		}
	})
	require.True(t, errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET), "%v", err)
	require.NoError(t, b.Close())
}

// A Write that the peer's end breaks off returns no less than the peer's program has read. Of a large
// transfer that is not known before the peer reports it, so these Writes are shorter.
func TestWriteCountsWhatPeerRead(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		for range heavy(40) {
			client, server := tr.pair(t)
			require.NoError(t, client.CloseWrite())
			wrote := make(chan int64, 1)
			go func() {
				io.Copy(io.Discard, server)
				var sum int64
				for range 16 {
					n, err := server.Write(make([]byte, 256<<10))
					if sum += int64(n); err != nil {
						break
					}
				}
				wrote <- sum
			}()
			read, err := io.ReadAtLeast(client, make([]byte, 64<<10), 35_000)
			require.NoError(t, err)
			require.NoError(t, client.Close())
			within(t, "Write", func() {
				if sum := <-wrote; sum < int64(read) {
					t.Error(defect.Lost("Writes returned %d bytes, and the peer had read %d", sum, read))
				}
			})
			require.NoError(t, server.Close())
		}
	})
}

// A peer that has ended its direction, and is then gone with bytes that it had not read, is no
// orderly end.
func TestCloseContextAfterReset(t *testing.T) {
	checkLeaks(t)
	var cfg Config
	if !onRDMA {
		cfg.Provider = overTCP() // The kernels have what is unread, and not the peer's process.
	}
	closes := cfg
	closes.LingerTimeout = -1
	a, b := pipe(t, "rdma4", local4, &ListenConfig{Config: closes}, &Dialer{Config: cfg})
	needHeld(t, a, b)
	require.NoError(t, b.CloseWrite())
	_, err := a.Read(make([]byte, 1))
	require.True(t, err == io.EOF)
	_, err = a.Write(make([]byte, 1000<<10))
	require.NoError(t, err)
	require.NoError(t, b.Close())
	// Until b has let go, its host may get all of it, with the end.
	require.True(t, eventually(func() bool { return Lingering().Now == 0 }))
	if err := a.CloseWrite(); err != nil {
		require.ErrorIs(t, err, syscall.ECONNRESET)
	}
	within(t, "CloseContext", func() { require.ErrorIs(t, a.CloseContext(tctx), syscall.ECONNRESET) })
}

// When both directions have ended, in whatever order, both sides know that the other has got
// everything. A peer that closes without reading may have got less, and then it is not said.
func TestCloseContextAfterHalfClose(t *testing.T) {
	for _, how := range []string{"one CloseWrite", "both CloseWrite", "Close after both"} {
		t.Run(how, func(t *testing.T) {
			checkLeaks(t)
			a, b := pipeOn(t, Config{})
			data := pattern(9, 100<<10)
			_, err := a.Write(data)
			require.NoError(t, err)
			require.NoError(t, a.CloseWrite())
			got, err := io.ReadAll(b)
			require.NoError(t, err)
			defect.Bytes(t, data, got)
			_, err = b.Write(data)
			require.NoError(t, err)
			if how != "one CloseWrite" {
				require.NoError(t, b.CloseWrite())
			}
			if how == "Close after both" {
				got, err = io.ReadAll(a)
				require.NoError(t, err)
				defect.Bytes(t, data, got)
			}
			result := make(chan error, 1)
			go func() { result <- b.CloseContext(tctx) }()
			require.NoError(t, a.CloseContext(tctx))
			if err := <-result; how == "Close after both" || !errors.Is(err, syscall.ECONNRESET) {
				require.NoError(t, err)
			}
		})
	}
}

// exchangeOneWay sends n bytes and checks them.
func exchangeOneWay(t testing.TB, from, to net.Conn, n int) {
	t.Helper()
	data := pattern(6, n)
	done := make(chan error, 1)
	go func() {
		_, err := from.Write(data)
		done <- err
	}()
	require.NoError(t, defect.ReadFull(to, data))
	require.NoError(t, <-done)
}

func TestCloseRead(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		blocked := make(chan error, 1)
		go func() {
			_, err := server.Read(make([]byte, 1))
			blocked <- err
		}()
		require.NoError(t, server.CloseRead())
		require.True(t, <-blocked == io.EOF)
		_, err := server.Read(make([]byte, 1))
		require.True(t, err == io.EOF)
		exchangeOneWay(t, server, client, 1<<20)
	})
}

// Nothing that was unread, or comes later, is seen after CloseRead, and the
// writer does not block on it.
func TestCloseReadDrops(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			checkLeaks(t)
			client, server := pipe(t, lb.network, lb.address, new(ListenConfig), new(Dialer))
			_, err := client.Write(make([]byte, 100))
			require.NoError(t, err)
			require.NoError(t, defect.ReadFull(server, make([]byte, 50)))
			require.NoError(t, server.CloseRead())
			within(t, "write to one who does not read", func() {
				_, err = client.Write(make([]byte, 16<<20))
			})
			require.NoError(t, err)
			n, err := server.Read(make([]byte, 1))
			require.Zero(t, n)
			require.True(t, err == io.EOF)
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
		})
	}
}

// A peer that has closed is told by EOF to the reader, by EPIPE or ECONNRESET
// to the writer, sooner or later.
func TestWriteAfterPeerClosed(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		require.NoError(t, server.Close())
		_, err := client.Read(make([]byte, 1))
		require.True(t, err == io.EOF)
		within(t, "write to one who is gone", func() {
			for err = nil; err == nil; {
				_, err = client.Write(make([]byte, 1000))
			}
		})
		requireConnError(t, tr, err, "write")
		require.True(t, errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET), "%v", err)
	})
}

// A peer that has closed does not hear of the end, which is no error.
func TestCloseWriteAfterPeerClosed(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		require.NoError(t, server.Close())
		_, err := client.Read(make([]byte, 1))
		require.True(t, err == io.EOF)
		if c, ok := client.(*Conn); ok {
			require.True(t, eventually(func() bool { return peerGone(c) }))
		}
		require.NoError(t, client.CloseWrite())
		_, err = client.Write(make([]byte, 1))
		require.ErrorIs(t, err, syscall.EPIPE)
		require.NoError(t, client.Close())
	})
}

// After Close every method says net.ErrClosed.
func TestUseAfterClose(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		require.NoError(t, client.Close())
		future := time.Now().Add(time.Hour)
		calls := []struct {
			op string
			f  func() error
		}{
			{"read", func() error { _, err := client.Read(make([]byte, 1)); return err }},
			{"write", func() error { _, err := client.Write(make([]byte, 1)); return err }},
			{"close", client.CloseRead},
			{"close", client.CloseWrite},
			{"close", client.Close},
		}
		for _, c := range calls {
			err := c.f()
			requireOpError(t, tr, err, c.op)
			require.ErrorIs(t, err, net.ErrClosed)
		}
		for _, set := range []func(time.Time) error{client.SetDeadline, client.SetReadDeadline, client.SetWriteDeadline} {
			oe := requireOpError(t, tr, set(future), "set")
			require.ErrorIs(t, oe, net.ErrClosed)
			require.Nil(t, oe.Source)
			require.Equal(t, client.LocalAddr(), oe.Addr)
		}
		require.NotNil(t, client.LocalAddr())
		require.Equal(t, server.LocalAddr().String(), client.RemoteAddr().String())
	})
}

// Close ends a Read and a Write that are under way.
func TestCloseUnblocks(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, _ := tr.pair(t)
		if tr.rdma {
			c, peer := pipe(t, tr.network, tr.address, new(ListenConfig), &Dialer{Config: Config{LingerTimeout: -1}}) // nobody reads what was written
			t.Cleanup(func() { peer.Close() })
			client = c
		}
		errs := make(chan error, 2)
		go func() {
			_, err := client.Read(make([]byte, 1))
			requireOp(errs, err, "read")
		}()
		started := make(chan struct{})
		go func() {
			client.Write(make([]byte, 1))
			close(started)
			_, err := client.Write(make([]byte, 64<<20))
			requireOp(errs, err, "write")
		}()
		<-started
		within(t, "close", func() {
			require.NoError(t, client.Close())
			for range 2 {
				require.NoError(t, <-errs)
			}
		})
	})
}

// requireOp passes on what is wrong with an error that should be op's and
// net.ErrClosed.
func requireOp(errs chan<- error, err error, op string) {
	var oe *net.OpError
	if errors.As(err, &oe) && oe.Op == op && errors.Is(err, net.ErrClosed) {
		err = nil
	}
	errs <- err
}

// What was written before Close arrives, however late it is read.
func TestCloseAfterWrite(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		const rest = 64 << 10
		size := heavy(64 << 20)
		block := pattern(7, 1<<20)
		written := make(chan error, 1)
		closed := make(chan error, 1)
		go func() {
			var err error
			for n := 0; n < size && err == nil; n += len(block) {
				_, err = client.Write(block)
			}
			written <- err
			closed <- client.Close()
		}()
		for n := 0; n < size; n += len(block) {
			split := len(block)
			if n+len(block) == size {
				split -= rest
			}
			require.NoError(t, defect.ReadFull(server, block[:split]))
			if split < len(block) {
				require.NoError(t, <-written) // Close is called from here on
				require.NoError(t, defect.ReadFull(server, block[split:]))
			}
		}
		_, err := server.Read(make([]byte, 1))
		require.True(t, err == io.EOF, "%v", err)
		require.NoError(t, server.Close())
		require.NoError(t, <-closed)
	})
}

// Where a send completes before the peer has it, Close asks the peer's device
// whether it has everything.
func TestCloseAsksPeer(t *testing.T) {
	checkLeaks(t)
	m := newModest(t, 1<<20, 1<<14, false)
	m.buffer = true
	cfg := Config{Provider: newSwitch(t, m)}
	for range 20 {
		client, server := pipeOn(t, cfg)
		before := m.reads.Load()
		exchange(t, client, server, 10<<10)
		go server.Write(pattern(1, 100))
		require.NoError(t, client.Close())
		require.True(t, eventually(func() bool { return m.reads.Load() == before+1 }))
		require.NoError(t, server.Close())
		require.LessOrEqual(t, m.reads.Load(), before+2)
	}
}

// A peer that neither reads nor closes holds Close up for the linger time only.
func TestLingerIsBounded(t *testing.T) {
	checkLeaks(t)
	for _, linger := range []time.Duration{-1, time.Millisecond} {
		dev := scripted.New(newProvider(t))
		client, server := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: dev}}, &Dialer{Config: Config{LingerTimeout: linger}})
		e := dev.Endpoint(server.Info().QPN)
		require.NoError(t, client.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
		n, err := client.Write(make([]byte, 64<<20))
		requireTimeout(t, err)
		e.HoldAll(true) // it does nothing any more
		within(t, "close", func() { err = client.Close() })
		e.HoldAll(false)
		require.NoError(t, err)
		got, err := io.Copy(io.Discard, server)
		require.LessOrEqual(t, got, int64(n))
		if err != nil {
			require.ErrorIs(t, err, syscall.ECONNRESET)
		} else if got < int64(n) {
			t.Error(defect.Lost("an orderly end after %d of %d", got, n))
		}
		require.NoError(t, server.Close())
	}
}
