package iwarp

import (
	"bytes"
	"slices"
	"testing"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// Idle names the receives that nothing has come for, in their order, leaves them posted,
// and gives back what the queues have grown by.
func TestIdle(t *testing.T) {
	const size = 4096
	for _, portable := range []bool{false, true} {
		x, y := newPair(t, Config{portable: portable}, 16, size)
		send := func(c byte, n int) {
			p := bytes.Repeat([]byte{c}, n)
			if _, err := x.qp.PostSend([]ibv.SendWR{{ID: 99, Op: ibv.OpSend, Flags: ibv.SendInline | ibv.SendSignaled, SGL: []ibv.SGE{{Buf: p}}}}); err != nil {
				t.Fatal(err)
			}
			x.next(t)
		}
		unused := func(e *end) (ids []int) {
			e.qp.(ibv.IdleQP).Idle(func(buf []byte) {
				if len(buf) != size {
					t.Errorf("a receive of %d bytes", len(buf))
				}
				ids = append(ids, int(uintptr(unsafe.Pointer(&buf[0]))-uintptr(unsafe.Pointer(&e.buf[0])))/size)
				clear(buf)
			})
			return ids
		}
		all := unused(y)
		for i := range byte(12) {
			send('a'+i, size)
			if wc := y.next(t); wc.ID != uint64(i) || wc.ByteLen != size {
				t.Fatalf("%+v", wc)
			}
		}
		if want := all[12:]; len(all) != 16 || !slices.Equal(unused(y), want) {
			t.Errorf("Idle names %v, want %v", unused(y), want)
		}
		if n := y.buf[0]; n != 'a' {
			t.Errorf("what has come was touched: %d", n)
		}
		unused(x) // with its send queue
		x.qp.(*qp).sq.mu.Lock()
		if x.qp.(*qp).stream.Load().tx.mem != nil {
			t.Error("an idle queue pair has memory for a batch")
		}
		x.qp.(*qp).sq.mu.Unlock()
		send('z', 100)
		if wc := y.next(t); wc.ID != 12 || wc.ByteLen != 100 || y.buf[12*size] != 'z' {
			t.Errorf("%+v", wc)
		}
		x.qp.Close()
		y.qp.Close()
		if ids := unused(y); len(ids) > 0 {
			t.Errorf("a closed queue pair names %v", ids)
		}
	}
}
