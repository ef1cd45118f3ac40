//go:build amd64 || arm64

package iwarp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// A controlSocket is the Unix socket over which the two ends of a shared link have met. Afterwards it
// carries offers of larger rings, and the answers. The end of its stream means that the peer has
// gone, for whatever reason.
type controlSocket struct {
	conn *net.UnixConn
	raw  syscall.RawConn
}

// A controlMessage is a byte of the control socket. Those from 12 to 20 offer a ring of that power of
// two, whose descriptor comes with the byte.
type controlMessage byte

const (
	offerRefused  controlMessage = iota // offerRefused answers that the peer must not use the ring.
	offerAccepted                       // offerAccepted answers that the peer may move to the ring.
)

func newControlSocket(conn *net.UnixConn) (*controlSocket, error) {
	raw, err := conn.SyscallConn()
	return &controlSocket{conn, raw}, err
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

// close tells the peer that this end has gone. What the peer has sent and nobody has received is
// dropped, which can take as long as it likes, so nobody waits for that.
func (c *controlSocket) close() {
	unread := 0
	c.raw.Control(func(fd uintptr) {
		unix.Shutdown(int(fd), unix.SHUT_RDWR) // Nothing more can come.
		unread, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ)
	})
	if unread == 0 {
		c.conn.Close()
		return
	}
	go func() {
		hearing <- struct{}{}
		c.conn.Close()
		<-hearing
	}()
}

// hearing bounds how many goroutines of this process deal with descriptors of peers. Whoever closes
// one may wait, and has a thread of the system meanwhile.
var hearing = make(chan struct{}, 64)
