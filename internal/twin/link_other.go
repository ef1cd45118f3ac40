//go:build !linux

package twin

import "net"

// listenSmall listens on loopback. On these systems the size of the socket buffers is set
// when the connections exist.
func listenSmall(bool) (*net.TCPListener, error) {
	return net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
}

// dialSmall connects with small socket buffers, or with those of the system.
func dialSmall(target string, usual bool) (*net.TCPConn, error) {
	nc, err := net.Dial("tcp4", target)
	if err != nil {
		return nil, err
	}
	c := nc.(*net.TCPConn)
	if !usual {
		c.SetReadBuffer(8 << 10)
		c.SetWriteBuffer(8 << 10)
	}
	return c, nil
}
