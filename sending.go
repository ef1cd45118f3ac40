package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// sending is the state of the outgoing stream. Conn.mu guards it.
type sending struct {
	wantsCredit bool // wantsCredit is set while a writer waits for credits.

	data uint64 // data is the number of the last send with something of the program's.

	responseDue bool   // responseDue is set when the peer has asked for a message.
	probeDue    bool   // probeDue is set when this side must ask the peer for one.
	peerWants   bool   // peerWants is set if the peer's last message said that its payload waits for credits.
	closing     int    // calls of CloseWrite that wait
	ended       bool   // this side's direction has ended: FIN was queued, or sends are closed
	closed      bool   // the device was told to end this side's direction, and nothing may be posted
	endSeen     bool   // the peer has found the end of this side's direction
	midMessage  bool   // midMessage is set while a message has begun and not ended.
	truncated   bool   // truncated is set if it never will, because a deadline has passed.
	barrier     bool   // barrier is set while the request of queueBarrier is under way.
	probeSeq    uint64 // probeSeq is the number of the send whose completion answers a keep-alive probe, or 0.
	idle        bool   // nothing was sent for a while

	handingOver bool  // a call waits until the device has handed over its data, without mu
	failed      error // why nothing can be sent any more although the connection is not over, or nil

	joined joined // joined is the segment that small Writes join, see join.go.
}

// batchBudget bounds the bytes that are in flight in the device, about.
const batchBudget = 256 << 10

// joined is the segment that small Writes join, see join.go.
type joined struct {
	buf    *regmem.Buffer // buf has the payload behind room for the header, and is nil without payload.
	n      int            // n is how many bytes of payload there are.
	sealed bool           // sealed is set if nothing may join any more, because a message went ahead.
	watch  bool           // watch is set if a goroutine was started to lead for this segment.

	small int       // small counts the small segments sent since the peer last sent something.
	since time.Time // since is when the first of them was sent.
	asked bool      // asked is set if one of them has asked for an answer.
}

// full reports whether nothing more may join the segment, of which a message of size bytes has
// room for the payload and the header.
func (j *joined) full(size int) bool { return j.n > 0 && (j.sealed || dataOffset+j.n == size) }

// heard notes that the peer has sent something.
func (j *joined) heard() { j.small, j.asked = 0, false }
