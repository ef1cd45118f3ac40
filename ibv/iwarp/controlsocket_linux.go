//go:build amd64 || arm64

package iwarp

import (
	"errors"
	"net"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// A controlSocket is the Unix socket over which the two ends of a shared link have met. Afterwards it
// carries offers of larger rings, and the answers. The end of its stream means that the peer has
// gone, for whatever reason.
type controlSocket struct {
	conn   *net.UnixConn
	raw    syscall.RawConn
	closed atomic.Bool
}

// A controlMessage is a byte of the control socket. Those from 12 to 20 offer a ring of that power of
// two, whose descriptor comes with the byte. The others answer an offer.
type controlMessage byte

const (
	accepted controlMessage = 1 + iota // whoever has offered the ring may move to it
	refused                            // whoever has offered the ring must not use it
	awaited                            // never sent: the peer has not answered
)

// maxSharing bounds the ends of this process that have shared memory, or wait for their control
// sockets to be closed. Each has up to six mappings, and Linux gives a process 65,530
// (vm.max_map_count). One that has used them up gets no memory. It is a variable for tests.
var maxSharing atomic.Int32

func init() { maxSharing.Store(8192) }

// sharers counts these ends.
var sharers atomic.Int32

var (
	errSharedMany        = errors.New("too many connections of this process have it already")
	errSharedDescriptors = errors.New("a quarter of the file descriptors that this process may have are in use: raise the limit (ulimit -n) for more connections with shared memory")
)

// newControlSocket makes a control socket of a new Unix socket, and takes that over. It returns an
// error if this process should not have more ends with shared memory, because it has many, or uses
// a quarter of the descriptors that it may have: those that shared memory takes could be missing to
// accept connections. With all it may use all descriptors. The kernel gives out the lowest free
// number, so at least as many as conn's are in use.
func newControlSocket(conn *net.UnixConn, all bool) (*controlSocket, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, os.NewSyscallError("getrlimit", err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var number uint64
	if err := raw.Control(func(fd uintptr) { number = uint64(fd) }); err != nil {
		return nil, err
	}
	if number >= limit.Cur/4 && !all {
		return nil, errSharedDescriptors
	}
	if sharers.Add(1) > maxSharing.Load() {
		sharers.Add(-1)
		return nil, errSharedMany
	}
	return &controlSocket{conn: conn, raw: raw}, nil
}

// send sends a message, with descriptors. It does not wait.
func (c *controlSocket) send(m controlMessage, fds ...int) (err error) {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if cerr := c.raw.Control(func(fd uintptr) {
		err = unix.Sendmsg(int(fd), []byte{byte(m)}, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}); err == nil {
		err = cerr
	}
	return err
}

// receive returns the next message, and the descriptor that came with it, or -1. The caller closes
// that. ok is false if there is no message: receive does not wait.
func (c *controlSocket) receive() (m controlMessage, ring int, ok bool) {
	ring = -1
	c.raw.Control(func(fd uintptr) {
		b, oob := make([]byte, 1), make([]byte, unix.SizeofCmsghdr+4) // The kernel drops further descriptors.
		n, oobn, _, _, err := unix.Recvmsg(int(fd), b, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if err != nil || n == 0 {
			return
		}
		m, ok = controlMessage(b[0]), true
		if fds := rightsIn(oob[:oobn]); len(fds) > 0 {
			ring = fds[0]
		}
	})
	return m, ring, ok
}

// close tells the peer that this end has gone. It may be called more than once, and with any lock
// held: it waits for nothing.
func (c *controlSocket) close() {
	if c.closed.Swap(true) {
		return
	}
	c.raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	aside(func() {
		c.conn.Close()
		sharers.Add(-1)
	})
}

// aside runs f in a goroutine of its own. That is for calls that a peer can have wait as long as it
// likes: those that close, as the last ones, a descriptor that has come from the peer, or that the
// peer has sent and nobody has received. A TCP socket may linger then. No lock may be held, and no
// call of the program may wait for f. Each call that waits has a thread of the system, so a few run
// at a time. The others wait, and maxSharing bounds them.
func aside(f func()) {
	go func() {
		waiting <- struct{}{}
		defer func() { <-waiting }()
		f()
	}()
}

// waiting has a token for each goroutine of aside that runs.
var waiting = make(chan struct{}, 64)
