package rdmanet

import (
	"errors"
	"syscall"
	"time"
)

// withdrawWithin is how long a call that has to give up a transfer waits, while nothing
// is heard of the peer, for it to let go of the memory, and withdrawTimes how many times
// as long in any case. After that the connection is broken: the memory is the caller's
// again, and the peer may be in the middle of reading it.
var withdrawWithin = 5 * time.Second

const withdrawTimes = 12

// closedShare is the part of withdrawWithin that such a call waits after Close: nobody
// will use the connection any more.
const closedShare = 5

// withdrawPatience is how long a call that has a reason to end waits for a silent peer.
func (c *conn) withdrawPatience() time.Duration {
	if c.life.closed {
		return withdrawWithin / closedShare
	}
	return withdrawWithin
}

var errTransferHeld = &resetError{syscall.ETIMEDOUT, errors.New("the peer does not let go of a transfer")}

// remainingPatience returns how much longer a call that has a reason to end since then waits for
// the peer to let go of its memory, unless something more is heard. Not more than 0 is
// no longer.
func (c *conn) remainingPatience(since time.Time) time.Duration {
	whole := withdrawTimes*withdrawWithin - time.Since(since)
	for _, t := range []time.Time{c.live.lastReceived, c.tx.wrote} {
		if t.After(since) {
			since = t
		}
	}
	return min(whole, c.withdrawPatience()-time.Since(since))
}
