package udconn

import "sync/atomic"

// Stats counts what a Conn has done. Its fields are those of PacketStats of package rdmanet.
type Stats struct {
	DatagramsSent     uint64
	DatagramsReceived uint64
	BytesSent         uint64
	BytesReceived     uint64

	Overruns uint64
	Strays   uint64

	Looped uint64

	Unsent uint64

	Resolutions        uint64
	ResolutionFailures uint64
	QueueStalls        uint64

	Peers    int
	Receives int
}

// Info describes a queue pair or the UDP socket. Its fields are those of PacketInfo of
// package rdmanet.
type Info struct {
	Device    string
	Transport string
	Port      int
	QPN       uint32
	MTU       int
}

// counters are the counts of Stats as they are kept.
type counters struct {
	datagramsSent, datagramsReceived, bytesSent, bytesReceived,
	overruns, strays, looped, unsent, resolutions, failures, stalls atomic.Uint64
}

// stats returns the counts of the moment. Peers and Receives are left out.
func (c *counters) stats() Stats {
	return Stats{
		DatagramsSent: c.datagramsSent.Load(), DatagramsReceived: c.datagramsReceived.Load(),
		BytesSent: c.bytesSent.Load(), BytesReceived: c.bytesReceived.Load(),
		Overruns: c.overruns.Load(), Strays: c.strays.Load(), Looped: c.looped.Load(), Unsent: c.unsent.Load(),
		Resolutions: c.resolutions.Load(), ResolutionFailures: c.failures.Load(), QueueStalls: c.stalls.Load(),
	}
}
