package rdmanet

import (
	"bytes"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// recvQueue is the receives of the queue pair, and what has arrived by them and waits for
// the reader. Conn.mu guards it.
type recvQueue struct {
	posted ring.Ring[*regmem.Buffer] // posted has the receives in the queue pair, oldest first.
	unread ring.Ring[segment]        // unread has what waits for the reader, oldest first.
	held   int                       // held counts the unread segments that keep the buffer of a receive.
	inBufs int                       // inBufs counts the segments in unread whose payload lies in such a buffer.

	copies copyBreak
	watch  unreadWatch

	reasm      reassembler
	opening    int  // opening is the length of a message that has begun and has no unread segment yet.
	eof        bool // eof is set when the peer's FIN has arrived.
	discarding bool // CloseRead or Close was called: what arrives is dropped

	// wr and sge are memory for the post of one receive.
	wr  [1]ibv.RecvWR
	sge [1]ibv.SGE
}

// segment is received payload that waits for the reader, or a transfer in its place.
type segment struct {
	transfer *recvTransfer // transfer is the transfer, or nil for payload.

	// data is the payload. It lies in buf, or in chunk, or else in memory of its own.
	data  []byte
	buf   *regmem.Buffer
	chunk *copyBreakChunk

	size  int  // size is the length of the whole message if the segment begins one, and otherwise 0.
	last  bool // last is set if the segment ends its message.
	flags MsgFlags
}

// unreadWatch finds out that nobody reads while unread payloads hold the peer back. Two programs
// that write before they read would wait for each other, where TCP's buffers would carry what
// they write. Programs that read now and then are spared copies that way.
type unreadWatch struct {
	timer *time.Timer
	set   bool   // the timer is set
	reads uint64 // counts the moments at which the last call that reads has ended
	since uint64 // the value of reads when the timer was set
	alone bool   // nobody has read for unreadFor, and nobody reads
	short bool   // other connections had used up the memory for the last copy
}

const (
	// unreadFor is how long nobody reads until unread payloads leave their receives.
	unreadFor = 10 * time.Millisecond

	// unreadAgain is when memory is looked for again that other connections have used up.
	unreadAgain = 100 * time.Millisecond
)

// start sets the timer.
func (w *unreadWatch) start(d time.Duration, f func()) {
	w.set, w.since = true, w.reads
	if w.timer == nil {
		w.timer = time.AfterFunc(d, f)
	} else {
		w.timer.Reset(d)
	}
}

// offeredBytes returns how many of n bytes can be asked for at the head of the unread
// queue. With message set, it counts one message at most.
func (q *recvQueue) offeredBytes(n int, message bool) int {
	room := n
	for i := 0; i < q.unread.Len() && room > 0; i++ {
		s := q.unread.At(i)
		if s.transfer == nil || s.transfer.fetches.Len() > 0 {
			break
		}
		room -= min(room, s.transfer.length-s.transfer.asked)
		if message && s.last {
			break
		}
	}
	return n - room
}

// nextTransfer returns the transfer that a direct read asks for next, or nil. With message
// set, the data behind a message is left for the next call, also if the message was
// withdrawn.
func (q *recvQueue) nextTransfer(message bool) *recvTransfer {
	for i := 0; i < q.unread.Len(); i++ {
		s := q.unread.At(i)
		switch {
		case s.transfer == nil || s.transfer.fetches.Len() > 0:
			return nil
		case s.transfer.asked < s.transfer.length:
			return s.transfer
		}
		if message && s.last {
			return nil
		}
	}
	return nil
}

// push adds a segment whose payload lies in the buffer of a receive.
func (q *recvQueue) push(s segment) {
	q.unread.Push(s)
	q.held++
	q.inBufs++
}

// pop removes the head of the unread queue. What it holds is still to be given back.
func (q *recvQueue) pop() segment {
	s := q.unread.Pop()
	if s.buf != nil {
		q.inBufs--
	}
	return s
}

// evict moves the latest payload in the unread queue to ordinary memory, and returns the
// buffer that it was in, or nil. The head of the queue stays where it is, because a reader
// may be copying from it.
func (q *recvQueue) evict(stats *Stats) *regmem.Buffer {
	for i := q.unread.Len() - 1; i > 0; i-- {
		if s := q.unread.At(i); s.buf != nil {
			buf := s.buf
			s.data, s.buf = bytes.Clone(s.data), nil
			q.inBufs--
			stats.BytesCopied += uint64(len(s.data))
			return buf
		}
	}
	return nil
}
