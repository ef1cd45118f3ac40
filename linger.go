package rdmanet

import "time"

// closing is what a connection knows of its end. It is guarded by Conn.mu.
type closing struct {
	turn    bool   // the send queue is Close's for good
	marked  bool   // the completion of last stands for all that was written
	last    uint64 // the number of that send
	evicted bool   // the process has too many connections that linger

	bound  bound
	result error         // why the peer may not have everything
	over   chan struct{} // closed when result is set
}

// bound bounds a wait by how long nothing moves, and as a whole.
type bound struct {
	stall time.Duration
	ends  time.Time
	seen  progress
	over  bool // it is over, whatever moves afterwards
}

// progress is what moves while a connection ends.
type progress struct {
	sent     uint64 // sends that have completed
	received uint64 // messages
	unsent   int    // bytes that are still on this host
}
