package rdmanet

// acquireQueue waits for the send queue and acquires it for a call. The caller holds mu and has
// seen that the call may begin (sendErr). It calls releaseQueue in the end unless there is an
// error.
func (c *conn) acquireQueue(kind int, call callKind) error {
	q := &c.queue
	if q.available(kind) {
		q.acquire(kind)
		return nil
	}
	t := callEntry(call)
	c.enqueue(t, kind)
	return c.awaitEntry(t)
}

// acquireStream is acquireQueue for a new call that writes to the stream.
func (c *conn) acquireStream() error {
	if err := c.refusal(normal); err != nil {
		return err
	}
	return c.acquireQueue(normal, streamCall)
}

// enqueue puts t behind the others of its kind.
func (c *conn) enqueue(t *queueEntry, kind int) {
	q := &c.queue
	t.kind = kind
	q.waiters[kind].push(t)
	q.waiting++
	if q.busy && q.mustYield() {
		// The send that has the queue may be waiting for credits, perhaps as the leader.
		c.writers.WakeAll()
		c.wait.Interrupt()
	}
}

// awaitEntry waits until the call of t has the queue, or returns why it never will.
func (c *conn) awaitEntry(t *queueEntry) (err error) {
	c.unlocked(func() { err = <-t.ready })
	return err
}

// yieldQueue lets expedited sends go first, and acquires the queue again. It returns with the
// queue also if the call has to end.
func (c *conn) yieldQueue(call callKind) {
	t := callEntry(call)
	c.queue.yielded = t
	c.queue.waiting++
	c.releaseQueue()
	c.awaitEntry(t)
}

// releaseQueue gives the queue to the next send.
func (c *conn) releaseQueue() {
	c.queue.busy = false
	if c.queue.waiting > 0 {
		if s := c.acquireNext(); s != nil {
			s.start()
		}
	}
	if c.queue.wantsWritable {
		c.signalWritable()
	}
	if c.life.closed {
		c.writers.WakeAll() // Close waits for the queue
	}
}

// refuseOpen ends the waits of CloseWrite if a message has begun and nothing that could end it
// has the queue or waits for it.
func (c *conn) refuseOpen() {
	q := &c.queue
	for t, next := q.waiters[normal].first, (*queueEntry)(nil); t != nil; t = next {
		if next = t.next; t.send == nil && t.call == closeCall {
			q.remove(t)
			t.ready <- errMessageOpen
		}
	}
}

// acquireNext gives the queue, which is not busy, to the next send. If that is a queued send
// it is returned, and the caller sends it.
func (c *conn) acquireNext() pendingSend {
	q := &c.queue
	c.failWaiters()
	t := q.next()
	if t == nil {
		if !q.busy {
			c.refuseOpen()
		}
		return nil
	}
	q.acquire(t.kind)
	if t.send != nil {
		return t.send
	}
	t.ready <- nil
	return nil
}
