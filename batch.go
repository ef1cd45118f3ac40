package rdmanet

import (
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/fault"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file builds work requests and queues them in the lane: segments, messages without
// payload, and the RDMA operations that probe the peer's device. send.go and control.go
// decide what to send, fetch.go builds the RDMA Reads of transfers, and lane.go posts what
// is queued.

// sendBatch is what one batch sends: the segments of one message, or messages without
// payload.
type sendBatch struct {
	p []byte // p is the payload.

	// segs is how many segments, or messages without payload, the batch has.
	segs int

	full int // full is how many bytes of payload each segment but the last one has.

	rest  int             // rest is how many bytes of the message follow later.
	all   uint16          // all has the flags of each segment.
	flags uint16          // flags has further flags of the last segment.
	token uint32          // token is the key that the first segment invalidates, or 0.
	bufs  regmem.Buffers  // bufs are for the segments that do not go inline, whose payload is there (fill).
	head  *transferHeader // head is the transfer header of the only segment, or nil.

	joined bool // joined is set if the only segment has a buffer although it could go inline.

	// grant is answered by an RDMA Write in front of the message, or is nil.
	grant *memoryGrant

	more bool // more is set if its writer has more to send.

	control bool // control is set if nothing in the batch is the program's.
}

// queueBatch builds the work requests of a batch and queues them.
func (c *conn) queueBatch(o *sendBatch) (*postBatch, error) {
	l := &c.lane
	if c.life.over() {
		l.putBuffers(o.bufs)
		return nil, c.life.cause
	}
	b := l.newBatch(o.segs)
	if o.grant != nil {
		c.answerGrant(b, o.grant)
	}
	var staged regmem.Buffers
	for p, i := o.p, 0; i < o.segs; i++ {
		n := len(p)
		if i < o.segs-1 {
			n = o.full
		}
		granted, flags := c.credits.spend()
		h := segmentHeader{
			CreditsRequested: c.requested(),
			CreditsGranted:   granted,
			Flags:            o.all | flags | c.endFlags(),
			Remaining:        uint32(len(p) - n + o.rest),
			DataLength:       uint32(n),
		}
		if n > 0 {
			h.DataOffset = dataOffset
		}
		last := i == o.segs-1
		if last {
			h.Flags |= o.flags | c.answerFlags() | c.creditFlags(o.more)
		}
		header := b.hdrs[i][:h.putWith(o.head, b.hdrs[i][:])]
		wr := b.next()
		wr.Op, wr.Flags = ibv.OpSend, ibv.SendSolicited|ibv.SendInline
		if o.token != 0 && i == 0 && l.invalidates {
			wr.Op, wr.InvKey = ibv.OpSendInv, o.token
		}
		takes := n // takes is how many bytes of memory the send takes until it has completed, about.
		if o.joined || len(header)+n > l.inline {
			buf := o.bufs.Pop()
			c.stats.BytesCopied += uint64(copy(buf.B, header))
			b.element(wr, buf.B[:len(header)+n], buf.LKey)
			wr.Flags &^= ibv.SendInline
			staged.Push(buf)
			if buf.Pool() == l.large {
				takes = l.large.Size
			}
		} else {
			b.element(wr, header, 0)
			if n > 0 {
				b.element(wr, p[:n], 0)
			}
		}
		p = p[n:]
		if l.number(wr, takes, o.flags&flagFIN != 0 || !staged.Empty() && (l.signalEach || last)) {
			l.signal(wr, staged, nil, 0)
			staged = regmem.Buffers{}
			c.stats.Signaled++
		}
		if !o.control {
			c.send.data = l.seq
		}
		c.stats.countSent(n)
	}
	if len(o.p) > 0 && o.rest == 0 && o.head == nil {
		c.stats.MessagesSent++
	}
	c.stats.Posts++
	l.enqueue(b)
	return b, nil
}

// answerGrant adds the RDMA Write that answers a memory grant.
func (c *conn) answerGrant(b *postBatch, g *memoryGrant) {
	l := &c.lane
	wr := b.next()
	wr.Op, wr.RemoteAddr, wr.RKey = ibv.OpWrite, g.addr, g.key
	b.element(wr, g.o.p[g.at:g.at+g.n], g.o.source.LKey)
	l.number(wr, 0, true)
	l.signal(wr, regmem.Buffers{}, g.o, g.n)
	g.o.writing++
	c.tx.writing++
	c.stats.Signaled++
	// The leader may wait for receives only.
	c.wait.Interrupt()
}

// countSent counts a Send with n bytes of payload.
func (s *Stats) countSent(n int) {
	if n == 0 {
		s.EmptySent++
		return
	}
	s.SegmentsSent++
	s.BytesSent += uint64(n)
}

// fill copies the payload of o to its buffers, behind room for the headers, as far as it does not
// go inline. It returns how many bytes of that can be read. Only a batch for which these are all
// may be queued. What goes inline has been checked.
func (c *conn) fill(o *sendBatch) (good int) {
	good = len(o.p)
	var filled regmem.Buffers // filled is a stack, so the last segment comes first.
	for i := o.segs - 1; i >= 0; i-- {
		from, header := i*o.full, dataOffset
		if o.head != nil {
			header = transferOffset
		}
		p := o.p[from:]
		if i < o.segs-1 {
			p = p[:o.full]
		}
		if header+len(p) <= c.lane.inline {
			continue
		}
		buf := o.bufs.Pop()
		n, _ := fault.Copy(buf.B[header:], p)
		filled.Push(buf)
		c.stats.BytesCopied += uint64(n)
		if n < len(p) {
			good = from + n
		}
	}
	o.bufs = filled
	return good
}

// answerFlags returns the flags of a message that is sent in place of the answer and the
// probe that are due. An answer does not ask for another answer: two peers would never
// stop.
func (c *conn) answerFlags() uint16 {
	s := &c.send
	s.responseDue = false
	if !s.probeDue {
		return 0
	}
	s.probeDue = false
	c.stats.KeepAliveSent++
	return flagResponseRequested
}

// creditFlags returns the flag that tells the peer that payload waits for credits. more is set
// if a writer is about to wait. A program that waits for Writable counts as one. While both ends
// send, the peer cannot see that from what it has granted: most of that may be on its way, behind
// much else.
func (c *conn) creditFlags(more bool) uint16 {
	waits := more || c.send.wantsCredit || c.queue.wantsWritable || c.send.joined.n > 0
	if c.messages && waits && c.credits.spendable() == 0 {
		return flagWantsCredits
	}
	return 0
}

// endFlags returns the flag that tells a peer that the end of its direction was found here.
func (c *conn) endFlags() uint16 {
	if c.holds && c.in.eof {
		return flagEndSeen
	}
	return 0
}

// requested returns the CreditsRequested of the next message. An idle connection asks for
// few credits, see keepalive.go.
func (c *conn) requested() uint16 {
	if c.send.idle {
		return uint16(c.set.initial)
	}
	return uint16(c.set.target)
}

// midMessage reports whether a message is unfinished that nothing may interrupt. A peer
// that follows [MS-SMBD] 3.1.5.8 to the letter accepts nothing between its segments.
// rdmanet peers accept messages without payload there.
func (c *conn) midMessage() bool { return c.send.midMessage && !c.peer.rdmanet }

// emptyBuffers returns the buffers for n messages without payload, or with head set for one
// message with a transfer header. If it has none, the next completion of a send is handled
// soon, as it may bring a buffer back.
func (c *conn) emptyBuffers(n int, head bool) (segs int, bufs regmem.Buffers) {
	if head {
		segs, bufs = c.lane.transferBuffers(0)
	} else if dataHeaderLen <= c.lane.inline {
		return n, bufs
	} else {
		segs, _, bufs = c.lane.sendBuffers(n, 0, 0)
	}
	if segs == 0 {
		c.wantSendCompletion()
	}
	return segs, bufs
}

// queueEmpty queues up to n messages without payload, and reports whether it did.
func (c *conn) queueEmpty(n int) bool {
	n, bufs := c.emptyBuffers(n, false)
	if n == 0 {
		return false
	}
	_, err := c.queueBatch(&sendBatch{segs: n, bufs: bufs, control: true})
	return err == nil
}

// queueEmptyWrite queues an RDMA Write of no bytes, if the queue pair's send queue has
// room. The Write needs neither a credit nor a key. It shows whether the peer's device is
// there, and its completion stands for all sends before it.
func (c *conn) queueEmptyWrite() {
	if c.freeSlots() == 0 || c.life.over() {
		return
	}
	l := &c.lane
	wr := l.looseBatch().next()
	wr.Op = ibv.OpWrite
	l.number(wr, 0, true)
	l.signal(wr, regmem.Buffers{}, nil, 0)
	c.stats.Signaled++
}

// queueBarrier queues an RDMA Read, of no bytes or of the peer's probe target, unless one
// is under way. Its completion shows that the peer's device has got everything that was
// sent before. It needs no credit. queueBarrier reports whether such a Read is under way.
func (c *conn) queueBarrier() bool {
	if c.send.barrier {
		return true
	}
	if c.lane.id.Param().InitiatorDepth == 0 || !c.life.posts() {
		return false
	}
	b := c.lane.looseBatch()
	wr := b.next()
	wr.ID, wr.Op, wr.Flags = barrierID, ibv.OpRead, ibv.SendSignaled
	if t := c.live.target; t != nil {
		wr.RemoteAddr, wr.RKey = t.addr, t.key
		b.element(wr, c.live.memory.answer(), c.live.memory.buf.LKey)
	}
	c.send.barrier = true
	return true
}

// canSend reports whether a message without payload may be sent now.
func (c *conn) canSend() bool {
	return c.credits.maySendControl() && c.freeSlots() > 0
}
