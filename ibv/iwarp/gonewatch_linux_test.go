//go:build amd64 || arm64

package iwarp

import (
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

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
	l.bell.Load().conn.Close()
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

// An interrupted write returns though there is no room, and others wait again after resumeWrite.
func TestInterruptRingWrite(t *testing.T) {
	leaktest.Check(t)
	x, y := movedPair(t)
	full := make(chan error, 1)
	data := make([]byte, 2*thirdRing)
	go func() { full <- writeTo(x, data) }()
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
