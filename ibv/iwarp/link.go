package iwarp

import (
	"net"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// A link carries the bytes of a stream in both directions, in order and without loss. It
// does not know FPDUs, keys or queues. tcp.go has the link over TCP.
//
// A stream has one receiver at a time, which holds the receiving role: it calls
// read, poll, readv and setReadDeadline. The sender is whoever holds the send
// queue's lock: it calls write, writev, closeWrite and unsent. A write that may wait
// is called without the lock, and its step takes it. Receiver and sender call at the
// same time. interrupt, close and closeAfter are for any goroutine that is in no
// step, at any time.
//
// Once close or closeAfter has returned, and in a read or a write that waits then,
// the error matches net.ErrClosed.
type link interface {
	// read calls step, and again whenever bytes may have come since, until step
	// returns true. It waits between two calls only. at is for readv. The error
	// matches os.ErrDeadlineExceeded after the deadline or an interrupt. Any other
	// error means that nothing comes any more.
	read(step func(at uintptr) bool) error

	// poll calls step at most once, for what has come already. step returns true.
	// poll does not wait, whatever the deadline. A new deadline is set before the
	// next read.
	poll(step func(at uintptr) bool) error

	// readv reads into bufs what has come, and does not wait. It is called in a step
	// of read or poll. wait is set when nothing has come. The error is io.EOF when
	// the peer has ended its direction and all before that has been read.
	readv(at uintptr, bufs [][]byte) (n int, wait bool, err error)

	// setReadDeadline sets when read gives up, never for the zero time. It undoes the
	// interrupts before it.
	setReadDeadline(t time.Time)

	// interrupt ends the read that waits, or the next read, as the deadline does. The
	// caller ensures that setReadDeadline is not called at the same time, except for a
	// link that will be closed.
	interrupt()

	// write calls step, and again whenever there may be room, until step returns
	// true. It waits between two calls only, and not at all for a step that returns
	// true at once. at is for writev. While one goroutine waits no other one calls
	// write.
	write(step func(at uintptr) bool) error

	// writev takes what there is room for of bufs, and does not wait. It is called in
	// a step of write. What it has taken need not stay in bufs. wait asks the caller
	// for another write, with a step that returns false for as long as wait is set. An
	// error means that no byte was taken. One that matches EPIPE, ECONNRESET or
	// net.ErrClosed, or for which errno.HostSilent holds, is met by read as well.
	writev(at uintptr, bufs [][]byte) (n int, wait bool, err error)

	// closeWrite ends this direction behind all that writev has taken. The peer reads
	// io.EOF then. A step of write may call it.
	closeWrite() error

	// unsent is how many of the bytes that writev has taken are not on their way to
	// the peer yet, as far as the system tells.
	unsent() int

	// close ends the link and frees what it holds. The peer's read fails if reset is
	// set. Else it finds io.EOF behind what was on its way, unless this end had bytes
	// to read.
	close(reset bool) error

	// closeAfter is like close, for a stream that must still send words, such as a
	// Terminate. It sends them behind all that writev has taken, and ends this direction.
	// It closes the link, and returns, when the peer has ended its direction too, or after
	// lastWordsTimeout.
	closeAfter(words []byte)
}

// A directLink is a link of which the peer has what writev has taken, whatever becomes of this
// process. So the caller of a post can wait until its data was taken from where it lies.
type directLink interface {
	link

	// interruptWrite ends the write that waits, and those that follow, until resumeWrite is
	// called. The error matches os.ErrDeadlineExceeded. Both are for any goroutine.
	interruptWrite()
	resumeWrite()

	// acknowledged tells whether the peer's host has everything that was written. It is called
	// after closeWrite.
	acknowledged() ibv.Ack
}

// lastWordsTimeout bounds how long a link exists without its queue pair to send a
// Terminate.
const lastWordsTimeout = time.Second

// An opener makes the link for a connection whose MPA start-up over conn has agreed
// on s, which it may change. Both ends must use links with the same bytes on the wire.
// The two links over TCP fit each other. The link takes conn over; on error conn is the
// caller's.
type opener func(conn net.Conn, s *setup) (link, error)

// chooseLink returns the opener of the device's links.
func chooseLink(cfg *Config) opener {
	if cfg.portable {
		return openPortable
	}
	return openShared
}
