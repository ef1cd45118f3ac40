package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
)

// This file handles completions of the connection's queue pair. Package cqwait decides
// which goroutine waits for them. That goroutine handles whatever has arrived, for all
// goroutines, and wakes those that it concerns: readers wait in conn.readers, all others in
// conn.writers. delivery.go has the completions of receives.

// completions implements cqwait.Owner for a connection.
type completions conn

// startWaiting prepares a new connection to wait for completions, and its timer.
func (c *conn) startWaiting(attr *ibv.DeviceAttr) {
	polls := !attr.Caps.Has(ibv.CapWaitReceives)
	var pays func() bool
	if q, ok := c.lane.qp.(ibv.PollPayer); ok {
		polls, pays = true, q.PollPays
	}
	c.wait.Init(cqwait.Config{Owner: (*completions)(c), CQ: c.lane.cq, Lock: (*locker)(c), Groups: []*cqwait.Group{&c.readers, &c.writers},
		BusyPoll: c.set.busyPoll, Polls: polls, Pays: pays, Background: cqwait.WhenVacant})
	c.live.onTimer = c.tick
}

func (o *completions) conn() *conn { return (*conn)(o) }

func (o *completions) Poll() int     { return o.conn().poll() }
func (o *completions) Arrived() bool { return o.conn().answered() }
func (o *completions) Over() bool    { return o.life.closed || o.life.over() }

func (o *completions) Failed(err error) { o.conn().fail(err) }

func (o *completions) Stopped(answer bool) bool {
	if answer {
		return o.conn().stopsReading()
	}
	return o.life.over() || o.life.closed || o.readDue.Expired() || o.writeDue.Expired()
}

// Silent reports whether no event is to be expected any more. A broken connection still
// expects some while the device uses memory, and a disconnected one until the peer has
// ended its direction.
func (o *completions) Silent() bool {
	return o.life.over() && !o.conn().moving() && !o.life.draining()
}

// Solicited reports whether a leader may sleep until a solicited message arrives. A peer
// that is rdmanet marks its messages as solicited. Completions of sends then wake no
// goroutine, but RDMA operations of transfers need it. Soft-RoCE does not wake for a send
// that failed, so keep-alive must be on to find that.
func (o *completions) Solicited() bool {
	return o.peer.rdmanet && o.set.keepAlive > 0 && !o.wantsSendCompletion && !o.conn().moving()
}

// Background reports whether a leader in the background is of use. It is, too, on a broken
// connection while the device may still use memory.
func (o *completions) Background() bool {
	return !o.life.closed && (!o.life.over() || o.conn().moving() && !o.wait.HasFailed())
}

// poll handles the completions that have arrived and returns how many these are. One more
// counts if poll finds the end of the connection. The caller holds mu.
func (c *conn) poll() int {
	// The events are loaded first: everything that completed before them is handled before them.
	event, peerDone := c.event.Load(), c.peerDone.Load()
	total := 0
	for {
		n, err := c.lane.cq.Poll(c.wcs[:])
		if err != nil {
			if !c.wait.HasFailed() {
				total++
			}
			c.wait.Fail(err)
			break
		}
		for i := range c.wcs[:n] {
			c.complete(&c.wcs[i])
		}
		total += n
		if n < len(c.wcs) {
			break
		}
	}
	if c.live.received {
		c.send.joined.heard()
		c.live.received, c.live.lastReceived = false, time.Now()
		c.confirmReceipt(c.live.lastReceived)
	}
	if peerDone && !c.in.eof && !c.life.over() {
		c.in.eof = true
		c.readers.WakeAll()
		total++
	}
	if event != nil && !c.life.over() {
		c.peerEnded(event)
		total++
	}
	if e := c.sendEvent.Load(); e != nil && !c.life.over() && c.send.failed == nil {
		c.sendFailed(e.Err)
		total++
	}
	if c.life.over() {
		// The posted receives come back, and none are posted again.
		c.credits.charge.Lower(c.in.held + c.credits.largeExtra())
	}
	if total > 0 {
		c.replenish()
		if c.idle.returnsCredits && c.send.idle || c.grantedLate() {
			c.returnCredits()
		}
		if c.queue.wantsWritable {
			c.signalWritable()
		}
	}
	return total
}

// complete handles one completion.
func (c *conn) complete(wc *ibv.WC) {
	if wc.ID&sendID != 0 {
		c.sent(wc)
	} else {
		c.received(wc)
	}
}

// notify receives the device's events: the connection has ended, or its port is down. It is
// called by the device's goroutines and takes no lock. A port that is down may come back
// while the device retries. If it does not, a completion fails.
func (c *conn) notify(e ibv.Event) {
	if e.Kind == ibv.EventPortError {
		c.set.failureLog.Debug("rdmanet: port went down", "device", c.lane.id.Device().Name(), "port", c.lane.id.Port(), "local", c.local, "remote", c.remote)
		return
	}
	switch e.Kind {
	case ibv.EventSQError:
		c.sendEvent.Store(&e)
	case ibv.EventSendsClosed:
		c.peerDone.Store(true)
	default:
		c.event.CompareAndSwap(nil, &e)
	}
	c.lane.cq.Interrupt()
}

// sent handles the completion of a work request of the queue pair's send queue.
func (c *conn) sent(wc *ibv.WC) {
	s, ok, op := &c.send, wc.Status == ibv.WCSuccess, ibv.WCSend
	switch wc.ID {
	case fetchID:
		c.fetched(wc)
		return
	case barrierID:
		op, s.barrier = ibv.WCRead, false
		if ok {
			c.live.probing = false
			if c.live.lastReceived.Before(c.live.probedAt) {
				// The answer may be old, because its completion has woken no goroutine.
				c.live.lastReceived = c.live.probedAt
			}
		}
	default:
		c.lane.completed(wc.ID&^sendID, ok)
		if s.probeSeq != 0 && c.lane.done >= s.probeSeq {
			s.probeSeq, c.live.probing = 0, false
		}
	}
	for {
		seq, t, written, found := c.lane.nextSignaled()
		if !found {
			break
		}
		switch {
		case t == nil:
		case ok:
			c.wrote(t, written)
		case seq == wc.ID&^sendID:
			op = ibv.WCWrite
		}
	}
	if !ok {
		c.status(wc, op)
	}
	if c.wantsSendCompletion {
		c.wantsSendCompletion = false
		c.writers.WakeAll()
		c.wait.Interrupt()
	}
}

// sendsLost reports whether data of the program's was not sent, or the device did not carry
// out the send. All sends behind a failed one fail too, so a failed send counts even without
// a completion of its own. With SendsBuffered it does not count: its data may have arrived.
func (c *conn) sendsLost() bool {
	failed := c.lane.failed != 0 && c.lane.failed <= c.send.data
	return failed && !c.lane.id.Device().Attr().Quirks.SendsBuffered || c.send.joined.n > 0
}

// postFailed implements [laneOwner]: the device has refused a work request.
func (c *conn) postFailed(err error) { c.fail(err) }

// requestCanceled implements [laneOwner]: a work request was not posted.
func (c *conn) requestCanceled(id uint64, t *sendTransfer) {
	switch {
	case id == fetchID:
		c.rx.fetchCanceled()
	case id == barrierID:
		c.send.barrier = false
	case t != nil:
		c.tx.writeEnded(t)
	}
}
