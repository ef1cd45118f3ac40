package rdmanet

// sending is the state of the outgoing stream. Conn.mu guards it.
type sending struct {
	wantsCredit bool // wantsCredit is set while a writer waits for credits.

	data uint64 // data is the number of the last send with something of the program's.

	responseDue bool // responseDue is set when the peer has asked for a message.
	probeDue    bool // probeDue is set when this side must ask the peer for one.
	finSent     bool
	midMessage  bool   // midMessage is set while a message has begun and not ended.
	truncated   bool   // truncated is set if it never will, because a deadline has passed.
	barrier     bool   // barrier is set while the request of queueBarrier is under way.
	probeSeq    uint64 // probeSeq is the number of the send whose completion answers a keep-alive probe, or 0.
	idle        bool   // nothing was sent for a while
}

// batchBudget bounds the bytes that are in flight in the device, about.
const batchBudget = 256 << 10
