package rdmanet

import (
	"slices"
	"time"
)

// Large transfers straight into a reader's memory, where they are not copied. transfer_recv.go
// has the rest of the receiver's side.

// directReadMin is the room that a Read must have for the device to put a transfer
// straight there. Such a Read has but its own RDMA Reads under way, and nobody until
// the next one comes; with less room it takes longer to wait for them than to have
// scratch filled ahead and to copy.
const directReadMin = 512 << 10

// offeredBytes returns how many of n bytes can be asked for at the head of the
// queue, up to the end of a message if message is set.
func (c *conn) offeredBytes(n int, message bool) int {
	room := n
	for i := 0; i < c.in.unread.Len() && room > 0; i++ {
		s := c.in.unread.At(i)
		if s.transfer == nil || s.transfer.pieces.Len() > 0 {
			break
		}
		room -= min(room, s.transfer.length-s.transfer.asked)
		if message && s.last {
			break
		}
	}
	return n - room
}

// readDirect has the device put the transfers at the head of the queue into p, and
// waits for that: the memory is in use until it returns. It returns 0 and no error if p
// cannot be registered, if nothing may be asked for now, and when what was offered has been
// withdrawn.
func (c *conn) readDirect(p []byte, message bool) (n int, last bool, err error) {
	into := &directRead{p: p[:c.offeredBytes(len(p), message)], message: message}
	for {
		stop := c.stopsReading()
		if !stop {
			c.fillDirect(into)
			stop = c.stopsReading()
		}
		if into.pending == 0 || into.lost || c.life.over() && c.rx.mode == transferWrite && !c.ending() {
			break
		}
		switch {
		case stop && into.late == nil:
			into.ends = time.Now()
			into.late = time.AfterFunc(c.withdrawPatience(), func() { c.abandonDirect(into) })
		case stop && c.life.closed && !into.hurried:
			into.hurried = true
			into.late.Reset(max(c.remainingPatience(into.ends), 0))
		case !stop && into.late != nil: // the deadline was moved
			into.late.Stop()
			into.late = nil
		}
		c.await(&c.readers)
	}
	if into.late != nil {
		into.late.Stop()
		into.late = nil // so that one that has fired, and waits for mu, does not set it again
	}
	c.unlocked(func() {
		for _, o := range slices.Backward(into.opened) { // a Buffer freed meanwhile goes with the first
			o.close()
		}
	})
	for n < into.got {
		x := c.in.unread.At(0).transfer
		k := min(into.got-n, x.landed-x.taken)
		x.taken += k
		n += k
		last = c.popFinished()
	}
	// A transfer that was withdrawn as a whole holds nothing back: what comes behind it, such
	// as the end of the stream, tells how to go on.
	if n == 0 && c.stopsReading() {
		if x := c.in.unread.At(0).transfer; x.taken < x.length {
			err = c.stopReadErr()
		}
	}
	return n, last, err
}

// fillDirect asks for what has room in a reader's memory, as far as may be now. To register
// the memory it lets go of mu.
func (c *conn) fillDirect(into *directRead) {
	for {
		x := c.wanted(into)
		room := into.p[into.asked:]
		if x == nil || len(room) == 0 || !c.canAsk() || c.stopsReading() {
			return
		}
		reg := into.registered()
		if reg == nil {
			from := into.asked
			b := room[:min(len(room), x.length-x.asked, fetchSize)]
			o, err := c.registerRange(b)
			if err != nil {
				into.p = into.p[:into.asked]
				return
			}
			o.from, o.to = from, from+len(b)
			into.opened = append(into.opened, o)
			continue // it was withdrawn meanwhile, or there is an end
		}
		f := &fetch{x: x, into: into, b: room[:min(reg.to-into.asked, x.length-x.asked, c.rx.pace.next())]}
		if reg.mr != nil {
			f.addr, f.key = reg.mr.Addr()+uint64(into.asked-reg.from), reg.mr.RKey()
		}
		into.asked += len(f.b)
		into.pending++
		c.fetch(f, reg.target.LKey)
	}
}

// registered returns the registration of the byte that is to be asked for next, nil if
// there is none. It need not be the latest one: where a transfer was withdrawn the next
// one goes to the memory that it leaves.
func (into *directRead) registered() *registeredRange {
	for i := range slices.Backward(into.opened) {
		if o := &into.opened[i]; o.from <= into.asked && into.asked < o.to {
			return o
		}
	}
	return nil
}

// wanted returns the transfer of which a reader's memory is to be filled next, nil if
// there is none: what comes behind a message is the next call's, also if the message
// was withdrawn.
func (c *conn) wanted(into *directRead) *recvTransfer {
	for i := 0; i < c.in.unread.Len(); i++ {
		s := c.in.unread.At(i)
		switch {
		case s.transfer == nil || s.transfer.pieces.Len() > 0:
			return nil
		case s.transfer.asked < s.transfer.length:
			return s.transfer
		}
		if into.message && s.last {
			return nil
		}
	}
	return nil
}

// registerRange registers memory for the device, or the peer, to fill. It lets go of mu.
func (c *conn) registerRange(b []byte) (o registeredRange, err error) {
	c.unlocked(func() {
		if c.rx.mode == transferRead {
			o.target, err = c.dom.RegisterTarget(b)
		} else {
			o.mr, err = c.dom.Expose(c.lane.qp, b, peerWrites)
		}
	})
	if err != nil {
		c.stats.TransfersRefused++
	}
	return o, err
}

func (o *registeredRange) close() {
	if o.mr != nil {
		o.mr.Close()
	} else {
		o.target.Close()
	}
}

// abandonDirect ends a wait for memory that a call must give back. If the connection is
// alive it breaks, as the device may be writing there.
func (c *conn) abandonDirect(into *directRead) {
	c.mu.Lock()
	defer c.unlock()
	switch {
	case into.pending == 0 || into.lost:
		return
	case !c.stopsReading():
		into.late = nil
		return
	}
	if more := c.remainingPatience(into.ends); more > 0 {
		if into.late != nil {
			into.late.Reset(more)
		}
		return
	}
	c.fail(errTransferHeld)
	if c.ending() { // fail takes it for over, but its link lives
		c.lane.qp.SetError()
	}
	into.lost = true
	c.wakeAll()
}
