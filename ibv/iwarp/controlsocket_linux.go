//go:build amd64 || arm64

package iwarp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// A controlSocket is the Unix socket over which the two ends of a shared link have met. Afterwards it
// carries the descriptors of new rings, each with a byte. The end of its stream means that the peer
// has gone, for whatever reason.
type controlSocket struct {
	conn *net.UnixConn
	raw  syscall.RawConn
}

func newControlSocket(conn *net.UnixConn) (*controlSocket, error) {
	raw, err := conn.SyscallConn()
	return &controlSocket{conn, raw}, err
}

// give sends a descriptor. It does not wait.
func (c *controlSocket) give(ring int) (err error) {
	if cerr := c.raw.Control(func(fd uintptr) {
		err = unix.Sendmsg(int(fd), []byte{0}, unix.UnixRights(ring), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}); err == nil {
		err = cerr
	}
	return err
}

// take returns the descriptor that the peer has sent next, or -1. It does not wait. The caller
// closes the descriptor.
func (c *controlSocket) take() (ring int) {
	ring = -1
	c.raw.Control(func(fd uintptr) {
		oob := make([]byte, unix.SizeofCmsghdr+4) // The kernel drops further descriptors.
		_, oobn, _, _, err := unix.Recvmsg(int(fd), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			return
		}
		for _, got := range rightsIn(oob[:oobn]) {
			if ring >= 0 {
				unix.Close(ring)
			}
			ring = got
		}
	})
	return ring
}

func (c *controlSocket) close() { c.conn.Close() }
