//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// nudgeAfter is how long the passive side of siw waits for a first message. By
// then the active side has its answer and hears, as MPA wants it (RFC 5044,
// section 7.1.3).
const nudgeAfter = 100 * time.Millisecond

// nudges is how many requests nudge adds to a send queue.
const nudges = 1

// nudgeID is the request of nudge, which is in no ledger.
const nudgeID = ^C.uint64_t(0)

// expectFirst begins to wait for the first message of the active side. siw
// overlooks what comes between its answer to the request for the connection and
// the moment when it takes over the socket, until something else comes.
func (q *qp) expectFirst() {
	q.first = time.AfterFunc(nudgeAfter, func() {
		q.sq.mu.Lock()
		defer q.sq.mu.Unlock()
		if q.sq.c != nil && !q.failed.Load() && q.rq.ledger.untouched() {
			q.nudge()
		}
	})
}

// nudge has the peer's device send something: the answer to an RDMA Read of no
// bytes. What goes wrong with it goes wrong with the connection and is seen
// there. Called with sq.mu held.
func (q *qp) nudge() {
	wr := C.struct_rn_wr{id: nudgeID, opcode: opcodes[ibv.OpRead], num_sge: 1} // as in addSend
	postSend(q.sq.c, []C.struct_rn_wr{wr}, &C.struct_rn_sge{})
}
