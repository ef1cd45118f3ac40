package regmem

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// A private domain gives back what it has not needed for a
// while, and never what is in use.
func TestPrivateMemoryShrinks(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, &limited{Provider: provider, pins: true, apart: true})
	dom := acquire(t, sw)
	const size = 8 << 10
	p := dom.Pool(size)
	var held []*Buffer
	take := func(n int) {
		for range n {
			b, err := p.Get()
			require.NoError(t, err)
			b.B[0] = byte(len(held)) // it is there
			held = append(held, b)
		}
	}
	take(4)
	first := sw.RegisteredBytes()
	require.Nil(t, p.timer, "nothing will have to be given back")
	take(96)
	grown := sw.RegisteredBytes()
	for _, b := range held[4:] {
		b.Release()
	}
	held = held[:4]
	p.trim()
	require.Equal(t, grown, sw.RegisteredBytes(), "it was needed")
	require.NoError(t, checkHeld(held))

	take(60) // and so is this
	for _, b := range held[4:] {
		b.Release()
	}
	held = held[:4]
	p.trim()
	shrunk := sw.RegisteredBytes()
	require.Less(t, shrunk, grown)
	require.GreaterOrEqual(t, shrunk, int64(64*size))
	require.NotNil(t, p.timer)
	p.trim()
	require.Equal(t, first, sw.RegisteredBytes())
	require.Nil(t, p.timer)
	require.NoError(t, checkHeld(held))
	take(96)
	require.NoError(t, checkHeld(held))

	f := sw.FailNth(1, nil, verbstest.CloseMR)
	for _, b := range held {
		b.Release()
	}
	p.trim()
	p.trim()
	require.True(t, f.Fired())
	require.NoError(t, dom.CheckFree(), "a slab that stays is still of use")
	held = nil
	take(100)
	require.NoError(t, checkHeld(held))
	for _, b := range held {
		b.Release()
	}
	timer := p.timer
	require.NotNil(t, timer)
	require.NoError(t, dom.Release())
	p.trim() // if the timer was faster
	require.False(t, timer.Stop(), "the timer outlives the domain")
	requireReleased(t, sw)
}

// checkHeld looks whether the buffers have what was put there.
func checkHeld(held []*Buffer) error {
	for i, b := range held {
		if b.B[0] != byte(i) {
			return fmt.Errorf("buffer %d has the mark of %d", i, b.B[0])
		}
	}
	return nil
}

// Buffers of every size are whole, and those of one pool share no byte.
func TestPoolSizes(t *testing.T) {
	checkLeaks(t)
	dom := acquire(t, newSwitch(t, nil))
	for _, tt := range []struct{ n, size int }{
		{1, 512}, {512, 512}, {513, 1024}, {4096, 4096}, {4097, 8192}, {3 << 20, 3 << 20},
	} {
		p := dom.Pool(tt.n)
		require.Equal(t, tt.size, p.Size, "%d bytes", tt.n)
		require.Same(t, p, dom.Pool(tt.size))
		var held []*Buffer
		for i := range 2*slabBuffers/(1+tt.n/PageSize) + 2 {
			b, err := p.Get()
			require.NoError(t, err)
			require.Len(t, b.B, tt.size)
			require.Equal(t, tt.size, cap(b.B), "what is behind is another's")
			require.Same(t, p, b.Pool())
			require.Equal(t, ibv.SGE{Buf: b.B[:tt.n], LKey: b.LKey}, b.SGE(tt.n))
			b.B[0], b.B[tt.size-1] = byte(i), byte(i)
			held = append(held, b)
		}
		require.NoError(t, checkHeld(held))
		require.Error(t, dom.CheckFree())
		for i, b := range held {
			require.Equal(t, byte(i), b.B[tt.size-1])
			b.Release()
		}
		require.NoError(t, dom.CheckFree())
	}
	require.NoError(t, dom.Release())
}

// Older brings what is in use together in the first slab, as far as there is room.
func TestPoolOlder(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, &limited{Provider: provider, apart: true})
	dom := acquire(t, sw)
	p := dom.Pool(4096)
	var held []*Buffer
	for range firstBuffers + 1 {
		b, err := p.Get()
		require.NoError(t, err)
		held = append(held, b)
	}
	var inUse ring.Ring[*Buffer]
	last := held[firstBuffers]
	inUse.Push(last)
	require.NotSame(t, held[0].slab, last.slab)
	require.False(t, p.Scattered(&inUse), "the first slab is full")
	require.Same(t, last, p.Older(last))
	held[3].Release()
	require.True(t, p.Scattered(&inUse))
	moved := p.Older(last)
	require.Same(t, held[3], moved)
	require.Same(t, moved, p.Older(moved), "it is there already")
	*inUse.At(0) = moved
	require.False(t, p.Scattered(&inUse))
	other, err := dom.Pool(512).Get()
	require.NoError(t, err)
	require.Same(t, other, p.Older(other), "it is another pool's")
	other.Release()
	for _, b := range held[:firstBuffers] {
		b.Release()
	}
	require.NoError(t, dom.CheckFree())
	require.NoError(t, dom.Release())
}

// A pool that cannot grow says what to do, does not ask the device again at once unless
// it has a new user, and grows when there is memory.
func TestPoolWithoutMemory(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	dom := acquire(t, sw)
	p := dom.Pool(1000)
	sw.FailNth(1, syscall.ENOMEM, verbstest.RegMR)
	_, err := p.Get()
	require.ErrorIs(t, err, syscall.ENOBUFS)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.EqualError(t, err, fmt.Sprintf("%v: 1024 bytes of registered memory on %s: %v "+
		"(raise the limit on locked memory, ulimit -l, or lower the number of buffers)", syscall.ENOBUFS, dom.Dev.Name(), syscall.ENOMEM))
	calls := sw.Calls(verbstest.RegMR)
	if _, again := p.Get(); again != nil { // else 50 ms have passed
		require.Equal(t, calls, sw.Calls(verbstest.RegMR))
		require.Equal(t, err, again)
	}
	b, err := dom.Pool(1000).Get()
	require.NoError(t, err)
	b.Release()
	require.NoError(t, dom.Release())
}

// Buffers come out of a stack in the opposite order, and may be pushed again.
func TestBuffers(t *testing.T) {
	var s Buffers
	require.True(t, s.Empty())
	require.Nil(t, s.Pop())
	bufs := make([]Buffer, 3)
	for range 2 {
		for i := range bufs {
			s.Push(&bufs[i])
			require.False(t, s.Empty())
		}
		for i := len(bufs) - 1; i >= 0; i-- {
			require.Same(t, &bufs[i], s.Pop())
			require.Nil(t, bufs[i].next)
		}
		require.True(t, s.Empty())
	}
}
