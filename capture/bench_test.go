package capture

import (
	"fmt"
	"testing"
)

// bulk returns traffic of 32 MiB in Writes, each acknowledged, that begins at
// PSN 0.
func bulk(mtu int) (ps []Packet, size int64) {
	x := newRoCEBuilder()
	data := pattern(64<<10, 1)
	psn := uint32(0)
	for range 512 {
		psn = x.write(17, psn, 1<<32, 99, data, mtu)
		x.reversed(func() { x.ack(18, psn-1) })
	}
	for _, p := range x.packets {
		size += int64(len(p.Data))
	}
	return x.packets, size
}

// Summarising is what one does first with a large file: every packet is
// decoded, its checksum compared, and put in its place, but no data is kept.
func BenchmarkSummarise(b *testing.B) {
	for _, mtu := range []int{1024, 4096} {
		ps, size := bulk(mtu)
		for _, data := range []bool{false, true} {
			b.Run(fmt.Sprintf("mtu=%d/data=%v", mtu, data), func(b *testing.B) {
				b.SetBytes(size)
				b.ReportAllocs()
				for b.Loop() {
					complete := 0
					r := NewReassembler(Config{Data: data, Message: func(m *Message) {
						if m.Complete {
							complete++
						}
					}})
					for i := range ps {
						r.Add(&ps[i])
					}
					r.Flush()
					if complete != 512 {
						b.Fatalf("%d complete", complete)
					}
				}
				b.ReportMetric(float64(len(ps))*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mpackets/s")
			})
		}
	}
}

// In the steady state a packet costs no memory.
func TestNoAllocation(t *testing.T) {
	ps, _ := bulk(1024)
	r := NewReassembler(Config{Message: func(*Message) {}})
	i := 0
	for ; i < len(ps)/2; i++ {
		r.Add(&ps[i])
	}
	if n := testing.AllocsPerRun(1000, func() {
		r.Add(&ps[i])
		i++
	}); n != 0 {
		t.Errorf("%v allocations a packet", n)
	}
}
