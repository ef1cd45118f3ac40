package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// This file has the state of the transfers that a connection receives. transfer.go has
// their messages, and read_transfer.go the calls that read from them.
//
//  1. An offer joins the unread queue, and no data moves yet (offered, transfer_arrival.go).
//  2. A Read with enough room has the device put the data into its memory, so the data is
//     not copied (readDirect, directread.go).
//  3. For a Read with less room, the data is fetched ahead into bounce buffers and copied
//     from there (readAhead, fetch.go).
//  4. Data that no call reads for prefetchAfter is fetched into bounce buffers too.
//     Otherwise two programs that write before they read would wait for each other.
//
// Connections that the program has not accepted use half of the memory for bounce buffers at
// most. Otherwise any peer could use up all of it.
//
// With RDMA Writes the steps are the same. The receiver sends a memory grant where it would
// otherwise post an RDMA Read.

// transferReceiver is the transfers that a connection receives. It fetches their data, and
// knows of the connection only what receiverParts has. Conn.mu guards it.
type transferReceiver struct {
	receiverParts

	mode TransferMode // mode is how the data moves.
	last uint32       // last is the ID of the latest offer or request.

	// live has the transfers that have not arrived as a whole, oldest first.
	live ring.Ring[*recvTransfer]

	inFlight ring.Ring[*fetch] // inFlight has the fetches that have not arrived, oldest first.

	// unsentGrants has the fetches whose memory grants are not sent, oldest first.
	unsentGrants ring.Ring[*fetch]

	doneDue bool   // doneDue is set while a done message is to be sent.
	done    uint32 // done is the ID that the next done message has.
	length  int    // length is the length in bytes that the next done message has.

	depth         int  // depth is how many RDMA Reads may be under way.
	pace          pace // pace bounds how many bytes may be under way.
	reading       int  // reading counts the calls that read at this moment.
	readsAhead    bool // readsAhead is set if the reader takes little at a time.
	bounceBuffers int  // bounceBuffers counts the bounce buffers in use.

	// filling is the bounce buffer that has room for the next fetch, or nil.
	filling *bounceBuffer

	refused     error // refused is why the last bounce buffer could not be had.
	hasReserved bool  // hasReserved is set if the connection has a bounce buffer of its own.

	// reserved is the connection's own bounce buffer, nil while it is in use.
	reserved *bounceBuffer

	prefetchTimer *time.Timer   // prefetchTimer calls prefetch.
	again         time.Duration // again is after how long prefetch tries again if there was no memory.

	notAccepted bool // until Accept returns the connection, which may use less memory before
}

// receiverParts is what a transferReceiver uses of its connection.
type receiverParts struct {
	lane  *lane          // lane takes the RDMA Reads.
	life  *life          // life says whether data may still be asked for.
	stats *Stats         // stats has the counters of the connection.
	dom   *regmem.Domain // dom registers memory, and has the chunks.
	pool  *regmem.Pool   // pool has the receive buffers.

	memory int // memory is how many bytes of chunks the connections of the device may use.

	readers *cqwait.Group  // readers are woken when a fetch is over.
	wait    *cqwait.Waiter // wait has the leader, who may wait for receives only.

	// prefetch is called prefetchAfter after the data of a transfer was left unread.
	prefetch func()
}

// trim frees the memory that the lists have grown by.
func (in *transferReceiver) trim() {
	in.live.Trim()
	in.inFlight.Trim()
	in.unsentGrants.Trim()
}

// recvTransfer is a transfer that a connection receives.
type recvTransfer struct {
	id      uint32
	addr    uint64 // addr is the address of the peer's memory in an offer.
	key     uint32 // key opens the peer's memory in an offer.
	length  int    // length is the length in bytes, which a withdrawal lowers.
	asked   int    // asked is how many bytes were asked for.
	arrived int    // arrived is how many bytes have arrived.
	taken   int    // taken is how many bytes the reader has taken.
	first   bool   // first is set if the message begins with the transfer.
	cut     bool   // cut is set if the withdrawal has left the message without an end.

	// withdrawn is set if the peer has withdrawn the transfer and waits for its memory.
	withdrawn bool

	dropped bool // dropped is set if no call will read the transfer.

	// fetches has the unread fetches into bounce buffers, oldest first.
	fetches ring.Ring[*fetch]
}

