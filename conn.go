package rdmanet

import (
	"context"
	"io"
	"net"
	"runtime"
	"time"
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
//
// A Conn that the program drops without Close is closed when the garbage collector finds
// it, as those of package net are. Config.Logger receives a warning, or slog.Default() if
// that is nil.
type Conn struct {
	*conn
}

// opError wraps what a call returns, once.
func (c *Conn) opError(op string, err error) error { return opError(op, c.local, c.remote, err) }

// LocalAddr returns the local address, a *net.TCPAddr.
func (c *Conn) LocalAddr() net.Addr {
	return c.local
}

// RemoteAddr returns the peer's address, a *net.TCPAddr.
func (c *Conn) RemoteAddr() net.Addr {
	return c.remote
}

// Info returns what carries the connection, and what was agreed with the peer.
func (c *Conn) Info() Info {
	return c.info()
}

// Stats returns the counters of the moment.
func (c *Conn) Stats() Stats {
	return c.snapshot()
}

// MaxMessageSize returns the length, in bytes, of the longest message, or piece of one, that
// WriteMsg can send. It is math.MaxInt where large transfers carry what is longer than the
// peer's MaxFragmentedSize; otherwise it is that size. A message in pieces may have any
// length.
func (c *Conn) MaxMessageSize() int {
	return c.maxMessageSize()
}

// SetDeadline sets both deadlines; see net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return opError("set", nil, c.local, c.setDeadlines(t, &c.readDue, &c.writeDue))
}

// SetReadDeadline bounds Read, ReadMsg, ReadPiece and WriteTo, those in progress too.
func (c *Conn) SetReadDeadline(t time.Time) error {
	return opError("set", nil, c.local, c.setDeadlines(t, &c.readDue))
}

// SetWriteDeadline bounds Write, WriteMsg, ReadFrom and CloseWrite, those in progress too,
// and what is queued by QueueMsg, but for large transfers that the peer has been told of. A
// Write that times out has sent what n says, and the stream goes on from there.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	return opError("set", nil, c.local, c.setDeadlines(t, &c.writeDue))
}

// Read reads the next bytes of the stream, as many as are there and fit into
// p, at least one. It returns io.EOF once the peer has closed, or called
// CloseWrite, and everything before that has been read.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	runtime.KeepAlive(c)
	return n, c.opError("read", err)
}

// Write sends p and returns when all of it has been handed to the device.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.write(p, sendOptions{})
	runtime.KeepAlive(c)
	return n, c.opError("write", err)
}

// WriteMsg sends p as one message, which keeps its boundaries for a peer that uses ReadMsg,
// and returns how many bytes were taken. p is the caller's again when it returns. Options
// send a piece of a message ([Partial]), ahead of others ([Expedited]), without blocking
// ([NonBlocking]), with a hint for the peer ([NoResponse]), or take back a key of the peer's
// ([Invalidate]). Unknown options match syscall.EINVAL. Without options, and with flags,
// WriteMsg allocates nothing for them.
//
// More than MaxMessageSize bytes are refused with ErrMessageTooLong, and nothing is sent. An
// empty message is legal: it is delivered to a peer with [Extensions].MessageFlags, and only
// carries flow control to others. Partial needs such a peer; for others the error matches
// errors.ErrUnsupported.
//
// All of p is taken unless there is an error, with one exception: with NonBlocking
// n may be less, and what was taken is then a piece of the message. The caller goes
// on with WriteMsg(p[n:], flags), for which Writable tells the time. When not even
// one byte is taken the error matches syscall.EAGAIN. To peers without
// Extensions.MessageFlags it is all or nothing, for at most 16 segments; longer messages
// are refused with an error that matches syscall.EMSGSIZE.
//
// A deadline that passes before the first byte is sent leaves things as they were.
// When it passes in the middle, n bytes are gone, the message can never be ended,
// and the connection is unusable for writing: the peer reads an error where the
// message breaks off.
func (c *Conn) WriteMsg(p []byte, opts ...MsgOption) (n int, err error) {
	n, err = c.writeMsg(p, opts)
	runtime.KeepAlive(c)
	return n, c.opError("write", err)
}

// QueueMsg queues p to be sent as WriteMsg does, and returns at once. Queued messages,
// and calls that send, take their turns in the order in which they were
// made, expedited ones first. NonBlocking is refused (syscall.EINVAL).
//
// p is in use until the message is done, and must neither be changed nor unmapped
// before. The queue has no limit but the memory that the program puts into it.
//
// A message that goes by a large transfer (Config.TransferSize) is done when the peer has
// fetched it. Up to four such messages are under way at a time, so that the peer finds the
// next one when it has one: many in the queue move more than as many calls of WriteMsg.
//
// The write deadline holds for queued messages too: those that have not been sent, and
// of which the peer has not been told, when it passes fail. So do all when the
// connection breaks, or at Close, behind which what the peer has been told of goes
// on as what was written does. A program that wants the rest sent waits for the last of them
// first, or calls CloseWrite, which takes its turn behind them.
func (c *Conn) QueueMsg(p []byte, opts ...MsgOption) *PendingMessage {
	return c.queueMsg(p, opts)
}

// Writable returns the channel that receives a value when, after a WriteMsg with
// NonBlocking that did not take all it was given, another might take some; or when
// sending has become impossible, so that another would say why. There is one channel
// a connection, which holds one value: each is for one receiver, and may be of an
// earlier time, so that EAGAIN can follow all the same.
func (c *Conn) Writable() <-chan struct{} {
	return c.writableChan()
}

