package twin

import (
	"errors"
	"fmt"
	"time"

	"github.com/rdmanet/rdmanet"
)

// drainBytes is the size of the reads at the end of the reading lane.
const drainBytes = 64 << 10

// receive does an operation of the reading lane.
func (l *lane) receive(op Op) {
	rc, _ := l.conn.(*rdmanet.Conn)
	switch {
	case op.Do == ReadFull:
		part := op.Part
		if part <= 0 {
			part = max(1, op.Size)
		}
		k := newBlock(min(part, op.Size), op.Memory)
		defer k.free()
		for left := op.Size; left > 0; {
			n, class := l.readOnce(k.part(0, min(len(k.b), left)))
			if left -= n; class != OK {
				return
			}
		}
	case op.Do == WriteTo:
		l.writeTo(op)
	case op.Do == ReadMsg && rc != nil, op.Do == ReadPiece && rc != nil:
		k := newBlock(op.Size, op.Memory)
		defer k.free()
		l.readMessage(op.Do, rc, k.b)
	default:
		k := newBlock(op.Size, op.Memory)
		defer k.free()
		l.readOnce(k)
	}
}

// got checks what was received, and records the call.
func (l *lane) got(c Call, p []byte, n int, err error) Class {
	c.N = int64(n)
	if n < 0 || int64(n) > int64(len(p))-c.Bad {
		c.Wrong = fmt.Sprintf("n is %d of %d", n, len(p))
	} else {
		c.Wrong = l.wanted.differ(p[:n], l.read.Load())
		l.read.Add(int64(n))
	}
	return l.gotten(c, err)
}

func (l *lane) gotten(c Call, err error) Class {
	class := l.add(c, err)
	if class != Deadline { // A plain peer returns that error again and again.
		l.moved.Add(1)
	}
	switch class {
	case OK, Deadline, Short, BadAddress:
	default:
		l.fatal++
	}
	return class
}

func (l *lane) readOnce(k block) (int, Class) {
	c := Call{End: l.i, Lane: l.which, Do: Read, Start: l.now(), Asked: int64(len(k.b)), Bad: k.bad()}
	n, err := l.conn.Read(k.b)
	return n, l.got(c, k.b, n, err)
}

// readMessage reads a message, or the part of it that was received.
func (l *lane) readMessage(do Kind, rc *rdmanet.Conn, b []byte) {
	c := Call{End: l.i, Lane: l.which, Do: do, Start: l.now(), Asked: int64(len(b))}
	at := l.read.Load()
	l.wanted.fill(b, at)
	for i := range b {
		b[i] ^= 0xff // The change shows whether the beginning of a message that is too long was written there.
	}
	var n int
	var err error
	if do == ReadMsg {
		n, err = rc.ReadMsg(b)
	} else {
		n, _, err = rc.ReadPiece(b)
	}
	if classify(err) == Short {
		c.More, n = int64(n), 0
		if len(b) > 0 && l.wanted.differ(b, at) == "" {
			n = len(b)
		}
	}
	l.got(c, b, n, err)
}

// checker is the writer for WriteTo.
type checker struct {
	l     *lane
	want  int64
	n     int64
	wrong string
}

func (w *checker) Write(p []byte) (int, error) {
	if w.wrong == "" {
		w.wrong = w.l.wanted.differ(p, w.l.read.Load())
	}
	w.l.read.Add(int64(len(p)))
	w.l.moved.Add(1)
	if w.n += int64(len(p)); w.n >= w.want {
		return len(p), errEnough
	}
	return len(p), nil
}

func (l *lane) writeTo(op Op) {
	c := Call{End: l.i, Lane: l.which, Do: WriteTo, Start: l.now(), Asked: int64(op.Size)}
	w := &checker{l: l, want: int64(op.Size)}
	n, err := l.conn.WriteTo(w)
	c.N, c.Wrong = n, w.wrong
	if n != w.n && c.Wrong == "" {
		c.Wrong = fmt.Sprintf("n is %d, but the writer was given %d bytes", n, w.n)
	}
	switch {
	case errors.Is(err, errEnough):
		err = nil
	case err == nil:
		// WriteTo does not report the end of the stream. A Read would.
		c.Class = EOF
	}
	if c.Class == EOF {
		l.ended(c)
		return
	}
	l.gotten(c, err)
}

// ended records a WriteTo that came to the end of the stream.
func (l *lane) ended(c Call) {
	c.Return = l.now()
	l.put(c)
	l.moved.Add(1)
	l.fatal++
}

// endReading reads to the end of the stream.
func (l *lane) endReading() {
	k := newBlock(drainBytes, Heap)
	plain, _ := l.conn.(*plainConn)
	for {
		if plain != nil {
			if l.otherIsThrough() {
				return // The Close of this end ends the other end's stream.
			}
			plain.Peer.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		}
		_, class := l.readOnce(k)
		switch class {
		case OK:
		case Deadline:
			if plain == nil {
				l.clear(ClearRead, l.conn.SetReadDeadline)
			}
		default:
			return
		}
	}
}

// otherIsThrough reports whether the other end has written everything, and this end has
// read it.
func (l *lane) otherIsThrough() bool {
	other := l.ends[1-l.i]
	select {
	case <-other.wrote:
		return l.read.Load() >= other.taken.Load()
	default:
		return false
	}
}
