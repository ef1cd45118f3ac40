// Package iwarp is the software device: RDMA over TCP in pure Go, on any
// system, with no privileges. It speaks MPA (RFC 5044, RFC 6581), DDP
// (RFC 5041) and RDMAP (RFC 5040), so its peers may also be Linux siw or an
// iWARP adapter.
//
// # How it is built
//
// What a queue pair means is kept apart from how its bytes move. qp.go holds
// the queues, their completions and their order; cq.go and pd.go the
// completion queues, the regions and their keys. The work becomes FPDUs, and
// FPDUs become completions, in the stream: stream.go with transmit.go, frame.go,
// receive.go and place.go. A link carries the stream's bytes: link.go states what
// it owes the stream, tcp.go is the one over TCP, and portable.go the one over TCP
// for systems without raw descriptors. cm.go and listen.go set connections up; of
// the link they know only how it begins, with a connection for MPA start-up.
//
// No goroutine is tied to a queue pair. A post hands what it can to the socket
// and starts a sender only for what the socket did not take. Whoever waits on
// a completion queue receives on behalf of its queue pair; a goroutine of the
// device's own takes over when nobody has done so for a few milliseconds, in a
// busy process for a fifth of a second at most.
//
// # What it has and lacks
//
// Send, Send with Invalidate, with Solicited Event and both, RDMA Write, RDMA
// Read, Local Invalidate. No immediate data, no atomics, no datagrams: RFC 5040
// has none. An RDMA Read has one destination element. A send completes when
// TCP has taken it, which is not yet when the peer has it.
package iwarp
