package rdmanet

import (
	"errors"
	"syscall"
	"time"
)

// This file bounds how long a call that has to end waits until the peer lets go of the
// call's memory. write_transfer.go has such waits of Write (giveUp), and directread.go
// those of Read (readDirect).

// withdrawWithin is how long a call that has to end waits for its memory while nothing
// arrives from the peer. After that the connection is broken: the memory becomes the
// caller's again, and the peer may still use it.
var withdrawWithin = 5 * time.Second

// withdrawTimes bounds the whole wait of a call that has to end, as a multiple of
// withdrawWithin.
const withdrawTimes = 12

// closedShare divides withdrawWithin after Close: no call will use the connection any more.
const closedShare = 5

// withdrawPatience returns how long a call that has to end waits for a silent peer.
func (l *life) withdrawPatience() time.Duration {
	if l.closed {
		return withdrawWithin / closedShare
	}
	return withdrawWithin
}

var errTransferHeld = &resetError{syscall.ETIMEDOUT, errors.New("the peer does not let go of a transfer")}

// remainingPatience returns how much longer a call waits that has had to end since the
// given time. The wait grows with each message of the peer and each RDMA Write that
// completes. A result of 0 or less means that the wait is over.
func (c *conn) remainingPatience(since time.Time) time.Duration {
	whole := withdrawTimes*withdrawWithin - time.Since(since)
	for _, t := range []time.Time{c.live.lastReceived, c.tx.wrote} {
		if t.After(since) {
			since = t
		}
	}
	return min(whole, c.life.withdrawPatience()-time.Since(since))
}
