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

// conn is what a Conn leads to. Everything that outlives a call refers to it, and not to
// the Conn, which the garbage collector finds when the program has dropped it.
type conn struct {
	set      settings
	dom      *regmem.Domain
	pool     *regmem.Pool // receive buffers
	agreed   agreement
	fin      bool // half-close was agreed
	messages bool // and expedited, partial and empty messages
	peer     privateData
	local    *net.TCPAddr
	remote   *net.TCPAddr

	// readMu lets one Read in at a time and is held while it waits. Writers take turns.
	readMu sync.Mutex

	event atomic.Pointer[ibv.Event] // the end of the connection, from the device

	// mu guards what follows. It is never held while waiting.
	mu    sync.Mutex
	lane  lane
	life  life
	stats Stats

	end closing

	// Completions: see completion.go.
	wait                cqwait.Waiter
	readers             cqwait.Group // readers that wait for something to read
	writers             cqwait.Group // goroutines that wait for anything else
	sentAtReceive       uint64       // Stats.MessagesSent when the peer last sent something
	wcs                 [8]ibv.WC    // memory for polling
	wantsSendCompletion bool         // a writer waits for the completion of a send

	credits credits

	in recvQueue // what arrives, until the program has read it

	readDue  deadline.Deadline
	writeDue deadline.Deadline

	// Sending: see sendqueue.go and send.go.
	queue sendQueue
	send  sending

	// Large transfers: see transfer.go.
	tx transferSender
	rx transferReceiver

	live liveness  // signs of life of the peer, and the timer
	idle idleState // what an idle connection gives back
}

// newConn returns a Conn that uses no more than slots of the send queue, which may be longer.
func newConn(set settings, dom *regmem.Domain, id ibv.ID, cq ibv.CQ, qp ibv.QP, slots int) *conn {
	c := &conn{set: set, dom: dom}
	c.local, c.remote = tcpAddr(id.LocalAddr()), tcpAddr(id.RemoteAddr())
	c.rx.depth = min(readSlots, slots/8)
	attr := id.Device().Attr()
	c.lane = lane{owner: c, mu: &c.mu, id: id, cq: cq, qp: qp, slots: slots - 1 - c.rx.depth, inline: qp.Cap().MaxInline,
		invalidates: attr.Caps.Has(ibv.CapSendInvalidate), signalEach: attr.Quirks.SendsBuffered}
	lock := (*locker)(c)
	c.readers.Init(lock, true)
	c.writers.Init(lock, false) // some of them do not lead
	c.lane.posters.Init(lock, false)
	c.readDue.Init(c.readExpired)
	c.writeDue.Init(c.writeExpired)
	return c
}

func tcpAddr(a netip.AddrPort) *net.TCPAddr { return net.TCPAddrFromAddrPort(a) }

// LocalAddr implements [Conn.LocalAddr].
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements [Conn.RemoteAddr].
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// Info implements [Conn.Info].
func (c *conn) Info() Info {
	dev := c.lane.id.Device()
	info := Info{
		Device:            dev.Name(),
		Transport:         dev.Attr().Transport.String(),
		Port:              c.lane.id.Port(),
		QPN:               c.lane.qp.QPN(),
		LocalGID:          gidOf(c.lane.id.LocalAddr()),
		RemoteGID:         gidOf(c.lane.id.RemoteAddr()),
		Rdmanet:           c.peer.rdmanet,
		MessageFlags:      c.messages,
		MaxSendSize:       int(c.agreed.maxSend),
		MaxReceiveSize:    int(c.agreed.maxReceive),
		MaxFragmentedSize: int(c.agreed.maxFragmentedSend),
	}
	if port, err := dev.Port(c.lane.id.Port()); err == nil {
		info.MTU = port.ActiveMTU
	}
	return info
}

// Stats implements [Conn.Stats].
func (c *conn) Stats() Stats {
	c.mu.Lock()
	defer c.unlock()
	s := c.stats
	s.SendCredits, s.ReceiveCredits, s.ReceiveWindow = c.credits.have, c.credits.posted, c.credits.window
	return s
}

