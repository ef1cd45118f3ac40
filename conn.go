package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// Conn is a connection over a reliably connected queue pair. It implements
// net.Conn, io.ReaderFrom and io.WriterTo; all methods may be called by several
// goroutines at once.
//
// Errors are *net.OpError but for io.EOF, which Read returns bare, and those of the
// reader or writer that ReadFrom or WriteTo was given, which come as they are. Inside them
// are found, with errors.Is: os.ErrDeadlineExceeded when a deadline has passed
// (the connection goes on), net.ErrClosed after Close, syscall.ECONNRESET when
// the connection broke, syscall.ETIMEDOUT when the peer has gone silent, and
// syscall.EPIPE on a Write after CloseWrite or after the peer has closed.
type Conn struct {
	set         settings
	dom         *domain
	pool        *pool // receive buffers
	sends       *pool // and buffers for sends that do not go inline
	id          ibv.ID
	cq          ibv.CQ
	qp          ibv.QP
	agreed      agreement
	fin         bool // half-close was agreed
	messages    bool // and expedited, partial and empty messages
	peer        privateData
	inline      int  // bytes that a send may have without a buffer
	invalidates bool // the device has Send with Invalidate
	markEach    bool // each send from a buffer is signalled: nothing else frees the buffer
	slots       int  // length of the send queue, but for RDMA Reads
	local       *net.TCPAddr
	remote      *net.TCPAddr

	// One Read at a time; it is held while the call waits. Who writes has the turn.
	readMu sync.Mutex

	event atomic.Pointer[ibv.Event] // the end of the connection, from the device

	// mu guards what follows. It is never held while waiting.
	mu     sync.Mutex
	closed bool
	dead   error // why the connection is over; errPeerClosed for an orderly end
	stats  Stats

	flushed bool // the queue pair was seen to have failed, not why

	// Who waits for completions: see progress.go.
	seat     vacancy.Seat
	poller   poller
	spoken   uint64 // Stats.MessagesSent when the peer last sent something
	leading  bool
	keeping  bool // that is a keeper
	sleeping bool // the leader has let go of mu to wait, and nobody has roused it
	cqLost   bool // the completion queue has failed once: its events are not waited for
	readable sync.Cond
	writable sync.Cond
	readers  int       // goroutines in readable.Wait
	writers  int       // and in writable.Wait
	wcs      [8]ibv.WC // memory for polling
	wantSend bool      // a writer waits for the completion of a send

	credits credits

	// Receiving: see recv.go.
	recvWR   [1]ibv.RecvWR      // memory for a post
	recvSGE  [1]ibv.SGE         // and for its only element
	posted   ring.Ring[*buffer] // receives in the queue pair, oldest first
	unread   ring.Ring[segment] // for the reader
	kept     int                // of the unread segments, how many keep a buffer
	spill    *spill             // see spill.go
	spilled  int                // bytes
	reasm    reassembler
	opened   int  // length of a message that has begun and has no segment unread yet
	eof      bool // the peer's FIN has come
	deaf     bool // CloseRead or Close: drop what arrives
	readDue  deadline
	writeDue deadline

	// Sending: see turn.go and send.go.
	turns turns
	send  sending

	// Large transfers: see transfer.go.
	out outgoing
	in  incoming

	// Keep-alive: see keepalive.go.
	timer     *time.Timer
	heard     bool // something has arrived, which poll notes the time of
	lastHeard time.Time
	lookAt    time.Time // when the timer is to look next, if it is set
	probing   bool      // the peer, or its device, must answer,
	asked     time.Time // which it was asked to do then
	warm      bool      // there are credits or receives to give back when idle
	reckoned  time.Time // when it was last looked how much has moved,
	moved     uint64    // and how much that was

	answers bool   // the peer's device can be asked by an RDMA Read: see pulse.go
	pulse   *pulse // namely of, nil for one of no bytes
	beat    beat
}

