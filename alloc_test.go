package rdmanet

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

// alloc is Alloc for the time of the test.
func alloc(t testing.TB, n int) *Buffer {
	t.Helper()
	b, err := Alloc(n)
	require.NoError(t, err)
	t.Cleanup(b.Free)
	return b
}

// mapped is RegisterMemory of n bytes for the time of the test.
func mapped(t testing.TB, n int) *Buffer {
	t.Helper()
	mem, err := allocPages(n)
	require.NoError(t, err)
	b, err := RegisterMemory(mem)
	require.NoError(t, err)
	t.Cleanup(func() {
		b.Free()
		require.NoError(t, freePages(mem))
	})
	return b
}

// Buffers have the length that was asked for, are zero however often the memory
// was in use before, and share no byte.
func TestAlloc(t *testing.T) {
	checkLeaks(t)
	sizes := []int{1, 511, pageSize, pageSize + 1, 10000, 64 << 10, 64<<10 + 1, largePiece, largePiece + 1, 1 << 20, hugeSpan - 1,
		hugeSpan, 5<<20 + 1}
	for round := range 3 {
		var bufs []*Buffer
		for i, n := range append(sizes, sizes...) {
			b, err := Alloc(n)
			require.NoError(t, err)
			mem := b.Bytes()
			require.Len(t, mem, n)
			require.Equal(t, n, cap(mem), "what is behind is another's")
			require.Zero(t, addressOf(mem)%pageSize)
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
			require.Equal(t, len(b.Bytes()), bytes.Count(b.Bytes(), []byte{byte(i + 1)}), "Buffer %d was overwritten", i)
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
		_, err := Alloc(n)
		require.ErrorIs(t, err, syscall.EINVAL, "%d", n)
	}
}

// What one Buffer has taken and given back the next one gets, and when all are
// given back the system has it.
func TestAllocReuses(t *testing.T) {
	checkLeaks(t)
	keep := alloc(t, 100)
	before := len(memory.list())
	var last uintptr
	for i := range 10 * spanBytes / pageSize {
		b, err := Alloc(pageSize)
		require.NoError(t, err)
		if i > 0 {
			require.Equal(t, last, addressOf(b.Bytes()))
		}
		last = addressOf(b.Bytes())
		b.Free()
	}
	require.Len(t, memory.list(), before)
	require.NotNil(t, findRegion(keep.Bytes()))
}

// Memory is found by any part of it, and nothing else is.
func TestFindRegion(t *testing.T) {
	checkLeaks(t)
	heap := make([]byte, 10000)
	own, err := RegisterMemory(heap[1000:9000])
	require.NoError(t, err)
	defer own.Free()
	for _, b := range []*Buffer{alloc(t, 1), alloc(t, 5000), alloc(t, 5000), alloc(t, largePiece), alloc(t, 300<<10),
		alloc(t, hugeSpan), mapped(t, 3*pageSize), own} {
		mem := b.Bytes()
		n := len(mem)
		for _, part := range [][]byte{mem, mem[:1], mem[n-1:], mem[n/3 : n/2+1]} {
			require.Same(t, b, findRegion(part), "%d of %d bytes", len(part), n)
		}
		require.Nil(t, findRegion(mem[:0]))
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
		"beyond the Buffer":     span[a.at*a.span.size:][:5001],
		"several Buffers":       span[:len(span):len(span)],
	} {
		require.Nil(t, findRegion(b), name)
	}
	mem := a.Bytes()
	a.Free()
	require.Nil(t, findRegion(mem), "after Free")
	mem = own.Bytes()
	own.Free()
	require.Nil(t, findRegion(mem), "after Free")
}

func TestRegisterMemoryRefused(t *testing.T) {
	checkLeaks(t)
	mem := make([]byte, 10000)
	b, err := RegisterMemory(mem[2000:6000])
	require.NoError(t, err)
	a := alloc(t, 1000)
	for _, bad := range [][]byte{nil, mem[:0], mem, mem[2000:6000], mem[:2001], mem[5999:], mem[3000:3001], a.Bytes(), a.Bytes()[999:]} {
		_, err := RegisterMemory(bad)
		require.ErrorIs(t, err, syscall.EINVAL)
	}
	before, err := RegisterMemory(mem[:2000])
	require.NoError(t, err)
	behind, err := RegisterMemory(mem[6000:])
	require.NoError(t, err)
	b.Free()
	b.Free()
	require.Nil(t, b.Bytes())
	again, err := RegisterMemory(mem[2000:6000])
	require.NoError(t, err)
	for _, b := range []*Buffer{before, behind, again} {
		b.Free()
	}
	require.Equal(t, make([]byte, 10000), mem, "the application's bytes are nobody else's")
}

// Memory that the application has unmapped without Free is forgotten when the
// system has given the addresses away again.
func TestStaleMemory(t *testing.T) {
	var m spans
	mem := make([]byte, 9000)
	at := func(from, to int, ours bool) *span {
		return &span{mem: mem[from:to], size: to - from, ours: ours, pieces: make([]atomic.Pointer[Buffer], 1)}
	}
	left, stale1, stale2, right := at(0, 1000, true), at(1000, 3000, false), at(4000, 5000, false), at(6000, 9000, false)
	for _, s := range []*span{right, stale2, left, stale1} {
		require.True(t, m.insert(s))
	}
	require.Equal(t, []*span{left, stale1, stale2, right}, m.list())
	require.False(t, m.insert(at(500, 4500, true)), "part of it is ours already")
	require.False(t, m.insert(at(2999, 3001, false)))
	ours := at(2000, 6000, true)
	require.True(t, m.insert(ours))
	require.Equal(t, []*span{left, ours, right}, m.list())
	m.remove(stale1) // Free after all
	m.remove(left)
	require.Equal(t, []*span{ours, right}, m.list())
}

// Free of the application's memory waits for what is under way, as it may be
// unmapped then; Free of Alloc's leaves that to the transfer.
func TestFreeInUse(t *testing.T) {
	checkLeaks(t)
	own, err := RegisterMemory(make([]byte, 100))
	require.NoError(t, err)
	require.True(t, own.hold())
	require.True(t, own.hold())
	done := make(chan int, 2)
	for i := range cap(done) {
		go func() {
			own.Free()
			done <- i
		}()
	}
	require.True(t, eventually(func() bool { return own.Bytes() == nil }))
	require.False(t, own.hold())
	own.unhold(nil)
	require.Empty(t, done)
	own.unhold(nil)
	within(t, "Free", func() { <-done; <-done })

	a, err := Alloc(100)
	require.NoError(t, err)
	mem := a.Bytes()
	require.True(t, a.hold())
	within(t, "Free", a.Free)
	require.False(t, a.hold())
	require.NotEmpty(t, memory.list())
	mem[0] = 1 // still there
	other := alloc(t, 100)
	require.NotEqual(t, addressOf(mem), addressOf(other.Bytes()), "given away while in use")
	a.unhold(nil)
	require.Equal(t, byte(0), alloc(t, 100).Bytes()[0])
}

// Many goroutines take, find, hold and free at once.
func TestAllocConcurrent(t *testing.T) {
	checkLeaks(t)
	shared := make([]atomic.Pointer[Buffer], 8)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 1))
			for range heavy(500) {
				b, err := Alloc(1 + rnd.IntN(3*largePiece/2))
				if err != nil {
					panic(err)
				}
				mem := b.Bytes()
				if findRegion(mem) != b {
					panic(fmt.Sprintf("%d bytes are not found", len(mem)))
				}
				if old := shared[rnd.IntN(len(shared))].Swap(b); old != nil {
					held := old.hold()
					old.Free()
					if held {
						old.b[0]++ // no other Buffer's as long as it is held
						old.unhold(nil)
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
