package rdmanet

// sendQueue decides which call, or which queued send, may send. One at a time has the
// queue, and keeps it until the device has what it sends. Conn.mu guards it.
//
//  1. A call that finds the queue available acquires it. Others wait in one of two lists,
//     expedited sends apart from normal ones. A queued send waits in a list too, without a
//     goroutine.
//  2. When the queue is released, the first expedited send acquires it, else the first normal
//     one. A queued send is then sent by a goroutine, which goes on with the next entry as
//     long as that is a queued send too.
//  3. A normal send that has the queue yields it to expedited ones wherever none of its
//     messages has begun and not ended: while it waits for credits, and between the batches
//     of a Write.
//  4. After a piece of a message (Partial) only sends of its kind acquire the queue, until
//     the last piece has been sent.
//  5. While CloseWrite waits for its turn, nothing begins but the next pieces of a message, and
//     writes of the stream end. CloseWrite is refused where only another call could end a
//     message.
//
// Whatever cannot be sent any more is refused and waits no longer (sendErr).
type sendQueue struct {
	busy    bool // busy is set while a send has the queue.
	kind    int  // kind is the kind of the send that has it.
	waiters [2]entryList
	yielded *queueEntry // yielded is the normal send that has yielded the queue, or nil.
	waiting int         // waiting counts the entries in the lists and in yielded.

	// partial is set while the last piece of a message has not been sent; partialKind is the
	// kind of that message.
	partial     bool
	partialKind int

	writable      chan struct{} // writable is the channel of Conn.Writable.
	wantsWritable bool          // wantsWritable is set if a send would have blocked and writable has had no value since.
	lacking       shortage      // lacking is what that send lacked.
}

// shortage is what a send that would have blocked lacked.
type shortage struct {
	kind     int
	segments int    // segments is how many segments it would have made.
	bytes    int    // bytes is how many bytes of payload could not have been sent in part, or 0.
	buffer   bool   // buffer is set if no buffers were free. Sends that complete free some.
	done     uint64 // done is how many sends had completed then.
}

// These are the two kinds of sends.
const (
	normal = iota
	expedited
)

// pendingSend is a queued send as the send queue knows it.
type pendingSend interface {
	// start sends it in a goroutine of its own. It has the queue.
	start()

	// finish ends it with n bytes sent, and with err if that is not all.
	finish(n int, err error)
}

// callKind says what ends a send that goes on or waits for the queue. Only calls write to the
// stream; queued sends are messages.
type callKind uint8

const (
	messageCall callKind = iota // a message, which CloseWrite lets go first
	streamCall                  // a write of the stream, which CloseWrite ends
	closeCall                   // CloseWrite, which heeds no deadline
)

// queueEntry is a send that waits for the queue: a queued send, or else a call.
type queueEntry struct {
	list       *entryList // list is the list that the entry is in, or nil.
	prev, next *queueEntry
	kind       int
	call       callKind    // what ends the wait
	send       pendingSend // send is the queued send, or nil for a call.
	ready      chan error  // ready gives a call the queue with nil. Otherwise it has the reason why the call never gets it.
}

// entryList is a list of entries, the oldest first. An entry may leave it at any time.
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

// callEntry returns the entry of a call. It is not used again: its channel belongs to the
// bubble of testing/synctest in which it was made.
func callEntry(call callKind) *queueEntry {
	return &queueEntry{call: call, ready: make(chan error, 1)}
}

// available reports whether a send of that kind may acquire the queue now.
func (q *sendQueue) available(kind int) bool { return !q.busy && (!q.partial || q.partialKind == kind) }

// acquire gives the queue, which is available, to a send of that kind.
func (q *sendQueue) acquire(kind int) { q.busy, q.kind = true, kind }

// mustYield reports whether the send that has the queue has to yield it, if it is between
// two messages.
func (q *sendQueue) mustYield() bool {
	if q.partial {
		return q.partialKind != q.kind
	}
	return q.kind == normal && q.waiters[expedited].first != nil
}

// next takes the entry that is to have the queue next out of its list, nil if there is none.
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

// remove takes a waiting entry out of its list.
func (q *sendQueue) remove(t *queueEntry) {
	t.list.remove(t)
	q.waiting--
}
