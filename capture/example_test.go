package capture_test

import (
	"fmt"
	"time"

	"github.com/rdmanet/rdmanet/capture"
)

// A RoCEv2 packet is handed in, and the message comes out. Programs read
// packets from a file or an interface; examples/rdmadump does.
func Example() {
	packet := []byte{
		2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, // Ethernet
		0x45, 0, 0, 49, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, // IPv4
		0xc0, 0, 0x12, 0xb7, 0, 29, 0, 0, // UDP to port 4791
		4, 0, 0xff, 0xff, 0, 0, 0, 0x11, 0, 0, 0, 1, // RC SEND Only to QP 0x11, PSN 1
		'h', 'e', 'l', 'l', 'o', // and no padding, which is not as it should be, but taken
		0, 0, 0, 0, // ICRC
	}
	r := capture.NewReassembler(capture.Config{
		Data:            true,
		IgnoreChecksums: true, // that ICRC is wrong
		Message: func(m *capture.Message) {
			fmt.Printf("%v from %v: %q, complete: %v\n", m.Kind, m.Conn.Ends[m.From].Addr.Addr(), m.Data, m.Complete)
		},
		Loss: func(l capture.Loss) { fmt.Println(l) },
	})
	r.Add(&capture.Packet{Time: time.Unix(0, 0), Link: capture.LinkEthernet, Data: packet})
	r.Flush()
	// Output: Send from 192.0.2.1: "hello", complete: true
}

// A segment of which the parts come in any order.
func ExampleSegments() {
	var memory capture.Segments
	s := memory.Add(0x1234, 1<<20, 10)
	s.Place(1<<20+6, []byte("rld!"))
	fmt.Println(s.Complete(), s.Size(false), s.Missing(), s.Contains(1<<20+9), s.Contains(1<<20+10))
	s.Place(1<<20, []byte("hi, wo"))
	fmt.Printf("%v %q, %d bytes with padding\n", s.Complete(), s.Data(false), s.Size(true))
	// Output:
	// false 4 [[0, 6)] true false
	// true "hi, world!", 12 bytes with padding
}
