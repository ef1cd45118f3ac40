package rdmanet

import (
	"math"
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// minCredits is the least number of receives that a side posts. With fewer, not counting
// the one for FIN, each grant would call for another grant.
const minCredits = 4

// credits is the flow control of one connection, [MS-SMBD] 3.1.5.1 and 3.1.5.9. A message
// may be sent only if the peer has posted a receive for it. Each side grants the other the
// receives that it has newly posted. receives.go posts them, and control.go sends grants
// that no other message carries. Conn.mu guards it.
//
// The number of posted receives follows use. A connection starts with initial receives. The
// window doubles, up to maximum and to the number that the peer asks for, when the reader
// keeps up and one of two things happens: the peer has used up all its credits, or grants
// of their own follow one another quickly. Each of those grants wakes the peer.
type credits struct {
	have   int // have is how many sends the peer can take.
	posted int // posted is how many receives are posted.

	// ungranted is how many posted receives the peer was not granted yet.
	ungranted int

	target int // target is how many receives the peer wants to be posted.
	window int // window is how many receives are to be posted or unread.

	// initial and maximum are the limits of window.
	initial, maximum int

	// charge is what the device's budget is charged with: receives that are posted or
	// unread beyond idleReceives.
	charge regmem.Share

	// reserveOut and reserveIn are the credits, of this side and of the peer, that are set
	// aside for FIN: 1 between rdmanet peers, and otherwise 0. So a stream can be ended
	// although its reader takes nothing.
	reserveOut, reserveIn int

	// transferReserve is 1 if there are large transfers, and otherwise 0. It is how many
	// receives more than the window are posted. They are granted only by messages that take
	// the last credit but that for FIN. So each side can always send messages about
	// transfers, even with its last credit, which has to go with a grant.
	transferReserve int

	// pendingGrant is set if a message about transfers has arrived and nothing was granted
	// since.
	pendingGrant bool

	// readerWaited is set if the reader has found nothing to read since the window last
	// grew.
	readerWaited bool

	// alone is when a grant last went in a message without payload.
	alone time.Time

	// ungrantedPayload is set if a receive that carried payload was posted again and not
	// granted.
	ungrantedPayload bool

	// patient is set if the payload in all receives that can be granted again had the flag
	// NoResponse.
	patient bool
}

// oweGrant notes that a receive that carried payload can be granted again. patient is set
// if the payload had the flag NoResponse.
func (c *credits) oweGrant(patient bool) {
	c.patient = patient && (c.patient || !c.ungrantedPayload)
	c.ungrantedPayload = true
}

// receive notes that a message has arrived: it has used up a receive, and its credits count
// from now on. The sum of credits is bounded by the largest number that the wire format
// has.
func (c *credits) receive(h *segmentHeader) {
	c.posted--
	c.have = min(c.have+int(h.CreditsGranted), math.MaxUint16)
	c.target = max(int(h.CreditsRequested), minCredits)
	if c.peerCredits() <= c.peerReserve() {
		c.grow()
	}
}

// grow doubles the window if the reader keeps up, as far as maximum and the budget allow.
func (c *credits) grow() {
	if c.readerWaited {
		to := min(2*c.window, c.maximum)
		c.window = max(c.window, min(to, c.idleReceives()+c.charge.Raise(to-c.idleReceives())))
		c.readerWaited = false
	}
}

// idleReceives returns how many receives, and how many credits, an idle connection keeps.
// These are more than the initial ones, because the peer cannot use up receives that it was
// not granted yet. So many are not charged. Otherwise idle connections would take the
// budget from busy ones.
func (c *credits) idleReceives() int { return 2 * c.initial }

// lowerCharge ends the charge for receives that are neither posted nor unread, and that may
// not be posted again.
func (c *credits) lowerCharge(unread int) {
	c.charge.Lower(max(c.window, c.posted+unread-c.transferReserve) - c.idleReceives())
}

// growWithin is the time between two grants of their own within which the window grows.
const growWithin = 10 * time.Millisecond

// grantAlone notes that a message without payload carries a grant that was due. Most such
// messages are sent for nothing else.
func (c *credits) grantAlone(now time.Time) {
	if now.Sub(c.alone) < growWithin {
		c.grow()
	}
	c.alone = now
}

// room returns how many receives to post now, while unread buffers are kept for the reader.
// sending is set while a writer waits for credits.
//
// The last credit may be spent only with a grant. So a writer that waits with its last
// credit gets a receive to grant, even if that is one more than the maximum. Without it
// both sides could wait: a peer that sends nothing does not grant again what mere grants
// have used up. It is of no use if the last credit is kept for grants alone.
func (c *credits) room(unread int, sending bool) int {
	n := min(c.window, c.target) + c.transferReserve - c.posted - unread
	if n <= 0 && sending && c.reserveOut == 0 && c.have == 1 && c.ungranted == 0 && c.posted+unread <= c.maximum {
		return 1
	}
	if c.reserveIn > 0 && c.posted+unread <= c.maximum+1 {
		// The peer must be able to send grants, whatever is unread.
		n = max(n, c.reserveShort())
	}
	return max(n, 0)
}

// reserveShort returns how many receives are missing from the reserve for messages without
// payload.
func (c *credits) reserveShort() int { return c.peerReserve() + c.transferReserve - c.posted }

// post notes n newly posted receives.
func (c *credits) post(n int) {
	c.posted += n
	c.ungranted += n
}

// spendable returns how many messages with payload may be sent now. The last credit is kept
// for a message with a grant. Between rdmanet peers it is kept for a message with a grant
// and no payload: otherwise what a program writes without reading would use up the credits
// that its grants need.
func (c *credits) spendable() int {
	have := c.have - c.reserveOut
	if c.ungranted > 0 && have == 1 && c.reserveOut == 0 {
		// With several messages the first would take the grant, and the last would go
		// without.
		return 1
	}
	return max(have-1, 0)
}

// maySendControl reports whether a message without payload may be sent now.
func (c *credits) maySendControl() bool {
	have := c.have - c.reserveOut
	return have > 1 || have == 1 && c.ungranted > 0
}

// peerReserve returns how many credits the peer keeps back from payload.
func (c *credits) peerReserve() int {
	if c.reserveIn > 0 {
		return c.reserveIn + 1
	}
	return 0
}

// spend takes the credit for one message, and returns the grant that the message must
// carry.
func (c *credits) spend() (granted uint16) {
	g := min(c.ungranted, math.MaxUint16)
	if c.have-c.reserveOut > 1 {
		g = min(g, c.toGrant())
	}
	c.have--
	c.ungranted -= g
	c.ungrantedPayload, c.pendingGrant = false, false
	return uint16(g)
}

// grantAll returns the first grant, for the receives that were posted before.
func (c *credits) grantAll() uint16 {
	n := c.toGrant()
	c.ungranted -= n
	return uint16(n)
}

// toGrant returns how many receives can be granted.
func (c *credits) toGrant() int { return max(c.ungranted-c.transferReserve, 0) }

// peerCredits returns how many credits the peer has, with those on their way to it.
func (c *credits) peerCredits() int { return c.posted - c.ungranted }

// grantDue reports whether a grant is due that no other message carries. unread is how many
// buffers the reader has not used up, and busy is set if these hold receives back. idle is
// set if no other message seems about to be sent.
//
// A grant is due when the peer cannot send at all, or can send only with a grant that it
// may not have. It is also due when the peer has used most of its credits for payload. It
// may wait longer while the reader is busy, because its program may be about to write.
//
// Two mere grants are answered by one. If each were answered, the two ends would never
// stop.
//
// While the reader works on buffers, a grant waits until a good part of the window is free
// again. Otherwise the peer would wake up for one message at a time (silly window
// syndrome). Only the peer's payload waits for such a grant, because all messages of this
// side carry grants.
func (c *credits) grantDue(unread int, busy, idle bool) bool {
	n := c.toGrant()
	if n > 0 && c.pendingGrant && c.peerCredits() <= c.peerReserve() {
		// The peer may have more messages about transfers to send.
		return true
	}
	if n == 0 || c.ungrantedPayload && busy && n < min(c.window, c.target, c.posted+unread)/4 {
		return false
	}
	low := c.posted / 4
	if idle {
		low = c.posted / 2
	}
	left := c.peerCredits()
	switch {
	case c.ungrantedPayload && c.patient:
		return left <= c.peerReserve()
	case c.ungrantedPayload:
		return left <= max(c.peerReserve(), low)
	case n == 1:
		return left <= c.reserveIn && unread == 0 // Otherwise the next read calls for the grant.
	default:
		return left <= c.reserveIn+1
	}
}
