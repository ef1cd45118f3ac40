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
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
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
	mu     sync.Mutex
	lane   lane
	closed bool
	dead   error // why the connection is over; errPeerClosed for an orderly end
	stats  Stats

	flushed time.Time // when the queue pair was seen to have failed, not why
	end     closing

	// Completions: see completion.go.
	wait                cqwait.Waiter
	readers             cqwait.Group // readers that wait for something to read
	writers             cqwait.Group // goroutines that wait for anything else
	sentAtReceive       uint64       // Stats.MessagesSent when the peer last sent something
	wcs                 [8]ibv.WC    // memory for polling
	wantsSendCompletion bool         // a writer waits for the completion of a send

	credits credits

	// Receiving: see recv.go.
	recvWR         [1]ibv.RecvWR             // memory for a post
	recvSGE        [1]ibv.SGE                // and for its only element
	posted         ring.Ring[*regmem.Buffer] // receives in the queue pair, oldest first
	unread         ring.Ring[segment]        // for the reader
	heldBuffers    int                       // of the unread segments, how many keep a buffer
	copyBreak      *copyBreakChunk           // see copybreak.go
	copyBreakBytes int                       // bytes
	reasm          reassembler
	openedSize     int  // length of a message that has begun and has no segment unread yet
	eof            bool // the peer's FIN has come
	discarding     bool // CloseRead or Close: drop what arrives
	readDue        deadline
	writeDue       deadline

	// Sending: see sendqueue.go and send.go.
	queue sendQueue
	send  sending

	// Large transfers: see transfer.go.
	tx transferSender
	rx transferReceiver

	// Keep-alive: see keepalive.go.
	timer          *time.Timer
	receivedSince  bool // something has arrived, which poll notes the time of
	lastReceived   time.Time
	timerAt        time.Time // when the timer is to look next, if it is set
	probing        bool      // the peer, or its device, must answer,
	probedAt       time.Time // which it was asked to do then
	oneWay         oneWay    // what has come since this side last sent something
	trimmable      bool      // there is something to give back when idle
	trimmed        bool      // it was, and nothing has come since that calls for it again
	pagesTouched   bool      // its buffers may have more than their first page in memory
	trimPending    bool      // tidy has to come once more
	idleCheckedAt  time.Time // when it was last looked how much has moved,
	moved          uint64    // how much that was,
	movedAt        time.Time // and when it was more than before
	returnsCredits bool      // returnCredits goes on when sends complete
	compactions    int       // answers that may still be asked for to bring receives together

	answersReads bool         // the peer's device can be asked by an RDMA Read: see probe.go
	peerProbe    *probeTarget // namely of, nil for one of no bytes
	probeMem     probeMemory
}

// segment is received payload that waits for the reader.
type segment struct {
	transfer  *recvTransfer // a transfer in place of data
	data      []byte
	buf       *regmem.Buffer  // where it lies: in the buffer that it came in,
	copyBreak *copyBreakChunk // or in spill memory,
	n         int             // n bytes of it
	size      int             // of the whole message when the segment begins one, else 0
	last      bool            // ends its message
	flags     MsgFlags
}

// newConn returns a Conn that uses no more than slots of the send queue, which may be longer.
func newConn(set settings, dom *regmem.Domain, id ibv.ID, cq ibv.CQ, qp ibv.QP, slots int) *conn {
	c := &conn{set: set, dom: dom}
	c.local, c.remote = tcpAddr(id.LocalAddr()), tcpAddr(id.RemoteAddr())
	c.rx.depth = min(readSlots, slots/8)
	attr := id.Device().Attr()
	c.lane = lane{id: id, cq: cq, qp: qp, slots: slots - 1 - c.rx.depth, inline: qp.Cap().MaxInline,
		invalidates: attr.Caps.Has(ibv.CapSendInvalidate), signalEach: attr.Quirks.SendsBuffered}
	lock := (*locker)(c)
	c.readers.Init(lock, true)
	c.writers.Init(lock, false) // some of them do not lead
	c.lane.posters.Init(lock, false)
	c.wait.Init(cqwait.Config{Owner: (*completions)(c), CQ: cq, Lock: lock, Groups: []*cqwait.Group{&c.readers, &c.writers},
		BusyPoll: set.busyPoll, Polls: !attr.Caps.Has(ibv.CapWaitReceives), Background: cqwait.WhenVacant})
	c.readDue.fire, c.writeDue.fire = c.readExpired, c.writeExpired
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

func (c *conn) setDeadlines(t time.Time, ds ...*deadline) error {
	c.mu.Lock()
	defer c.unlock()
	if c.closed {
		return opError("set", nil, c.local, net.ErrClosed)
	}
	for _, d := range ds {
		d.set(t)
		if d.expired {
			c.wakeAll()
		}
	}
	return nil
}

func (c *conn) readExpired()  { c.expired(&c.readDue) }
func (c *conn) writeExpired() { c.expired(&c.writeDue) }

func (c *conn) expired(d *deadline) {
	c.mu.Lock()
	defer c.unlock()
	if d.check() {
		c.wakeAll()
	}
}

// Read implements [Conn.Read].
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	return n, c.opError("read", err)
}

// Write implements [Conn.Write].
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.write(p, sendOptions{})
	return n, c.opError("write", err)
}

