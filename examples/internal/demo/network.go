package demo

import (
	"context"
	"net"
	"strings"

	"github.com/rdmanet/rdmanet"
)

// listen opens the listener of a server by rdmanet or by package net. Both ListenConfigs
// have the same method, so the rest of a program does not depend on the choice.
func (o options) listen(ctx context.Context) (net.Listener, error) {
	if o.plainTCP() {
		var lc net.ListenConfig
		return lc.Listen(ctx, o.network, o.serve)
	}
	lc := rdmanet.ListenConfig{Config: rdmanet.Config{Device: o.device}}
	return lc.Listen(ctx, o.network, o.serve)
}

// dialer returns the function that dials, from rdmanet or from package net.
func (o options) dialer() DialFunc {
	dial := (&rdmanet.Dialer{Config: rdmanet.Config{Device: o.device}}).DialContext
	if o.plainTCP() {
		dial = new(net.Dialer).DialContext
	}
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return dial(ctx, o.network, addr)
	}
}

// listenPacket is listen for datagrams.
func (o options) listenPacket(ctx context.Context, address string) (net.PacketConn, error) {
	if o.plainUDP() {
		var lc net.ListenConfig
		return lc.ListenPacket(ctx, o.network, address)
	}
	lc := rdmanet.ListenConfig{Config: rdmanet.Config{Device: o.device}}
	return lc.ListenPacket(ctx, o.network, address)
}

// packetDialer is dialer for datagrams. For rdmanet the name of the network makes the
// difference.
func (o options) packetDialer() DialFunc {
	dial, network := (&rdmanet.Dialer{Config: rdmanet.Config{Device: o.device}}).DialContext, strings.Replace(o.network, "rdma", "udp", 1)
	if o.plainUDP() {
		dial = new(net.Dialer).DialContext
	}
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return dial(ctx, network, addr)
	}
}

// plainUDP is plainTCP for datagrams.
func (o options) plainUDP() bool { return strings.HasPrefix(o.network, "udp") }

// plainTCP reports whether the network is one of package net. (For rdmanet itself the tcp
// networks are other names for the rdma networks.)
func (o options) plainTCP() bool { return strings.HasPrefix(o.network, "tcp") }
