package rdmanet

// consumed takes the head of the unread queue off after its last byte was read.
func (c *conn) consumed() { c.done(c.in.unread.Pop()) }

// done gives back what a segment held.
func (c *conn) done(s segment) {
	if s.transfer != nil {
		if s.transfer.taken < s.transfer.length {
			c.discard(s.transfer)
		}
		c.dropPieces(s.transfer)
		return
	}
	if s.copyBreak != nil {
		c.in.releaseFromChunk(s.copyBreak, s.n)
		return
	}
	c.in.held--
	c.credits.oweGrant(s.flags&NoResponse != 0)
	if s.buf == nil { // evicted
		c.replenish()
	} else {
		c.reuse(s.buf)
	}
}

// dropUnread throws away what nobody will read.
func (c *conn) dropUnread() {
	for c.in.unread.Len() > 0 {
		c.consumed()
	}
}

// doneReading notes that a call that read has ended; what it has left is neglected
// if no other comes.
func (c *conn) doneReading() {
	c.rx.reading--
	if c.life.closed {
		c.dropUnread() // Close leaves it to the call that reads
	}
	if n := c.rx.live.Len(); c.rx.reading == 0 && n > 0 && !c.life.closed {
		if x := *c.rx.live.At(n - 1); x.asked < x.length {
			c.startPrefetchTimer()
		}
	}
}

// popFinished takes transfers that have been read off the queue and reports whether
// a message has ended.
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
