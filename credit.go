package rdmanet

import (
	"math"
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// minCredits is the least number of receives that a side posts. With fewer, not counting
// the one for FIN, each grant would call for another grant.
const minCredits = 4

// leastLarge is how many large receives must be possible for any to be posted.
const leastLarge = 2 * minCredits

// credits is the flow control of one connection, [MS-SMBD] 3.1.5.1 and 3.1.5.9. A message
// may be sent only if the peer has posted a receive for it. Each side grants the other the
// receives that it has newly posted. receives.go posts them, and control.go sends grants
// that no other message carries. Conn.mu guards it.
//
// The number of posted receives follows use. A connection starts with initial receives. The
// window doubles, up to maximum and to the number that the peer asks for, when the reader
// keeps up and one of three things happens: the peer has used up all its credits, it says that
// payload waits for credits, or grants of their own follow one another quickly. Each of those
// grants wakes the peer.
type credits struct {
	off    bool // the devices hold Sends, and nothing is granted or spent, see hold.go
	have   int  // have is how many sends the peer can take.
	posted int  // posted is how many receives are posted.

	// ungranted is how many posted receives the peer was not granted yet.
	ungranted int

	granted receiveSizes // granted has the sizes of the receives behind have.
	toBe    receiveSizes // toBe has those of the receives that ungranted counts.
	large   largeReceives

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
	if c.off {
		c.target = max(int(h.CreditsRequested), minCredits)
		return
	}
	have := min(c.have+int(h.CreditsGranted), math.MaxUint16)
	c.granted.add(c.have, have-c.have, c.large.known && h.Flags&flagLarge != 0)
	c.have = have
	c.target = max(int(h.CreditsRequested), minCredits)
	if c.peerCredits() <= c.peerReserve() {
		c.grow()
	}
}

// grow doubles the window if the reader keeps up, as far as maximum and the budget allow.
func (c *credits) grow() {
	if c.readerWaited {
		c.window = max(c.window, c.affordable(min(2*c.window, c.most())))
		c.readerWaited = false
	}
}

// keptUnread returns how many receives unread payloads may keep while nobody reads: half of those
// for payload. But two are left: the peer may use up one by a message without payload, which alone
// is not granted again. A peer without a reserve needs a third, because its last one goes with a
// grant. unread are kept already. There may be fewer receives than the window says, for want of
// memory.
func (c *credits) keptUnread(unread int) int {
	n, left := min(c.window, c.target, c.posted+unread-c.transferReserve)-c.peerReserve(), 2
	if c.reserveIn == 0 {
		left++
	}
	return max(min(n/2, n-left), 0)
}

// idleReceives returns how many receives, and how many credits, an idle connection keeps.
// These are more than the initial ones, because the peer cannot use up receives that it was
// not granted yet. So many are not charged. Otherwise idle connections would take the
// budget from busy ones.
func (c *credits) idleReceives() int { return 2 * c.initial }

// lowerCharge ends the charge for receives that are neither posted nor unread, and that may
// not be posted again.
func (c *credits) lowerCharge(unread int) {
	c.charge.Lower(max(c.window*c.weight(), c.posted+unread-c.transferReserve+c.largeExtra()) - c.idleReceives())
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
	if c.off {
		return max(n, 0)
	}
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
func (c *credits) post(n int, large bool) {
	c.posted += n
	if c.off {
		return
	}
	c.toBe.add(c.ungranted, n, large)
	c.ungranted += n
}

// spendable returns how many messages with payload may be sent now. The last credit is kept
// for a message with a grant. Between rdmanet peers it is kept for a message with a grant
// and no payload: otherwise what a program writes without reading would use up the credits
// that its grants need.
func (c *credits) spendable() int {
	if c.off {
		return math.MaxUint16
	}
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

// spend takes the credit for one message. It returns the grant that the message must carry,
// which is for receives of one size, and flagLarge if these are large.
func (c *credits) spend() (granted, flags uint16) {
	if c.off {
		return 0, 0
	}
	same, large := c.toBe.next(c.ungranted)
	g := min(same, math.MaxUint16)
	if c.have-c.reserveOut > 1 {
		g = min(g, c.toGrant())
	}
	c.granted.take(1)
	c.have--
	c.toBe.take(g)
	c.ungranted -= g
	c.ungrantedPayload, c.pendingGrant = false, false
	if large && g > 0 {
		flags = flagLarge
	}
	return uint16(g), flags
}

// grantAll returns the first grant, for the receives that were posted before.
func (c *credits) grantAll() uint16 {
	n := c.toGrant()
	c.ungranted -= n
	return uint16(n)
}

// toGrant returns how many receives can be granted.
func (c *credits) toGrant() int { return max(c.ungranted-c.transferReserve, 0) }

// heldMemory is for how many bytes a connection without credits keeps receives posted, unless
// InitialReceiveCredits are more. The rest of what nobody reads is in the kernels.
const heldMemory = 256 << 10

// turnOff ends the counting of credits, before the first message. Receives have size bytes.
func (c *credits) turnOff(size int) {
	c.window = max(c.window, min(c.maximum, heldMemory/size))
	c.initial = c.window
	c.off, c.have, c.ungranted, c.transferReserve = true, c.window, 0, 0
}

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
	if c.off {
		return false
	}
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

// observe notes a segment that has arrived. It is long if it is one of several of a message,
// or if no normal receive would have taken it.
func (c *credits) observe(long bool) {
	l := &c.large
	switch {
	case !l.agreed:
	case long:
		if l.score = min(l.score+1, largeAfter); l.score == largeAfter && !l.on {
			c.enlarge()
		}
	case l.score > 0:
		if l.score--; l.score == 0 {
			l.on = false
		}
	}
}

// enlarge has large receives posted from now on, if the budget allows. The window becomes
// smaller, so that it takes no more memory than a window of normal receives may.
func (c *credits) enlarge() {
	l := &c.large
	l.on = true
	charged := c.charge.Charged()
	if window := c.affordable(min(c.window, l.most)); window >= c.initial {
		c.window = window
	} else {
		l.on, l.score = false, 0
		c.charge.Lower(charged)
	}
}

// most returns the upper limit of the window.
func (c *credits) most() int {
	if c.large.on {
		return c.large.most
	}
	return c.maximum
}

// surplusDue reports whether an idle connection is to grant receives, for the peer to use them
// up.
func (c *credits) surplusDue() bool {
	return c.toGrant() > 0 && (c.toBe.untilNormal() > 0 || c.posted > c.initial+c.transferReserve)
}

// lacksReserve reports whether an idle connection is to post one receive more than its window:
// the reserve for transfers is large. It takes the place of the large one, which can be granted
// then, for the peer to use it up.
func (c *credits) lacksReserve(unread int) bool {
	return !c.large.on && c.toBe.untilNormal() > c.toGrant() && unread == 0 && c.posted <= c.initial+c.transferReserve &&
		c.initial+2 <= c.maximum
}

// weight returns how many normal receives one of the window takes the memory of.
func (c *credits) weight() int {
	if c.large.on {
		return c.large.weight
	}
	return 1
}

// largeExtra returns how many more normal receives those that are large take the memory of.
func (c *credits) largeExtra() int { return c.large.kept * max(c.large.weight-1, 0) }

// affordable charges the budget for a window of n receives, as far as it allows, and returns
// how many it allows.
func (c *credits) affordable(n int) int {
	idle, weight, extra := c.idleReceives(), c.weight(), 0
	if !c.large.on {
		extra = c.largeExtra()
	}
	return min(n, (idle+c.charge.Raise(n*weight+extra-idle)-extra)/weight)
}
