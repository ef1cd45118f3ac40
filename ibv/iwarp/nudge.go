package iwarp

import "time"

// Linux's Soft-iWARP (siw) as the responder of a connection does not notice what comes
// between its MPA reply and the moment when it takes over the socket, until something else
// comes. So an initiator that has sent something, and has received nothing, sends RDMA
// Writes of zero bytes, which the peer's program does not see.
const (
	// firstNudge is how long the initiator waits for an answer. Each further nudge takes
	// twice as long to come as the one before.
	firstNudge = 50 * time.Millisecond

	// nudges is how many there are at most, the last one after 13 s.
	nudges = 8
)

// expectFirst starts the wait for the responder's first frame. The caller holds qp.sq.mu.
func (st *stream) expectFirst() {
	t := &st.tx
	wait, left := firstNudge, nudges
	t.first = time.AfterFunc(wait, func() {
		st.qp.sq.mu.Lock()
		defer st.qp.sq.mu.Unlock()
		if t.first == nil {
			return
		}
		st.nudge()
		if left--; left == 0 {
			t.first = nil
			return
		}
		wait *= 2
		t.first.Reset(wait)
	})
}

// expectNoMore ends the wait for the first frame.
func (t *transmitter) expectNoMore() {
	if t.first != nil {
		t.first.Stop()
		t.first = nil
	}
}

// nudge sends an RDMA Write of zero bytes if something was sent and the peer has all of it.
// The caller holds qp.sq.mu.
func (st *stream) nudge() {
	t := &st.tx
	busy := t.stopped || t.draining || t.flushing || t.msg.active || len(t.out) > 0 || t.rtr != rtrNone
	if busy || t.sendMSN == 0 && t.readMSN == 0 {
		return
	}
	t.rtr = rtrWrite
	st.push(false)
}
