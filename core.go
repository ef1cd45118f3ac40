package rdmanet

import (
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/deadline"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// conn is the connection that a Conn refers to. Everything that outlives a call refers to
// the conn and not to the Conn. So the garbage collector finds a Conn that the program has
// dropped (dropped.go).
//
// The parts of the connection have their state in files of their own. This file has what
// the parts share, and the methods that concern several parts: deadlines, the errors of
// calls, the lock, and the wait for completions.
type conn struct {
	set    settings
	dom    *regmem.Domain
	pool   *regmem.Pool // pool has the receive buffers.
	agreed agreement    // agreed is the result of the negotiation.
	early  bool         // early is set if the negotiation was part of the connection set-up.
	fin    bool         // fin is set if half-close was agreed.

	// messages is set if expedited, partial and empty messages were agreed.
	messages bool

	// holds is set if the devices hold Sends until there are receives for them, see hold.go.
	holds bool

	largePool *regmem.Pool // largePool has the buffers of large receives, and is nil where there are none, see large.go.

	peer   privateData // peer is the private data of the peer.
	local  *net.TCPAddr
	remote *net.TCPAddr

	// readMu lets one call read at a time, and is held while the call waits. Calls that
	// write take turns by queue.
	readMu sync.Mutex

	// event is the device's event for the end of the connection, or nil.
	event atomic.Pointer[ibv.Event]

	// sendEvent is the device's event for the end of this side's direction alone, or nil.
	sendEvent atomic.Pointer[ibv.Event]

	// peerDone is set by the device's event for the end of the peer's direction alone.
	peerDone atomic.Bool

	holding ibv.HoldingQP // it is the queue pair if holds is set, and otherwise nil

	// mu guards all fields below. It is never held while a goroutine waits.
	mu    sync.Mutex
	lane  lane
	life  life
	stats Stats

	end closing // end is the state of Close, see linger.go.

	// wait decides which goroutine waits for completions, see completion.go.
	wait    cqwait.Waiter
	readers cqwait.Group // readers are goroutines that wait for something to read.
	writers cqwait.Group // writers are goroutines that wait for anything else.

	// sentAtReceive is Stats.MessagesSent at the time when the peer last sent something.
	sentAtReceive uint64

	wcs [8]ibv.WC // wcs is memory for polling.

	// wantsSendCompletion is set if the completion of a send is to be handled soon.
	wantsSendCompletion bool

	credits credits // credits is the flow control, see credit.go.

	// in has what has arrived and the program has not read, see recvqueue.go.
	in recvQueue

	readDue  deadline.Deadline
	writeDue deadline.Deadline

	queue sendQueue // queue decides which send is next, see sendqueue.go.
	send  sending   // send is the state of the outgoing stream, see sending.go.

	tx transferSender   // tx is the state of outgoing transfers, see transfer_send.go.
	rx transferReceiver // rx is the state of incoming transfers, see transfer_recv.go.

	live liveness  // live has the signs of life of the peer, and the timer; see liveness.go.
	idle idleState // idle is what an idle connection gives back, see liveness.go.
}

// newConn returns a conn that uses no more than slots work requests of the queue pair's
// send queue, which may have room for more.
func newConn(set settings, dom *regmem.Domain, id ibv.ID, cq ibv.CQ, qp ibv.QP, slots int) *conn {
	c := &conn{set: set, dom: dom}
	c.local, c.remote = tcpAddr(id.LocalAddr()), tcpAddr(id.RemoteAddr())
	c.rx.depth = min(readSlots, slots/8)
	attr := id.Device().Attr()
	c.lane = lane{owner: c, mu: &c.mu, id: id, cq: cq, qp: qp, slots: slots - 1 - c.rx.depth, inline: qp.Cap().MaxInline,
		invalidates: attr.Caps.Has(ibv.CapSendInvalidate), signalEach: attr.Quirks.SendsBuffered}
	lock := (*locker)(c)
	c.readers.Init(lock, true)
	// Some of the writers do not lead.
	c.writers.Init(lock, false)
	c.lane.posters.Init(lock, false)
	c.readDue.Init(c.readExpired)
	c.writeDue.Init(c.writeExpired)
	return c
}

func tcpAddr(a netip.AddrPort) *net.TCPAddr { return net.TCPAddrFromAddrPort(a) }

func (c *conn) info() Info {
	dev := c.lane.id.Device()
	info := Info{
		Device:            dev.Name(),
		Transport:         dev.Attr().Transport.String(),
		Port:              c.lane.id.Port(),
		QPN:               c.lane.qp.QPN(),
		LocalGID:          gidOf(c.lane.id.LocalAddr()),
		RemoteGID:         gidOf(c.lane.id.RemoteAddr()),
		Extensions:        c.extensions(),
		MaxSendSize:       int(c.agreed.maxSend),
		MaxReceiveSize:    int(c.agreed.maxReceive),
		MaxFragmentedSize: int(c.agreed.maxFragmentedSend),
	}
	if l, ok := c.lane.id.(ibv.Linker); ok {
		info.Link, info.LinkReason = l.Link()
	}
	if port, err := dev.Port(c.lane.id.Port()); err == nil {
		info.MTU = port.ActiveMTU
	}
	return info
}

// snapshot returns the counters, and the credits of the moment with them.
func (c *conn) snapshot() Stats {
	c.mu.Lock()
	defer c.unlock()
	s := c.stats
	s.SendCredits, s.ReceiveCredits, s.ReceiveWindow = c.credits.have, c.credits.posted, c.credits.window
	return s
}

func (c *conn) maxMessageSize() int {
	if c.tx.mode != TransferNone {
		return math.MaxInt
	}
	return int(c.agreed.maxFragmentedSend)
}

func (c *conn) setDeadlines(t time.Time, ds ...*deadline.Deadline) error {
	c.mu.Lock()
	defer c.unlock()
	if c.life.closed {
		return net.ErrClosed
	}
	for _, d := range ds {
		d.Set(t)
		if d.Expired() {
			c.wakeAll()
		}
	}
	return nil
}

func (c *conn) readExpired()  { c.expired(&c.readDue) }
func (c *conn) writeExpired() { c.expired(&c.writeDue) }

func (c *conn) expired(d *deadline.Deadline) {
	c.mu.Lock()
	defer c.unlock()
	if d.Check() {
		c.wakeAll()
	}
}

// readErr returns why Read cannot go on when nothing is unread, or nil.
func (c *conn) readErr() error {
	switch {
	case c.life.closed:
		return net.ErrClosed
	case c.readDue.Expired():
		return os.ErrDeadlineExceeded
	case c.in.discarding, c.in.eof && c.in.unread.Len() == 0 && !c.in.reasm.cut:
		return io.EOF
	case c.in.unread.Len() > 0:
		return nil
	case c.in.reasm.cut:
		return errTruncated
	case c.holds && c.life.peerClosed():
		return io.EOF // The process has ended.
	case c.life.peerClosed() && (c.fin || c.in.reasm.remaining > 0 || c.in.reasm.rest > 0):
		return errTruncated // An rdmanet peer sends FIN before it closes.
	case c.life.peerClosed():
		return io.EOF
	}
	return c.life.cause
}

// writeErr returns why nothing can be sent, or nil.
func (c *conn) writeErr() error { return c.sendErr(messageCall) }

// refusal returns why no send of that kind can begin, or nil. While CloseWrite waits, only the
// next pieces of a message that has begun can.
func (c *conn) refusal(kind int) error {
	err := c.writeErr()
	if err == nil && c.send.closing > 0 && !(c.queue.partial && c.queue.partialKind == kind) {
		err = errWriteClosed
	}
	return err
}

// sendErr returns why a call that is sending, or waits for the send queue, has to end, or nil.
func (c *conn) sendErr(call callKind) error {
	switch {
	case c.life.closed:
		return net.ErrClosed
	case call != closeCall && c.writeDue.Expired():
		return os.ErrDeadlineExceeded
	case c.life.over():
		return c.life.cause
	case c.send.failed != nil:
		return c.send.failed
	case c.send.ended:
		return errWriteClosed
	case c.send.truncated:
		return errMessageCut
	case call == streamCall:
		return c.refusal(normal)
	}
	return nil
}

// unlock hands to the device what is queued and what has become due, and lets go of mu. If
// another goroutine is posting, it leaves the queued batches to that one.
func (c *conn) unlock() {
	if c.lane.queue.Len() > 0 || c.owesControl() || c.send.joined.n > 0 {
		c.lane.flush()
	}
	c.mu.Unlock()
}

// unlocked runs f without mu, because f takes time or takes another lock. The state may
// have changed when it returns.
func (c *conn) unlocked(f func()) {
	c.unlock()
	defer c.mu.Lock()
	f()
}

// touchUnlocked is how many bytes f of touch takes at least for it to run without mu.
const touchUnlocked = 4 << 10

// touch runs f, which reads or writes n bytes of the program's memory, without mu if they are
// many: that takes time, and they may have to come from a file.
func (c *conn) touch(n int, f func()) {
	if n < touchUnlocked {
		f()
	} else {
		c.unlocked(f)
	}
}

// locker is mu as a sync.Locker, for goroutines that wait under mu. Its Unlock is
// conn.unlock, which flushes the lane. So a goroutine that begins to wait in a cqwait.Group,
// or as the leader, first hands to the device what is queued and what has become due.
type locker conn

func (l *locker) Lock() { l.mu.Lock() }

func (l *locker) Unlock() { (*conn)(l).unlock() }

// await waits until something may have changed, as a goroutine of g. The caller holds mu,
// and holds it again on return.
func (c *conn) await(g *cqwait.Group) {
	c.wait.Await(g, g == &c.readers && c.answerDue())
}

// answerDue reports whether a Read that waits does so for an answer. That is so if there is
// nothing to read and this side was the last to send.
func (c *conn) answerDue() bool {
	return c.stats.MessagesSent != c.sentAtReceive && !c.answered() && !c.stopsReading()
}

// answered reports whether there is something to read, or the peer has ended its stream.
func (c *conn) answered() bool { return c.in.unread.Len() > 0 || c.in.eof }

// moving reports whether RDMA Reads or Writes of transfers are under way on this side's
// queue pair.
func (c *conn) moving() bool {
	return c.tx.writing > 0 || c.rx.mode == TransferRead && c.rx.inFlight.Len() > 0
}

// stopsReading reports whether a Read that waits has a reason to stop.
func (c *conn) stopsReading() bool {
	return c.life.closed || c.in.discarding || c.readDue.Expired() || c.life.over()
}

// stopReadErr returns why Read cannot go on when data in the unread queue cannot be had.
func (c *conn) stopReadErr() error {
	switch {
	case c.life.closed, c.readDue.Expired():
		return c.readErr()
	case c.in.discarding:
		return io.EOF
	case c.life.peerClosed():
		return errTruncated
	}
	return c.life.cause
}

// over implements [laneOwner]: it reports whether no batch may be posted any more.
func (c *conn) over() bool { return c.life.over() }

// extensions returns what was agreed with the peer.
func (c *conn) extensions() Extensions {
	return Extensions{
		EarlyNegotiation: c.early,
		HalfClose:        c.fin,
		MessageFlags:     c.messages,
		SendTransfers:    c.tx.mode,
		ReceiveTransfers: c.rx.mode,
		ProbeTarget:      c.live.target != nil,
		LargeSegments:    c.largePool != nil || c.lane.large != nil,
		HeldSends:        c.holds,
	}
}

// owesControl reports whether there is anything that a message without payload could carry.
// In most calls there is not.
func (c *conn) owesControl() bool {
	return c.credits.toGrant() > 0 || c.send.responseDue || c.send.probeDue || c.rx.hasControl() || c.tx.hasControl()
}
