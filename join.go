package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/internal/fault"
)

// This file joins small Writes of a stream into one segment.
//
// A Write goes at once if nothing is ahead of it. Otherwise its bytes join the segment that
// goes next (ahead, join), and Write returns: as with TCP, the bytes are on their way when
// the program has its buffer back. The segment goes when it is full, when nothing is ahead
// of it any more (queueDue), or when a message or a transfer of the program's must follow it.
// FIN goes with it. There is no timer.
//
// What is ahead of a Write always ends by itself, and a goroutine notices the end: the
// poster for a post, the leader of cqwait for credits, completions and answers. watchJoined
// makes sure that there is a leader.
//
// A program that writes faster than its peer reads would never be short of anything for as
// long as the peer's device takes each small segment. So after askAfter segments to a peer
// that sends nothing, one asks for an answer, and Writes join until something arrives.

const (
	// joinMost is the length of the longest Write that joins others on devices that send
	// straight from the caller's memory: it costs a copy.
	joinMost = 16 << 10

	// askAfter is how many small segments go until one asks for an answer.
	askAfter = 16
)

// askWithin is the time within which so many must be sent. With more time between them
// each has left before the next.
var askWithin = 10 * time.Millisecond

// joins reports whether a Write of n bytes may join others. Only streams between rdmanet
// peers have no boundaries: for other peers a Write is a message of the upper layer.
func (c *conn) joins(n int, m *sendOptions) bool {
	return c.fin && !c.holds && !m.message && m.token == 0 && n <= min(joinMost, int(c.agreed.maxSend)-dataOffset) && !c.queue.partial
}

// ahead reports whether something is ahead of a small Write, so that bytes may join it.
func (c *conn) ahead() bool {
	l := &c.lane
	switch {
	case c.send.joined.asked, l.posting, l.queue.Len() > 0, c.credits.spendable() == 0:
		return true
	case c.freeSlots() <= reservedSlots || l.inFlight >= batchBudget:
		c.wantSendCompletion()
		return true
	}
	return false
}

// join appends what there is room for of p, and returns how many bytes that is. Without a
// buffer it is 0. The connection's own buffer is for messages without payload. An error says
// that the next byte cannot be read.
func (c *conn) join(p []byte) (n int, err error) {
	j := &c.send.joined
	if j.sealed {
		return 0, nil
	}
	if j.buf == nil {
		buf, err := c.lane.buffers.Get()
		if err != nil {
			return 0, nil
		}
		j.buf = buf
	}
	n, err = fault.Copy(j.buf.B[dataOffset+j.n:c.agreed.maxSend], p)
	j.n += n
	c.send.idle = false
	c.stats.BytesCopied += uint64(n)
	if j.n == 0 {
		j.buf.Release()
		j.buf = nil
	}
	return n, err
}

// queueJoined queues the segment if that is possible now, and reports whether nothing is
// left to be queued.
func (c *conn) queueJoined() bool {
	if c.send.joined.n == 0 {
		return true
	}
	if c.life.over() || c.credits.spendable() == 0 || c.freeSlots() <= reservedSlots || c.lane.inFlight >= batchBudget {
		return false // On a connection that is over it stays, and counts as lost.
	}
	o, _ := c.takeJoined()
	c.queueBatch(&o)
	return true
}

// takeJoined returns the segment for it to be queued, if there is one.
func (c *conn) takeJoined() (o sendBatch, ok bool) {
	j := &c.send.joined
	if j.n == 0 {
		return o, false
	}
	o = sendBatch{p: j.buf.B[dataOffset:][:j.n], segs: 1, joined: true}
	o.bufs.Push(j.buf)
	j.buf, j.n, j.sealed, j.watch = nil, 0, false, false
	return o, true
}

// queueJoinedDue queues the segment if nothing is ahead of it, or if it is full, and
// reports whether it did.
func (c *conn) queueJoinedDue() bool {
	return c.send.joined.n > 0 && (c.send.joined.full(int(c.agreed.maxSend)) || !c.ahead()) && c.queueJoined()
}

// sendsSmall returns the flags for a small segment that goes by itself.
func (c *conn) sendsSmall() uint16 {
	j := &c.send.joined
	switch j.small++; {
	case j.small == 1:
		j.since = time.Now()
	case j.small < askAfter || j.asked || c.send.peerWants:
		// An answer would take the credit that the peer's payload waits for.
	case time.Since(j.since) > askWithin:
		j.small = 0
	default:
		j.asked = true
		return flagResponseRequested
	}
	return 0
}

// watchJoined makes sure that a goroutine notices when the segment can go.
func (c *conn) watchJoined() {
	j := &c.send.joined
	if j.n > 0 && !j.watch && !c.wait.Leading() && !c.life.closed && !c.life.over() {
		j.watch = true
		go c.wait.Run()
	}
}

// dropJoined releases the segment of a connection that has ended.
func (c *conn) dropJoined() {
	j := &c.send.joined
	if j.buf != nil {
		j.buf.Release()
	}
	*j = joined{}
}
