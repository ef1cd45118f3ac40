// Package iwarp is the software device: RDMA over TCP in pure Go, on any
// system, with no privileges. It speaks MPA (RFC 5044, RFC 6581), DDP
// (RFC 5041) and RDMAP (RFC 5040), so its peers may also be Linux siw or an
// iWARP adapter.
//
// # How it is built
//
// The rules of a queue pair are separate from the transport of its bytes. qp.go has the
// queues, their completions and their order. cq.go has the completion queues, and pd.go the
// regions and their keys. The stream makes FPDUs of work requests, and completions of
// FPDUs: stream.go with transmit.go, frame.go, receive.go and place.go. A link carries the
// stream's bytes. link.go has the rules for links, tcp.go the link over TCP, and
// portable.go the link over TCP for systems without raw descriptors. shared_linux.go has the
// link between two processes of a host: it begins with TCP and moves to shared memory, as
// samehost.go and handover_linux.go agree with the peer. cm.go and listen.go set
// connections up. They only know that a link begins with a connection for MPA start-up.
//
// No goroutine belongs to a queue pair. A post hands what it can to the socket, and starts
// a sender only for what the socket did not take. A caller that waits for that itself needs
// neither a sender nor a copy (inplace.go). The goroutine that waits for a completion
// queue receives for the queue's queue pair. When no goroutine has waited for a few
// milliseconds, or in a busy process for a fifth of a second at most, a goroutine of the
// device receives.
//
// # What it has and lacks
//
// It has Send, Send with Invalidate, with Solicited Event and with both, RDMA Write, RDMA
// Read and Local Invalidate. It has no immediate data, no atomics and no datagrams, because
// RFC 5040 has none. An RDMA Read has one destination element. A send completes when its
// link has taken it, and the peer may not have it yet.
package iwarp
