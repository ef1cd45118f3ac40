package rdmanet

import (
	"context"
	"io"
	"net"
	"runtime"
	"time"
)

// Conn is a connection over a reliably connected queue pair. It implements net.Conn,
// io.ReaderFrom and io.WriterTo. All methods may be called by several goroutines at once.
//
// Errors are *net.OpError, with two exceptions. Read returns io.EOF as it is. ReadFrom and
// WriteTo return errors of the reader or writer that they were given as they are. These
// errors can be found by errors.Is:
//
//   - os.ErrDeadlineExceeded: a deadline has passed, and the connection goes on;
//   - net.ErrClosed: the program has called Close;
//   - syscall.EFAULT: memory of the call cannot be accessed, and the connection goes on unless
//     the error matches syscall.ECONNRESET too;
//   - syscall.ECONNRESET: the connection broke;
//   - syscall.ETIMEDOUT: the peer has gone silent;
//   - syscall.EPIPE: a Write after CloseWrite, or after the peer has closed.
//
// A Conn that the program drops without Close is closed when the garbage collector finds
// it, as connections of package net are. Config.Logger then receives a warning, or
// slog.Default() if that is nil.
type Conn struct {
	*conn
}

// opError wraps an error of a call with the operation and both addresses.
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

// Stats returns the counters as they are at this moment.
func (c *Conn) Stats() Stats {
	return c.snapshot()
}

// MaxMessageSize returns how many bytes WriteMsg can send in one message, or in one piece of
// a message. It is math.MaxInt where large transfers carry what is longer than the peer's
// MaxFragmentedSize; otherwise it is that size. A message in pieces may have any length.
func (c *Conn) MaxMessageSize() int {
	return c.maxMessageSize()
}

// SetDeadline sets both deadlines; see net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return opError("set", nil, c.local, c.setDeadlines(t, &c.readDue, &c.writeDue))
}

// SetReadDeadline sets the deadline of Read, ReadMsg, ReadPiece and WriteTo. It holds for
// calls in progress too.
func (c *Conn) SetReadDeadline(t time.Time) error {
	return opError("set", nil, c.local, c.setDeadlines(t, &c.readDue))
}

// SetWriteDeadline sets the deadline of Write, WriteMsg and ReadFrom. It holds for calls in
// progress too, and for messages that QueueMsg has queued. It does not hold for queued large
// transfers that were announced to the peer. A Write that times out has sent the n bytes that
// it returns, and the stream goes on behind them.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	return opError("set", nil, c.local, c.setDeadlines(t, &c.writeDue))
}

// Read reads the next bytes of the stream: as many as have arrived and fit into p, and at
// least one. It returns io.EOF when the peer has closed, or called CloseWrite, and everything
// before that has been read.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	runtime.KeepAlive(c)
	return n, c.opError("read", err)
}

// Write sends p. It returns when all of it has been handed to the device, or waits in the
// process behind bytes that were written before. So the caller may use p again, and as with
// TCP the peer may not have anything yet. Between software devices on Linux the kernel has all
// of it, unless [Extensions].HeldSends is off. Write waits while the peer takes nothing.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.write(p, sendOptions{})
	runtime.KeepAlive(c)
	return n, c.opError("write", err)
}

// WriteMsg sends p as one message, and returns how many bytes were taken. A peer that uses
// ReadMsg receives the message as a whole. p is the caller's again when WriteMsg returns.
//
// Options change how the message is sent:
//
//   - [Expedited]: ahead of normal messages;
//   - [Partial]: as a piece of a message, which later calls go on with;
//   - [NoResponse]: with the hint that no answer is expected;
//   - [NonBlocking]: as far as that is possible at once;
//   - [Invalidate]: so that it takes back a memory key of the peer's.
//
// Unknown options match syscall.EINVAL. Options cost no allocation.
//
// A message of more than MaxMessageSize bytes fails with ErrMessageTooLong, and nothing is
// sent. A peer with [Extensions].MessageFlags receives empty messages. For other peers they
// only carry flow control, and Partial matches errors.ErrUnsupported.
//
// Without an error all of p is taken, unless the call has NonBlocking. Then n may be less,
// and what was taken is a piece of the message. The caller goes on with WriteMsg(p[n:]) and
// the same flags when Writable says so. If not even one byte can be taken the error matches
// syscall.EAGAIN. For peers without Extensions.MessageFlags it is all or nothing, for at most
// 16 segments; longer messages match syscall.EMSGSIZE.
//
// When the deadline passes before the first byte is sent, nothing has happened. When it
// passes in the middle, n bytes have been sent and the message can never be ended. From then
// on nothing can be written, and the peer reads an error where the message breaks off.
func (c *Conn) WriteMsg(p []byte, opts ...MsgOption) (n int, err error) {
	n, err = c.writeMsg(p, opts)
	runtime.KeepAlive(c)
	return n, c.opError("write", err)
}

