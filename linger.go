package rdmanet

import "time"

// closing is the state of the end of a connection, which close.go brings about. Conn.mu
// guards it.
type closing struct {
	hasQueue bool // hasQueue is set when Close has acquired the send queue, which it keeps.

	half bool // CloseWrite had told the device to end this side's direction before Close

	// marked is set when last is known.
	marked bool

	// last is the number of the send whose completion stands for all that was written.
	last uint64

	// evicted is set if the connection is given up because too many others linger.
	evicted bool

	bound  bound // bound limits the wait of Close, or of the linger.
	result error // result is why the peer may not have everything, or nil.

	// over is closed when told, the result of CloseContext, is set. Then, and without
	// CloseContext, it is nil.
	over chan struct{}
	told error
}

// bound limits a wait: by the time for which nothing moves, and as a whole.
type bound struct {
	// stall is how long the wait goes on while nothing moves.
	stall time.Duration

	ends time.Time // ends is when the wait ends in any case.
	seen progress  // seen is the progress when it was last looked at.
	over bool      // over is set when the wait has ended, whatever moves afterwards.
}

// progress is what moves while a connection ends.
type progress struct {
	sent     uint64 // sent is how many sends have completed.
	received uint64 // received is how many Data Transfer messages have arrived.
	unsent   int    // unsent is how many bytes are still on this host.
}
