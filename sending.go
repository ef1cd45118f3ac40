package rdmanet

// sending is the state of the outgoing stream. Conn.mu guards it.
type sending struct {
	wantsCredit bool // a writer waits for credits

	data uint64 // number of the last send with something of the program's

	responseDue bool // the peer has asked for a message
	probeDue    bool // this side is to ask the peer for one
	finSent     bool
	midMessage  bool   // a message has begun and not ended
	truncated   bool   // it never will: a deadline has passed
	barrier     bool   // the request of queueBarrier is under way
	probeSeq    uint64 // number of the send whose completion answers a keep-alive probe, or 0
	idle        bool   // nothing was sent for a while
}

// batchBudget bounds the bytes that are in flight in the device, about.
const batchBudget = 256 << 10
