package rdmanet

import "sync"

// Whose turn it is to send. One call, or one queued Send, has the turn at a time,
// and keeps it until the device has what it sends.
//
//  1. takeTurn gives it to a call that finds it free. Others line up, expedited
//     ones apart from normal ones; a Send lines up without anybody who waits.
//  2. passTurn gives it to the first of the expedited ones, or else to the first of
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
type turns struct {
	taken   bool
	kind    int // of who has it
	lines   [2]line
	aside   *turn // a normal one, which has stepped aside
	waiting int   // in the lines and aside

	// A message whose last piece has not been sent.
	open     bool
	openKind int

	possible chan struct{} // see SendPossible
	hungry   bool          // a send would have blocked, and nobody was told since that it would not
	short    shortage      // what it was that it had not
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

// turn is a place in a line: that of a Send, or else of a call that waits.
type turn struct {
	in         *line
	prev, next *turn
	kind       int
	send       *Send
	ready      chan error // nil: it is the call's turn; else why it never will be
}

// line is a queue that can be left.
type line struct{ first, last *turn }

func (l *line) push(t *turn) {
	t.in, t.prev, t.next = l, l.last, nil
	if l.last != nil {
		l.last.next = t
	} else {
		l.first = t
	}
	l.last = t
}

func (l *line) remove(t *turn) {
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
	t.in, t.prev, t.next = nil, nil, nil
}

var calls = sync.Pool{New: func() any { return &turn{ready: make(chan error, 1)} }}

// free reports whether one of that kind may have the turn now.
func (q *turns) free(kind int) bool { return !q.taken && (!q.open || q.openKind == kind) }

// take makes it the turn of one of that kind.
func (q *turns) take(kind int) { q.taken, q.kind = true, kind }

// overtaken reports whether the one who has the turn has to step aside, if it is
// between two messages.
func (q *turns) overtaken() bool {
	if q.open {
		return q.openKind != q.kind
	}
	return q.kind == normal && q.lines[expedited].first != nil
}

// next takes who comes next out of its line, nil if there is nobody.
func (q *turns) next() *turn {
	var t *turn
	if q.free(expedited) {
		t = q.lines[expedited].first
	}
	if t == nil && q.free(normal) {
		if t = q.aside; t != nil {
			q.aside = nil
			q.waiting--
			return t
		}
		t = q.lines[normal].first
	}
	if t != nil {
		q.leave(t)
	}
	return t
}

func (q *turns) leave(t *turn) {
	t.in.remove(t)
	q.waiting--
}

// takeTurn waits for the turn. The caller holds mu, calls passTurn in the end
// unless there is an error, and finds mu held again.
func (c *conn) takeTurn(kind int) error {
	q := &c.turns
	if q.free(kind) {
		q.take(kind)
		return nil
	}
	if err := c.writeErr(); err != nil {
		return err
	}
	t := calls.Get().(*turn)
	c.lineUp(t, kind)
	return c.awaitTurn(t)
}

// lineUp puts t behind the others of its kind.
func (c *conn) lineUp(t *turn, kind int) {
	q := &c.turns
	t.kind = kind
	q.lines[kind].push(t)
	q.waiting++
	if q.taken && q.overtaken() {
		// It may be waiting for credits, itself or as the leader.
		c.writable.Broadcast()
		c.rouse()
	}
}

func (c *conn) awaitTurn(t *turn) error {
	c.mu.Unlock()
	err := <-t.ready
	c.mu.Lock()
	calls.Put(t)
	return err
}

// stepAside lets those go first who overtake the one who has the turn, and waits
// for it again.
func (c *conn) stepAside() {
	t := calls.Get().(*turn)
	t.kind = normal
	c.turns.aside = t
	c.turns.waiting++
	c.passTurn()
	c.awaitTurn(t)
}

// passTurn gives the turn to the next.
func (c *conn) passTurn() {
	c.turns.taken = false
	if c.turns.waiting > 0 {
		if s := c.giveTurn(); s != nil {
			go c.sendQueued(s)
		}
	}
	if c.turns.hungry {
		c.tellPossible()
	}
	if c.closed {
		c.writable.Broadcast() // Close waits for it
	}
}

// giveTurn gives the turn, which nobody has, to the next. If that is a Send it is
// returned, and for the caller to have sent.
func (c *conn) giveTurn() *Send {
	q := &c.turns
	c.turnAway()
	t := q.next()
	if t == nil {
		return nil
	}
	q.take(t.kind)
	if t.send != nil {
		return t.send
	}
	t.ready <- nil
	return nil
}

// turnAway ends the wait of all in line if nothing can be sent. Who has stepped
// aside gets the turn back, to find out for itself.
func (c *conn) turnAway() {
	q := &c.turns
	err := c.writeErr()
	if err == nil {
		return
	}
	for i := range q.lines {
		for t := q.lines[i].first; t != nil; t = q.lines[i].first {
			q.leave(t)
			if t.send != nil {
				t.send.finish(0, err)
			} else {
				t.ready <- err
			}
		}
	}
	if t := q.aside; t != nil && !q.taken {
		q.aside = nil
		q.waiting--
		q.take(t.kind)
		t.ready <- nil
	}
}

// lookAgain is for when something has changed that those who wait should know of.
func (c *conn) lookAgain() {
	q := &c.turns
	if q.waiting > 0 {
		c.turnAway()
	}
	if q.hungry {
		c.tellPossible()
	}
}
