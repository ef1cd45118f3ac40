package rdmanet_test

import (
	"fmt"
	"testing"
)

// BenchmarkTransfers puts large transfers against segments, in the manner of
// BenchmarkCompare: writes of one size after the other, from and to ordinary memory
// and memory of rdmanet's. Where the ratio passes 1 is where transfers pay. The link
// of the software device is TCP.
func BenchmarkTransfers(b *testing.B) {
	for _, registered := range []bool{false, true} {
		memory := "ordinary"
		if registered {
			memory = "Buffer"
		}
		for _, size := range []int{16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20} {
			c := streamCase(BenchService{Name: "sink", Registered: registered}, size, registered, writeAll)
			b.Run(fmt.Sprintf("memory=%s/%s", memory, c.name), func(b *testing.B) {
				for b.Loop() {
					compare(b, c, "segments", "transfers")
				}
				b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
			})
		}
	}
}

// BenchmarkReaders is BenchmarkTransfers of 4 MiB from a Buffer to readers that take
// less at a time, into ordinary memory.
func BenchmarkReaders(b *testing.B) {
	for _, room := range []int{4 << 10, 32 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20} {
		c := streamCase(BenchService{Name: "sink", Size: room}, 4<<20, true, writeAll)
		b.Run("room="+sizeName(room), func(b *testing.B) {
			for b.Loop() {
				compare(b, c, "segments", "transfers")
			}
			b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
		})
	}
}
