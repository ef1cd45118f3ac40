//go:build amd64 || arm64

package iwarp

import (
	"io"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// movedPair returns both ends of a link whose directions have moved to shared memory.
func movedPair(t *testing.T) (x, y *shared) {
	t.Helper()
	a, b := linkPair(t, sharedKinds()["shared"])
	carry(t, a, b, 64<<10)
	carry(t, b, a, 64<<10)
	x, y = a.(*shared), b.(*shared)
	require.True(t, x.out.on.Load() && y.out.on.Load())
	return x, y
}

// quit does to a link what the end of the process does, which sets nothing in shared memory.
func quit(l *shared) {
	l.control.close()
	l.conn.Close()
}

// A write fails when the peer's process has ended, though nobody reads or waits, and the ring
// has room.
func TestGoneWatchTellsWriter(t *testing.T) {
	leaktest.Check(t)
	x, y := movedPair(t)
	quit(y)
	var err error
	require.NoError(t, soon(t, func() error {
		for err == nil {
			err = writeTo(x, nil)
		}
		return nil
	}))
	require.ErrorIs(t, err, errno.EPIPE)
}

// A ring is read to its end when the peer's process has ended. Then comes the orderly end, or a
// reset if the peer has left something unread.
func TestGoneBehindData(t *testing.T) {
	for name, unread := range map[string]bool{"all read": false, "some unread": true} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			x, y := movedPair(t)
			require.NoError(t, writeTo(y, []byte("hello")))
			if unread {
				require.NoError(t, writeTo(x, []byte("unread")))
			}
			quit(y)
			b := make([]byte, 10)
			var n int
			err := soon(t, func() (err error) {
				n, err = readFrom(x, b)
				return err
			})
			require.Equal(t, "hello", string(b[:n]))
			if unread {
				require.ErrorIs(t, err, errno.ECONNRESET)
			} else {
				require.ErrorIs(t, err, io.EOF)
			}
		})
	}
}

// writerSleeps reports whether a writer has said that it sleeps.
func (l *shared) writerSleeps() bool {
	l.out.Lock()
	defer l.out.Unlock()
	nap := (*atomic.Uint32)(unsafe.Pointer(&l.out.mapped[wordSendNap]))
	return nap.Load()%2 == 1
}

// A peer that goes and leaves bytes of TCP unread resets the connection also if it had moved to its
// ring and this end has not.
func TestGoneWithTCPUnread(t *testing.T) {
	for name, unread := range map[string]bool{"all read": false, "some unread": true} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			x, y := halfMovedPair(t)
			require.NoError(t, writeTo(y, []byte("answer")))
			if !unread {
				_, err := readFrom(x, make([]byte, 6))
				require.NoError(t, err)
			}
			carry(t, x, y, 64<<10) // y learns now that x has moved.
			require.True(t, y.in.on.Load() && !y.out.on.Load())
			quit(x)
			err := soon(t, func() error {
				_, err := readFrom(y, make([]byte, 10))
				return err
			})
			if unread {
				require.ErrorIs(t, err, errno.ECONNRESET)
			} else {
				require.ErrorIs(t, err, io.EOF)
			}
		})
	}
}

// awaitHandover waits until a link may move.
func awaitHandover(t *testing.T, l *shared) {
	t.Helper()
	require.Eventually(t, func() bool {
		l.out.Lock()
		defer l.out.Unlock()
		return l.out.may
	}, patience, time.Millisecond)
}

// halfMovedPair returns both ends of a link of which x has moved to shared memory. The mark has not
// been read.
func halfMovedPair(t *testing.T) (x, y *shared) {
	t.Helper()
	a, b := linkPair(t, sharedKinds()["sharing"])
	x, y = a.(*shared), b.(*shared)
	carry(t, x, y, moveAfterBytes)
	awaitHandover(t, x)
	require.NoError(t, writeTo(x, nil))
	require.True(t, x.out.on.Load())
	require.False(t, y.in.on.Load())
	return x, y
}

// readerPair returns both ends of a link of which x has moved to shared memory. y has read the mark and
// all that follows, and has written nothing since.
func readerPair(t *testing.T) (x, y *shared) {
	t.Helper()
	x, y = halfMovedPair(t)
	carry(t, x, y, 64<<10)
	require.True(t, y.in.on.Load())
	require.False(t, y.out.on.Load())
	return x, y
}

// The end of a process that only reads is a reset if it has left something unread, and orderly if
// it has not, or has ended its own direction before.
func TestReaderGone(t *testing.T) {
	for _, tt := range []struct {
		name           string
		unread, closes bool
		want           error
	}{
		{"all read", false, false, io.EOF},
		{"some unread", true, false, errno.ECONNRESET},
		{"some unread behind its own end", true, true, io.EOF},
	} {
		for _, first := range []string{"TCP", "control socket"} {
			t.Run(tt.name+", "+first+" first", func(t *testing.T) {
				leaktest.Check(t)
				x, y := readerPair(t)
				if tt.closes {
					require.NoError(t, y.closeWrite())
				}
				if tt.unread {
					require.NoError(t, writeTo(x, make([]byte, 100)))
				}
				if first == "TCP" {
					y.conn.Close()
				}
				quit(y)
				require.ErrorIs(t, soon(t, func() error {
					_, err := readFrom(x, make([]byte, 10))
					return err
				}), tt.want)
			})
		}
	}
}

// An end that has closed its direction before it has got shared memory is orderly for a peer that
// moves afterwards.
func TestClosedBeforeHandover(t *testing.T) {
	leaktest.Check(t)
	a, b := linkPair(t, sharedKinds()["sharing"])
	x, y := a.(*shared), b.(*shared)
	require.NoError(t, y.closeWrite())
	carry(t, x, y, moveAfterBytes)
	awaitHandover(t, x)
	require.NoError(t, writeTo(x, make([]byte, 100)))
	require.True(t, x.out.on.Load())
	_, err := readFrom(x, make([]byte, 10))
	require.ErrorIs(t, err, io.EOF)
}

