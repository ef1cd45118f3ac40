// Package shmring carries bytes between two processes of a host through rings in shared
// memory, one for each direction.
//
// Each end owns memory that it writes, and that its peer maps for reading only. The first
// piece is a page, the [Page], with the indices and flags of that end and with a small
// ring. A writer moves to a larger ring in memory of its own while there is much to send
// (see [Writer.Move]), and back to the page afterwards.
//
// # What a peer can do
//
// A peer may store any values into its own memory at any time. So a Reader and a Writer
// keep their own indices in private memory, and check each value of the peer's page when
// they load it: [ErrCorrupt] is the answer to a value that no honest peer stores. Whatever
// the peer does, no byte outside the rings is touched. Payload may change while it is
// copied, so the caller looks at its copy only.
//
// # Order of memory accesses
//
// The two ends synchronise by atomic operations on the words of the pages. Those of package
// sync/atomic are sequentially consistent, on each processor that Go has: in one order that
// all processors agree on, and which contains the order of each goroutine. Go compiles them
// to instructions that give this order for any memory that processors share, and not only
// within one process. On amd64 a store is XCHG, which is a full barrier, and loads are
// ordered by the processor. On arm64 a store is STLR and a load LDAR. LDAR is not executed
// before an STLR that precedes it in the program, and both order the plain accesses around
// them: what was copied into a ring before the STLR of the tail is visible to a goroutine
// whose LDAR has loaded that tail, and what is copied out before the STLR of the head has
// been loaded when the writer sees the head.
//
// A sleeping end is not forgotten for the same reason. It stores its sleep word, and then
// loads the other end's index. The other end stores its index, and then loads the sleep
// word. In any order that contains both, at least one of the two loads sees the store of
// the other end. So either the first end finds what it waits for and does not sleep, or
// the other end finds the sleep word and rings.
package shmring
