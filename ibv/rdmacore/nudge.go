//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// siw on the passive side of a connection does not notice what comes between its answer to
// the connection request and the moment when it takes over the socket, until something else
// comes. So each side makes something come while it has received nothing. A passive siw
// makes the peer's device send an answer. An active siw sends something that the peer's
// program does not see.
const (
	// nudgePassive is how long the passive side waits for a first message. By then the
	// active side has its answer and receives, as MPA requires (RFC 5044, section 7.1.3).
	nudgePassive = 100 * time.Millisecond

	// nudgeActive is how long the active side waits for an answer to what it has sent.
	// Each further nudge takes twice as long to come as the one before.
	nudgeActive = 50 * time.Millisecond

	// nudges is how many requests the active side adds to a send queue at most, the last
	// one after 13 s. The passive side adds one.
	nudges = 8
)

// nudgeID is the ID of the requests of nudge, which are in no ledger.
const nudgeID = ^C.uint64_t(0)

// expectFirst begins to wait for the first message of the peer.
func (q *qp) expectFirst() {
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	if q.id.passive {
		q.first = time.AfterFunc(nudgePassive, func() {
			q.sq.mu.Lock()
			defer q.sq.mu.Unlock()
			if q.heardNothing() {
				q.nudge(ibv.OpRead)
			}
		})
		return
	}
	wait, left := nudgeActive, nudges
	q.first = time.AfterFunc(wait, func() {
		q.sq.mu.Lock()
		defer q.sq.mu.Unlock()
		if !q.heardNothing() {
			return
		}
		if q.sq.ledger.used() {
			q.nudge(ibv.OpWrite)
		}
		if left--; left > 0 {
			wait *= 2
			q.first.Reset(wait)
		}
	})
}

// heardNothing reports whether a queue pair in use has completed no receive. The caller
// holds sq.mu.
func (q *qp) heardNothing() bool {
	return q.sq.c != nil && !q.failed.Load() && q.rq.ledger.untouched()
}

// nudge posts a request of zero bytes. An RDMA Read makes the peer's device send an answer,
// and an RDMA Write sends something to it. If the request fails, the connection fails,
// which is noticed there. The caller holds sq.mu.
func (q *qp) nudge(op ibv.Opcode) {
	wr := C.struct_rn_wr{id: nudgeID, opcode: opcodes[op]}
	if op == ibv.OpRead {
		wr.num_sge = 1 // as in addSend
	}
	q.dev.postSend(q.sq.c, []C.struct_rn_wr{wr}, &C.struct_rn_sge{})
}
