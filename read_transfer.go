package rdmanet

import "github.com/rdmanet/rdmanet/internal/fault"

// This file has the calls that read take data of transfers. directread.go has Reads whose
// memory the device fills, fetch.go fills bounce buffers, and recv.go has the calls.

// takeTransfer takes bytes of the transfer at the head of the unread queue. If there are
// none yet and wait is set, it waits until something has changed. With message set, it
// takes bytes of one message at most. last reports whether a message has ended.
//
// A result of 0 without an error means that the caller has to look again. Without wait it
// may also mean that there is nothing yet.
func (c *conn) takeTransfer(p []byte, wait, message bool) (n int, last bool, err error) {
	x := c.in.unread.At(0).transfer
	switch {
	case x.taken == x.length:
		return 0, c.popFinished(), nil
	case x.fetches.Len() > 0:
		return c.copyFetch(p, wait)
	case !wait:
		return 0, false, nil
	}
	if c.rx.readsAhead = len(p) < min(directReadMin, c.set.bufferTransferMin); !c.rx.readsAhead {
		if n, last, err := c.readDirect(p, message); n > 0 || err != nil || x.taken == x.length {
			return n, last, err
		}
		// p cannot be registered, or nothing may be asked for now.
		c.rx.readsAhead = true
	}
	c.rx.readAhead()
	if x.fetches.Len() > 0 || x.taken == x.length {
		return 0, false, nil
	}
	return 0, false, c.awaitFetch(x)
}

// awaitRead waits until something has changed, or returns why a Read cannot go on.
func (c *conn) awaitRead() error {
	if c.stopsReading() {
		return c.stopReadErr()
	}
	c.await(&c.readers)
	return nil
}

// takeFetch takes the next fetch in a bounce buffer of the transfer at the head of the
// unread queue. The result is nil without an error if the caller has to look again.
func (c *conn) takeFetch() (*fetch, error) {
	x := c.in.unread.At(0).transfer
	c.rx.readsAhead = true
	c.rx.readAhead()
	switch {
	case x.taken == x.length:
		c.popFinished()
		return nil, nil
	case x.fetches.Len() == 0:
		return nil, c.awaitFetch(x)
	}
	f := *x.fetches.At(0)
	switch {
	case !f.over:
		return nil, c.awaitRead()
	case f.got == 0:
		return nil, c.voidFetch(x)
	}
	x.fetches.Pop()
	x.taken += f.got - f.taken
	c.popFinished()
	return f, nil
}

// awaitFetch waits until a fetch of x can be asked for or has arrived, or returns why there
// is no memory for one. A fetch that fails ends the connection, which ends the wait.
func (c *conn) awaitFetch(x *recvTransfer) error {
	if c.rx.bounceBuffers > 0 || x.asked == x.length || !c.rx.canAsk() {
		return c.awaitRead()
	}
	return c.rx.refused
}

// voidFetch handles a fetch at the head of x that has brought no data.
func (c *conn) voidFetch(x *recvTransfer) error {
	if c.life.over() {
		return c.stopReadErr()
	}
	// The transfer was withdrawn.
	c.rx.releaseFetch(x.fetches.Pop())
	return nil
}

// copyFetch copies from the oldest fetch of the transfer at the head of the unread queue.
func (c *conn) copyFetch(p []byte, wait bool) (n int, last bool, err error) {
	x := c.in.unread.At(0).transfer
	f := *x.fetches.At(0)
	if !f.over {
		if wait {
			err = c.awaitRead()
		}
		return 0, false, err
	}
	if f.got == 0 {
		return 0, false, c.voidFetch(x)
	}
	data := f.b[f.taken:f.got]
	// Only the reader, which holds readMu, removes from the queue, so the copy needs no mu.
	c.unlocked(func() { n, err = fault.Copy(p, data) })
	if n == 0 && err != nil {
		return 0, false, err
	}
	c.stats.BytesCopied += uint64(n)
	f.taken += n
	x.taken += n
	if f.taken == f.got {
		c.rx.releaseFetch(x.fetches.Pop())
	}
	return n, c.popFinished(), err
}
