package shim

import (
	"context"
	"net"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet"
)

// TCPConn stands for net.TCPConn.
type TCPConn = rdmanet.Conn

// TCPListener stands for net.TCPListener.
type TCPListener struct{ *rdmanet.Listener }

// Addr returns the address that the suite expects.
func (l *TCPListener) Addr() net.Addr { return fromDevice(l.Listener.Addr()) }

// AcceptTCP is Accept with the concrete type of the connection.
func (l *TCPListener) AcceptTCP() (*TCPConn, error) {
	c, err := l.Accept()
	if err != nil {
		return nil, err
	}
	return c.(*TCPConn), nil
}

// Listen stands for net.Listen.
func Listen(network, address string) (net.Listener, error) {
	return new(ListenConfig).Listen(context.Background(), network, address)
}

// ListenTCP stands for net.ListenTCP.
func ListenTCP(network string, laddr *net.TCPAddr) (*TCPListener, error) {
	l, err := Listen(network, tcpAddress(laddr))
	if err != nil {
		return nil, err
	}
	return l.(*TCPListener), nil
}

// ListenConfig stands for net.ListenConfig.
type ListenConfig struct {
	Control         func(network, address string, c syscall.RawConn) error
	KeepAlive       time.Duration
	KeepAliveConfig net.KeepAliveConfig
}

// Listen stands for the method of net.ListenConfig.
func (lc *ListenConfig) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	if !overRDMA(network) {
		plain := net.ListenConfig{Control: lc.Control, KeepAlive: lc.KeepAlive, KeepAliveConfig: lc.KeepAliveConfig}
		return plain.Listen(ctx, network, address)
	}
	requireNoBubble()
	l, err := new(rdmanet.ListenConfig).Listen(ctx, network, toDevice(network, address, false))
	if err != nil {
		return nil, err
	}
	return &TCPListener{l.(*rdmanet.Listener)}, nil
}

// Dial stands for net.Dial.
func Dial(network, address string) (net.Conn, error) { return new(Dialer).Dial(network, address) }

// DialTimeout stands for net.DialTimeout.
func DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	return (&Dialer{Timeout: timeout}).Dial(network, address)
}

// DialTCP stands for net.DialTCP.
func DialTCP(network string, laddr, raddr *net.TCPAddr) (*TCPConn, error) {
	d := new(Dialer)
	if laddr != nil {
		d.LocalAddr = laddr
	}
	c, err := d.Dial(network, tcpAddress(raddr))
	if err != nil {
		return nil, err
	}
	return c.(*TCPConn), nil
}

// Dialer stands for net.Dialer. It has the fields that suites set.
type Dialer struct {
	Timeout         time.Duration
	Deadline        time.Time
	LocalAddr       net.Addr
	FallbackDelay   time.Duration
	KeepAlive       time.Duration
	KeepAliveConfig net.KeepAliveConfig
	Resolver        *net.Resolver
	Control         func(network, address string, c syscall.RawConn) error
}

// Dial stands for the method of net.Dialer.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext stands for the method of net.Dialer.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if !overRDMA(network) {
		plain := net.Dialer{
			Timeout: d.Timeout, Deadline: d.Deadline, LocalAddr: d.LocalAddr, FallbackDelay: d.FallbackDelay,
			KeepAlive: d.KeepAlive, KeepAliveConfig: d.KeepAliveConfig, Resolver: d.Resolver, Control: d.Control,
		}
		return plain.DialContext(ctx, network, address)
	}
	requireNoBubble()
	rd := rdmanet.Dialer{
		Timeout: d.Timeout, Deadline: d.Deadline, LocalAddr: localAddr(d.LocalAddr), FallbackDelay: d.FallbackDelay,
		Resolver: d.Resolver,
	}
	c, err := rd.DialContext(ctx, network, toDevice(network, address, true))
	if err != nil {
		return nil, err
	}
	count(c.(*rdmanet.Conn))
	return c, nil
}

// localAddr is like toDevice, for Dialer.LocalAddr.
func localAddr(addr net.Addr) net.Addr {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || tcp == nil || len(tcp.IP) == 0 || !device4.IsValid() {
		return addr
	}
	ip := deviceFor(tcp.AddrPort().Addr(), false)
	return &net.TCPAddr{IP: ip.AsSlice(), Port: tcp.Port, Zone: ip.Zone()}
}
