package regmem

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// newMemory returns a Memory of n bytes.
func newMemory(n int) (*Memory, error) {
	m := new(Memory)
	return m, m.Alloc(n)
}

// register returns a Memory of the program's own.
func register(b []byte) (*Memory, error) {
	m := new(Memory)
	return m, m.Register(b)
}

// alloc returns a Memory of n bytes for the time of the test.
func alloc(t testing.TB, n int) *Memory {
	t.Helper()
	m, err := newMemory(n)
	require.NoError(t, err)
	t.Cleanup(m.Free)
	return m
}

// mapped returns a Memory of n bytes that the test has mapped itself, for the time of the
// test.
func mapped(t testing.TB, n int) *Memory {
	t.Helper()
	b, err := AllocPages(n)
	require.NoError(t, err)
	m, err := register(b)
	require.NoError(t, err)
	t.Cleanup(func() {
		m.Free()
		require.NoError(t, FreePages(b))
	})
	return m
}

// Memory has the length that was asked for, is zero however often it
// was in use before, and no two have a byte in common.
func TestAlloc(t *testing.T) {
	checkLeaks(t)
	sizes := []int{1, 511, PageSize, PageSize + 1, 10000, 64 << 10, 64<<10 + 1, largePiece, largePiece + 1, 1 << 20, hugeSpan - 1,
		hugeSpan, 5<<20 + 1}
	for round := range 3 {
		var bufs []*Memory
		for i, n := range append(sizes, sizes...) {
			b, err := newMemory(n)
			require.NoError(t, err)
			mem := b.Bytes()
			require.Len(t, mem, n)
			require.Equal(t, n, cap(mem), "what is behind is another's")
			require.Zero(t, addressOf(mem)%PageSize)
			if n >= hugeSpan && runtime.GOOS == "linux" {
				require.Zero(t, addressOf(mem)%hugeSpan)
			}
			require.Equal(t, n, bytes.Count(mem, []byte{0}), "%d bytes in round %d", n, round)
			for j := range mem {
				mem[j] = byte(i + 1)
			}
			bufs = append(bufs, b)
		}
		for i, b := range bufs {
			require.Equal(t, len(b.Bytes()), bytes.Count(b.Bytes(), []byte{byte(i + 1)}), "Memory %d was overwritten", i)
		}
		rand.Shuffle(len(bufs), func(i, j int) { bufs[i], bufs[j] = bufs[j], bufs[i] })
		for i, b := range bufs {
			if round == 1 && i%2 == 0 {
				defer b.Free() // so that spans stay, in part
				continue
			}
			b.Free()
			require.Nil(t, b.Bytes())
			b.Free()
		}
	}
}

func TestAllocRefused(t *testing.T) {
	checkLeaks(t)
	for _, n := range []int{0, -1, math.MinInt, math.MaxInt} {
		_, err := newMemory(n)
		require.ErrorIs(t, err, syscall.EINVAL, "%d", n)
	}
}

// What one Memory has taken and given back the next one gets, and when all are
// given back the system has it.
func TestAllocReuses(t *testing.T) {
	checkLeaks(t)
	keep := alloc(t, 100)
	before := len(memory.list())
	var last uintptr
	for i := range 10 * spanBytes / PageSize {
		b, err := newMemory(PageSize)
		require.NoError(t, err)
		if i > 0 {
			require.Equal(t, last, addressOf(b.Bytes()))
		}
		last = addressOf(b.Bytes())
		b.Free()
	}
	require.Len(t, memory.list(), before)
	require.NotNil(t, Find(keep.Bytes()))
}

