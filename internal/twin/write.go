package twin

import (
	"io"
	"net"
	"time"

	"github.com/rdmanet/rdmanet"
)

// memory returns n bytes for an operation, and the function that frees them.
func memory(n int, own bool) ([]byte, func()) {
	if own {
		if b, err := rdmanet.Alloc(max(1, n)); err == nil {
			return b.Bytes()[:n], b.Free
		}
	}
	return make([]byte, n), func() {}
}

// write does an operation of the writing lane.
func (l *lane) write(op Op) {
	if op.Do == Malformed {
		l.malform(op)
		return
	}
	b, free := memory(op.Size, op.Own)
	defer free()
	l.sent.fill(b, l.taken.Load())
	rc, _ := l.conn.(*rdmanet.Conn)
	do := op.Do
	if rc == nil && do.message() {
		do = Write
	}
	part := op.Part
	if part <= 0 {
		part = max(1, op.Size)
	}
	switch do {
	case Write:
		l.took(do, b, false, func() (int64, error) {
			n, err := l.conn.Write(b)
			return int64(n), err
		})
	case ReadFrom:
		l.took(do, b, false, func() (int64, error) { return l.conn.ReadFrom(&yielder{b, part}) })
	case Buffers:
		var list net.Buffers
		for rest := b; len(rest) > 0; {
			n := min(part, len(rest))
			list, rest = append(list, rest[:n]), rest[n:]
		}
		l.took(do, b, false, func() (int64, error) { return list.WriteTo(l.conn) })
	case WriteMsg:
		c := l.begin(do, b)
		n, err := rc.WriteMsg(b)
		if err == nil {
			c.N = int64(n)
		} else if class := classify(err); class != TooLong && class != Unsupported {
			c.More = int64(len(b))
		}
		l.finish(c, b, err)
	case Pieces:
		for rest := b; len(rest) > 0; {
			n := min(part, len(rest))
			flags := rdmanet.Partial
			if n == len(rest) {
				flags = 0
			}
			class := l.took(do, rest[:n], flags != 0, func() (int64, error) {
				k, err := rc.WriteMsg(rest[:n], flags)
				return int64(k), err
			})
			if class != OK {
				return
			}
			rest = rest[n:]
		}
	case TryMsg:
		l.try(rc, b)
	case Queue:
		l.queue(rc, b, part)
	}
}

// malform makes a wire-level peer send a malformed message. Nothing may arrive after it.
func (l *lane) malform(op Op) {
	p, ok := l.conn.(*plainConn)
	if !ok {
		return
	}
	c := Call{End: l.i, Lane: l.which, Do: op.Do, Start: l.now(), Asked: breachBytes}
	err := p.malformed(op.Size, l.sent, l.taken.Load())
	if err == nil {
		c.N = breachBytes
	} else {
		c.More = breachBytes // The message before it is not malformed and may have been sent.
	}
	l.finish(c, nil, err)
	l.fatal += 2
}

func (l *lane) begin(do Kind, b []byte) Call {
	return Call{End: l.i, Lane: l.which, Do: do, Start: l.now(), Asked: int64(len(b))}
}

// finish records a call that has written. The memory is the caller's again, so finish
// overwrites it. If it is sent later, the wrong bytes show that.
func (l *lane) finish(c Call, b []byte, err error) Class {
	if c.N >= 0 && c.N <= c.Asked {
		l.taken.Add(c.N)
	}
	class := l.add(c, err)
	clear(b)
	l.moved.Add(1)
	switch class {
	case OK, Deadline, Again, TooLong:
	default:
		l.fatal++
	}
	return class
}

func (l *lane) took(do Kind, b []byte, piece bool, f func() (int64, error)) Class {
	c := l.begin(do, b)
	c.Piece = piece
	n, err := f()
	c.N = n
	return l.finish(c, b, err)
}

// try sends without blocking as much as it can, and goes on when more is possible.
func (l *lane) try(rc *rdmanet.Conn, b []byte) {
	for tries := 0; len(b) > 0; tries++ {
		flags := rdmanet.NonBlocking
		if tries >= 20 {
			flags = 0 // The message must have an end.
		}
		c := l.begin(TryMsg, b)
		n, err := rc.WriteMsg(b, flags)
		c.N, c.Piece = int64(n), err == nil && n < len(b)
		taken := max(0, min(n, len(b)))
		var rest []byte
		if taken < len(b) {
			rest = append(rest, b[taken:]...)
		}
		if class := l.finish(c, b, err); class != OK && class != Again {
			return
		}
		if b = rest; len(b) > 0 {
			select {
			case <-rc.Writable():
			case <-l.closed:
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

// queue queues messages and then waits for all of them.
func (l *lane) queue(rc *rdmanet.Conn, b []byte, part int) {
	var sends []*rdmanet.PendingMessage
	var calls []Call
	var bufs [][]byte
	for rest := b; len(rest) > 0; {
		n := min(part, len(rest))
		if n < part && part >= mayBeTooLong && len(rest) < len(b) {
			break // It would be sent although messages before it were refused for their length.
		}
		calls, bufs = append(calls, l.begin(Queue, rest[:n])), append(bufs, rest[:n])
		sends = append(sends, rc.QueueMsg(rest[:n]))
		rest = rest[n:]
	}
	failed := false
	for i, s := range sends {
		n, err := s.Result()
		calls[i].N = int64(n)
		if failed && n > 0 {
			// The message before it is missing, so the place of this one in the stream
			// is not known.
			calls[i].Wrong = "was sent although a message before it in the queue was not"
			l.fatal++
		}
		switch classify(err) {
		case OK, Closed, Pipe, ResetByPeer, TimedOut:
			// When the connection ends, transfers that were announced to the peer fail.
			// Messages behind them that the device already has do not. The peer does not
			// read them.
		default:
			failed = true
		}
		l.finish(calls[i], bufs[i], err)
	}
}

// yielder is a reader that yields so many bytes at a time.
type yielder struct {
	rest []byte
	part int
}

func (y *yielder) Read(p []byte) (int, error) {
	if len(y.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, y.rest[:min(y.part, len(y.rest))])
	y.rest = y.rest[n:]
	return n, nil
}

// endWriting ends the writing lane.
func (l *lane) endWriting() {
	if l.p.Peer != Rdmanet && l.network != "tcp" {
		return // The connection has no half-close.
	}
	for range 100 {
		if l.isClosed() {
			return
		}
		switch l.call(CloseWrite, l.conn.CloseWrite) {
		case Deadline:
		case Other:
			// A message was cut. Then only Close can send an end.
			l.end.close(l.which)
			return
		default:
			return
		}
		l.clear(ClearWrite, l.conn.SetWriteDeadline)
	}
}