// segment is received payload that waits for the reader.
type segment struct {
	x     *inbound // a transfer in place of data
	data  []byte
	buf   *buffer // where it lies: in the buffer that it came in,
	spill *spill  // or in spill memory,
	n     int     // n bytes of it
	size  int     // of the whole message when the segment begins one, else 0
	last  bool    // ends its message
	flags MsgFlags
}

func newConn(set settings, dom *domain, id ibv.ID, cq ibv.CQ, qp ibv.QP) *Conn {
	c := &Conn{set: set, dom: dom, id: id, cq: cq, qp: qp}
	c.readable.L, c.writable.L = &c.mu, &c.mu
	c.local, c.remote = tcpAddr(id.LocalAddr()), tcpAddr(id.RemoteAddr())
	c.in.depth = min(readSlots, qp.Cap().MaxSendWR/8)
	c.slots, c.inline = qp.Cap().MaxSendWR-1-c.in.depth, qp.Cap().MaxInline
	attr := id.Device().Attr()
	c.invalidates = attr.Caps.Has(ibv.CapSendInvalidate)
	c.markEach = attr.SendsBuffered
	c.seat.Init(&keepers, c.startKeeper)
	c.poller = newPoller(id.Device(), set.busyPoll)
	c.readDue.fire, c.writeDue.fire = c.readExpired, c.writeExpired
	return c
}

func tcpAddr(a netip.AddrPort) *net.TCPAddr { return net.TCPAddrFromAddrPort(a) }

// LocalAddr returns the local address, a *net.TCPAddr.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the peer's address, a *net.TCPAddr.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Info returns what carries the connection.
func (c *Conn) Info() Info {
	dev := c.id.Device()
	info := Info{
		Device:            dev.Name(),
		Transport:         dev.Attr().Transport.String(),
		Port:              c.id.Port(),
		QPN:               c.qp.QPN(),
		LocalGID:          gidOf(c.id.LocalAddr()),
		RemoteGID:         gidOf(c.id.RemoteAddr()),
		Rdmanet:           c.peer.rdmanet,
		MessageFlags:      c.messages,
		MaxSendSize:       int(c.agreed.maxSend),
		MaxReceiveSize:    int(c.agreed.maxReceive),
		MaxFragmentedSize: int(c.agreed.maxFragmentedSend),
	}
	if port, err := dev.Port(c.id.Port()); err == nil {
		info.MTU = port.ActiveMTU
	}
	return info
}

// Stats returns the counters of the moment.
func (c *Conn) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.SendCredits, s.ReceiveCredits, s.ReceiveWindow = c.credits.have, c.credits.posted, c.credits.window
	return s
}

// MaxMessageSize is the length of the longest message that WriteMsg can send, and
// of the longest piece that SendMsg can, in bytes: math.MaxInt where large transfers
// carry what is longer than the peer's MaxFragmentedSize, else that. A message in
// pieces may have any length.
func (c *Conn) MaxMessageSize() int {
	if c.out.mode != transferNone {
		return math.MaxInt
	}
	return int(c.agreed.maxFragmentedSend)
}

// SetDeadline sets both deadlines; see net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readDue, &c.writeDue)
}

// SetReadDeadline bounds Read, ReadMsg, RecvMsg and WriteTo, those in progress too.
func (c *Conn) SetReadDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readDue)
}

// SetWriteDeadline bounds Write, WriteMsg, SendMsg, ReadFrom and CloseWrite, those
// in progress too, and what is queued by QueueMsg, but for large transfers that the
// peer has been told of. A Write that times out has sent what n says and the stream
// goes on from there.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.writeDue)
}

func (c *Conn) setDeadlines(t time.Time, ds ...*deadline) error {
	c.mu.Lock()
	defer c.mu.Unlock()
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

func (c *Conn) readExpired()  { c.expired(&c.readDue) }
func (c *Conn) writeExpired() { c.expired(&c.writeDue) }

func (c *Conn) expired(d *deadline) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d.check() {
		c.wakeAll()
	}
}

// Read reads the next bytes of the stream, as many as are there and fit into
// p, at least one. It returns io.EOF once the peer has closed, or called
// CloseWrite, and everything before that has been read.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	return n, c.opError("read", err)
}

