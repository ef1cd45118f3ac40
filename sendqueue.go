package rdmanet

import "sync"

// Whose turn it is to send. One call, or one queued Send, has the turn at a time,
// and keeps it until the device has what it sends.
//
//  1. acquireQueue gives it to a call that finds it free. Others line up, expedited
//     ones apart from normal ones; a Send lines up without anybody who waits.
//  2. releaseQueue gives it to the first of the expedited ones, or else to the first of
//     the normal ones. A Send is then sent by a goroutine, which goes on with the
//     next as long as those are Sends too.
//  3. A normal one that has the turn steps aside for expedited ones wherever none
//     of its messages has begun and not ended: for as long as it waits for
//     credits, and between the batches of a Write.
//  4. After a piece of a message (Partial) nobody has a turn but those of its
//     kind, until the last piece has been sent.
//
// When nothing can be sent any more (writeErr) all who wait are turned away. All of
// it is guarded by Conn.mu.
type sendQueue struct {
	busy    bool
	kind    int // of who has it
	waiters [2]entryList
	yielded *queueEntry // a normal one, which has stepped aside
	waiting int         // in the lines and aside

	// A message whose last piece has not been sent.
	partial     bool
	partialKind int

	writable      chan struct{} // see SendPossible
	wantsWritable bool          // a send would have blocked, and nobody was told since that it would not
	lacking       shortage      // what it was that it had not
}

// The two kinds of sends.
const (
	normal = iota
	expedited
)

func (f MsgFlags) kind() int {
	if f&Expedited != 0 {
		return expedited
	}
	return normal
}

// queueEntry is a place in a line: that of a Send, or else of a call that waits.
type queueEntry struct {
	list       *entryList
	prev, next *queueEntry
	kind       int
	send       *Send
	ready      chan error // nil: it is the call's turn; else why it never will be
}

// entryList is a queue that can be left.
type entryList struct{ first, last *queueEntry }

func (l *entryList) push(t *queueEntry) {
	t.list, t.prev, t.next = l, l.last, nil
	if l.last != nil {
		l.last.next = t
	} else {
		l.first = t
	}
	l.last = t
}

func (l *entryList) remove(t *queueEntry) {
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		l.first = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	} else {
		l.last = t.prev
	}
	t.list, t.prev, t.next = nil, nil, nil
}

var callEntries = sync.Pool{New: func() any { return &queueEntry{ready: make(chan error, 1)} }}

// available reports whether one of that kind may have the turn now.
func (q *sendQueue) available(kind int) bool { return !q.busy && (!q.partial || q.partialKind == kind) }

// acquire makes it the turn of one of that kind.
func (q *sendQueue) acquire(kind int) { q.busy, q.kind = true, kind }

// mustYield reports whether the one who has the turn has to step aside, if it is
// between two messages.
func (q *sendQueue) mustYield() bool {
	if q.partial {
		return q.partialKind != q.kind
	}
	return q.kind == normal && q.waiters[expedited].first != nil
}

// next takes who comes next out of its line, nil if there is nobody.
func (q *sendQueue) next() *queueEntry {
	var t *queueEntry
	if q.available(expedited) {
		t = q.waiters[expedited].first
	}
	if t == nil && q.available(normal) {
		if t = q.yielded; t != nil {
			q.yielded = nil
			q.waiting--
			return t
		}
		t = q.waiters[normal].first
	}
	if t != nil {
		q.remove(t)
	}
	return t
}

func (q *sendQueue) remove(t *queueEntry) {
	t.list.remove(t)
	q.waiting--
}

// acquireQueue waits for the turn. The caller holds mu, calls releaseQueue in the end
// unless there is an error, and finds mu held again.
func (c *conn) acquireQueue(kind int) error {
	q := &c.queue
	if q.available(kind) {
		q.acquire(kind)
		return nil
	}
	if err := c.writeErr(); err != nil {
		return err
	}
	t := callEntries.Get().(*queueEntry)
	c.enqueue(t, kind)
	return c.awaitEntry(t)
}

// enqueue puts t behind the others of its kind.
func (c *conn) enqueue(t *queueEntry, kind int) {
	q := &c.queue
	t.kind = kind
	q.waiters[kind].push(t)
	q.waiting++
	if q.busy && q.mustYield() {
		// It may be waiting for credits, itself or as the leader.
		c.writers.WakeAll()
		c.wait.Interrupt()
	}
}

func (c *conn) awaitEntry(t *queueEntry) (err error) {
	c.unlocked(func() { err = <-t.ready })
	callEntries.Put(t)
	return err
}

// yieldQueue lets those go first who overtake the one who has the turn, and waits
// for it again.
func (c *conn) yieldQueue() {
	t := callEntries.Get().(*queueEntry)
	t.kind = normal
	c.queue.yielded = t
	c.queue.waiting++
	c.releaseQueue()
	c.awaitEntry(t)
}

// releaseQueue gives the turn to the next.
func (c *conn) releaseQueue() {
	c.queue.busy = false
	if c.queue.waiting > 0 {
		if s := c.acquireNext(); s != nil {
			go c.sendQueued(s)
		}
	}
	if c.queue.wantsWritable {
		c.signalWritable()
	}
	if c.closed {
		c.writers.WakeAll() // Close waits for it
	}
}

// acquireNext gives the turn, which nobody has, to the next. If that is a Send it is
// returned, and for the caller to have sent.
func (c *conn) acquireNext() *Send {
	q := &c.queue
	c.failWaiters()
	t := q.next()
	if t == nil {
		return nil
	}
	q.acquire(t.kind)
	if t.send != nil {
		return t.send
	}
	t.ready <- nil
	return nil
}

// failWaiters ends the wait of all in line if nothing can be sent. Who has stepped
// aside gets the turn back, to find out for itself.
func (c *conn) failWaiters() {
	q := &c.queue
	err := c.writeErr()
	if err == nil {
		return
	}
	for i := range q.waiters {
		for t := q.waiters[i].first; t != nil; t = q.waiters[i].first {
			q.remove(t)
			if t.send != nil {
				t.send.finish(0, err)
			} else {
				t.ready <- err
			}
		}
	}
	if t := q.yielded; t != nil && !q.busy {
		q.yielded = nil
		q.waiting--
		q.acquire(t.kind)
		t.ready <- nil
	}
}

// recheckQueue is for when something has changed that those who wait should know of.
func (c *conn) recheckQueue() {
	q := &c.queue
	if q.waiting > 0 {
		c.failWaiters()
	}
	if q.wantsWritable {
		c.signalWritable()
	}
}