// MaxMessageSize implements [Conn.MaxMessageSize].
func (c *conn) MaxMessageSize() int {
	if c.tx.mode != transferNone {
		return math.MaxInt
	}
	return int(c.agreed.maxFragmentedSend)
}

// SetDeadline implements [Conn.SetDeadline].
func (c *conn) SetDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readDue, &c.writeDue)
}

// SetReadDeadline implements [Conn.SetReadDeadline].
func (c *conn) SetReadDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readDue)
}

// SetWriteDeadline implements [Conn.SetWriteDeadline].
func (c *conn) SetWriteDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.writeDue)
}

func (c *conn) setDeadlines(t time.Time, ds ...*deadline.Deadline) error {
	c.mu.Lock()
	defer c.unlock()
	if c.life.closed {
		return opError("set", nil, c.local, net.ErrClosed)
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

func (c *conn) opError(op string, err error) error {
	return opError(op, c.local, c.remote, err)
}

// readErr is why Read cannot go on when nothing is unread.
func (c *conn) readErr() error {
	switch {
	case c.life.closed:
		return net.ErrClosed
	case c.readDue.Expired():
		return os.ErrDeadlineExceeded
	case c.in.discarding, c.in.eof && c.in.unread.Len() == 0:
		return io.EOF
	case c.in.unread.Len() > 0:
		return nil
	case c.life.peerClosed() && (c.fin || c.in.reasm.remaining > 0 || c.in.reasm.rest > 0):
		return errTruncated // rdmanet peers say FIN before they go
	case c.life.peerClosed():
		return io.EOF
	}
	return c.life.cause
}

// writeErr is why Write cannot go on.
func (c *conn) writeErr() error {
	switch {
	case c.life.closed:
		return net.ErrClosed
	case c.writeDue.Expired():
		return os.ErrDeadlineExceeded
	case c.life.over():
		return c.life.cause
	case c.send.finSent:
		return errWriteClosed
	case c.send.truncated:
		return errMessageCut
	}
	return nil
}

// unlock hands what is queued to the device, and what has become due meanwhile, and lets go
// of mu. A goroutine that finds another one posting leaves its batches to that one.
func (c *conn) unlock() {
	c.lane.flush()
	c.mu.Unlock()
}

// unlocked runs f without mu: f takes time, or another lock. Callers look at their state
// again.
func (c *conn) unlocked(f func()) {
	c.unlock()
	defer c.mu.Lock()
	f()
}

// locker is Conn.mu for those that wait for something under it.
type locker conn

func (l *locker) Lock() { l.mu.Lock() }

func (l *locker) Unlock() { (*conn)(l).unlock() }

// await waits until something may have changed, as a goroutine of g. The caller holds mu,
// and again on return.
func (c *conn) await(g *cqwait.Group) {
	c.wait.Await(g, g == &c.readers && c.answerDue())
}

// answerDue reports whether a Read that waits does so for an answer: this side has sent
// something since the peer last sent something, and there is nothing to read.
func (c *conn) answerDue() bool {
	return c.stats.MessagesSent != c.sentAtReceive && !c.answered() && !c.stopsReading()
}

// answered reports whether there is something to read, or never will be.
func (c *conn) answered() bool { return c.in.unread.Len() > 0 || c.in.eof }

// moving reports whether RDMA Reads or Writes of transfers are under way.
func (c *conn) moving() bool {
	return c.tx.writing > 0 || c.rx.mode == transferRead && c.rx.inFlight.Len() > 0
}

// stopsReading reports whether a Read that waits has a reason not to.
func (c *conn) stopsReading() bool {
	return c.life.closed || c.in.discarding || c.readDue.Expired() || c.life.over()
}

// stopReadErr is readErr where there is something in the queue that cannot be had.
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

// over reports whether nothing is posted any more.
func (c *conn) over() bool { return c.life.over() }