// QueueMsg queues p to be sent as WriteMsg does, and returns at once. Queued messages and
// calls that send take turns in the order in which they were made, expedited ones first.
// NonBlocking matches syscall.EINVAL.
//
// p is in use until the message is done. Until then it must be neither changed nor unmapped.
// The queue has no limit but the memory that the program puts into it.
//
// A message that goes by a large transfer (Config.TransferSize) is done when the peer has
// fetched it. Up to four such messages are announced to the peer at a time, so that it finds
// the next one when it has fetched one. Thus many queued messages move more bytes than as
// many calls of WriteMsg.
//
// When the write deadline passes, queued messages fail that were neither sent nor announced
// to the peer. All queued messages fail when the connection breaks, or at Close. What was
// announced to the peer goes on behind Close, as what was written does. A program that wants
// the rest sent waits for the last message before it calls Close, or calls CloseWrite, which
// takes its turn behind the queue.
func (c *Conn) QueueMsg(p []byte, opts ...MsgOption) *PendingMessage {
	return c.queueMsg(p, opts)
}

// Writable returns the channel that receives a value when a WriteMsg with NonBlocking may
// take something again, after one that did not take all of its message. It also receives a
// value when nothing can be sent any more, so that the next call returns the reason. A
// connection has one channel, which holds one value. Each value is for one receiver. A value
// may be of an earlier time, so that the next call returns EAGAIN all the same.
func (c *Conn) Writable() <-chan struct{} {
	return c.writableChan()
}

// ReadMsg reads one whole message, or what Read has left of one, and returns its length. A
// message that does not fit into p gives io.ErrShortBuffer with the length of the message as
// n, and can be read again. When the deadline passes in the middle, n bytes of the message
// have been read, and the next call reads the rest.
//
// An empty message has length 0. If a message was sent in pieces (Partial), ReadMsg reads all
// of them as they arrive. If the first piece does not fit into p, n is its length with
// io.ErrShortBuffer. If a later piece does not fit, p is full, n is the length of p, and the
// next call reads the rest. ReadPiece reads pieces one by one.
func (c *Conn) ReadMsg(p []byte) (n int, err error) {
	n, _, err = c.readMsg(p, false)
	runtime.KeepAlive(c)
	return n, c.opError("read", err)
}

// ReadPiece reads one piece of a message, for peers that send messages in pieces. In flags
// Expedited says that the message was sent so, and Partial that more of it is to come. The
// piece without Partial ends the message. A message that was sent whole is one piece. Pieces
// and whole messages come in the order in which the sender's device received them.
//
// A piece that does not fit into p is treated as ReadMsg treats a message. If n bytes of a
// piece come with an error, flags has Partial, and the next call reads the rest of it.
//
// ReadPiece allocates nothing for what comes in segments.
func (c *Conn) ReadPiece(p []byte) (n int, flags MsgFlags, err error) {
	n, flags, err = c.readMsg(p, true)
	runtime.KeepAlive(c)
	return n, flags, c.opError("read", err)
}

// ReadFrom writes what r yields until its end; see io.ReaderFrom. While r yields nothing
// ReadFrom holds a few KiB of memory. While bytes keep coming it reads 256 KiB at a time, and
// where large transfers are in use it reads them into memory that the peer fetches from.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	n, rerr, err := c.readFrom(r)
	runtime.KeepAlive(c)
	if err != nil {
		return n, c.opError("write", err)
	}
	return n, rerr
}