// Write sends p and returns when all of it has been handed to the device.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.write(p, manner{})
	return n, c.opError("write", err)
}

// WriteMsg sends p as one message, which keeps its boundaries for a peer that
// uses ReadMsg. More than MaxMessageSize bytes are refused with
// ErrMessageTooLong and nothing is sent. An empty message is legal: it is
// delivered to a peer with Info.MessageFlags, and only carries flow control to
// others. A deadline that passes when part of the message is gone makes the
// connection unusable for writing. SendMsg has more ways to send.
func (c *Conn) WriteMsg(p []byte) error {
	_, err := c.write(p, manner{message: true})
	return c.opError("write", err)
}

// WriteMsgInvalidate is WriteMsg, and takes back the peer's memory key (iWARP:
// STag) token: the peer's device closes it before the message is delivered.
// Exactly one segment carries it, [MS-SMBD] 3.1.5.4. A token of 0 is none; it is
// dropped where the device has no Send with Invalidate. A peer that has no such
// key breaks the connection. With a token p goes in segments, and may have
// [Info].MaxFragmentedSize bytes.
func (c *Conn) WriteMsgInvalidate(p []byte, token uint32) error {
	_, err := c.write(p, manner{message: true, token: token})
	return c.opError("write", err)
}

// ReadMsg reads one whole message, or what Read has left of one, and returns
// its length. A message that does not fit into p gives io.ErrShortBuffer and
// its length as n, and stays. When the deadline passes in the middle, n bytes
// of the message have been read and the rest is for the next call.
//
// An empty message has length 0. Of one that was sent in pieces (Partial) all are
// read, as they come. The length in io.ErrShortBuffer is then that of the first;
// when it is a later one for which p is too small, p is full, n is its length, and
// the rest is for the next call. RecvMsg tells more.
func (c *Conn) ReadMsg(p []byte) (n int, err error) {
	n, _, err = c.readMsg(p, false)
	return n, c.opError("read", err)
}

// ReadFrom writes what r yields until its end; see io.ReaderFrom. Where large
// transfers serve, r reads straight into memory that the peer fetches from.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	if c.out.mode != transferNone && c.set.ofScratch <= scratchBytes {
		return c.transferFrom(r)
	}
	return c.copyFrom(r)
}

// copyFrom is ReadFrom by Write.
func (c *Conn) copyFrom(r io.Reader) (int64, error) {
	b := copyPool.Get().(*[copyBytes]byte)
	defer copyPool.Put(b)
	var total int64
	for {
		n, err := r.Read(b[:])
		if n > 0 {
			w, werr := c.Write(b[:n])
			total += int64(w)
			if werr != nil {
				return total, werr
			}
		}
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

const copyBytes = 256 << 10

var copyPool = sync.Pool{New: func() any { return new([copyBytes]byte) }}

// WriteTo reads until the end of the stream and writes to w, straight from the
// receive buffers; see io.WriterTo.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	if err := c.retain(); err != nil {
		return 0, c.opError("read", err)
	}
	defer c.dom.release()
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
func (c *Conn) retain() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.dom.retain()
	return nil
}

// CloseRead ends the reading side: Read returns io.EOF, what has not been read and
// what still arrives is dropped.
func (c *Conn) CloseRead() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.deaf = true
	c.wakeAll()
	c.mu.Unlock()

	c.readMu.Lock() // whoever copies from a buffer is out now
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropUnread()
	return nil
}

// CloseWrite ends the writing side: the peer reads io.EOF after all that was
// written. It needs a peer that is rdmanet too (Info tells); for others the
// error matches errors.ErrUnsupported. It takes its turn behind what is queued,
// and fails, with nothing done, where a message has not got its last piece. Of a peer
// that has closed already it says nothing, as with TCP.
func (c *Conn) CloseWrite() error { return c.opError("close", c.closeWrite()) }