// WriteMsg implements [Conn.WriteMsg].
func (c *conn) WriteMsg(p []byte) error {
	_, err := c.write(p, sendOptions{message: true})
	return c.opError("write", err)
}

// WriteMsgInvalidate implements [Conn.WriteMsgInvalidate].
func (c *conn) WriteMsgInvalidate(p []byte, token uint32) error {
	_, err := c.write(p, sendOptions{message: true, token: token})
	return c.opError("write", err)
}

// ReadMsg implements [Conn.ReadMsg].
func (c *conn) ReadMsg(p []byte) (n int, err error) {
	n, _, err = c.readMsg(p, false)
	return n, c.opError("read", err)
}

// ReadFrom implements [Conn.ReadFrom].
func (c *conn) ReadFrom(r io.Reader) (total int64, err error) {
	for err == nil {
		var n int64
		n, err = c.copyLittle(r)
		total += n
		for more := err == nil; more && err == nil; total += n {
			n, more, err = c.copyMuch(r)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return total, err
}

// littleBytes is what ReadFrom waits with for more. It is a size that Go's heap has, and
// none that a reader's blocks have: a read that fills it has left something.
const littleBytes = 4864

const copyBytes = 256 << 10

var (
	littlePool = sync.Pool{New: func() any { return new([littleBytes]byte) }}
	copyPool   = sync.Pool{New: func() any { return new([copyBytes]byte) }}
)

// copyLittle writes what r yields, up to and with a read that leaves something.
func (c *conn) copyLittle(r io.Reader) (total int64, err error) {
	b := littlePool.Get().(*[littleBytes]byte)
	defer littlePool.Put(b)
	for n := 0; n < len(b) && err == nil; {
		n, err = r.Read(b[:])
		w, werr := c.writeCopied(b[:n])
		total += int64(w)
		if werr != nil {
			err = c.opError("write", werr)
		}
	}
	return total, err
}

// copyMuch writes what one read with much room yields. more says that there was not enough.
func (c *conn) copyMuch(r io.Reader) (written int64, more bool, err error) {
	if c.tx.mode != transferNone && c.set.ofScratch <= regmem.ChunkSize {
		if s := c.dom.GetChunk(c.set.transferMemory); s != nil {
			return c.transferChunk(s, r)
		}
	}
	b := copyPool.Get().(*[copyBytes]byte)
	defer copyPool.Put(b)
	n, err := r.Read(b[:])
	w, werr := c.writeCopied(b[:n])
	if werr != nil {
		err = c.opError("write", werr)
	}
	return int64(w), n == len(b), err
}

// WriteTo implements [Conn.WriteTo].
func (c *conn) WriteTo(w io.Writer) (int64, error) {
	if err := c.retain(); err != nil {
		return 0, c.opError("read", err)
	}
	defer c.dom.Release()
	var total int64
	for {
		n, err := c.writeSegment(w)
		total += int64(n)
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// retain keeps the memory of received segments for longer than the connection;
// c.dom.release ends it.
func (c *conn) retain() error {
	c.mu.Lock()
	defer c.unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.dom.Retain()
	return nil
}

// CloseRead implements [Conn.CloseRead].
func (c *conn) CloseRead() error {
	if !c.beginDiscarding() {
		return c.opError("close", net.ErrClosed)
	}
	c.readMu.Lock() // whoever copies from a buffer is out now
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	c.dropUnread()
	return nil
}

// beginDiscarding has what arrives dropped from now on. It reports false after Close.
func (c *conn) beginDiscarding() bool {
	c.mu.Lock()
	defer c.unlock()
	if c.closed {
		return false
	}
	c.discarding = true
	c.wakeAll()
	return true
}

// CloseWrite implements [Conn.CloseWrite].
func (c *conn) CloseWrite() error { return c.opError("close", c.closeWrite()) }

// fail ends the connection because of err, the first one only.
func (c *conn) fail(err error) {
	if c.dead != nil {
		return
	}
	c.dead = broken(err)
	c.logBroken(err)
	c.lane.qp.SetError()
	c.lane.id.Disconnect() // InfiniBand's connection manager does not watch the queue pair
	c.wakeAll()
}

func (c *conn) logBroken(err error) {
	c.set.log.Debug("rdmanet: connection broken", "local", c.local, "remote", c.remote, "err", err)
}

func (c *conn) opError(op string, err error) error {
	return opError(op, c.local, c.remote, err)
}

// readErr is why Read cannot go on when nothing is unread.
func (c *conn) readErr() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.readDue.expired:
		return os.ErrDeadlineExceeded
	case c.discarding, c.eof && c.unread.Len() == 0:
		return io.EOF
	case c.unread.Len() > 0:
		return nil
	case c.dead == errPeerClosed && (c.fin || c.reasm.remaining > 0 || c.reasm.rest > 0):
		return errTruncated // rdmanet peers say FIN before they go
	case c.dead == errPeerClosed:
		return io.EOF
	}
	return c.dead
}

// writeErr is why Write cannot go on.
func (c *conn) writeErr() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.writeDue.expired:
		return os.ErrDeadlineExceeded
	case c.dead != nil:
		return c.dead
	case c.send.finSent:
		return errWriteClosed
	case c.send.truncated:
		return errMessageCut
	}
	return nil
}