// Memory is found by any part of it, and nothing else is.
func TestFind(t *testing.T) {
	checkLeaks(t)
	heap := make([]byte, 10000)
	own, err := register(heap[1000:9000])
	require.NoError(t, err)
	defer own.Free()
	for _, b := range []*Memory{alloc(t, 1), alloc(t, 5000), alloc(t, 5000), alloc(t, largePiece), alloc(t, 300<<10),
		alloc(t, hugeSpan), mapped(t, 3*PageSize), own} {
		mem := b.Bytes()
		n := len(mem)
		for _, part := range [][]byte{mem, mem[:1], mem[n-1:], mem[n/3 : n/2+1]} {
			require.Same(t, b, Find(part), "%d of %d bytes", len(part), n)
		}
		require.Nil(t, Find(mem[:0]))
	}
	a := alloc(t, 5000)
	span := a.span.mem
	for name, b := range map[string][]byte{
		"nil":                   nil,
		"heap":                  make([]byte, 100),
		"before":                heap[999:1001],
		"behind":                heap[8999:9001],
		"around":                heap,
		"rest of the last page": span[a.at*a.span.size+5000:][:1],
		"beyond the Memory":     span[a.at*a.span.size:][:5001],
		"several of them":       span[:len(span):len(span)],
	} {
		require.Nil(t, Find(b), name)
	}
	mem := a.Bytes()
	a.Free()
	require.Nil(t, Find(mem), "after Free")
	mem = own.Bytes()
	own.Free()
	require.Nil(t, Find(mem), "after Free")
}

func TestRegisterRefused(t *testing.T) {
	checkLeaks(t)
	mem := make([]byte, 10000)
	b, err := register(mem[2000:6000])
	require.NoError(t, err)
	a := alloc(t, 1000)
	for _, bad := range [][]byte{nil, mem[:0], mem, mem[2000:6000], mem[:2001], mem[5999:], mem[3000:3001], a.Bytes(), a.Bytes()[999:]} {
		_, err := register(bad)
		require.ErrorIs(t, err, syscall.EINVAL)
	}
	before, err := register(mem[:2000])
	require.NoError(t, err)
	behind, err := register(mem[6000:])
	require.NoError(t, err)
	b.Free()
	b.Free()
	require.Nil(t, b.Bytes())
	again, err := register(mem[2000:6000])
	require.NoError(t, err)
	for _, b := range []*Memory{before, behind, again} {
		b.Free()
	}
	require.Equal(t, make([]byte, 10000), mem, "the application's bytes are nobody else's")
}

// Free of the application's memory waits for what is under way, as it may be
// unmapped then; Free of Alloc's leaves that to the transfer.
func TestFreeInUse(t *testing.T) {
	checkLeaks(t)
	own, err := register(make([]byte, 100))
	require.NoError(t, err)
	require.True(t, own.borrow())
	require.True(t, own.borrow())
	done := make(chan int, 2)
	for i := range cap(done) {
		go func() {
			own.Free()
			done <- i
		}()
	}
	require.True(t, eventually(func() bool { return own.Bytes() == nil }))
	require.False(t, own.borrow())
	own.Return(nil)
	require.Empty(t, done)
	own.Return(nil)
	within(t, "Free", func() { <-done; <-done })

	a, err := newMemory(100)
	require.NoError(t, err)
	mem := a.Bytes()
	require.True(t, a.borrow())
	within(t, "Free", a.Free)
	require.False(t, a.borrow())
	require.NotEmpty(t, memory.list())
	mem[0] = 1 // still there
	other := alloc(t, 100)
	require.NotEqual(t, addressOf(mem), addressOf(other.Bytes()), "given away while in use")
	a.Return(nil)
	require.Equal(t, byte(0), alloc(t, 100).Bytes()[0])
}

// Many goroutines take, find, hold and free at once.
func TestAllocConcurrent(t *testing.T) {
	checkLeaks(t)
	shared := make([]atomic.Pointer[Memory], 8)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 1))
			for range heavy(500) {
				b, err := newMemory(1 + rnd.IntN(3*largePiece/2))
				if err != nil {
					panic(err)
				}
				mem := b.Bytes()
				if Find(mem) != b {
					panic(fmt.Sprintf("%d bytes are not found", len(mem)))
				}
				if old := shared[rnd.IntN(len(shared))].Swap(b); old != nil {
					held := old.borrow()
					old.Free()
					if held {
						old.b[0]++ // no other Memory's as long as it is held
						old.Return(nil)
					}
				}
			}
		})
	}
	wg.Wait()
	for i := range shared {
		if b := shared[i].Load(); b != nil {
			b.Free()
		}
	}
}
