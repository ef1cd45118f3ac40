package rdmanet

// This file removes segments from the unread queue and gives back what they hold.
// delivery.go adds the segments, and recv.go has the calls that read them.

// consumed removes the head of the unread queue, after its last byte was read or to drop
// it.
func (c *conn) consumed() { c.done(c.in.unread.Pop()) }

// done gives back what a segment holds that was removed from the unread queue: fetched data
// of a transfer, room in a chunk, or a receive buffer. A transfer that was not read to its
// end is discarded.
//
// The receive of a segment that was held is noted to be granted again. For a transfer, and
// for a payload in a chunk, that was noted on arrival (store).
func (c *conn) done(s segment) {
	if s.transfer != nil {
		if s.transfer.taken < s.transfer.length {
			c.rx.discard(s.transfer)
		}
		c.rx.dropFetches(s.transfer)
		return
	}
	if s.copyBreak != nil {
		c.in.releaseFromChunk(s.copyBreak, s.n)
		return
	}
	c.in.held--
	c.credits.oweGrant(s.flags&NoResponse != 0)
	// The payload was moved to ordinary memory, and its buffer was posted again (evict).
	if s.buf == nil {
		c.replenish()
	} else {
		c.reuse(s.buf)
	}
}

// dropUnread removes all segments, which no call will read.
func (c *conn) dropUnread() {
	for c.in.unread.Len() > 0 {
		c.consumed()
	}
}

// doneReading notes that a call that reads has ended. If no other call follows, the rest of
// an offer is prefetched.
func (c *conn) doneReading() {
	c.rx.reading--
	if c.life.closed {
		// Close leaves this to the calls that read.
		c.dropUnread()
	}
	if n := c.rx.live.Len(); c.rx.reading == 0 && n > 0 && !c.life.closed {
		if x := *c.rx.live.At(n - 1); x.asked < x.length {
			c.rx.startPrefetchTimer()
		}
	}
}

// popFinished removes the transfers at the head of the unread queue that were read as a
// whole, and reports whether a message has ended.
func (c *conn) popFinished() (last bool) {
	for c.in.unread.Len() > 0 {
		s := c.in.unread.At(0)
		if s.transfer == nil || s.transfer.taken < s.transfer.length {
			if s.transfer != nil && s.transfer.taken > 0 {
				s.size = 0
			}
			return false
		}
		last = s.last && !s.transfer.cut
		c.consumed()
		if last {
			return true
		}
	}
	return last
}
