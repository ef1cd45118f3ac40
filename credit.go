package rdmanet

import (
	"math"
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// minCredits is how many receives a side posts at least. With fewer, besides
// that for FIN, every grant would call for a grant.
const minCredits = 4

// credits is the flow control of one connection, [MS-SMBD] 3.1.5.1 and
// 3.1.5.9: a message may be sent only where the peer has posted a receive for
// it, and each side tells the other how many it has posted anew.
//
// How many receives are kept posted follows use. A connection starts with
// initial; the window doubles, up to maximum and to what the peer asks for, when
// the reader keeps up and either the peer has used up all it had, or so few
// receives call for grants of their own all the time: each wakes the peer up.
type credits struct {
	have      int // sends that the peer can take
	posted    int // receives posted
	ungranted int // of these, how many the peer has not been told of
	target    int // receives that the peer wants posted
	window    int // receives to keep posted or unread

	initial, maximum int

	charge regmem.Share // what is posted or unread beyond keep

	// Between rdmanet peers one credit is set aside for FIN, so that a stream
	// can be ended although its reader takes nothing.
	reserveOut, reserveIn int

	// Where there are large transfers, each side must be able to tell the other of
	// them at any time, also with its last credit, which has to go with a grant. So
	// one receive more than the window is posted and kept for that.
	transferReserve int  // 1, else 0
	pendingGrant    bool // the peer has told us of transfers, and was granted nothing since

	readerWaited     bool      // the reader has found nothing since the window last grew
	alone            time.Time // when a grant last went without payload
	ungrantedPayload bool      // a receive that carried payload was posted again and not yet granted
	patient          bool      // the peer has said of all such payload that there is no hurry
}

// oweGrant notes that a receive that carried payload can be granted again.
func (c *credits) oweGrant(patient bool) {
	c.patient = patient && (c.patient || !c.ungrantedPayload)
	c.ungrantedPayload = true
}

// receive notes an arrived message: its receive is used up, and what it says
// holds from now on. The sum of credits is bounded by what their count on the
// wire can say.
func (c *credits) receive(h *segmentHeader) {
	c.posted--
	c.have = min(c.have+int(h.CreditsGranted), math.MaxUint16)
	c.target = max(int(h.CreditsRequested), minCredits)
	if c.peerCredits() <= c.peerReserve() {
		c.grow()
	}
}

// grow widens the window if the reader keeps up, as far as there is memory for it.
func (c *credits) grow() {
	if c.readerWaited {
		to := min(2*c.window, c.maximum)
		c.window = max(c.window, min(to, c.idleReceives()+c.charge.Raise(to-c.idleReceives())))
		c.readerWaited = false
	}
}

// idleReceives is how many receives, and how many credits, a connection keeps when it is idle.
// More than the initial ones: those that the peer has not been granted yet cannot be used
// up by it. So what is not charged for must be that many, or those that idle would take
// the budget from those that do not.
func (c *credits) idleReceives() int { return 2 * c.initial }

// lowerCharge gives back what is charged for receives that are neither posted any more nor
// unread, and may not be posted again.
func (c *credits) lowerCharge(unread int) {
	c.charge.Lower(max(c.window, c.posted+unread-c.transferReserve) - c.idleReceives())
}

// growWithin is how soon grants of their own may follow one another.
const growWithin = 10 * time.Millisecond

// grantAlone notes that a message was sent for its grant only.
func (c *credits) grantAlone(now time.Time) {
	if now.Sub(c.alone) < growWithin {
		c.grow()
	}
	c.alone = now
}

// room is how many receives to post now, while unread buffers are kept for the
// reader. sending is set while something waits to be sent: with the last credit
// it may go only together with a grant, so there must be one to give, even if
// that makes one more than the maximum: a peer with nothing to send does not
// grant again what mere grants have used up. Where a credit is kept for grants
// alone it would be of no use.
func (c *credits) room(unread int, sending bool) int {
	n := min(c.window, c.target) + c.transferReserve - c.posted - unread
	if n <= 0 && sending && c.reserveOut == 0 && c.have == 1 && c.ungranted == 0 && c.posted+unread <= c.maximum {
		return 1
	}
	if c.reserveIn > 0 && c.posted+unread <= c.maximum+1 {
		n = max(n, c.reserveShort()) // whatever is unread, the peer can grant
	}
	return max(n, 0)
}

// reserveShort is how many receives are lacking of those without which the two sides could
// not tell each other what the reader waits for.
func (c *credits) reserveShort() int { return c.peerReserve() + c.transferReserve - c.posted }

// post notes n newly posted receives.
func (c *credits) post(n int) {
	c.posted += n
	c.ungranted += n
}

// spendable is how many messages may be sent now: the last credit is kept for
// a message that grants some. Between rdmanet peers it is kept for one that does
// nothing else: while a program does not read, what it writes takes grants for
// which there would be no credit.
func (c *credits) spendable() int {
	have := c.have - c.reserveOut
	if c.ungranted > 0 && have == 1 && c.reserveOut == 0 {
		return 1 // of several the first would take the grant, and the last go without
	}
	return max(have-1, 0)
}

// maySendControl reports whether a message without payload may be sent now.
func (c *credits) maySendControl() bool {
	have := c.have - c.reserveOut
	return have > 1 || have == 1 && c.ungranted > 0
}

// peerReserve is how many credits a peer has left that may send payload no more.
func (c *credits) peerReserve() int {
	if c.reserveIn > 0 {
		return c.reserveIn + 1
	}
	return 0
}

// spend takes the credit for one message and returns the grant that it must
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

// grantAll returns the grant for the receives posted before the peer has any.
func (c *credits) grantAll() uint16 {
	n := c.toGrant()
	c.ungranted -= n
	return uint16(n)
}

// toGrant is how many receives the peer is to be told of.
func (c *credits) toGrant() int { return max(c.ungranted-c.transferReserve, 0) }

// peerCredits is how many credits the peer has in hand or on the way.
func (c *credits) peerCredits() int { return c.posted - c.ungranted }

// grantDue reports whether a grant is due although nothing else is to be sent:
// when the peer could not send at all, or only together with a grant that it may
// not have, or when it has used most of its credits for payload. It may wait
// longer while the reader is busy, whose program may be about to write, than
// when it goes to sleep (idle). One grant in answer to every mere grant would
// never end; one for two does.
//
// While the reader has kept buffers to work on, the peer is held back until a
// good part of the window is free again: it would wake up for one message at a
// time otherwise (TCP's silly window). Nothing waits for such a grant but the
// peer's payload: all that we send ourselves takes it along.
//
// kept is how many buffers the reader has not used up; busy says that it is
// they that hold receives back.
func (c *credits) grantDue(kept int, busy, idle bool) bool {
	n := c.toGrant()
	if n > 0 && c.pendingGrant && c.peerCredits() <= c.peerReserve() {
		return true // it may have more to tell
	}
	if n == 0 || c.ungrantedPayload && busy && n < min(c.window, c.target, c.posted+kept)/4 {
		return false
	}
	low := c.posted / 4
	if idle {
		low = c.posted / 2
	}
	held := c.peerCredits()
	switch {
	case c.ungrantedPayload && c.patient:
		return held <= c.peerReserve()
	case c.ungrantedPayload:
		return held <= max(c.peerReserve(), low)
	case n == 1:
		return held <= c.reserveIn && kept == 0 // else a read calls for it
	default:
		return held <= c.reserveIn+1
	}
}
