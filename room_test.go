package rdmanet

import (
	"bytes"
	"math"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// roomWay is a way in which a connection keeps what nobody reads: in the kernels of both hosts
// over the software device, and else in receives and in copies.
type roomWay struct {
	name string
	cfg  Config
}

func roomWays(t testing.TB) []roomWay {
	ways := []roomWay{{"default", Config{}}, {"few receives", Config{MaxReceiveCredits: minCredits}}, {"writes", Config{NoRDMARead: true}},
		{"transfers", Config{TransferSize: 64 << 10}}}
	if onRDMA {
		return ways
	}
	pinned := newModest(t, 64, 1<<14, true)
	for _, way := range ways {
		unpinned := way
		unpinned.cfg = withCredits(t, way.cfg)
		way.cfg.Provider = pinned
		ways = append(ways, roomWay{way.name + " with credits", unpinned.cfg}, roomWay{way.name + " in pinned memory", way.cfg})
	}
	return ways
}

// roomWrites are Writes that a connection takes though nobody reads.
var roomWrites = []struct{ size, count int }{{1 << 20, 1}, {512 << 10, 2}, {64 << 10, 16}, {8 << 10, 128}, {5000, 210}, {2000, 600}, {200, 10000}, {1, 10000}}

// writeInParts makes Writes of that many bytes.
func writeInParts(c *Conn, p []byte, size int) error {
	for ; len(p) > 0; p = p[size:] {
		if _, err := c.Write(p[:size]); err != nil {
			return err
		}
	}
	return nil
}

// atBothEnds runs a program at both ends at once, and then reads what each has left unread.
func atBothEnds(t testing.TB, a, b *Conn, left []byte, program func(c *Conn) error) {
	t.Helper()
	errs := make(chan error, 2)
	for _, c := range []*Conn{a, b} {
		go func() { errs <- program(c) }()
	}
	for range 2 {
		within(t, "a program", func() { require.NoError(t, <-errs) })
	}
	for _, c := range []*Conn{a, b} {
		require.NoError(t, defect.ReadFull(c, left))
	}
}

// A connection that nobody reads takes about as much as TCP does, in Writes of any size, in both
// directions at once, and all of it arrives.
func TestRoomForWriter(t *testing.T) {
	for _, way := range roomWays(t) {
		t.Run(way.name, func(t *testing.T) {
			checkLeaks(t)
			cfg := way.cfg
			for _, w := range roomWrites {
				a, b := pipeOn(t, cfg)
				want := pattern(1, w.size*w.count)
				atBothEnds(t, a, b, want, func(c *Conn) error { return writeInParts(c, want, w.size) })
				closeBoth(t, a, b)
			}
		})
	}
}

// Data that was written before the other end has accepted the connection has as much room.
func TestRoomBeforeAccept(t *testing.T) {
	for _, way := range roomWays(t) {
		t.Run(way.name, func(t *testing.T) {
			checkLeaks(t)
			cfg := way.cfg
			ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
			require.NoError(t, err)
			defer ln.Close()
			for _, w := range roomWrites {
				c, err := (&Dialer{Config: cfg}).DialContext(tctx, "rdma4", ln.Addr().String())
				require.NoError(t, err)
				a := c.(*Conn)
				want := pattern(2, w.size*w.count)
				within(t, "Writes", func() { require.NoError(t, writeInParts(a, want, w.size)) })
				b, err := ln.Accept()
				require.NoError(t, err)
				require.NoError(t, defect.ReadFull(b, want))
				closeBoth(t, a, b.(*Conn))
			}
		})
	}
}

// The room is there again after a connection was idle, also while something is unread.
func TestRoomAfterIdle(t *testing.T) {
	for _, way := range roomWays(t) {
		t.Run(way.name, func(t *testing.T) {
			checkLeaks(t)
			a, b := pipeOn(t, way.cfg)
			for range 2 {
				want := pattern(3, 1<<20)
				for p := want; len(p) > 0; p = p[256<<10:] {
					within(t, "Writes", func() { require.NoError(t, writeInParts(a, p[:256<<10], 64<<10)) })
					a.idleFor(idleAfter)
					b.idleFor(idleAfter)
				}
				require.NoError(t, defect.ReadFull(b, want))
			}
			closeBoth(t, a, b)
		})
	}
}

// Programs that have read, and then both write before they read on, have the room too.
func TestRoomAfterReading(t *testing.T) {
	for _, way := range roomWays(t) {
		t.Run(way.name, func(t *testing.T) {
			checkLeaks(t)
			a, b := pipeOn(t, way.cfg)
			for _, bulk := range []bool{false, true} {
				if bulk {
					exchange(t, a, b, 8<<20)
				}
				want := pattern(4, 1<<20)
				atBothEnds(t, a, b, want[1:], func(c *Conn) error {
					if err := writeInParts(c, want[:64<<10], 64<<10); err != nil {
						return err
					}
					if err := defect.ReadFull(c, want[:1]); err != nil {
						return err
					}
					return writeInParts(c, want[64<<10:], 64<<10)
				})
			}
			closeBoth(t, a, b)
		})
	}
}

// A writer that has found Config.ReceiveMemory used up goes on when other connections have given
// some back, though nobody reads.
func TestRoomComesBack(t *testing.T) {
	checkLeaks(t)
	cfg := withCredits(t, Config{ReceiveMemory: 2 << 20, TransferSize: -1})
	a, b := pipeOn(t, cfg)
	c, d := pipeOn(t, cfg)
	first, second := pattern(5, 8<<20), pattern(6, 1<<20)
	wrote := writing(a, first)
	stalled(t, a, b)
	other := writing(c, second)
	stalled(t, c, d)
	require.Empty(t, other)
	require.NoError(t, defect.ReadFull(b, first))
	require.NoError(t, (<-wrote).err)
	a.idleFor(idleAfter)
	b.idleFor(idleAfter)
	within(t, "Write", func() { require.NoError(t, (<-other).err) })
	require.NoError(t, defect.ReadFull(d, second))
	closeBoth(t, a, b)
	closeBoth(t, c, d)
}

// Connections whose windows have used up Config.ReceiveMemory leave others the room of small Writes.
func TestRoomBesideBusy(t *testing.T) {
	checkLeaks(t)
	cfg := Config{ReceiveMemory: 1 << 20, TransferSize: -1}
	if !onRDMA {
		cfg.Provider = newModest(t, 64, 1<<14, true)
	}
	a, b := pipeOn(t, cfg)
	require.True(t, eventually(func() bool {
		exchange(t, a, b, 4<<20)
		return a.dom.Budget.Used() > 1<<20-int64(a.pool.Size)
	}))
	c, d := pipeOn(t, cfg)
	want := pattern(7, 100<<10)
	atBothEnds(t, c, d, want, func(c *Conn) error { return writeInParts(c, want, 200) })
	closeBoth(t, a, b)
	closeBoth(t, c, d)
}

// Unread data takes no more than Config.ReceiveMemory on all connections together. A writer that
// finds that used up waits for the reader, nothing is lost, and the memory is given back.
func TestRoomIsBounded(t *testing.T) {
	const bound, count = 3 << 20, 4
	for _, size := range []int{20, 2000, 64 << 10} {
		t.Run(strconv.Itoa(size), func(t *testing.T) {
			checkLeaks(t)
			cfg := Config{ReceiveMemory: bound, TransferSize: -1}
			if !onRDMA {
				cfg.Provider = newModest(t, 64, 1<<14, true)
			}
			var from, to [count]*Conn
			wrote := make([]chan int, count)
			for i := range count {
				from[i], to[i] = pipeOn(t, cfg)
				wrote[i] = make(chan int, 1)
				go func() {
					data, sent := pattern(uint64(i), 8<<20), 0
					for n, err := 0, error(nil); err == nil; {
						n, err = from[i].WriteMsg(data[sent:][:size])
						sent += n
					}
					wrote[i] <- sent
				}()
			}
			used := to[0].dom.Budget.Used
			for i := range count {
				stalled(t, from[i], to[i])
				require.NoError(t, from[i].SetWriteDeadline(past))
			}
			require.LessOrEqual(t, used(), int64(bound))
			require.Greater(t, used(), int64(bound/2))
			for i := range count {
				require.NoError(t, defect.ReadFull(to[i], pattern(uint64(i), 8<<20)[:<-wrote[i]]))
				closeBoth(t, from[i], to[i])
			}
			require.True(t, eventually(func() bool { return used() == 0 }), "%d bytes are still charged", used())
		})
	}
}

// Where the kernels hold what nobody reads, connections have their room although
// Config.ReceiveMemory is used up, and take no more of it.
func TestRoomInKernels(t *testing.T) {
	checkLeaks(t)
	const bound = 128 << 10
	want := pattern(8, 2<<20)
	kernels := overTCP()
	var from, to [4]*Conn
	for i := range from {
		from[i], to[i] = heldPipeOn(t, Config{Provider: kernels, ReceiveMemory: bound})
		within(t, "Writes", func() { require.NoError(t, writeInParts(from[i], want, 256)) })
	}
	used := to[0].dom.Budget.Used
	copies := func() (n int) {
		for _, c := range to {
			c.mu.Lock()
			n += c.in.copies.bytes
			c.mu.Unlock()
		}
		return n
	}
	require.True(t, eventually(func() bool { return used() == bound }), "%d bytes are used", used())
	require.LessOrEqual(t, copies(), bound)
	for i := range from {
		require.NoError(t, defect.ReadFull(to[i], want))
		closeBoth(t, from[i], to[i])
	}
	require.True(t, eventually(func() bool { return used() == 0 }), "%d bytes are still charged", used())
}

// Payloads are copied to chunks, which are charged and given back.
func TestCopyBreak(t *testing.T) {
	budget := new(regmem.Budget)
	c := copyBreak{limit: copyBreakLimit, free: copyBreakFree, charge: budget.Share(math.MaxInt64, 1)}
	for _, n := range []int{0, 1, 4000, copyBreakSize / 4, copyBreakSize/4 + 1, copyBreakSize, 1 << 20} {
		payload := pattern(5, n)
		var copies [][]byte
		var chunks []*copyBreakChunk
		for {
			b, k := c.copy(payload)
			if k == nil {
				break
			}
			copies, chunks = append(copies, b), append(chunks, k)
		}
		require.Greater(t, len(copies), copyBreakLimit*3/4/(n+copyBreakCost)-1)
		require.LessOrEqual(t, len(copies), copyBreakLimit/(n+copyBreakCost))
		require.LessOrEqual(t, budget.Used(), int64(copyBreakLimit-copyBreakFree))
		require.GreaterOrEqual(t, budget.Used(), int64(len(copies)*(n+copyBreakCost)-copyBreakFree))
		for i, b := range copies {
			require.True(t, bytes.Equal(payload, b))
			require.Equal(t, len(b), cap(b), "the next payload is behind it")
			c.release(chunks[i])
		}
		require.Zero(t, budget.Used())
		require.Nil(t, c.filling)
	}
	c.charge = budget.Share(2*copyBreakSize+10, 1)
	for range 2 + copyBreakFree/copyBreakSize {
		for range copyBreakSize / copyBreakCost {
			_, k := c.copy(nil)
			require.NotNil(t, k)
		}
	}
	_, k := c.copy(nil)
	require.Nil(t, k, "the budget is used up")
	require.EqualValues(t, 2*copyBreakSize, budget.Used())
}
