package rdmanet

import (
	"fmt"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file makes a conn of a set-up whose negotiation has ended well, and lets it run.
// setup.go describes the steps before that.

// establish makes the connection after a negotiation by messages. On the passive side it
// posts receives and sends resp. On the active side resp is nil, and the first message
// grants the receives. Without an error the conn takes the setup's resources over.
func (s *setup) establish(a agreement, peer privateData, resp *negotiateResponse) (*conn, error) {
	c, err := s.newConn(a, peer, false)
	if err != nil {
		return nil, err
	}
	if resp != nil {
		resp.CreditsGranted = c.credits.grantAll()
		var b [negotiateResponseLen]byte
		if err := s.sendMessage(b[:resp.put(b[:])]); err != nil {
			c.discardUnstarted()
			return nil, err
		}
		// The buffer is released when the first signaled send completes.
		if s.send != nil {
			var bufs regmem.Buffers
			bufs.Push(s.send)
			c.lane.signaled.Push(signaledSend{bufs: bufs})
			s.send = nil
		}
	}
	c.start()
	return c, nil
}

// findProbe decides which RDMA Read can be a keep-alive probe: one that the peer's device
// answers, whatever its program does. There may be none. On transports whose devices
// differ, only an rdmanet peer announces what its device answers.
func (s *setup) findProbe(c *conn) error {
	switch {
	case s.id.Param().InitiatorDepth == 0:
		return nil
	case !c.peer.rdmanet:
		c.live.answersReads = s.id.Device().Attr().Caps.Has(ibv.CapEmptyReads)
		return nil
	}
	early := earlyResponseLen
	if s.passive {
		early = earlyRequestLen
	}
	c.live.target = parseProbeTarget(s.id.PrivateData(), early)
	c.live.answersReads = c.live.target != nil || c.peer.features&featureNoEmptyRead == 0
	if c.live.target != nil {
		return s.probeMem.hold(s.dom)
	}
	return nil
}

// newConn makes the conn with its receives posted, and start lets it run. granted is set if
// the peer was granted the receives that were posted before.
func (s *setup) newConn(a agreement, peer privateData, granted bool) (*conn, error) {
	c := newConn(s.set, s.dom, s.id, s.cq, s.qp, s.slots)
	attr := s.id.Device().Attr()
	c.startWaiting(&attr)
	c.agreed, c.peer = a, peer
	c.fin = peer.rdmanet && peer.features&featureFIN != 0
	c.messages = c.fin && peer.features&featureMessages != 0
	c.tx.mode, c.rx.mode = transferModes(s.private(), peer)
	c.rx.notAccepted = s.passive
	c.in.reasm = reassembler{max: a.maxFragmentedReceive, fin: c.fin, messages: c.messages}
	c.pool, c.lane.buffers = s.dom.Pool(int(a.maxReceive)), s.dom.Pool(int(a.maxSend))
	c.rx.receiverParts = receiverParts{lane: &c.lane, life: &c.life, stats: &c.stats, dom: c.dom, pool: c.pool, memory: s.set.transferMemory,
		readers: &c.readers, wait: &c.wait, prefetch: c.prefetch}
	c.tx.writers, c.tx.wait = &c.writers, &c.wait
	c.in.copies = copyBreak{limit: copyBreakLimit, free: copyBreakFree, charge: s.dom.Budget.Share(int64(c.rx.limit(s.set.receiveMemory)), 1)}
	c.credits = credits{
		have:         int(a.sendCredits),
		target:       max(int(a.receiveCreditTarget), minCredits),
		window:       s.set.initial,
		initial:      s.set.initial,
		maximum:      s.set.maximum,
		charge:       s.dom.Budget.Share(int64(s.set.receiveMemory), int64(c.pool.Size)),
		readerWaited: true,
	}
	if c.rx.mode != TransferNone {
		c.credits.transferReserve = 1
	}
	if c.fin {
		c.credits.reserveOut, c.credits.reserveIn = 1, 1
	}
	if c.holds = c.messages && s.set.hold && peer.features&featureHold != 0; c.holds {
		c.goWithoutCredits()
	} else if q, ok := s.qp.(ibv.HoldingQP); ok && s.set.hold {
		q.StopHolding()
	}
	if c.messages && s.set.large && peer.features&featureLarge != 0 {
		c.allowLarge()
	}
	for _, buf := range s.posted {
		c.in.posted.Push(buf)
	}
	c.credits.post(len(s.posted), false)
	if granted {
		c.credits.ungranted = 0
	}
	s.posted = nil
	s.releaseBuffers()
	err := s.findProbe(c)
	if err == nil {
		err = c.provision()
	}
	if err != nil {
		c.discardUnstarted()
		return nil, err
	}
	c.live.memory, s.probeMem = s.probeMem, probeMemory{}
	return c, nil
}

// start lets the connection run: it receives events, posts batches and waits for
// completions from now on.
func (c *conn) start() {
	c.mu.Lock()
	defer c.unlock()
	c.lane.id.Notify(c.notify)
	c.lane.open = true
	if c.holds {
		c.credits.turnOff(int(c.agreed.maxReceive))
	}
	// One RDMA Read is left for queueBarrier.
	c.rx.depth = max(1, min(c.rx.depth, c.lane.id.Param().InitiatorDepth-1))
	fetches := c.rx.depth
	if c.rx.mode == TransferWrite {
		fetches = maxTransfers
	}
	c.rx.pace = newPace(fetches)
	c.startTimer()
	// The buffers may have pages that another connection has written to.
	c.scheduleTrim()
	// The active side's first grant goes with the first Write, or before the first Read
	// that waits. If neither comes, a leader in the background sends it.
	c.wait.Start()
}

// provision posts the first receives, and gets the memory without which the connection
// could come to a halt. It fails with fewer than minCredits receives.
func (c *conn) provision() (err error) {
	c.mu.Lock()
	defer c.unlock()
	if int(c.agreed.maxSend) > c.lane.inline {
		if err = c.lane.reserve(); err != nil {
			return err
		}
	}
	if err := c.rx.reserve(); err != nil {
		return err
	}
	least := make([]*regmem.Buffer, 0, minCredits)
	for c.in.posted.Len()+len(least) < min(minCredits, c.set.initial) {
		buf, err := c.pool.Get()
		if err != nil {
			for _, buf := range least {
				buf.Release()
			}
			return err
		}
		least = append(least, buf)
	}
	for _, buf := range least {
		c.postRecv(buf)
	}
	c.replenish()
	if c.life.over() {
		return fmt.Errorf("post receives: %w", c.life.cause)
	}
	c.idle.pagesTouched = c.lane.reserved != nil && c.lane.reserved.Stale
	for i := range c.in.posted.Len() {
		c.idle.pagesTouched = c.idle.pagesTouched || (*c.in.posted.At(i)).Stale
	}
	return nil
}

// discardUnstarted gives back what the conn of a failed set-up holds.
func (c *conn) discardUnstarted() {
	c.credits.charge.Lower(0)
	if c.in.posted.Len() > 0 {
		c.lane.qp.Close()
	}
	for c.in.posted.Len() > 0 {
		c.in.posted.Pop().Release()
	}
	c.lane.release(unwritten)
	c.rx.releaseReserved()
	c.live.memory.close()
}
