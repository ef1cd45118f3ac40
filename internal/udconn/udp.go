package udconn

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/neterr"
)

// udpSocket is the UDP socket of a Conn. A datagram of the Conn is one of UDP, with nothing
// added, so a peer need not be rdmanet.
type udpSocket struct {
	*shared
	conn      *net.UDPConn
	at        netip.AddrPort // at is the local address.
	connected bool
	limit     int // limit is the greatest length of a datagram, in bytes.
}

// The headers in front of the payload, and the most that the length field of UDP leaves for
// the payload (RFC 768, RFC 8200).
const (
	udpHeaders4 = 20 + 8
	udpHeaders6 = 40 + 8
	maxUDP4     = 65535 - udpHeaders4
	maxUDP6     = 65535 - 8
)

// listenUDP opens a socket at a local address. A valid group is one that the socket will be
// a member of: the socket is bound to every address then, and the port may be shared.
func listenUDP(ctx context.Context, s *shared, local netip.AddrPort, group netip.Addr) (*udpSocket, error) {
	lc := net.ListenConfig{Control: socketOptions}
	network, host := "udp", ""
	if a := local.Addr(); a.IsValid() {
		host = a.String()
		if network = "udp6"; a.Is4() {
			network = "udp4"
		}
	}
	if group.IsValid() { // Package net binds every address in place of a group's.
		host = group.WithZone("").String()
	}
	c, err := lc.ListenPacket(ctx, network, net.JoinHostPort(host, strconv.Itoa(int(local.Port()))))
	if err != nil {
		return nil, neterr.Inner(err)
	}
	return newUDPSocket(s, c.(*net.UDPConn), false), nil
}

// dialUDP opens a socket that is connected to a peer.
func dialUDP(ctx context.Context, s *shared, local, remote netip.AddrPort) (*udpSocket, error) {
	d := net.Dialer{ControlContext: func(_ context.Context, network, address string, c syscall.RawConn) error {
		return socketOptions(network, address, c)
	}}
	if local.IsValid() {
		d.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	c, err := d.DialContext(ctx, "udp", remote.String())
	if err != nil {
		return nil, neterr.Inner(err)
	}
	return newUDPSocket(s, c.(*net.UDPConn), true), nil
}

func newUDPSocket(s *shared, c *net.UDPConn, connected bool) *udpSocket {
	at := unmapped(c.LocalAddr().(*net.UDPAddr).AddrPort())
	return &udpSocket{shared: s, conn: c, at: at, connected: connected, limit: udpLimit(at.Addr())}
}

// peer returns the address that datagrams of the peer of a connected socket are from.
func (u *udpSocket) peer() netip.AddrPort {
	return unmapped(u.conn.RemoteAddr().(*net.UDPAddr).AddrPort())
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// socketOptions sets what all sockets have in common.
func socketOptions(network, _ string, c syscall.RawConn) error {
	if err := dontFragment(network, c); err != nil {
		return err
	}
	return ownGroups(network, c)
}

// udpLimit returns what fits a packet of every interface that an address may lead out by.
func udpLimit(local netip.Addr) int {
	headers, most := udpHeaders6, maxUDP6
	if local.Is4() {
		headers, most = udpHeaders4, maxUDP4
	}
	ifis, err := net.Interfaces()
	if err != nil {
		return most
	}
	limit := most
	for _, ifi := range ifis {
		if ifi.Flags&net.FlagUp != 0 && ifi.MTU > headers && (local.IsUnspecified() || hasAddr(&ifi, local)) {
			limit = min(limit, ifi.MTU-headers)
		}
	}
	return limit
}

func (u *udpSocket) info() Info {
	return Info{Device: u.Software, Transport: "UDP", Port: 1, MTU: u.limit}
}

func (u *udpSocket) send(b []byte, to netip.AddrPort) (err error) {
	if u.connected {
		_, err = u.conn.Write(b)
	} else {
		_, err = u.conn.WriteToUDPAddrPort(b, to)
	}
	return neterr.Inner(err)
}

func (u *udpSocket) setWriteDeadline(t time.Time) error {
	return neterr.Inner(u.conn.SetWriteDeadline(t))
}

func (u *udpSocket) setReadBuffer(bytes int) error {
	return neterr.Inner(u.conn.SetReadBuffer(bytes))
}

func (u *udpSocket) setWriteBuffer(bytes int) error {
	return neterr.Inner(u.conn.SetWriteBuffer(bytes))
}

func (u *udpSocket) close() error { return neterr.Inner(u.conn.Close()) }

// receive delivers what arrives until the socket is closed. It empties the socket whether
// anybody reads or not, so that what is dropped is counted. received is called with the
// sender of each datagram.
func (u *udpSocket) receive(to *receiver, received func(from netip.AddrPort)) {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := u.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if u.closed.Load() || errors.Is(err, net.ErrClosed) {
				return
			}
			to.report(neterr.Inner(err))
			select {
			case <-time.After(time.Millisecond): // The error may be there to stay.
			case <-u.ctx.Done():
			}
			continue
		}
		from = unmapped(from)
		received(from)
		to.mu.Lock()
		to.deliver(from, false, buf[:n])
		to.wakeReaders()
		to.mu.Unlock()
	}
}
