//go:build unix

package fault

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/errno"
)

const pages = 8

// holed returns pages of which one can neither be read nor written.
func holed(t *testing.T, bad int) []byte {
	size := int(pageSize)
	mem, err := unix.Mmap(-1, 0, pages*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Munmap(mem) })
	for i := range mem {
		mem[i] = byte(i % 251)
	}
	require.NoError(t, unix.Mprotect(mem[bad*size:][:size], unix.PROT_NONE))
	return mem
}

// cut returns a mapped file that has lost all but its first pages.
func cut(t *testing.T, left int) []byte {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer f.Close()
	size := int(pageSize)
	require.NoError(t, f.Truncate(int64(pages*size)))
	mem, err := unix.Mmap(int(f.Fd()), 0, pages*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Munmap(mem) })
	require.NoError(t, f.Truncate(int64(left*size)))
	return mem
}

// Memory is good up to the first bad page, wherever it begins and ends, and whatever is done with
// it.
func TestBadPage(t *testing.T) {
	size := int(pageSize)
	for bad := range pages {
		for name, mem := range map[string][]byte{"protected": holed(t, bad), "cut": cut(t, bad)} {
			for _, from := range []int{0, 1, size - 1, size, 3*size + 7} {
				for _, to := range []int{from, from + 1, 4 * size, pages*size - 1, pages * size} {
					if to < from {
						continue
					}
					p := mem[from:to]
					good := len(p)
					badTo := (bad + 1) * size
					if name == "cut" {
						badTo = pages * size
					}
					if to > bad*size && from < badTo {
						good = max(bad*size-from, 0)
					}
					var err error
					if good < len(p) {
						err = errno.EFAULT
					}
					require.Equal(t, good, Readable(p))
					require.Equal(t, good, Writable(p))
					other := make([]byte, len(p))
					n, got := Copy(other, p)
					require.Equal(t, good, n)
					require.Equal(t, err, got)
					require.True(t, bytes.Equal(p[:good], other[:good]))
					n, got = Copy(p, other)
					require.Equal(t, good, n)
					require.Equal(t, err, got)
					require.Equal(t, err, Run(p, func() { clear(p) }))
				}
			}
		}
	}
}

// Memory that can only be read is not writable, and Writable changes nothing.
func TestReadOnly(t *testing.T) {
	mem := holed(t, 7)
	size := int(pageSize)
	require.NoError(t, unix.Mprotect(mem[2*size:][:size], unix.PROT_READ))
	want := bytes.Clone(mem[:7*size])
	require.Equal(t, 7*size, Readable(mem))
	require.Equal(t, 2*size, Writable(mem))
	require.Equal(t, want, mem[:7*size])
	n, err := Copy(mem, make([]byte, 5*size))
	require.Equal(t, 2*size, n)
	require.Equal(t, errno.EFAULT, err)
}

// A fault anywhere else is not caught, and neither is any other panic. What the goroutine has
// asked for is as it was.
func TestOtherPanics(t *testing.T) {
	for _, before := range []bool{false, true} {
		old := debug.SetPanicOnFault(before)
		mem, other := holed(t, 1), holed(t, 0)
		require.PanicsWithValue(t, "reason", func() { Run(mem, func() { panic("reason") }) })
		require.Panics(t, func() { Run(mem, func() { load(&other[0]) }) })
		require.Panics(t, func() { Run(mem, func() { load(nil) }) })
		Readable(mem)
		require.Equal(t, before, debug.SetPanicOnFault(old))
	}
}

func BenchmarkReadable(b *testing.B) {
	for b.Loop() {
		Readable(benchmarkMemory[:100])
	}
}

func BenchmarkReadable64K(b *testing.B) {
	for b.Loop() {
		Readable(benchmarkMemory[:])
	}
}

func BenchmarkCopy(b *testing.B) {
	for b.Loop() {
		Copy(benchmarkTarget[:100], benchmarkMemory[:100])
	}
}

func BenchmarkBuiltinCopy(b *testing.B) {
	for b.Loop() {
		copy(benchmarkTarget[:100], benchmarkMemory[:100])
	}
}

func BenchmarkRun(b *testing.B) {
	n := 0
	for b.Loop() {
		Run(benchmarkMemory[:100], func() { n++ })
	}
}

var benchmarkMemory, benchmarkTarget [64 << 10]byte