// fetch is a part of a transfer that one RDMA Read or one memory grant has asked for.
type fetch struct {
	x    *recvTransfer // x is the transfer.
	b    []byte        // b is the memory that the data goes to.
	in   *bounceBuffer // in is the bounce buffer that b lies in, or nil.
	into *directRead   // into is the direct read whose memory b lies in, or nil.
	addr uint64        // addr is the address of b in a memory grant.
	key  uint32        // key opens b to the peer in a memory grant.
	mr   ibv.MR        // mr is the registration for the peer if it is of b alone, or nil.
	got  int           // got is how many bytes have arrived.

	// under is how many bytes were under way when the fetch was asked for, with its own.
	under int

	at    time.Time // at is when the fetch was asked for.
	taken int       // taken is how many bytes the reader has copied.
	over  bool      // over is set when the device no longer uses b.
}

const (
	// maxBounceBuffers bounds the bounce buffers of a connection for data that it receives,
	// and the transfers of ReadFrom and of queued sends that it sends at a time.
	maxBounceBuffers = 4

	// readSlots is how many work requests of the queue pair's send queue are for RDMA
	// Reads, at most.
	readSlots = 8

	// prefetchAfter is how long an offer waits for a call that reads until its data is
	// fetched.
	prefetchAfter = 10 * time.Millisecond

	// prefetchAgain is how long prefetch waits at most until it tries again to register memory.
	// It begins with unreadAgain, and waits twice as long each time.
	prefetchAgain = 5 * time.Second
)

// hasControl reports whether nextControl has a message to send.
func (in *transferReceiver) hasControl() bool { return in.doneDue || in.unsentGrants.Len() > 0 }

// directRead is the memory of a Read, which the device fills in order. Memory for the next
// fetch is registered while the device fills that of earlier ones.
type directRead struct {
	p       []byte            // p is the part of the Read's memory that may be filled.
	opened  []registeredRange // opened has the registrations of p, oldest first.
	asked   int               // asked is how many bytes were asked for.
	pending int               // pending counts the fetches that are not over.
	got     int               // got is how many bytes have arrived.
	message bool              // message is set if the Read takes one message at most.
	ends    time.Time         // ends is when the Read first had a reason to stop.

	// late calls abandonDirect after the Read has had a reason to stop, or is nil.
	late *time.Timer

	shortened bool // shortened is set if late was set again because of Close.
	lost      bool // lost is set if the Read no longer waits for the device.
}

// registeredRange is the registration of a range of a Read's memory. A fetch may be shorter
// than the range.
type registeredRange struct {
	from, to int                 // from and to are the limits of the range in bytes.
	target   regmem.Registration // target is the registration for RDMA Reads of this side.
	mr       ibv.MR              // mr is the registration for RDMA Writes of the peer, or nil.
}

// bounceBuffer is memory of the connection's that received data is copied from. It is a
// chunk, or a receive buffer if there is no chunk.
type bounceBuffer struct {
	b     []byte
	lkey  uint32         // lkey is the local key of b.
	chunk *regmem.Chunk  // chunk is the chunk that b lies in, or nil.
	buf   *regmem.Buffer // buf is the receive buffer that b lies in, or nil.

	// mr lets the peer write to b as long as the bounce buffer exists, or is nil.
	mr ibv.MR

	used    int // used is how many bytes of b belong to fetches.
	fetches int // fetches counts the fetches in b that were not given back.

	// stuck is set if a registration could not be closed: the peer may still write to b.
	stuck bool
}
