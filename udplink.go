package rdmanet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/neterr"
)

// Datagrams over the software device: each is one of UDP, with nothing added, so
// that peers need not be rdmanet.

const softwareName = iwarp.Name

// isSoftware reports whether a provider is the software device.
func isSoftware(p ibv.Provider) bool { return p.Name() == softwareName }

// udpLink is a UDP socket.
type udpLink struct {
	p         *packetConn
	conn      *net.UDPConn
	connected bool
	limit     int
}

// Headers in front of a datagram's payload, and the most that UDP's length field
// leaves for that (RFC 768, RFC 8200).
const (
	udpHeaders4 = 20 + 8
	udpHeaders6 = 40 + 8
	maxUDP4     = 65535 - udpHeaders4
	maxUDP6     = 65535 - 8
)

// openUDP opens the socket, connected if remote is valid.
func (p *packetConn) openUDP(ctx context.Context, local, remote netip.AddrPort) error {
	l := &udpLink{p: p, connected: remote.IsValid()}
	if l.connected {
		d := net.Dialer{ControlContext: func(_ context.Context, network, address string, c syscall.RawConn) error {
			return socketOptions(network, address, c)
		}}
		if local.IsValid() {
			d.LocalAddr = udpAddr(local)
		}
		c, err := d.DialContext(ctx, "udp", remote.String())
		if err != nil {
			return neterr.Inner(err)
		}
		l.conn = c.(*net.UDPConn)
		peer := l.conn.RemoteAddr().(*net.UDPAddr).AddrPort() // as datagrams will be from it
		p.toward(netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port()))
	} else {
		lc := net.ListenConfig{Control: socketOptions}
		network, host := "udp", ""
		if a := local.Addr(); a.IsValid() {
			host = a.String()
			if network = "udp6"; a.Is4() {
				network = "udp4"
			}
		}
		if p.group.IsValid() { // for which package net binds every address, and shares the port
			host = p.group.WithZone("").String()
		}
		c, err := lc.ListenPacket(ctx, network, net.JoinHostPort(host, strconv.Itoa(int(local.Port()))))
		if err != nil {
			return neterr.Inner(err)
		}
		l.conn = c.(*net.UDPConn)
	}
	at := l.conn.LocalAddr().(*net.UDPAddr).AddrPort()
	p.at(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
	l.limit = udpLimit(p.local.Addr())
	p.soft = l
	return nil
}

// socketOptions sets what all sockets have in common.
func socketOptions(network, _ string, c syscall.RawConn) error {
	if err := dontFragment(network, c); err != nil {
		return err
	}
	return ownGroups(network, c)
}

// udpLimit is what fits a packet of every interface that an address may lead out by.
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

func hasAddr(ifi *net.Interface, addr netip.Addr) bool {
	addrs, err := ifi.Addrs()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		// A prefix may stand for more than the address it is written with: all of
		// 127.0.0.0/8 is the loopback interface's.
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		if ok && (ip.Unmap() == addr.WithZone("") || ip.IsLoopback() && n.Contains(addr.AsSlice())) {
			return true
		}
	}
	return false
}

func (l *udpLink) send(b []byte, to netip.AddrPort) (err error) {
	if l.connected {
		_, err = l.conn.Write(b)
	} else {
		_, err = l.conn.WriteToUDPAddrPort(b, to)
	}
	return neterr.Inner(err)
}

// receive takes what comes, for as long as the socket is open. The socket is emptied
// whether anybody reads or not, so that what is dropped is counted.
func (l *udpLink) receive() {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := l.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if l.p.closed.Load() || errors.Is(err, net.ErrClosed) {
				return
			}
			l.p.tell(neterr.Inner(err))
			select {
			case <-time.After(time.Millisecond): // for one that does not go away
			case <-l.p.ctx.Done():
			}
			continue
		}
		l.p.received(netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), buf[:n])
	}
}

// received takes a datagram that came by the software device.
func (p *packetConn) received(from netip.AddrPort, payload []byte) {
	if p.ud != nil {
		p.ud.peers.heardSoft(from, p.now())
	}
	p.rmu.Lock()
	defer p.rmu.Unlock()
	p.deliver(from, payload)
	p.rouse()
}
