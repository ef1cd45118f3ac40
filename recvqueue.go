package rdmanet

import (
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// recvQueue is the receives of the queue pair, and what has arrived by them and waits for
// the reader. Conn.mu guards it.
type recvQueue struct {
	posted ring.Ring[*regmem.Buffer] // receives in the queue pair, oldest first
	unread ring.Ring[segment]        // what waits for the reader, oldest first
	held   int                       // unread segments that keep the buffer of a receive

	copyBreak      *copyBreakChunk // the chunk that the next payload is copied to, or nil
	copyBreakBytes int             // bytes of payloads in chunks, each with copyBreakCost more

	reasm      reassembler
	opening    int  // length of a message that has begun and has no unread segment yet
	eof        bool // the peer's FIN has arrived
	discarding bool // CloseRead or Close was called: what arrives is dropped

	// wr and sge are memory for the post of one receive.
	wr  [1]ibv.RecvWR
	sge [1]ibv.SGE
}

// segment is received payload that waits for the reader, or a transfer in its place.
type segment struct {
	transfer *recvTransfer // the transfer, or nil for payload

	// data is the payload. It lies in buf, or in a chunk of copyBreak, or else in memory of
	// its own.
	data      []byte
	buf       *regmem.Buffer
	copyBreak *copyBreakChunk
	n         int // bytes of the payload when it arrived

	size  int  // length of the whole message if the segment begins one, else 0
	last  bool // the segment ends its message
	flags MsgFlags
}
