package rdmanet

import (
	"bytes"

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

// evict moves the latest payload in the unread queue to ordinary memory, and returns the
// buffer that it was in, or nil. The head of the queue stays where it is, because a reader
// may be copying from it.
func (q *recvQueue) evict(stats *Stats) *regmem.Buffer {
	for i := q.unread.Len() - 1; i > 0; i-- {
		if s := q.unread.At(i); s.buf != nil {
			buf := s.buf
			s.data, s.buf = bytes.Clone(s.data), nil
			stats.BytesCopied += uint64(len(s.data))
			return buf
		}
	}
	return nil
}
