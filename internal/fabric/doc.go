// Package fabric is an RDMA device for datagrams that exists in memory only, so that
// what uses UD queue pairs is tested on machines without RDMA, with the race
// detector, and against peers and mishaps that no real device would bring about on
// request. It passes for RoCE. It has no connections.
//
// # Locks
//
// They are taken in this order:
//
//   - Fabric.mu guards addresses, IDs and all state of datagrams.
//   - Fabric.gate is held for reading while registered memory is copied. It is held for
//     writing to register or to close a region. So no byte is copied once the owner of the
//     memory has it back.
//   - cq.mu guards a completion queue.
package fabric