// WriteTo reads until the end of the stream, and writes to w without a copy in between; see
// io.WriterTo.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	n, werr, err := c.writeTo(w)
	runtime.KeepAlive(c)
	if err != nil {
		return n, c.opError("read", err)
	}
	return n, werr
}

// CloseRead ends the reading side. Read returns io.EOF, and bytes that were not read, or that
// still arrive, are dropped.
func (c *Conn) CloseRead() error {
	err := c.closeRead()
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// CloseWrite ends the writing side: the peer reads io.EOF behind all that was written. As
// with TCP it heeds no deadline, and Writes in progress end with syscall.EPIPE. Messages that
// are being sent go first, and so do queued ones, and a Write that is sending the rest of a
// message; their own deadlines hold. A large transfer ends when the peer has stopped using its
// memory. CloseWrite fails, and the stream goes on, if the last piece of a message is missing. A
// peer without [Extensions].HalfClose matches errors.ErrUnsupported. When the peer has closed
// already CloseWrite returns nil, as with TCP.
func (c *Conn) CloseWrite() error {
	err := c.closeWrite()
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// Close ends the connection. Calls in progress and queued messages end at once with
// net.ErrClosed. Calls in the middle of a large transfer end when the peer has stopped using
// their memory. Bytes that were not read, or that still arrive, are dropped. The peer gets
// everything that was written, and large transfers of QueueMsg and ReadFrom that were
// announced to it. If the last piece of a message is missing the peer reads an error in place
// of io.EOF.
//
// As with TCP, Close does not wait for the peer. It waits until what was written has left the
// process. That takes no time unless the peer or the network is slow. Close waits for at most
// 100 ms, and for at most 30 ms in which nothing moves, or 2 ms if another Close has just
// waited that long. Behind Close the connection lingers until the peer has taken everything.
// If the peer takes nothing for Config.LingerTimeout the rest is lost. A process that ends
// before loses what has not left it; CloseContext waits for that.
func (c *Conn) Close() error {
	err := c.close()
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// CloseContext is Close for programs that must know whether the peer got everything. It
// returns nil when the peer's device has taken all that was written and has ended the
// connection, or where [Extensions].HeldSends is set when the peer's host has acknowledged all of
// it. If the peer closed first it also returns nil, unless the device knows of
// something that was not taken, or cannot tell. Otherwise the error matches
//
//   - ctx's error: ctx has ended, and the connection lingers on as after Close;
//   - syscall.ETIMEDOUT: the connection was given up, because nothing moved for
//     Config.LingerTimeout or because too many others linger;
//   - syscall.ECONNRESET: the connection broke.
//
// Only the peer's program can tell whether it has read what its device has taken. An RDMA
// device knows what the peer's device has taken. The software device knows what the kernel
// has taken, and that the peer has ended the connection in an orderly way. If the peer ends
// the connection by itself while bytes are on their way, those may not have reached it. Where a
// program on the path passes on a TCP connection of the software device, as a proxy does, what
// has reached that program's host counts.
func (c *Conn) CloseContext(ctx context.Context) error {
	err := c.closeContext(ctx)
	runtime.KeepAlive(c)
	return c.opError("close", err)
}

// Done returns a channel that is closed when the message is done: the device has taken it,
// the peer has fetched it by a large transfer, or neither will happen any more. Then the
// bytes are the caller's again, and Result returns at once.
func (s *PendingMessage) Done() <-chan struct{} {
	return s.done
}

// Result waits until the message is done. It returns how many bytes were taken, and the error
// that WriteMsg would have returned, or after Cancel one that matches context.Canceled.
func (s *PendingMessage) Result() (n int, err error) {
	<-s.done
	return s.n, opError("write", s.c.local, s.c.remote, s.err)
}

// Cancel takes the message out of the queue, so that nothing of it is sent and it is done. It
// returns false if the message is not in the queue any more: it is being sent, or is done.
func (s *PendingMessage) Cancel() bool {
	return s.cancel()
}
