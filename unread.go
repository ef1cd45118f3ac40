package rdmanet

// This file removes segments from the unread queue and gives back what they hold.
// delivery.go adds the segments, and recv.go has the calls that read them.

// consumed removes the head of the unread queue, after its last byte was read or to drop
// it.
func (c *conn) consumed() { c.done(c.in.pop()) }

// done gives back what a segment holds that was removed from the unread queue: fetched data
// of a transfer, room in a chunk, or a receive buffer. A transfer that was not read to its
// end is discarded.
//
// The receive of a segment that was held is noted to be granted again. For a transfer, and for a
// payload in a chunk, that was noted before (store, copyUnread).
func (c *conn) done(s segment) {
	if s.transfer != nil {
		if s.transfer.taken < s.transfer.length {
			c.rx.discard(s.transfer)
		}
		c.rx.dropFetches(s.transfer)
		return
	}
	if s.chunk != nil {
		c.in.copies.release(s.chunk)
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

// watchUnread sets the timer if nobody reads and the peer may wait for that.
func (c *conn) watchUnread() {
	w := &c.in.watch
	switch {
	case w.set || w.alone && !w.short || !c.holdsPeerBack():
	case w.alone:
		w.start(unreadAgain, c.leftUnread)
	default:
		w.start(unreadFor, c.leftUnread)
	}
}

// holdsPeerBack reports whether the peer may wait for somebody to read, and nobody does.
func (c *conn) holdsPeerBack() bool {
	q := &c.credits
	switch {
	case c.rx.reading > 0 || c.in.held == 0 || !c.life.posts():
		return false
	case q.off:
		return c.in.posted.Len() == 0 && !c.holding.SendsHaveRoom()
	}
	return q.peerCredits() <= max(q.peerReserve(), 1)
}

// leftUnread is called by the timer.
func (c *conn) leftUnread() {
	c.mu.Lock()
	defer c.unlock()
	w := &c.in.watch
	w.set = false
	if c.life.closed {
		return
	}
	if w.alone = w.reads == w.since && c.rx.reading == 0; w.alone {
		c.in.copies.limit = copyBreakLimit // It is less while the kernels hold what is unread.
		c.copyUnread()
		c.replenish()
	}
	c.watchUnread()
}

// copyUnread copies payloads out of their receives, which are posted again, until those that are
// left may keep theirs. The latest are copied first.
func (c *conn) copyUnread() {
	q := &c.in
	q.watch.short = false
	for i := q.unread.Len() - 1; i >= 0 && q.inBufs > 0 && !c.mayKeep(i); i-- {
		s := q.unread.At(i)
		if s.buf == nil {
			continue
		}
		data, chunk := q.copies.copy(s.data)
		if chunk == nil {
			q.watch.short = !q.copies.full()
			return
		}
		buf := s.buf
		s.data, s.buf, s.chunk = data, nil, chunk
		q.held--
		q.inBufs--
		c.stats.BytesCopied += uint64(len(data))
		c.credits.oweGrant(s.flags&NoResponse != 0)
		c.reuse(buf)
	}
}

// mayKeep reports whether the unread segment of that index, and those before it, may keep their
// receives.
func (c *conn) mayKeep(i int) bool {
	q := &c.in
	s := q.unread.At(i)
	switch {
	case q.watch.alone && c.rx.reading == 0:
		// While nobody reads, the peer needs the receives, whatever they hold.
		return q.held <= c.credits.keptUnread(q.held)
	case q.held <= min(c.credits.window, c.credits.target)/2:
		return true // The reader does not lag behind.
	case i == 0 && c.rx.reading > 0:
		return true // A reader may be copying from the head.
	}
	// While the reader lags behind, payloads that leave half of a receive empty are copied.
	return s.buf == nil || len(s.data) > min(c.receiveSize(s.buf), copyBreakSize)/2
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
	if c.rx.reading--; c.rx.reading == 0 {
		c.in.watch.reads++
		c.in.watch.alone = false
	}
	if c.life.closed {
		// Close leaves this to the calls that read.
		c.dropUnread()
	}
	if n := c.rx.live.Len(); c.rx.reading == 0 && n > 0 && !c.life.closed {
		if x := *c.rx.live.At(n - 1); x.asked < x.length {
			c.rx.startPrefetchTimer()
		}
	}
	c.watchUnread()
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
