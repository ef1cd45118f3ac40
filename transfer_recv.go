package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// The receiver's side of large transfers; transfer.go has the protocol.
//
//  1. An offer joins the unread queue. Nothing is moved yet.
//  2. A Read with room for much has the device put the bytes straight into its
//     memory (readDirect): they are not copied.
//  3. For a Read that takes little at a time they are fetched into scratch, some
//     ahead of it (readAhead), and copied from there.
//  4. What nobody reads for prefetchAfter is fetched as well, as far as scratch
//     goes: two programs that write before they read would wait for each other. Not
//     before the program has accepted the connection, or strangers could take all scratch.
//
// The same with RDMA Writes, but that the peer is granted the memory instead.

// transferReceiver is what a connection knows of the transfers that it receives.
type transferReceiver struct {
	mode         transferMode
	last         uint32                   // ID of the latest offer
	live         ring.Ring[*recvTransfer] // those that the peer has not been told of, oldest first
	inFlight     ring.Ring[*fetch]        // asked for and not there, oldest first
	unsentGrants ring.Ring[*fetch]        // grants to be sent, oldest first
	doneDue      bool                     // the peer is to be told that
	done         uint32                   // this transfer, and those before it,
	length       int                      // are over, it after so many bytes

	depth         int           // RDMA Reads at a time
	pace          pace          // how many bytes may be under way
	reading       int           // calls that read
	readsAhead    bool          // the reader takes little at a time: read ahead
	bounceBuffers int           // landings that are in use
	filling       *bounceBuffer // of these, the one that takes the next piece, nil for none
	refused       error         // why there was no memory for one more
	hasReserved   bool          // a landing of its own,
	reserved      *bounceBuffer // for a piece when there is no other memory, unless it is in use
	prefetchTimer *time.Timer

	notAccepted bool // the program has not accepted the connection: nothing is fetched
}

// trim gives back what the lists have grown by.
func (in *transferReceiver) trim() {
	in.live.Trim()
	in.inFlight.Trim()
	in.unsentGrants.Trim()
}

// recvTransfer is one transfer.
type recvTransfer struct {
	id       uint32
	addr     uint64
	key      uint32
	length   int // bytes; fewer when it is withdrawn
	asked    int // for
	landed   int
	taken    int               // by the reader
	first    bool              // its message begins with it
	cut      bool              // and does not end
	recalled bool              // the peer waits for the memory
	dropped  bool              // nobody will read it
	pieces   ring.Ring[*fetch] // in scratch, oldest first
}

// fetch is a part of a transfer that has been asked for.
type fetch struct {
	x     *recvTransfer
	b     []byte // where it goes to, which is
	in    *bounceBuffer
	into  *directRead // or the reader's memory
	addr  uint64      // of b, for a grant
	key   uint32
	mr    ibv.MR    // what the key belongs to, if it opens this piece only
	got   int       // bytes that have come
	under int       // bytes that were under way with it when it was asked for
	at    time.Time // when that was
	taken int
	over  bool // the device will not touch the memory any more
}

// bounceBuffer is our own memory for data to be copied from: scratch, or a buffer of a
// receive's size where there is none.
type bounceBuffer struct {
	b      []byte
	lkey   uint32
	chunk  *regmem.Chunk
	buf    *regmem.Buffer
	mr     ibv.MR // by which the peer may write to it as long as it lives
	used   int    // bytes of b that pieces were made of
	pieces int    // that have not been given back
	stuck  bool   // a region of it could not be closed: the peer may still write to it
}

const (
	maxBounceBuffers = 4 // of scratch, one connection and direction
	readSlots        = 8 // of the send queue, for RDMA Reads
	prefetchAfter    = 10 * time.Millisecond
)

// hasControl reports whether nextReceiverControl has something.
func (in *transferReceiver) hasControl() bool { return in.doneDue || in.unsentGrants.Len() > 0 }

func (l *bounceBuffer) release() {
	switch {
	case l.mr != nil && l.mr.Close() != nil:
		// The device may still use it.
	case l.buf != nil:
		l.buf.Release()
	default:
		l.chunk.Release()
	}
}

// directRead is a reader's memory, filled in order. What is to come next is registered
// while the device is still at work on what was asked for before.
type directRead struct {
	p       []byte
	opened  []registeredRange
	asked   int
	pending int // fetches
	got     int
	message bool        // no more than one
	ends    time.Time   // since when there is a reason to
	late    *time.Timer // for lose, then
	hurried bool        // late was set for a connection that is closed
	lost    bool        // the device does not say when it is done
}

// registeredRange is the registration of one piece of a reader's memory. Fetches may be shorter.
type registeredRange struct {
	from, to int // of the reader's bytes
	target   regmem.Registration
	mr       ibv.MR // in its place, where the peer writes
}
