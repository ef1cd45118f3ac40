package iwarp

import (
	"crypto/rand"
	"errors"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// linkKinds are the openers to test.
func linkKinds() map[string]opener {
	kinds := map[string]opener{"portable": openPortable, "memory": new(memoryNet).open}
	if haveRawIO {
		kinds["tcp"] = openTCP
	}
	maps.Copy(kinds, sharedKinds())
	return kinds
}

// The device keeps the rules of package ibv over every link. The software device as
// users have it is tested in package verbstest.
func TestConformanceOverLinks(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(linkKinds())) {
		if name == "tcp" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			verbstest.TestProvider(t, func(t *testing.T) verbstest.Env {
				p := New(Config{SameHost: SameHostOff})
				p.dev.open = linkKinds()[name]
				return verbstest.Env{Passive: p, Addr: netip.MustParseAddr("127.0.0.1")}
			})
		})
	}
}

// eachLink runs a test on the two ends of a link of every kind.
func eachLink(t *testing.T, run func(t *testing.T, x, y link)) {
	kinds := linkKinds()
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			x, y := linkPair(t, kinds[name])
			run(t, x, y)
		})
	}
}

func linkPair(t testing.TB, open opener) (x, y link) {
	t.Helper()
	ln, err := listenTCP(t.Context(), loopback)
	require.NoError(t, err)
	defer ln.Close()
	xc, err := dialTCP(t.Context(), netip.AddrPort{}, unmapped(ln.Addr()), time.Now().Add(patience))
	require.NoError(t, err)
	yc, err := ln.Accept()
	require.NoError(t, err)
	y, err = open(yc, &setup{awaits: true})
	require.NoError(t, err)
	x, err = open(xc, &setup{})
	require.NoError(t, err)
	t.Cleanup(func() {
		x.close(false)
		y.close(false)
	})
	return x, y
}

// writeTo writes b, and returns why it could not.
func writeTo(l link, b []byte) (err error) {
	taken := false // once all is, writev may still ask for a call
	if werr := l.write(func(at uintptr) bool {
		for !taken {
			n, wait, werr := l.writev(at, [][]byte{b[:len(b)/2], b[len(b)/2:]})
			if err = werr; err != nil {
				return true
			}
			b = b[n:]
			taken = len(b) == 0
			if wait {
				return false
			}
		}
		return true
	}); err == nil {
		err = werr
	}
	return err
}

// readFrom reads into b until it is full, and returns how much came before what error.
func readFrom(l link, b []byte) (n int, err error) {
	if rerr := l.read(func(at uintptr) bool {
		for n < len(b) {
			half := n + (len(b)-n)/2
			k, wait, rerr := l.readv(at, [][]byte{b[n:half], b[half:]})
			if wait {
				return false
			}
			n += k
			if err = rerr; err != nil {
				return true
			}
		}
		return true
	}); err == nil {
		err = rerr
	}
	return n, err
}

// pollFrom is readFrom by poll, once.
func pollFrom(l link, b []byte) (n int, err error) {
	if perr := l.poll(func(at uintptr) bool {
		n, _, err = l.readv(at, [][]byte{b})
		return true
	}); err == nil {
		err = perr
	}
	return n, err
}

// soon is what a call that waits returns, which must not take for ever.
func soon(t *testing.T, f func() error) error {
	t.Helper()
	c := make(chan error, 1)
	go func() { c <- f() }()
	select {
	case err := <-c:
		return err
	case <-time.After(patience):
		require.FailNow(t, "the call waits for ever")
		panic("unreachable")
	}
}

// All bytes arrive in their order, both ways at a time, and then the end, whatever the
// link has room for.
func TestLinkCarries(t *testing.T) {
	eachLink(t, func(t *testing.T, x, y link) {
		xs, ys := make([]byte, 3<<20), make([]byte, 3<<20)
		rand.Read(xs)
		rand.Read(ys)
		sent := make(chan error, 2)
		for l, b := range map[link][]byte{x: xs, y: ys} {
			go func() { sent <- errors.Join(writeTo(l, b), l.closeWrite()) }()
		}
		got := make(chan error, 2)
		for l, want := range map[link][]byte{x: ys, y: xs} {
			go func() {
				b := make([]byte, len(want)+1)
				n, err := readFrom(l, b)
				if wrong := defect.Differ(want, b[:n]); err == io.EOF && wrong != nil {
					err = wrong
				}
				got <- err
			}()
		}
		for range 2 {
			require.NoError(t, soon(t, func() error { return <-sent }))
			require.ErrorIs(t, soon(t, func() error { return <-got }), io.EOF)
		}
		for _, l := range []link{x, y} {
			require.Zero(t, l.unsent())
			require.NoError(t, l.close(false))
		}
	})
}

// poll takes what is there and waits for nothing, also with a deadline that has passed.
func TestLinkPoll(t *testing.T) {
	eachLink(t, func(t *testing.T, x, y link) {
		b := make([]byte, 10)
		y.interrupt()
		n, err := pollFrom(y, b)
		require.NoError(t, err)
		require.Zero(t, n)
		require.NoError(t, writeTo(x, []byte("hello")))
		require.NoError(t, soon(t, func() error {
			for n == 0 && err == nil {
				y.interrupt()
				n, err = pollFrom(y, b)
			}
			return err
		}))
		defect.Bytes(t, "hello", b[:n])
	})
}

