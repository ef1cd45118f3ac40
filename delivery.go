package rdmanet

import (
	"math"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file handles receives that have completed, which complete (completion.go) passes on:
//
//  1. received checks the message (parse), counts its credits, and notes what its flags ask
//     for.
//  2. reassemble finds the place of the message in a message of the upper layer.
//  3. store appends the payload to the unread queue, where a call that reads takes it
//     (recv.go).
//  4. transferred handles the transfer header, if there is one.

// delivery is a Data Transfer message that has arrived.
type delivery struct {
	buf      *regmem.Buffer // buf is the receive buffer.
	payload  []byte
	h        segmentHeader
	t        transferHeader // t is the transfer header if transfer is set.
	transfer bool
	opens    bool // opens is set if t is an offer or a request.
	empty    bool // empty is set for an empty message of the upper layer.
	flags    MsgFlags
}

// received handles the completion of a receive.
func (c *conn) received(wc *ibv.WC) {
	m := delivery{buf: c.in.posted.Pop()}
	if c.life.over() && wc.Status == ibv.WCSuccess {
		// A message before this one may be missing.
		c.drop(m.buf)
		return
	}
	if wc.Status == ibv.WCSuccess && int(wc.ByteLen) > c.receiveSize(m.buf) {
		// A receive that was posted before the negotiation may be longer than agreed.
		wc = &ibv.WC{ID: wc.ID, Status: ibv.WCLocLenErr}
	}
	if wc.Status != ibv.WCSuccess {
		c.drop(m.buf)
		c.status(wc, ibv.WCRecv)
		return
	}
	if err := c.parse(&m, int(wc.ByteLen)); err != nil {
		c.drop(m.buf)
		c.fail(err)
		return
	}
	c.credits.receive(&m.h)
	if c.credits.granted.runs.Len() > maxRuns {
		c.release(m.buf)
		c.fail(errGrantRuns)
		return
	}
	if c.credits.peerCredits() < 0 {
		// The receive was posted, but not granted to the peer.
		c.release(m.buf)
		c.fail(errNoCredit)
		return
	}
	if wc.Flags&ibv.WCWithInv != 0 {
		c.stats.KeysInvalidated++
	}
	c.live.received, c.live.probing = true, false
	c.idle.pagesTouched = c.idle.pagesTouched || wc.ByteLen > regmem.PageSize
	c.scheduleTrim()
	c.send.endSeen = c.send.endSeen || c.holds && m.h.Flags&flagEndSeen != 0
	if m.h.Flags&flagResponseRequested != 0 && !c.send.closed {
		c.send.responseDue = true
	}
	c.send.peerWants = c.messages && m.h.Flags&flagWantsCredits != 0
	if c.send.peerWants {
		c.credits.grow()
	}
	var last bool
	err := c.rx.checkOffer(m.opens, &m.t)
	if err == nil {
		last, err = c.in.reassemble(&m)
	}
	if err != nil {
		c.release(m.buf)
		c.fail(err)
		return
	}
	if len(m.payload) > 0 || !m.transfer {
		c.credits.observe(m.h.Remaining > 0 || len(m.payload) > segmentData(len(m.payload), int(c.agreed.maxReceive)))
	}
	c.store(&m, last)
	c.copyUnread()
	c.watchUnread()
	c.trimAfter(len(m.payload))
	c.wait.Interrupt()
	if m.transfer {
		c.credits.pendingGrant = true
		if err := c.transferred(&m.t, last, m.flags); err != nil {
			c.fail(err)
			return
		}
	}
	if c.in.reasm.ended && !c.in.eof {
		c.in.eof = true
		c.readers.WakeAll()
		if c.holds {
			c.holding.PeerCloses()
		}
	} else if len(m.payload) > 0 || m.opens || m.empty {
		c.sentAtReceive = c.stats.MessagesSent
		c.readers.Wake()
	}
	c.writers.WakeAll()
}

// parse reads the headers of m, a message of n bytes.
func (c *conn) parse(m *delivery, n int) (err error) {
	b := m.buf.B[:min(n, len(m.buf.B))]
	if m.payload, err = m.h.parse(b); err != nil {
		return err
	}
	m.empty = c.messages && m.h.Flags&flagEmpty != 0
	m.flags = c.messageFlags(&m.h)
	if m.transfer = m.h.Flags&flagTransfer != 0 && c.rx.mode != TransferNone; m.transfer {
		err = m.t.parse(&m.h, b)
		m.opens = m.t.opens()
	}
	return err
}

// store appends the payload of m to the unread queue. last is set if a message of the upper
// layer ends with m or with its transfer.
func (c *conn) store(m *delivery, last bool) {
	// The payload ends the message only if no transfer follows it.
	last = last && (!m.opens || m.t.Length == 0)
	c.stats.countReceived(len(m.payload), last)
	if len(m.payload) == 0 && !m.empty || c.in.discarding {
		c.reuse(m.buf)
	} else {
		s := segment{data: m.payload, buf: m.buf, size: c.in.opening, last: last, flags: m.flags}
		c.in.opening = 0
		c.in.push(s)
	}
	if m.opens || c.in.discarding && len(m.payload) > 0 {
		c.credits.oweGrant(m.flags&NoResponse != 0)
	}
}

// transferred handles the transfer header of a message.
func (c *conn) transferred(t *transferHeader, last bool, flags MsgFlags) error {
	switch t.Kind {
	case transferOffer, transferRequest:
		if t.Length == 0 {
			// The message has payload only.
			return nil
		}
		if last {
			c.stats.MessagesReceived++
		}
		size := c.in.opening
		c.in.opening = 0
		c.offered(t, segment{size: size, last: last, flags: flags})
		return nil
	case transferGrant:
		return c.tx.granted(t)
	case transferWritten:
		return c.written(t)
	case transferDone:
		return c.tx.doneBy(t)
	case transferWithdraw:
		return c.withdrawn(t)
	}
	return errTransferKind // parse has refused it already.
}

// received returns how many Data Transfer messages have arrived.
func (s *Stats) received() uint64 { return s.SegmentsReceived + s.EmptyReceived }

// countReceived counts a Data Transfer message with n bytes of payload. last is set if the
// payload ends a message of the upper layer.
func (s *Stats) countReceived(n int, last bool) {
	if last {
		s.MessagesReceived++
	}
	if n == 0 {
		s.EmptyReceived++
		return
	}
	s.SegmentsReceived++
	s.BytesReceived += uint64(n)
}

// messageFlags returns the flags that a Data Transfer message has for its message of the
// upper layer.
func (c *conn) messageFlags(h *segmentHeader) (flags MsgFlags) {
	if !c.messages || h.Flags&(flagExpedited|flagPartial|flagNoResponse) == 0 {
		return 0
	}
	if h.Flags&flagExpedited != 0 {
		flags |= Expedited
	}
	if h.Flags&flagPartial != 0 {
		flags |= Partial
	}
	if h.Flags&flagNoResponse != 0 {
		flags |= NoResponse
	}
	return flags
}

// reassemble passes m to the reassembler, and reports whether a message of the upper layer
// ends with m. An offer or a request ends one together with its transfer.
func (q *recvQueue) reassemble(m *delivery) (last bool, err error) {
	var first bool
	if m.opens {
		first, last, err = q.reasm.acceptTransfer(&m.h, &m.t)
	} else {
		first, last, err = q.reasm.accept(&m.h)
	}
	if first {
		sum := uint64(m.h.DataLength) + uint64(m.h.Remaining)
		// Rest and Length of other kinds are no part of a message.
		if m.opens {
			sum += uint64(m.t.Length) + m.t.Rest // The sum cannot overflow.
		}
		q.opening = int(min(sum, math.MaxInt))
	}
	return last, err
}
