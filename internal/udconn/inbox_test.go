package udconn

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// FuzzInbox reads bytes as operations and compares the inbox with a plain list.
func FuzzInbox(f *testing.F) {
	f.Add([]byte{3, 5, 0, 255, 200, 0, 1, 1, 254, 0, 0})
	f.Add([]byte{250, 250, 255, 3, 250, 0, 250, 255, 200, 250, 250, 0, 1})
	f.Add(bytes.Repeat([]byte{250, 250, 250, 0, 0}, 60))
	f.Fuzz(func(t *testing.T, ops []byte) {
		type entry struct {
			from netip.AddrPort
			b    []byte
		}
		var model []entry
		total := 0
		q := inbox{limit: 2000}
		for i := 0; i < len(ops); i++ {
			op := ops[i]
			if op == 255 && i+1 < len(ops) { // the reader changes its mind
				i++
				q.limit = 20 * int(ops[i])
				continue
			}
			if op == 0 || op == 1 {
				if len(model) == 0 {
					continue
				}
				want := model[0]
				model = model[1:]
				total -= len(want.b)
				buf := make([]byte, 2000)
				if op == 1 {
					buf = buf[:len(want.b)/2]
				}
				n, from, err := q.pop(buf)
				if err != nil {
					t.Fatalf("operation %d: %v", i, err)
				}
				defect.Bytes(t, want.b[:min(len(buf), len(want.b))], buf[:n], "operation %d", i)
				if from != want.from {
					t.Fatalf("operation %d: from %v, want %v", i, from, want.from)
				}
				continue
			}
			b := pattern(uint64(i), (int(op)-2)*7)
			from := netip.AddrPortFrom(netip.IPv6Loopback(), uint16(i))
			want := len(model) == 0 || total+len(b)+(len(model)+1)*Charge <= q.limit
			if got := q.push(from, b); got != want {
				t.Fatalf("operation %d: push of %d bytes beside %d in %d: %v", i, len(b), total, len(model), got)
			}
			if want {
				model, total = append(model, entry{from, b}), total+len(b)
			}
			if q.len() != len(model) || q.n != total {
				t.Fatalf("operation %d: %d datagrams of %d bytes, want %d of %d", i, q.len(), q.n, len(model), total)
			}
		}
	})
}

func TestInboxKeepsItsMemory(t *testing.T) {
	q := inbox{limit: 1 << 20}
	b := make([]byte, 1000)
	from := netip.AddrPortFrom(netip.IPv6Loopback(), 1)
	if n := testing.AllocsPerRun(100, func() {
		for range 10 {
			q.push(from, b)
		}
		for q.len() > 0 {
			q.pop(b)
		}
	}); n != 0 {
		t.Errorf("%v allocations a run", n)
	}
}
