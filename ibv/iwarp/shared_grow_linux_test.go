//go:build amd64 || arm64

package iwarp

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// ringsOf counts the rings of a size in this process, which has both ends of each: those that both
// have mapped, or -1 if there is one that only one end has.
func ringsOf(t testing.TB, size uint64) (n int) {
	t.Helper()
	f, err := os.Open("/proc/self/maps")
	require.NoError(t, err)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var from, to uint64
		if _, err := fmt.Sscanf(s.Text(), "%x-%x", &from, &to); err == nil && to-from == size && strings.Contains(s.Text(), "memfd:") {
			n++
		}
	}
	if n%2 == 1 {
		return -1
	}
	return n / 2
}

// carry carries n bytes from x to y.
func carry(t testing.TB, x, y link, n int) {
	t.Helper()
	werr := make(chan error, 1)
	go func() {
		b := make([]byte, 64<<10)
		for left := n; left > 0; left -= len(b) {
			if err := writeTo(x, b); err != nil {
				werr <- err
				return
			}
		}
		werr <- nil
	}()
	b := make([]byte, 64<<10)
	for left := n; left > 0; left -= len(b) {
		_, err := readFrom(y, b)
		require.NoError(t, err)
	}
	require.NoError(t, <-werr)
}

// carryUntil carries data from x to y until done reports true.
func carryUntil(t testing.TB, x, y link, what string, done func() bool) {
	t.Helper()
	for until := time.Now().Add(patience); !done(); {
		require.True(t, time.Now().Before(until), what)
		carry(t, x, y, 4<<20)
	}
}

// A ring grows to the largest size where a stream fills it, and goes when the stream
// pauses. Some connections may have such a ring at a time, and the others go on without.
func TestRingsGrow(t *testing.T) {
	oldWithin, oldMax := thirdWithin, maxThirdRings
	thirdWithin, maxThirdRings = time.Hour, 2
	t.Cleanup(func() { thirdWithin, maxThirdRings = oldWithin, oldMax })
	nothingLeft(t)
	shmem := &sharedNet{now: true}
	a, b := linkPair(t, shmem.open)
	c, d := linkPair(t, shmem.open)
	large := func(n int) func() bool { return func() bool { return ringsOf(t, thirdRing) == n } }
	require.True(t, large(0)())
	grown := func(n int) func() bool { return func() bool { return large(n)() && ringsOf(t, secondRing) == 0 } }
	carryUntil(t, a, b, "the ring of the initiator has not grown", grown(1))
	carryUntil(t, b, a, "the ring of the responder has not grown", grown(2))

	// The next one stays with the second size.
	carryUntil(t, c, d, "the ring has not grown to the second size", func() bool {
		return ringsOf(t, secondRing) == 1 && ringsOf(t, firstRing) == 0
	})
	carry(t, c, d, 64<<20)
	require.Equal(t, 2, ringsOf(t, thirdRing))
	require.Equal(t, 1, ringsOf(t, secondRing))

	// Another one that becomes idle makes room for it.
	b.(*shared).trim()
	carry(t, b, a, 64<<10) // The reader follows to the ring in the page.
	require.Equal(t, 1, ringsOf(t, thirdRing))
	carryUntil(t, c, d, "the ring has not grown when there was room", large(2))

	require.NoError(t, c.close(false))
	require.NoError(t, d.close(false))
	require.Eventually(t, large(1), patience, time.Millisecond) // An offer may be under way.
	carry(t, a, b, 64<<20)
	require.NoError(t, a.close(false))
	require.NoError(t, b.close(false))
	require.Eventually(t, large(0), patience, time.Millisecond)
	require.Zero(t, shmem.meeting.thirdRings.Load())
}

// A writer that waits for room goes on when the peer has accepted a larger ring, though the peer reads
// nothing.
func TestWriterGoesOnInLargerRing(t *testing.T) {
	nothingLeft(t)
	x, y := movedPair(t)
	for small := false; !small; { // An offer may be under way.
		x.trim()
		require.NoError(t, writeTo(x, []byte("x")))
		_, err := readFrom(y, make([]byte, 1))
		require.NoError(t, err)
		x.out.Lock()
		small = x.out.ring.Small() && x.out.ring.CanMove() && x.out.offered == nil
		x.out.Unlock()
	}
	want := bytesOf(40 << 10)
	require.NoError(t, soon(t, func() error { return writeTo(x, want) }))
	got := make([]byte, len(want))
	_, err := readFrom(y, got)
	require.NoError(t, err)
	defect.Bytes(t, want, got)
}

// A ring that the peer has refused is offered again, but not at once.
func TestRefusedOffer(t *testing.T) {
	leaktest.Check(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	p := newFuzzPeer(t, ln)
	defer p.close()
	control := plainControl(t, p.control)
	// offers writes more than there is room for, and reports whether the link offers a ring then.
	offers := func() bool {
		require.NoError(t, p.l.write(func(at uintptr) bool {
			_, _, err := p.l.writev(at, [][]byte{make([]byte, firstRing)})
			require.NoError(t, err)
			return true
		}))
		_, ring, ok := control.receive()
		if ok {
			require.GreaterOrEqual(t, ring, 0)
			unix.Close(ring)
		}
		return ok
	}
	refuse := func() {
		require.NoError(t, control.send(refused))
		require.Eventually(t, func() bool {
			p.l.out.Lock()
			defer p.l.out.Unlock()
			return p.l.out.offered == nil
		}, patience, time.Millisecond)
	}
	require.True(t, offers())
	refuse()
	p.l.out.growth.refused = time.Now().Add(time.Hour)
	require.False(t, offers())
	p.l.out.growth.refused = time.Now().Add(-ringPatience)
	require.True(t, offers())
	refuse()
	require.Less(t, time.Since(p.l.out.growth.refused), ringPatience)
}
