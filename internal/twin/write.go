package twin

import (
	"io"
	"net"
	"time"

	"github.com/rdmanet/rdmanet"
)

// write does an operation of the writing lane.
func (l *lane) write(op Op) {
	if op.Do == Malformed {
		l.malform(op)
		return
	}
	k := newBlock(op.Size, op.Memory)
	defer k.free()
	l.sent.fill(k.b[:k.good], l.taken.Load())
	b := k.b
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
		l.writeOnce(k)
	case Writes:
		if len(b)/part < manyWrites {
			for at := 0; at < len(b); at += part {
				if l.writeOnce(k.part(at, min(part, len(b)-at))) != OK {
					return
				}
			}
			return
		}
		c := l.begin(do, k)
		c.Each = int64(part)
		var err error
		for rest := b; len(rest) > 0 && err == nil; {
			n := 0
			n, err = l.conn.Write(rest[:min(part, len(rest))])
			rest, c.N = rest[n:], c.N+int64(n)
			l.moved.Add(1)
		}
		l.finish(c, k, err)
	case ReadFrom:
		l.took(do, k, false, func() (int64, error) { return l.conn.ReadFrom(&yielder{b, part}) })
	case Buffers:
		var list net.Buffers
		for rest := b; len(rest) > 0; {
			n := min(part, len(rest))
			list, rest = append(list, rest[:n]), rest[n:]
		}
		l.took(do, k, false, func() (int64, error) { return list.WriteTo(l.conn) })
	case WriteMsg:
		c := l.begin(do, k)
		n, err := rc.WriteMsg(b)
		if err == nil {
			c.N = int64(n)
		} else if class := classify(err); class != TooLong && class != Unsupported && class != BadAddress {
			c.More = int64(len(b))
		}
		l.finish(c, k, err)
	case Pieces:
		for rest := b; len(rest) > 0; {
			n := min(part, len(rest))
			flags := rdmanet.Partial
			if n == len(rest) {
				flags = 0
			}
			class := l.took(do, k.part(len(b)-len(rest), n), flags != 0, func() (int64, error) {
				k, err := rc.WriteMsg(rest[:n], flags)
				return int64(k), err
			})
			if class != OK {
				return
			}
			rest = rest[n:]
		}
	case TryMsg:
		l.try(rc, k)
	case Queue:
		l.queue(rc, k, part)
	}
}

// manyWrites is how many writes are recorded as one call.
const manyWrites = 200

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
	l.finish(c, block{}, err)
	l.fatal += 2
}

func (l *lane) begin(do Kind, k block) Call {
	c := Call{End: l.i, Lane: l.which, Do: do, Start: l.now(), Asked: int64(len(k.b)), Bad: k.bad()}
	l.server.begins(c)
	c.Start = l.now() // The notice may have had to wait.
	return c
}

// finish records a call that has written. The memory is the caller's again, so finish
// overwrites it. If it is sent later, the wrong bytes show that.
func (l *lane) finish(c Call, k block, err error) Class {
	if c.N >= 0 && c.N <= c.Asked {
		l.taken.Add(c.N)
	}
	class := l.add(c, err)
	k.wipe()
	l.moved.Add(1)
	switch class {
	case OK, Deadline, Again, TooLong, BadAddress:
	default:
		l.fatal++
	}
	return class
}

func (l *lane) took(do Kind, k block, piece bool, f func() (int64, error)) Class {
	c := l.begin(do, k)
	c.Piece = piece
	n, err := f()
	c.N = n
	return l.finish(c, k, err)
}

func (l *lane) writeOnce(k block) Class {
	return l.took(Write, k, false, func() (int64, error) {
		n, err := l.conn.Write(k.b)
		return int64(n), err
	})
}

// try sends without blocking as much as it can, and goes on when more is possible.
func (l *lane) try(rc *rdmanet.Conn, k block) {
	for tries := 0; len(k.b) > 0; tries++ {
		flags := rdmanet.NonBlocking
		if tries >= 20 {
			flags = 0 // The message must have an end.
		}
		c := l.begin(TryMsg, k)
		n, err := rc.WriteMsg(k.b, flags)
		c.N, c.Piece = int64(n), err == nil && n < len(k.b)
		rest := newBlock(len(k.b)-max(0, min(n, len(k.b))), Heap)
		copy(rest.b, k.b[len(k.b)-len(rest.b):])
		if class := l.finish(c, k, err); class != OK && class != Again {
			return
		}
		if k = rest; len(k.b) > 0 {
			select {
			case <-rc.Writable():
			case <-l.closed:
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

// queue queues messages and then waits for all of them.
func (l *lane) queue(rc *rdmanet.Conn, k block, part int) {
	var sends []*rdmanet.PendingMessage
	var calls []Call
	var parts []block
	for at := 0; at < len(k.b); at += part {
		q := k.part(at, min(part, len(k.b)-at))
		if len(q.b) < part && part >= mayBeTooLong && at > 0 {
			break // It would be sent although messages before it were refused for their length.
		}
		calls, parts = append(calls, l.begin(Queue, q)), append(parts, q)
		sends = append(sends, rc.QueueMsg(q.b))
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
		l.finish(calls[i], parts[i], err)
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
