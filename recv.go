package rdmanet

import (
	"io"
	"net"
	"os"

	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file has the calls that read.
//
//  1. Receives are posted, as many as the window says (replenish, receives.go). While bulk
//     data comes they are longer than what was negotiated (large.go).
//  2. A completion returns one with a message. The message is checked, and its payload joins
//     the unread queue (received, delivery.go).
//  3. Read copies from the queue. A buffer without unread bytes is posted again, and granted
//     to the peer with the next message or with a message of its own.
//
// Only long copies and checks of memory run without mu.

// waitReadable waits until there is something to read, or returns why there will be
// nothing. A deadline that has passed counts even if there is data.
func (c *conn) waitReadable() error {
	for {
		if c.readDue.Expired() && !c.life.closed {
			return os.ErrDeadlineExceeded
		}
		if err := c.readErr(); err != nil || c.in.unread.Len() > 0 {
			return err
		}
		c.credits.readerWaited = true
		c.await(&c.readers)
	}
}

// take copies from the head of the unread queue into p. What does not get there, because p
// cannot be written, stays in the queue.
func (c *conn) take(p []byte) (n int, last bool, err error) {
	s := c.in.unread.At(0)
	data := s.data
	// Only the call that holds readMu removes from the queue, so the copy needs no mu.
	c.touch(min(len(p), len(data)), func() { n, err = fault.Copy(p, data) })
	s = c.in.unread.At(0)
	if n == 0 && err != nil {
		return 0, false, err
	}
	c.stats.BytesCopied += uint64(n)
	s.data = data[n:]
	s.size = 0 // The message has begun, so ReadMsg takes the rest as it is.
	if len(s.data) > 0 {
		return n, false, err
	}
	last = s.last
	c.consumed()
	return n, last, nil
}

// read reads what has arrived, and waits if that is nothing.
func (c *conn) read(p []byte) (n int, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, err
	}
	defer buf.Return(nil)
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	return c.readUnread(p)
}

// readUnread is read for a caller that holds readMu and mu. It is a function of its own
// because the compiler makes defers cheap only in functions with few of them.
func (c *conn) readUnread(p []byte) (n int, err error) {
	if len(p) == 0 {
		if c.life.closed {
			return 0, c.readErr()
		}
		return 0, nil
	}
	c.rx.reading++
	defer c.doneReading()
	for n == 0 {
		if err := c.waitReadable(); err != nil {
			return 0, err
		}
		for n < len(p) && c.in.unread.Len() > 0 && !c.life.closed {
			k, _, err := c.next(p[n:], n == 0, false)
			n += k
			if k == 0 {
				if n == 0 && err != nil {
					return 0, err
				}
				break
			}
		}
	}
	c.replenish()
	return n, nil
}

// next takes bytes from the head of the unread queue. Its parameters and results are those
// of takeTransfer.
func (c *conn) next(p []byte, wait, message bool) (n int, last bool, err error) {
	if c.in.unread.At(0).transfer != nil {
		return c.takeTransfer(p, wait, message)
	}
	return c.take(p)
}

// readMsg reads a message. With pieces set it reads a piece of one, and flags says whether
// more follows.
func (c *conn) readMsg(p []byte, pieces bool) (n int, flags MsgFlags, err error) {
	buf, err := regmem.Borrow(p)
	if err != nil {
		return 0, 0, err
	}
	defer buf.Return(nil)
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	return c.readUnreadMsg(p, pieces)
}

// readUnreadMsg is readMsg for a caller that holds readMu and mu.
func (c *conn) readUnreadMsg(p []byte, pieces bool) (n int, flags MsgFlags, err error) {
	c.rx.reading++
	defer c.doneReading()
	for begun := false; ; {
		if err := c.waitReadable(); err != nil {
			if err == io.EOF && n > 0 {
				err = io.ErrUnexpectedEOF
			}
			if n > 0 {
				flags |= Partial
			}
			return n, flags, err
		}
		s := c.in.unread.At(0)
		flags = s.flags & (Expedited | Partial)
		empty := s.transfer == nil && len(s.data) == 0
		switch {
		case n == 0 && s.size > len(p):
			return s.size, flags, io.ErrShortBuffer
		case n == len(p) && !empty: // p is full, and the message goes on.
			return n, flags | Partial, io.ErrShortBuffer
		case n == 0 && !c.writable(p[:s.size]): // The message stays whole, as one that does not fit.
			return 0, flags, errno.EFAULT
		}
		k, last, err := c.next(p[n:], true, true)
		n += k
		begun = begun || k > 0 || empty
		c.replenish()
		if err != nil {
			return n, flags | Partial, err
		}
		if last && begun { // Otherwise the message was withdrawn as a whole.
			if pieces || flags&Partial == 0 {
				return n, flags, nil
			}
			begun = false
		}
	}
}

// writable reports whether all of p can be written. It lets go of mu if p is long. Only the reader
// that p was passed to may use it.
func (c *conn) writable(p []byte) (all bool) {
	c.touch(len(p), func() { all = fault.Writable(p) == len(p) })
	return all
}

// writeSegment passes the next unread bytes to w without copying them. Meanwhile the bytes
// are not in the queue and no lock is held, because w may take long and Close must not wait
// for w. The caller holds a reference to the memory. err is why nothing can be read, and
// werr is w's error.
func (c *conn) writeSegment(w io.Writer) (n int, werr, err error) {
	data, done, err := c.detach()
	if err != nil {
		return 0, nil, err
	}
	defer func() { // w may panic.
		c.mu.Lock()
		defer c.unlock()
		done()
		c.replenish()
	}()
	n, werr = w.Write(data)
	if n < len(data) && werr == nil {
		werr = io.ErrShortWrite
	}
	return n, werr, nil
}

// detach removes the next unread bytes from the queue. The caller calls done with mu held to
// give their memory back.
func (c *conn) detach() (data []byte, done func(), err error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	c.rx.reading++
	defer c.doneReading()
	for {
		if err := c.waitReadable(); err != nil {
			return nil, nil, err
		}
		if s := c.in.unread.At(0); s.transfer == nil && len(s.data) == 0 {
			c.consumed() // The message is empty.
			continue
		}
		if c.in.unread.At(0).transfer == nil {
			s := c.in.pop()
			return s.data, func() { c.done(s) }, nil
		}
		f, err := c.takeFetch()
		if err != nil {
			return nil, nil, err
		}
		if f != nil {
			return f.b[f.taken:f.got], func() { c.rx.releaseFetch(f) }, nil
		}
	}
}

// writeTo passes what is read to w until the end of the stream. err is why the connection
// cannot be read, and werr is w's error.
func (c *conn) writeTo(w io.Writer) (total int64, werr, err error) {
	if err := c.retain(); err != nil {
		return 0, nil, err
	}
	defer c.dom.Release()
	for {
		n, werr, err := c.writeSegment(w)
		total += int64(n)
		if err == io.EOF {
			return total, nil, nil
		}
		if werr != nil || err != nil {
			return total, werr, err
		}
	}
}

// retain keeps the memory of received segments after the end of the connection, until
// c.dom.Release is called.
func (c *conn) retain() error {
	c.mu.Lock()
	defer c.unlock()
	if c.life.closed {
		return net.ErrClosed
	}
	c.dom.Retain()
	return nil
}
