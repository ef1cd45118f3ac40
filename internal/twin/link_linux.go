package twin

import (
	"context"
	"net"
	"syscall"
)

// smallBuffer is the size of the socket buffers of a slow link. It is small, so that few
// bytes are on their way.
const smallBuffer = 8 << 10

// listenSmall listens on loopback, with small socket buffers or with those of the system.
// The size is set before the connections are made, because TCP does not reduce a window.
func listenSmall(usual bool) (*net.TCPListener, error) {
	var lc net.ListenConfig
	if !usual {
		lc.Control = small
	}
	ln, err := lc.Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return ln.(*net.TCPListener), nil
}

// dialSmall is the same for the connection to the other end.
func dialSmall(target string, usual bool) (*net.TCPConn, error) {
	var d net.Dialer
	if !usual {
		d.Control = small
	}
	c, err := d.Dial("tcp4", target)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func small(_, _ string, rc syscall.RawConn) error {
	var err error
	if cerr := rc.Control(func(fd uintptr) {
		for _, option := range []int{syscall.SO_RCVBUF, syscall.SO_SNDBUF} {
			if e := syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, option, smallBuffer); e != nil {
				err = e
			}
		}
	}); cerr != nil {
		return cerr
	}
	return err
}
