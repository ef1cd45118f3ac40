package capture

import (
	"fmt"
	"net/netip"
	"time"
)

// Side is an end of a connection.
type Side uint8

// The ends. Where the set-up was not captured, Initiator is the one that was
// heard first.
const (
	Initiator Side = 0
	Responder Side = 1
)

// Other returns the other end.
func (s Side) Other() Side { return 1 - s }

// Transport is how RDMA travels.
type Transport uint8

// The transports.
const (
	RoCE2 Transport = iota + 1
	IWARP
)

// String returns the usual name.
func (t Transport) String() string {
	if t == IWARP {
		return "iWARP"
	}
	return "RoCEv2"
}

// End is what is known of one end of a connection.
type End struct {
	Addr    netip.AddrPort // Addr has port 0 if the port is not known.
	QP      uint32         // QP is 0 if it is not known, and on iWARP.
	Private []byte         // Private is the private data of the set-up. RoCE pads it with zeros.
}

// Conn is a pair of queue pairs that are connected.
type Conn struct {
	ID        int // ID counts from 1 on, in the order of the connections' first messages.
	Transport Transport
	Ends      [2]End // Ends has the ends by Side.
	SetUp     bool   // SetUp is set if the set-up was captured.
	Closed    bool   // Closed is set if the end of the connection was captured.

	// Unpaired is set if this is one direction of a RoCE connection, and it is not proved
	// which the other direction is. Reads have no answers then.
	Unpaired bool

	MTU      int  // MTU is the path MTU of RoCE in bytes, 0 if it is not known.
	CRC      bool // CRC is set if the FPDUs of iWARP have checksums.
	Markers  [2]bool
	Protocol Protocol    // Protocol is what the Sends carry.
	Sent     [2]Counters // Sent has the counters by the side that sent.
	Opened   time.Time   // Opened is the time of the first packet.
	Last     time.Time   // Last is the time of the last packet.

	packets uint64 // packets counts those of both sides. It is the clock by which things are given up.
	upper   upper
	roce    [2]*roceFlow
	tcp     *tcpConn
	cmKeys  []cmKey

	newer, older *Conn // in order of use, see Reassembler.touch
}

// Counters count what one side of a connection has sent.
type Counters struct {
	Packets uint64
	Bytes   uint64 // Bytes counts from the IP header on.

	Messages [StartReply + 1]uint64 // Messages counts by Kind, complete messages and others.
	Payload  uint64                 // Payload counts the bytes of the messages that were captured.
	Partial  uint64                 // Partial counts messages that are not complete.

	Repeats   uint64 // Repeats counts packets, or TCP segments, that came again.
	Reordered uint64 // Reordered counts packets, or TCP segments, that came too early.
	Lost      uint64 // Lost counts PSNs, or bytes of TCP, that did not come.
	NAKs      uint64 // NAKs counts RoCE's negative acknowledgements other than RNR.
	RNRs      uint64 // RNRs counts RoCE's acknowledgements "receiver not ready".
	Marked    uint64 // Marked counts packets with FECN.

	// Latency is how long this side's requests took. A Read takes until its data was
	// captured, and other requests until they were acknowledged. iWARP acknowledges only
	// in TCP, so there Latency covers Reads only.
	Latency Latency

	begun uint64 // begun counts messages.
}

// Latency sums up times.
type Latency struct {
	Count    uint64
	Sum      time.Duration
	Min, Max time.Duration

	// Log2 counts the times of at least 2^i ns and less than twice that. The last element
	// also counts all longer times.
	Log2 [32]uint64
}

func (l *Latency) add(d time.Duration) {
	d = max(d, 0)
	if l.Count == 0 || d < l.Min {
		l.Min = d
	}
	l.Max = max(l.Max, d)
	l.Count++
	l.Sum += d
	i := 0
	for n := uint64(d); n > 1 && i < len(l.Log2)-1; n >>= 1 {
		i++
	}
	l.Log2[i]++
}

// Mean returns the mean, 0 if there were none.
func (l *Latency) Mean() time.Duration {
	if l.Count == 0 {
		return 0
	}
	return l.Sum / time.Duration(l.Count)
}

// Quantile returns a time that the fraction q of all does not exceed; it is
// precise to a factor of two.
func (l *Latency) Quantile(q float64) time.Duration {
	want, sum := uint64(q*float64(l.Count)), uint64(0)
	for i, n := range l.Log2 {
		if sum += n; sum > want || sum == l.Count {
			return min(time.Duration(2)<<i, l.Max)
		}
	}
	return l.Max
}

// String names the connection by its ends.
func (c *Conn) String() string {
	if c == nil {
		return "<nil>"
	}
	return fmt.Sprintf("%v - %v", c.Ends[0].name(c.Transport), c.Ends[1].name(c.Transport))
}

func (e *End) name(t Transport) string {
	s := e.Addr.String()
	if e.Addr.Port() == 0 {
		s = e.Addr.Addr().String()
	}
	if t == RoCE2 && e.QP != 0 {
		s += fmt.Sprintf(" QP 0x%x", e.QP)
	}
	return s
}
