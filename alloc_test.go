package rdmanet

import (
	"fmt"
	"math"
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

// A Buffer has the length that was asked for, and is zero whatever the memory had before.
func TestAlloc(t *testing.T) {
	checkLeaks(t)
	for range 3 {
		b, err := Alloc(5000)
		require.NoError(t, err)
		require.Equal(t, make([]byte, 5000), b.Bytes())
		require.Equal(t, 5000, cap(b.Bytes()), "what is behind is another's")
		copy(b.Bytes(), pattern(1, 5000))
		b.Free()
		require.Nil(t, b.Bytes())
		b.Free()
	}
}

// Alloc takes one object of Go's heap.
func TestAllocAllocates(t *testing.T) {
	checkLeaks(t)
	alloc(t, 100) // so that the mapping stays
	require.EqualValues(t, 1, testing.AllocsPerRun(100, func() {
		b, err := Alloc(100)
		if err != nil {
			t.Fatal(err)
		}
		b.Free()
	}))
}

func TestAllocRefused(t *testing.T) {
	checkLeaks(t)
	for _, n := range []int{0, -1, math.MinInt, math.MaxInt} {
		_, err := Alloc(n)
		require.ErrorIs(t, err, syscall.EINVAL, "%d", n)
		require.EqualError(t, err, fmt.Sprintf("rdmanet: Alloc of %d bytes: %v", n, syscall.EINVAL))
	}
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
		text := fmt.Sprintf("rdmanet: RegisterMemory of %d bytes that are in part a Buffer already: %v", len(bad), syscall.EINVAL)
		if len(bad) == 0 {
			text = fmt.Sprintf("rdmanet: RegisterMemory of no bytes: %v", syscall.EINVAL)
		}
		require.EqualError(t, err, text)
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
