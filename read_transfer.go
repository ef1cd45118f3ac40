package rdmanet

// takeTransfer takes bytes of the transfer at the head of the unread queue. With
// wait it waits until something has changed if there are none; message bounds it
// to one message, and last says that this has ended. A return of 0 and no error
// means to look again, or without wait that nothing is there.
func (c *conn) takeTransfer(p []byte, wait, message bool) (n int, last bool, err error) {
	x := c.in.unread.At(0).transfer
	switch {
	case x.taken == x.length:
		return 0, c.popFinished(), nil
	case x.pieces.Len() > 0:
		return c.takePiece(p, wait)
	case !wait:
		return 0, false, nil
	}
	if c.rx.readsAhead = len(p) < min(directReadMin, c.set.ofBuffer); !c.rx.readsAhead {
		if n, last, err := c.readDirect(p, message); n > 0 || err != nil || x.taken == x.length {
			return n, last, err
		}
		c.rx.readsAhead = true // p cannot be registered, or nothing may be asked for now
	}
	c.readAhead()
	if x.pieces.Len() > 0 || x.taken == x.length {
		return 0, false, nil
	}
	return 0, false, c.awaitPiece(x)
}

// awaitRead waits for something to happen and returns why a Read cannot go on.
func (c *conn) awaitRead() error {
	if c.stopsReading() {
		return c.stopReadErr()
	}
	c.await(&c.readers)
	return nil
}

// takeFetch takes the next piece, in scratch, of the transfer at the head of the
// unread queue. nil and no error means to look again.
func (c *conn) takeFetch() (*fetch, error) {
	x := c.in.unread.At(0).transfer
	c.rx.readsAhead = true
	c.readAhead()
	switch {
	case x.taken == x.length:
		c.popFinished()
		return nil, nil
	case x.pieces.Len() == 0:
		return nil, c.awaitPiece(x)
	}
	f := *x.pieces.At(0)
	switch {
	case !f.over:
		return nil, c.awaitRead()
	case f.got == 0:
		return nil, c.noPiece(x)
	}
	x.pieces.Pop()
	x.taken += f.got - f.taken
	c.popFinished()
	return f, nil
}

// awaitPiece waits until a piece of x can be asked for, or returns why there is no
// memory for one. What was asked for and did not come ends the connection soon.
func (c *conn) awaitPiece(x *recvTransfer) error {
	if c.rx.bounceBuffers > 0 || x.asked == x.length || !c.canAsk() {
		return c.awaitRead()
	}
	return c.rx.refused
}

// noPiece handles a piece at the head that did not come.
func (c *conn) noPiece(x *recvTransfer) error {
	if c.life.over() {
		return c.stopReadErr()
	}
	c.donePiece(x.pieces.Pop()) // it was withdrawn
	return nil
}

// takePiece copies from the oldest piece of the transfer at the head.
func (c *conn) takePiece(p []byte, wait bool) (n int, last bool, err error) {
	x := c.in.unread.At(0).transfer
	f := *x.pieces.At(0)
	if !f.over {
		if wait {
			err = c.awaitRead()
		}
		return 0, false, err
	}
	if f.got == 0 {
		return 0, false, c.noPiece(x)
	}
	data := f.b[f.taken:f.got]
	c.unlocked(func() { n = copy(p, data) }) // only the reader, who holds readMu, takes from the queue
	c.stats.BytesCopied += uint64(n)
	f.taken += n
	x.taken += n
	if f.taken == f.got {
		c.donePiece(x.pieces.Pop())
	}
	return n, c.popFinished(), nil
}