// ReadMsg reads one whole message, or what Read has left of one, and returns
// its length. A message that does not fit into p gives io.ErrShortBuffer and
// its length as n, and stays. When the deadline passes in the middle, n bytes
// of the message have been read and the rest is for the next call.
//
// An empty message has length 0. Of a message that was sent in pieces (Partial) all are
// read, as they come. The length in io.ErrShortBuffer is then that of the first;
// when it is a later one for which p is too small, p is full, n is its length, and
// the rest is for the next call. ReadPiece reads them one by one.
func (c *Conn) ReadMsg(p []byte) (n int, err error) {
	n, _, err = c.readMsg(p, false)
	runtime.KeepAlive(c)
	return n, c.opError("read", err)
}

// ReadPiece reads one piece of a message, for peers that send in pieces. The flags say
// whether it was sent Expedited and, by Partial, whether more of the message is to come; the
// piece without Partial ends the message. A message that was sent whole is one piece. Pieces,
// and whole messages, come in the order in which they were handed to the sender's device.
//
// A message that does not fit into p is treated as by ReadMsg. Where n bytes of a piece
// come with an error, Partial is set, and the next call has the rest of it.
//
// It allocates nothing for what comes in segments.
func (c *Conn) ReadPiece(p []byte) (n int, flags MsgFlags, err error) {
	n, flags, err = c.readMsg(p, true)
	runtime.KeepAlive(c)
	return n, flags, c.opError("read", err)
}

// ReadFrom writes what r yields until its end; see io.ReaderFrom. While r has nothing it
// holds a few KiB. Once bytes keep coming they are read 256 KiB at a time, and where large
// transfers serve straight into memory that the peer fetches from.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	n, rerr, err := c.readFrom(r)
	runtime.KeepAlive(c)
	if err != nil {
		return n, c.opError("write", err)
	}
	return n, rerr
}

// WriteTo reads until the end of the stream and writes to w, straight from the
// receive buffers; see io.WriterTo.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	n, werr, err := c.writeTo(w)
	runtime.KeepAlive(c)
	if err != nil {
		return n, c.opError("read", err)
	}
	return n, werr
}

// CloseRead ends the reading side: Read returns io.EOF, what has not been read and
// what still arrives is dropped.
func (c *Conn) CloseRead() error {
	return c.opError("close", c.closeRead())
}

// CloseWrite ends the writing side: the peer reads io.EOF after all that was
// written. It needs a peer with [Extensions].HalfClose; for others the
// error matches errors.ErrUnsupported. It takes its turn behind what is queued,
// and fails, with nothing done, where a message has not got its last piece. Of a peer
// that has closed already it says nothing, as with TCP.
func (c *Conn) CloseWrite() error {
	err := c.closeWrite()
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// Close ends the connection. Calls in progress, and what is queued, return with
// net.ErrClosed at once, but for those in the middle of a large transfer, whose memory the
// peer has to let go of first; bytes that were not read, and that still arrive, are dropped.
// Everything that was written reaches the peer first, and so do large transfers of
// QueueMsg's and ReadFrom's that the peer was told of. Where a message has not got its last piece the
// peer reads an error in place of io.EOF.
//
// As with TCP, Close does not wait for the peer. It waits until what was written has left
// the process, which takes no time unless the peer or the network is slow: 100 ms at
// most, and no longer than something moves (30 ms, or 2 ms where another Close has just
// waited in vain). The rest goes on behind it: the connection lingers until the peer has
// taken everything, or has taken nothing for Config.LingerTimeout, after which the rest
// is lost. A process that ends meanwhile loses what has not left it; CloseContext waits.
func (c *Conn) Close() error {
	err := c.close()
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// CloseContext is Close for programs that must know whether the peer got everything. It
// returns nil when the peer's device has taken all that was written and has ended the
// connection. Of a peer that closed first it returns nil unless the device knows of
// something that was not taken, or cannot tell. Otherwise the error says why that may not
// be so: ctx's own when ctx ends, while the connection lingers on as after Close; one that
// matches syscall.ETIMEDOUT when the connection was given up, because nothing moved for
// Config.LingerTimeout or too many others linger; and syscall.ECONNRESET when the
// connection broke. Whether the peer's program has read what its device has taken, only
// the program can tell.
//
// An RDMA device knows what the peer's has taken. The software device knows what the
// kernel has taken, and that the peer has ended the connection in an orderly way: what it
// ends by itself, while bytes are on their way, may not have reached it.
func (c *Conn) CloseContext(ctx context.Context) error {
	err := c.closeContext(ctx)
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// Done is closed when the message has been handed to the device, by a large transfer
// when the peer has fetched it, or when neither will be: then p is the caller's again
// and Result returns without waiting.
func (s *PendingMessage) Done() <-chan struct{} {
	return s.done
}

// Result waits until the message is done and returns how many bytes were taken and,
// if that is not all of them, why: what WriteMsg would have returned, or an error
// that matches context.Canceled.
func (s *PendingMessage) Result() (n int, err error) {
	<-s.done
	return s.n, opError("write", s.c.local, s.c.remote, s.err)
}

// Cancel takes the message out of the queue and reports whether it could: then nothing
// of it is sent and it is done. Otherwise it is being sent, or is done already.
func (s *PendingMessage) Cancel() bool {
	return s.cancel()
}