// A read ends at its deadline and by an interrupt, before it begins and while it waits,
// until another deadline is set. No byte is lost by that.
func TestLinkDeadline(t *testing.T) {
	eachLink(t, func(t *testing.T, x, y link) {
		b := make([]byte, 5)
		read := func() error {
			_, err := readFrom(y, b)
			return err
		}
		for _, d := range []time.Duration{-time.Second, 0, 10 * time.Millisecond} {
			y.setReadDeadline(time.Now().Add(d))
			require.ErrorIs(t, soon(t, read), os.ErrDeadlineExceeded)
		}
		y.setReadDeadline(time.Now().Add(time.Hour))
		y.interrupt()
		require.ErrorIs(t, soon(t, read), os.ErrDeadlineExceeded)
		y.setReadDeadline(time.Now().Add(time.Hour))
		over := time.AfterFunc(10*time.Millisecond, y.interrupt)
		require.ErrorIs(t, soon(t, read), os.ErrDeadlineExceeded)
		require.False(t, over.Stop())
		require.NoError(t, writeTo(x, []byte("hello")))
		y.setReadDeadline(time.Time{})
		require.NoError(t, soon(t, read))
		defect.Bytes(t, "hello", b)
	})
}

// After close every call says so, and so does one that waits meanwhile.
func TestLinkClosed(t *testing.T) {
	eachLink(t, func(t *testing.T, x, y link) {
		results := make(chan error, 2)
		go func() { results <- writeTo(x, make([]byte, 64<<20)) }()
		go func() {
			_, err := readFrom(x, make([]byte, 1))
			results <- err
		}()
		time.Sleep(10 * time.Millisecond) // the most likely order, either is right
		require.NoError(t, x.close(false))
		for range 2 {
			require.ErrorIs(t, soon(t, func() error { return <-results }), net.ErrClosed)
		}
		never := func(uintptr) bool {
			t.Error("a step after close")
			return true
		}
		require.ErrorIs(t, x.read(never), net.ErrClosed)
		require.ErrorIs(t, x.poll(never), net.ErrClosed)
		require.ErrorIs(t, x.write(never), net.ErrClosed)
		require.ErrorIs(t, x.closeWrite(), net.ErrClosed)
		require.ErrorIs(t, x.close(true), net.ErrClosed)
		require.Zero(t, x.unsent())
		x.interrupt()
		x.setReadDeadline(time.Time{})
		x.closeAfter([]byte("words"))
	})
}

// The peer tells an end from a reset, and its writes fail with errors that its reads
// meet as well.
func TestLinkPeerCloses(t *testing.T) {
	for _, reset := range []bool{false, true} {
		eachLink(t, func(t *testing.T, x, y link) {
			require.NoError(t, writeTo(x, []byte("hello")))
			b := make([]byte, 6)
			n, err := readFrom(y, b[:5])
			require.NoError(t, err)
			defect.Bytes(t, "hello", b[:n])
			require.NoError(t, x.close(reset))
			_, err = readFrom(y, b)
			if reset {
				require.ErrorIs(t, err, syscall.ECONNRESET)
			} else {
				require.ErrorIs(t, err, io.EOF)
			}
			require.NoError(t, soon(t, func() error {
				for err = nil; err == nil; {
					err = writeTo(y, []byte("hello"))
				}
				return nil
			}))
			require.True(t, endOfPeer(err), "%v", err)
			if !reset {
				require.True(t, errors.Is(err, errno.EPIPE) || errors.Is(err, errno.ECONNRESET), "%v", err)
			}
		})
	}
}

// Last words come behind all that was taken, and the link waits for the peer to read
// them, for a while.
func TestLinkLastWords(t *testing.T) {
	eachLink(t, func(t *testing.T, x, y link) {
		body := make([]byte, 3000)
		rand.Read(body)
		taken := 0
		require.NoError(t, x.write(func(at uintptr) (done bool) { // not all that is taken need be sent yet
			n, _, err := x.writev(at, [][]byte{body})
			require.NoError(t, err)
			taken = n
			return true
		}))
		over := make(chan error, 1)
		go func() {
			x.closeAfter([]byte("words"))
			over <- nil
		}()
		b := make([]byte, len(body)+6)
		n, err := readFrom(y, b)
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, append(body[:taken:taken], "words"...), b[:n])
		require.NoError(t, y.closeWrite())
		require.NoError(t, soon(t, func() error { return <-over }))
		require.ErrorIs(t, x.closeWrite(), net.ErrClosed)
	})
	eachLink(t, func(t *testing.T, x, y link) {
		begin := time.Now()
		x.closeAfter([]byte("words"))
		require.GreaterOrEqual(t, time.Since(begin), lastWordsTimeout)
		require.ErrorIs(t, x.closeWrite(), net.ErrClosed)
	})
}

// The link over TCP costs no memory for what passes through it.
func TestLinkAllocatesNothing(t *testing.T) {
	if !haveRawIO {
		t.Skip("no raw descriptors on this system")
	}
	x, y := linkPair(t, openTCP)
	out, in := [][]byte{bytesOf(100), bytesOf(100)}, [][]byte{make([]byte, 100), make([]byte, 150)}
	var n int
	var wait bool
	var err error
	write := func(at uintptr) bool {
		n, wait, err = x.writev(at, out)
		return true
	}
	read := func(at uintptr) bool {
		n, wait, err = y.readv(at, in)
		return !wait
	}
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if werr := x.write(write); werr != nil || err != nil || wait || n != 200 {
			t.Fatal(n, wait, err, werr)
		}
		y.setReadDeadline(time.Time{})
		if rerr := y.read(read); rerr != nil || err != nil || n != 200 {
			t.Fatal(n, err, rerr)
		}
	}))
}
