package shim

import (
	"context"
	"crypto/tls"
	"net"
)

// TLSListen stands for tls.Listen.
func TLSListen(network, laddr string, config *tls.Config) (net.Listener, error) {
	l, err := Listen(network, laddr)
	if err != nil {
		return nil, err
	}
	return tls.NewListener(l, config), nil
}

// TLSDial stands for tls.Dial.
func TLSDial(network, addr string, config *tls.Config) (*tls.Conn, error) {
	return TLSDialWithDialer(new(Dialer), network, addr, config)
}

// TLSDialWithDialer stands for tls.DialWithDialer.
func TLSDialWithDialer(dialer *Dialer, network, addr string, config *tls.Config) (*tls.Conn, error) {
	c, err := (&TLSDialer{NetDialer: dialer, Config: config}).Dial(network, addr)
	if err != nil {
		return nil, err
	}
	return c.(*tls.Conn), nil
}

// TLSDialer stands for tls.Dialer.
type TLSDialer struct {
	NetDialer *Dialer
	Config    *tls.Config
}

// Dial stands for the method of tls.Dialer.
func (d *TLSDialer) Dial(network, addr string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, addr)
}

// DialContext stands for the method of tls.Dialer. Timeout and Deadline of NetDialer
// bound the handshake too.
func (d *TLSDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := d.NetDialer
	if dialer == nil {
		dialer = new(Dialer)
	}
	if dialer.Timeout != 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, dialer.Timeout)
		defer cancel()
	}
	if !dialer.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, dialer.Deadline)
		defer cancel()
	}
	plain, err := dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	config := d.Config
	if config == nil {
		config = new(tls.Config)
	}
	if config.ServerName == "" {
		config = config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	c := tls.Client(plain, config)
	if err := c.HandshakeContext(ctx); err != nil {
		plain.Close()
		return nil, err
	}
	return c, nil
}
