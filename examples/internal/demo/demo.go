// Package demo has what the example programs share: the flags, and the demonstration that
// runs a server and its client as two processes.
package demo

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

// ErrDiffers is in the errors of programs that have read other bytes than were sent, or
// fewer. The tests of the programs tell it from other errors.
var ErrDiffers = errors.New("what came is not what was sent")

// A Program is a server and its client.
type Program struct {
	// Serve calls Ready and then serves ln until ln is closed.
	Serve func(ln net.Listener) error

	// Client uses the server at addr, which Serve has passed to Ready. It returns its
	// result in one line, or an error.
	Client func(ctx context.Context, dial DialFunc, addr string) (string, error)

	// Args is set if the client takes arguments behind the flags.
	Args bool

	// A program of datagrams sets ServePacket and ClientPacket in place of Serve and
	// Client. Its client dials, or opens a PacketConn of its own.
	ServePacket  func(p net.PacketConn) error
	ClientPacket func(ctx context.Context, dial DialFunc, listen ListenPacketFunc, addr string) (string, error)
}

// ListenPacketFunc opens a PacketConn at any address and port.
type ListenPacketFunc func(ctx context.Context) (net.PacketConn, error)

// DialFunc connects to addr.
type DialFunc func(ctx context.Context, addr string) (net.Conn, error)

// options are the flags that all examples have.
type options struct {
	serve    string
	dial     string
	network  string
	device   string
	untilEOF bool
}

// Main parses the flags and runs p as they request. It does not return. The exit status is
// 0 only if everything was right.
func Main(p Program) {
	var o options
	flag.StringVar(&o.serve, "serve", "", "be the server on this `address`")
	flag.StringVar(&o.dial, "dial", "", "be the client of the server at this `address`")
	flag.StringVar(&o.network, "network", "rdma", fmt.Sprintf("rdma, rdma4 or rdma6; or %[1]s, %[1]s4, %[1]s6 through package net", p.plain()))
	flag.StringVar(&o.device, "device", "", "RDMA `device`, for instance iwarp; by default rdmanet chooses")
	flag.BoolVar(&o.untilEOF, "until-eof", false, "with -serve: stop at the end of standard input")
	flag.Usage = usage
	flag.Parse()

	err := p.check(o, flag.Args())
	if err == nil {
		err = p.run(o)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name(), err)
		os.Exit(1)
	}
	os.Exit(0)
}

// plain is the network of package net that a program can use in place of rdmanet.
func (p Program) plain() string {
	if p.ServePacket != nil {
		return "udp"
	}
	return "tcp"
}

// check finds what is wrong with the flags and the arguments behind them.
func (p Program) check(o options, args []string) error {
	family := strings.TrimRight(o.network, "46")
	switch {
	case family != "rdma" && family != p.plain() || len(o.network) > len(family)+1:
		return fmt.Errorf("-network %q: want rdma or %s, with 4 or 6 behind it for IPv4 or IPv6 only", o.network, p.plain())
	case o.serve != "" && o.dial != "":
		return errors.New("-serve and -dial exclude each other")
	case len(args) > 0 && (!p.Args || o.serve != ""):
		return fmt.Errorf("what is %q? There are only flags, see -h", args[0])
	}
	for _, arg := range args {
		if strings.HasPrefix(arg, "-") {
			return fmt.Errorf("flags go in front of other arguments: %s", arg)
		}
	}
	return nil
}

func usage() {
	fmt.Fprintf(flag.CommandLine.Output(), "usage: %s [flags]\nWithout -serve and -dial it runs both, as two processes.\n\n", name())
	flag.PrintDefaults()
}

func name() string { return filepath.Base(os.Args[0]) }

func (p Program) run(o options) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	switch {
	case o.serve != "":
		return p.server(ctx, o)
	case o.dial != "":
		return p.client(ctx, o)
	default:
		return p.both(ctx, o)
	}
}

// server serves until it is interrupted or standard input ends.
func (p Program) server(ctx context.Context, o options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if o.untilEOF {
		go func() {
			io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
	}

	if p.ServePacket != nil {
		pc, err := o.listenPacket(ctx, o.serve)
		if err != nil {
			return err
		}
		defer context.AfterFunc(ctx, func() { pc.Close() })()
		return ended(ctx, p.ServePacket(pc))
	}
	ln, err := o.listen(ctx)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	return ended(ctx, p.Serve(ln))
}

// ended returns the error of a server that has ended.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil // The server was asked to stop, so the closed listener is no failure.
	}
	return err
}

// client runs the client against the server that -dial names.
func (p Program) client(ctx context.Context, o options) error {
	found, err := p.use(ctx, o, o.dial)
	if err != nil {
		return err
	}
	fmt.Println("ok:", found)
	return nil
}

// use runs the client against the server at addr.
func (p Program) use(ctx context.Context, o options, addr string) (string, error) {
	if p.ClientPacket != nil {
		return p.ClientPacket(ctx, o.packetDialer(), func(ctx context.Context) (net.PacketConn, error) { return o.listenPacket(ctx, ":0") }, addr)
	}
	return p.Client(ctx, o.dialer(), addr)
}

// readyPrefix is the beginning of the line that reports a server's address.
const readyPrefix = "listening on "

// Ready reports that the server is ready. addr is the address for -dial.
func Ready(addr string) { fmt.Println(readyPrefix + addr) }

// loopback is an address that only this machine reaches, with any free port.
func (o options) loopback() string {
	if strings.HasSuffix(o.network, "6") {
		return "[::1]:0"
	}
	return "127.0.0.1:0"
}