// An end that may move says nothing of its own accord. So a peer that answers, and whose process
// ends then, has an orderly end.
func TestMarkNeverAlone(t *testing.T) {
	leaktest.Check(t)
	a, b := linkPair(t, sharedKinds()["sharing"])
	x, y := a.(*shared), b.(*shared)
	carry(t, x, y, moveAfterBytes)
	awaitHandover(t, x)
	require.Zero(t, y.unreadInTCP())
	require.NoError(t, writeTo(y, []byte("answer")))
	quit(y)
	got := make([]byte, 10)
	n, err := readFrom(x, got)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, "answer", string(got[:n]))
}

// The peer writes and closes its control socket between a look at the ring and the sleep of an end
// that has not moved, and leaves TCP open. The bytes are read, and then comes the end.
func TestGoneBeforeSleep(t *testing.T) {
	leaktest.Check(t)
	x, y := readerPair(t)
	var end error
	got := 0
	step := func(at uintptr) bool {
		for end == nil {
			var n int
			var wait bool
			if n, wait, end = y.readv(at, [][]byte{make([]byte, 100)}); wait {
				break
			}
			got += n
		}
		if !y.gone.Load() {
			require.NoError(t, writeTo(x, []byte("words")))
			x.control.close()
			require.Eventually(t, y.gone.Load, patience, time.Millisecond)
		}
		return end != nil
	}
	require.NoError(t, soon(t, func() error { return y.read(step) }))
	require.Equal(t, len("words"), got)
	require.ErrorIs(t, end, io.EOF)
}

// An end that is closed with bytes to read is a reset for its peer, as with TCP. Where all is read
// it is an orderly end.
func TestCloseOfLinkWithUnread(t *testing.T) {
	for _, tt := range []struct {
		name  string
		reset bool
		pair  func(t *testing.T) (x, y *shared) // x is closed
	}{
		{"all read", false, movedPair},
		{"ring", true, func(t *testing.T) (x, y *shared) {
			x, y = movedPair(t)
			require.NoError(t, writeTo(y, []byte("unread")))
			return x, y
		}},
		{"smaller ring", false, func(t *testing.T) (x, y *shared) {
			x, y = movedPair(t)
			for large := false; !large; { // An offer may be under way.
				carry(t, y, x, 64<<10)
				y.out.Lock()
				large = !y.out.ring.Small() && y.out.ring.CanMove() && y.out.offered == nil
				y.out.Unlock()
			}
			y.trim()
			require.False(t, y.out.ring.Empty() && y.out.ring.CanMove(), "the ring has not shrunk")
			return x, y
		}},
		{"ring behind the mark", true, func(t *testing.T) (x, y *shared) {
			y, x = halfMovedPair(t)
			require.NoError(t, writeTo(y, []byte("unread")))
			return x, y
		}},
		{"ring, by an end that has not moved", true, func(t *testing.T) (x, y *shared) {
			y, x = readerPair(t)
			require.NoError(t, writeTo(y, []byte("unread")))
			return x, y
		}},
		{"all read, by an end that has not moved", false, func(t *testing.T) (x, y *shared) {
			y, x = readerPair(t)
			return x, y
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leaktest.Check(t)
			x, y := tt.pair(t)
			require.NoError(t, x.close(false))
			err := soon(t, func() error {
				_, err := readFrom(y, make([]byte, 100))
				return err
			})
			if tt.reset {
				require.ErrorIs(t, err, errno.ECONNRESET)
			} else {
				require.ErrorIs(t, err, io.EOF)
			}
		})
	}
}

// A peer that has gone never acknowledges the bytes that it has not read.
func TestGoneAcknowledgesNothing(t *testing.T) {
	leaktest.Check(t)
	x, y := movedPair(t)
	require.NoError(t, writeTo(x, []byte("unread")))
	require.NoError(t, x.closeWrite())
	require.NotEqual(t, ibv.AckNever, x.acknowledged())
	quit(y)
	require.Eventually(t, func() bool { return x.acknowledged() == ibv.AckNever }, patience, time.Millisecond)
}

// The mark goes at once also behind a call that has TCP keep what is incomplete.
func TestMarkBehindCork(t *testing.T) {
	leaktest.Check(t)
	a, b := linkPair(t, sharedKinds()["sharing"])
	x := a.(*shared)
	carry(t, x, b, moveAfterBytes)
	awaitHandover(t, x)
	x.ending()
	require.NoError(t, writeTo(x, nil))
	require.True(t, x.out.on.Load())
	corked := -1
	require.NoError(t, x.raw.Control(func(fd uintptr) {
		corked, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK)
	}))
	require.Zero(t, corked)
}

// An interrupted write returns though there is no room, and others wait again after resumeWrite.
func TestInterruptRingWrite(t *testing.T) {
	leaktest.Check(t)
	x, y := movedPair(t)
	full := make(chan error, 1)
	data := make([]byte, 2*thirdRing)
	go func() { full <- writeTo(x, data) }()
	require.Eventually(t, x.writerSleeps, patience, time.Millisecond)
	x.interruptWrite()
	require.ErrorIs(t, soon(t, func() error { return <-full }), os.ErrDeadlineExceeded)
	x.resumeWrite()
	go func() { full <- writeTo(x, []byte("hello")) }()
	require.NoError(t, soon(t, func() error {
		b := make([]byte, 64<<10)
		for {
			select {
			case err := <-full:
				return err
			default:
			}
			if _, err := pollFrom(y, b); err != nil {
				return err
			}
		}
	}))
}
