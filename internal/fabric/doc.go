// Package fabric is an RDMA device that exists in memory only. It reports itself as RoCE.
//
// For connections it is an ideal device: an operation costs a memory copy and little else.
// A benchmark over it measures the code above the verbs, without the noise of adapters,
// kernels and sockets. For datagrams the device can also lose, forge, delay and fail what a
// test names, as no real device does on request.
//
// # How it is built
//
// The goroutine that posts a request executes it: it checks the keys and the bounds, copies
// the bytes into the peer's receive or region, and adds the completions at both ends. A Send
// that finds no receive stays in the send queue, and so do the requests behind it. The
// goroutine that posts the receive executes them then. So the device has no goroutine of its
// own and makes no system call. It allocates nothing for a request once its queues have
// their size.
//
// A completion wakes a goroutine only if the completion queue is armed for it and the
// goroutine is in Wait.
//
// The queue pairs of connections and of datagrams share the completion queues (cq.go), the
// regions with their keys (mr.go) and the protection domains (pd.go). The queue pair of a
// connection is in qp.go, its queues are in sendqueue.go and recvqueue.go, and cm.go sets
// connections up. The datagrams are in udqp.go, packet.go, udid.go and mcast.go.
//
// # Locks
//
// They are taken in this order:
//
//   - Fabric.mu guards addresses, IDs and all state of datagrams.
//   - sendQueue.mu guards a send queue, also while its requests are executed.
//   - Fabric.gate is held for reading while registered memory is copied. It is held for
//     writing to end a queue pair, and to register or to close a region. So no byte is
//     copied once the owner of the memory has it back.
//   - recvQueue.mu guards a receive queue, but not the copies into its receives: PostRecv
//     does not wait for those.
//   - cq.mu guards a completion queue.
package fabric
