//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
)

const defaultBacklog = 1024

// listener implements ibv.Listener. Requests wait for Accept in a queue. While the queue is
// full, further requests are rejected.
type listener struct {
	p      *Provider
	ps     C.int // ps is the port space.
	handle C.uintptr_t
	addr   netip.AddrPort

	ready chan *id
	done  chan struct{}
	gone  chan struct{} // gone is closed when the device was removed.
	lost  sync.Once

	ids []*C.struct_rn_cm_id // ids has one ID, or one for each family.

	mu     sync.Mutex
	closed bool
}

// Listen binds an address for rdma_cm. An unspecified address is that of all devices, also
// of those that are added later.
func (p *Provider) Listen(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	l, err := p.listen(portSpaceTCP, local, backlog)
	if err != nil {
		return nil, fmt.Errorf("%s: listen on %v: %w", Name, local, listenError(local.Addr(), err))
	}
	return l, nil
}

func (p *Provider) listen(portSpace C.int, local netip.AddrPort, backlog int) (*listener, error) {
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	l := &listener{p: p, ps: portSpace, ready: make(chan *id, backlog), done: make(chan struct{}), gone: make(chan struct{})}
	l.handle = addHandle(l)
	if err := l.listen(local, backlog); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func (l *listener) listen(local netip.AddrPort, backlog int) error {
	if local.Addr().IsLoopback() && !l.p.onLoopback() {
		// rdma_cm would accept it, and siw would then hold the port for connections that
		// are never made.
		return syscall.EADDRNOTAVAIL
	}
	// rdma_cm chooses a port that it has free itself. The other family may use that port,
	// or TCP, whose ports siw needs too.
	for try := 1; ; try++ {
		err := l.bindAll(local, backlog)
		if err != syscall.EADDRINUSE || local.Port() != 0 || try == chooseAgain {
			return err
		}
		if err := l.destroy(); err != nil {
			return err
		}
	}
}

// chooseAgain is how many ports are tried before the error is that none is free.
const chooseAgain = 10

// bindAll binds one address, or all addresses. Those of IPv6 get the port of those of IPv4.
func (l *listener) bindAll(local netip.AddrPort, backlog int) error {
	if local.Addr().IsValid() {
		return l.bind(local, backlog)
	}
	// One socket for both families would not do: siw would reset connections by IPv4.
	if err := l.bind(netip.AddrPortFrom(netip.IPv4Unspecified(), local.Port()), backlog); err != nil {
		return err
	}
	err := l.bind(netip.AddrPortFrom(netip.IPv6Unspecified(), l.addr.Port()), backlog)
	if err == syscall.EAFNOSUPPORT || err == syscall.EADDRNOTAVAIL { // The host has no IPv6.
		return nil
	}
	return err
}

// onLoopback reports whether a device has been put on the loopback interface.
func (p *Provider) onLoopback() bool {
	devs, err := p.lib.list()
	if err != nil {
		return false
	}
	for _, d := range devs {
		for port := 1; port <= d.attr.Ports; port++ {
			if ifi, err := net.InterfaceByName(d.netDev(port)); err == nil && ifi.Flags&net.FlagLoopback != 0 {
				return true
			}
		}
	}
	return false
}

func (l *listener) bind(at netip.AddrPort, backlog int) error {
	var c *C.struct_rn_cm_id
	if err := errno(C.rn_create_id(l.p.lib.channel, l.handle, l.ps, &c)); err != nil {
		return err
	}
	l.ids = append(l.ids, c)
	if at.Addr().Is6() && !at.Addr().Is4In6() {
		if err := errno(C.rn_set_option(c, optionAFOnly, 1)); err != nil {
			return err
		}
	}
	addr := toSockaddr(at)
	if err := errno(C.rn_bind_addr(c, addr.pointer())); err != nil {
		return err
	}
	if l.ps == portSpaceUDP {
		if err := l.p.checkUD(c); err != nil {
			return err
		}
	}
	if err := errno(C.rn_listen(c, C.int(backlog))); err != nil {
		return err
	}
	l.addr = fromSockaddr(&c.src_storage)
	return nil
}

func (l *listener) destroy() (err error) {
	for _, c := range l.ids {
		err = errors.Join(err, errno(C.rn_destroy_id(c)))
	}
	l.ids = nil
	return err
}

// listenError explains the error if an address is not that of a device. For an unspecified
// address the error means that the port is not free.
func listenError(local netip.Addr, err error) error {
	switch {
	case err == syscall.EADDRNOTAVAIL && (!local.IsValid() || local.IsUnspecified()):
		return syscall.EADDRINUSE
	case err == syscall.ENODEV, err == syscall.EADDRNOTAVAIL:
		return fmt.Errorf("no RDMA device has this address: %w", err)
	}
	return err
}

// request handles a connection request. The only goroutine that takes events calls it, so
// it must not wait.
func (l *listener) request(info *C.struct_rn_event_info) {
	i := &id{p: l.p, passive: true, ud: l.ps == portSpaceUDP, c: info.id, steps: make(chan step, 8)}
	s := newStep(info)
	i.private = s.private
	i.param = s.param
	i.remote = fromSockaddr(&i.c.dst_storage)
	i.handle = addHandle(i)
	C.rn_set_handle(i.c, i.handle)
	if err := i.find(); err != nil {
		i.Close()
		return
	}
	// These are the depths that the peer proposes, as limits of this side.
	i.param.ResponderResources = min(i.param.ResponderResources, i.dev.attr.MaxQPRdAtom)
	i.param.InitiatorDepth = min(i.param.InitiatorDepth, i.dev.attr.MaxQPInitRdAtom)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		select {
		case l.ready <- i:
			return
		default: // The program does not accept, and the queue is full.
		}
	}
	i.Reject(nil)
	i.Close()
}

func (l *listener) Addr() netip.AddrPort { return l.addr }

func (l *listener) Accept(ctx context.Context) (ibv.ID, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case i := <-l.ready:
		return i, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-l.gone:
		return nil, fmt.Errorf("%s: accept on %v: device removed: %w", Name, l.addr, syscall.ENODEV)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *listener) Close() error {
	l.mu.Lock()
	closed := l.closed
	l.closed = true
	l.mu.Unlock()
	if closed {
		return net.ErrClosed
	}
	removeHandle(l.handle)
	close(l.done)
	err := l.destroy()
	for {
		select {
		case i := <-l.ready:
			i.Reject(nil)
			i.Close()
			continue
		default:
		}
		break
	}
	if err != nil {
		return fmt.Errorf("%s: close listener: %w", Name, err)
	}
	return nil
}
