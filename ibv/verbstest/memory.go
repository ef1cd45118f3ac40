package verbstest

import (
	"bytes"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// These are the rights that tests ask for.
const (
	localWrite = ibv.AccessLocalWrite
	allRights  = ibv.AccessLocalWrite | ibv.AccessRemoteWrite | ibv.AccessRemoteRead
)

// Mem is a registered region of memory.
type Mem struct {
	Buf    []byte
	MR     ibv.MR
	closed bool
}

// SGE returns the scatter/gather element of the n bytes from off.
func (m *Mem) SGE(off, n int) ibv.SGE {
	return ibv.SGE{Buf: m.Buf[off : off+n : off+n], LKey: m.MR.LKey()}
}

// SGL returns the n bytes from off as a list of parts elements. If there are fewer bytes,
// it has fewer elements, because devices treat empty elements differently.
func (m *Mem) SGL(off, n, parts int) []ibv.SGE {
	parts = min(parts, n)
	var sgl []ibv.SGE
	for i := range parts {
		from, to := n*i/parts, n*(i+1)/parts
		sgl = append(sgl, m.SGE(off+from, to-from))
	}
	return sgl
}

// Addr returns the remote address of the byte at off.
func (m *Mem) Addr(off int) uint64 { return m.MR.Addr() + uint64(off) }

// Close closes the region before the end of the test.
func (m *Mem) Close(t testing.TB) {
	t.Helper()
	if m.closed {
		return
	}
	m.closed = true
	if err := m.MR.Close(); err != nil {
		t.Errorf("MR.Close: %v", err)
	}
}

// pattern returns n bytes that are different for each seed. Bytes in a wrong place are
// noticed.
func pattern(n int, seed int) []byte {
	b := make([]byte, n)
	x := uint32(seed)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

// guard is the value of bytes that nothing must change.
const guard = 0xA5

// guarded returns n bytes of guard.
func guarded(n int) []byte { return bytes.Repeat([]byte{guard}, n) }

// untouched fails the test unless all bytes of b are guard.
func untouched(t testing.TB, what string, b []byte) {
	t.Helper()
	defect.Bytes(t, guarded(len(b)), b, "%s: changed", what)
}

// sameBytes fails the test unless got equals want.
func sameBytes(t testing.TB, what string, got, want []byte) {
	t.Helper()
	defect.Bytes(t, want, got, "%s", what)
}
