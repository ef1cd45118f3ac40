package rdmanet

import (
	"slices"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
)

// This file lets the device put transfers straight into the memory of a Read, so that the
// data is not copied. read_transfer.go decides which Reads do so, transfer_recv.go has the
// state, and fetch.go asks for the data.

// directReadMin is the length in bytes from which a Read has the device fill its memory.
// Such a Read has only its own RDMA Reads under way, and none until the next call. With
// less room, waiting for them takes longer than copying from bounce buffers that were
// filled ahead.
const directReadMin = 512 << 10

// readDirect has the device put the transfers at the head of the unread queue into p. It
// returns when the device no longer uses p, or when the connection was broken because that
// took too long. last reports whether a message has ended.
//
// The result is 0 without an error if p cannot be registered, if nothing may be asked for
// now, or if the transfers were withdrawn.
func (c *conn) readDirect(p []byte, message bool) (n int, last bool, err error) {
	into := &directRead{p: p[:c.in.offeredBytes(len(p), message)], message: message}
	for {
		stop := c.stopsReading()
		if !stop {
			c.fillDirect(into)
			stop = c.stopsReading()
		}
		if into.pending == 0 || into.lost || c.life.over() && c.rx.mode == TransferWrite && !c.ending() {
			break
		}
		switch {
		case stop && into.late == nil:
			into.ends = time.Now()
			into.late = time.AfterFunc(c.life.withdrawPatience(), func() { c.abandonDirect(into) })
		case stop && c.life.closed && !into.shortened:
			into.shortened = true
			into.late.Reset(max(c.remainingPatience(into.ends), 0))
		// The deadline was moved.
		case !stop && into.late != nil:
			into.late.Stop()
			into.late = nil
		}
		c.await(&c.readers)
	}
	if into.late != nil {
		into.late.Stop()
		// A timer that has fired and waits for mu does not set it again.
		into.late = nil
	}
	c.unlocked(func() {
		// The registrations are closed in the reverse order.
		for _, o := range slices.Backward(into.opened) {
			o.close()
		}
	})
	for n < into.got {
		x := c.in.unread.At(0).transfer
		k := min(into.got-n, x.arrived-x.taken)
		x.taken += k
		n += k
		last = c.popFinished()
	}
	// A transfer that was withdrawn as a whole is no reason for an error. The segment
	// behind it, or the end of the stream, decides what the call returns.
	if n == 0 && c.stopsReading() {
		if x := c.in.unread.At(0).transfer; x.taken < x.length {
			err = c.stopReadErr()
		}
	}
	return n, last, err
}

// fillDirect asks for as much data as the Read's memory has room for and may be under way.
// It lets go of mu to register memory.
func (c *conn) fillDirect(into *directRead) {
	for {
		x := c.in.nextTransfer(into.message)
		room := into.p[into.asked:]
		if x == nil || len(room) == 0 || !c.rx.canAsk() || c.stopsReading() {
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
			// Without mu the transfer may have been withdrawn, or the connection may have
			// ended.
			continue
		}
		f := &fetch{x: x, into: into, b: room[:min(reg.to-into.asked, x.length-x.asked, c.rx.pace.next())]}
		if reg.mr != nil {
			f.addr, f.key = reg.mr.Addr()+uint64(into.asked-reg.from), reg.mr.RKey()
		}
		into.asked += len(f.b)
		into.pending++
		c.rx.ask(f, reg.target.LKey)
	}
}

// registered returns the registration of the byte that is to be asked for next, or nil. The
// latest registration may be another one: the memory of a withdrawn transfer is used for
// the next transfer.
func (into *directRead) registered() *registeredRange {
	for i := range slices.Backward(into.opened) {
		if o := &into.opened[i]; o.from <= into.asked && into.asked < o.to {
			return o
		}
	}
	return nil
}

// registerRange registers memory that this side's device, or the peer, is to fill. It lets
// go of mu meanwhile. Memory that cannot be written is refused, because the software device
// registers any memory. A byte of each page is written for that: to be readable is not enough,
// and nobody else uses the memory of a Read.
func (c *conn) registerRange(b []byte) (o registeredRange, err error) {
	c.unlocked(func() {
		switch {
		case fault.Writable(b) < len(b):
			err = errno.EFAULT
		case c.rx.mode == TransferRead:
			o.target, err = c.dom.RegisterTarget(b)
		default:
			o.mr, err = c.dom.Expose(c.lane.qp, b, peerWrites)
		}
	})
	if err != nil {
		c.stats.TransfersRefused++
	}
	return o, err
}

// close ends the registration.
func (o *registeredRange) close() {
	if o.mr != nil {
		o.mr.Close()
	} else {
		o.target.Close()
	}
}

// abandonDirect ends a Read's wait for its memory once the wait has taken too long. It
// breaks the connection, because the device may still write to the memory.
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
	// fail has no effect after this side's disconnect, but the queue pair still works.
	if c.ending() {
		c.lane.qp.SetError()
	}
	into.lost = true
	c.wakeAll()
}