// Close ends the connection. What was written reaches the peer first, and so do large
// transfers of QueueMsg's that it has been told of: Close waits for that up to
// Config.LingerTimeout. Calls in progress, and what else is queued, return with
// net.ErrClosed at once. Where a message has not got its last piece the peer reads an
// error in place of io.EOF.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.closed, c.deaf = true, true
	c.wakeAll()
	c.mu.Unlock()

	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.lastTurn()
	c.linger()
	return c.opError("close", c.teardown())
}

// linger sees the last bytes off, within the linger time: FIN, the completion
// of all sends, the disconnect and the peer's own.
func (c *Conn) linger() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropUnread()
	if c.set.linger < 0 || c.dead != nil {
		return
	}
	c.writeDue.set(time.Now().Add(c.set.linger))
	defer c.writeDue.stop()
	alive := func() bool { return c.dead == nil && !c.writeDue.expired }
	if c.fin && !c.send.finSent && !c.send.cut && !c.turns.open { // no end where a message has none
		for alive() {
			if done, _ := c.postFIN(); done {
				break
			}
			c.waitToSend()
		}
	}
	for alive() && c.out.live.Len() > 0 {
		c.await(&c.writable, &c.writers)
	}
	c.postMarker(alive)
	last := c.send.seq // what is sent from here on, such as grants, may be lost
	if c.id.Device().Attr().SendsBuffered {
		c.awaitSends(func() bool { return alive() && c.send.barrier }) // keep-alive's is not behind everything
		if alive() {
			c.postBarrier()
		}
	}
	c.awaitSends(func() bool { return alive() && (c.send.done < last || c.send.barrier) })
	if !alive() || c.id.Disconnect() != nil {
		return
	}
	for alive() {
		c.await(&c.writable, &c.writers)
	}
}

// awaitSends waits for completions of sends while wanted says so.
func (c *Conn) awaitSends(wanted func() bool) {
	for wanted() {
		c.wantSend = true
		c.await(&c.writable, &c.writers)
	}
}

// teardown releases what the connection holds, in the order that verbs want.
func (c *Conn) teardown() error {
	err := c.qp.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead == nil {
		c.dead = net.ErrClosed
	}
	c.seat.Taken()
	for c.leading {
		c.cq.Interrupt()
		c.writers++
		c.writable.Wait()
		c.writers--
	}
	c.poller.fall(false)
	c.readDue.stop()
	c.writeDue.stop()
	if c.timer != nil {
		c.timer.Stop()
	}
	if c.in.neglect != nil {
		c.in.neglect.Stop()
	}
	for c.posted.Len() > 0 {
		c.posted.Pop().release()
	}
	c.dropUnread()
	c.releaseFetches()
	c.releaseTransfers()
	c.releaseSends()
	return errors.Join(err, c.beat.close(), c.cq.Close(), c.id.Close(), c.dom.release())
}

// fail ends the connection because of err, the first one only.
func (c *Conn) fail(err error) {
	if c.dead != nil {
		return
	}
	c.dead = broken(err)
	c.logBroken(err)
	c.qp.SetError()
	c.id.Disconnect() // InfiniBand's connection manager does not watch the queue pair
	c.wakeAll()
}

func (c *Conn) logBroken(err error) {
	c.set.log.Debug("rdmanet: connection broken", "local", c.local, "remote", c.remote, "err", err)
}

func (c *Conn) opError(op string, err error) error {
	return opError(op, c.local, c.remote, err)
}

// readErr is why Read cannot go on when nothing is unread.
func (c *Conn) readErr() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.readDue.expired:
		return os.ErrDeadlineExceeded
	case c.deaf, c.eof && c.unread.Len() == 0:
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
func (c *Conn) writeErr() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.writeDue.expired:
		return os.ErrDeadlineExceeded
	case c.dead != nil:
		return c.dead
	case c.send.finSent:
		return errWriteClosed
	case c.send.cut:
		return errMessageCut
	}
	return nil
}

// String names the two ends and the device.
func (c *Conn) String() string {
	return fmt.Sprintf("rdmanet: %v to %v on %s", c.local, c.remote, c.id.Device().Name())
}
