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
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// group is an IP multicast group that an ID has joined, or is joining.
type group struct {
	addr  netip.Addr
	how   ibv.JoinFlags
	event chan step // event has the first event, for the call that joins.
	told  bool      // told is set when event has it; the ID's mu guards it.
}

// groupLeft is the event of a group that was left before it was joined.
const groupLeft = -1

// tell reports an event to the call that joins, unless it has one already.
func (g *group) tell(s step) bool {
	if g.told {
		return false
	}
	g.told = true
	g.event <- s
	return true
}

// groups has the groups of an ID, by the number that their events have. The ID's mu guards
// it.
type groups struct {
	last uintptr
	m    map[uintptr]*group
}

// hold reports whether the queue pair of the ID is a member, or may become one.
func (s *groups) hold() bool {
	for _, g := range s.m {
		if g.how == ibv.JoinFullMember {
			return true
		}
	}
	return false
}

func (s *groups) find(addr netip.Addr) (n uintptr, ok bool) {
	for n, g := range s.m {
		if g.addr == addr {
			return n, true
		}
	}
	return 0, false
}

// errNoMulticast is the error of a device without multicast.
func (d *device) errNoMulticast() error { return ibv.Unsupported(d.name, "multicast") }

// errNotSupp is ENOTSUPP, an error number of the Linux kernel that programs should not see,
// and that it returns here.
const errNotSupp = syscall.Errno(524)

func (i *id) JoinMulticast(ctx context.Context, addr netip.Addr, how ibv.JoinFlags) (ibv.UDParam, error) {
	param, err := i.join(ctx, addr.WithZone(""), how)
	if errors.Is(err, errNotSupp) {
		err = fmt.Errorf("IPv6 groups over RoCE v2, which Linux's connection manager does not join: %w", errors.ErrUnsupported)
	}
	if err != nil {
		return ibv.UDParam{}, fmt.Errorf("%s: join %v: %w", i.dev.name, addr, groupError(err))
	}
	return param, nil
}

// groupError returns ErrLimit if the device has no room for another member.
func groupError(err error) error {
	if errors.Is(err, syscall.ENOMEM) {
		return fmt.Errorf("%w (%w)", ibv.ErrLimit, err)
	}
	return err
}

func (i *id) join(ctx context.Context, addr netip.Addr, how ibv.JoinFlags) (ibv.UDParam, error) {
	if err := ctx.Err(); err != nil {
		return ibv.UDParam{}, err
	}
	n, g, err := i.beginJoin(addr, how)
	if err != nil {
		return ibv.UDParam{}, err
	}
	select {
	case s := <-g.event:
		switch s.event {
		case cmMulticastJoin:
			return s.peer, nil
		case groupLeft:
			return ibv.UDParam{}, net.ErrClosed
		}
		err = i.stepError(s)
	case <-ctx.Done():
		err = ctx.Err()
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.groups.m[n] != nil { // It was not left meanwhile.
		if e := i.leaveGroup(n); e != nil {
			err = fmt.Errorf("%w; and then to leave it: %w", err, e)
		}
	}
	return ibv.UDParam{}, err
}

func (i *id) beginJoin(addr netip.Addr, how ibv.JoinFlags) (n uintptr, g *group, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	_, joined := i.groups.find(addr)
	switch {
	case i.closed:
		return 0, nil, net.ErrClosed
	case !i.dev.attr.Caps.Has(ibv.CapMulticast):
		return 0, nil, i.dev.errNoMulticast()
	case !i.ud:
		return 0, nil, ibv.ErrState
	case !addr.IsMulticast() || how > ibv.JoinSendOnly:
		return 0, nil, syscall.EINVAL
	case joined:
		return 0, nil, syscall.EADDRINUSE
	}
	g = &group{addr: addr, how: how, event: make(chan step, 1)}
	i.groups.last++
	n = i.groups.last
	if i.groups.m == nil {
		i.groups.m = make(map[uintptr]*group)
	}
	i.groups.m[n] = g
	to := toSockaddr(netip.AddrPortFrom(addr, 0))
	if err := errno(C.rn_join_multicast(i.c, to.pointer(), C.int(how), C.uintptr_t(n))); err != nil {
		delete(i.groups.m, n)
		return 0, nil, err
	}
	return n, g, nil
}

// grouped handles an event of a group.
func (i *id) grouped(n uintptr, s step) {
	i.mu.Lock()
	g := i.groups.m[n]
	known := g == nil || g.tell(s)
	i.mu.Unlock()
	if !known && s.event == cmMulticastError {
		i.event(ibv.Event{Kind: ibv.EventMulticastError, Err: fmt.Errorf("group %v: %w", g.addr, i.stepError(s))})
	}
}

// ungrouped ends the joins in progress on a device that was removed.
func (i *id) ungrouped() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, g := range i.groups.m {
		g.tell(step{event: cmDeviceRemoval})
	}
}

func (i *id) LeaveMulticast(addr netip.Addr) error {
	if err := i.leave(addr.WithZone("")); err != nil {
		return fmt.Errorf("%s: leave %v: %w", i.dev.name, addr, err)
	}
	return nil
}

func (i *id) leave(addr netip.Addr) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.closed:
		return net.ErrClosed
	case !i.dev.attr.Caps.Has(ibv.CapMulticast):
		return i.dev.errNoMulticast()
	}
	n, ok := i.groups.find(addr)
	if !ok {
		return syscall.EADDRNOTAVAIL
	}
	return i.leaveGroup(n)
}

// leaveAll is for Close. When an ID is destroyed, the library forgets the ID's groups, but
// does not free its memory for them. The caller holds mu.
func (i *id) leaveAll() {
	for n := range i.groups.m {
		i.leaveGroup(n)
	}
}

// leaveGroup does not wait. The library would wait for events that are being returned, and
// it attaches the queue pair when it returns an event. So leaveGroup excludes that. The
// caller holds mu.
func (i *id) leaveGroup(n uintptr) error {
	g := i.groups.m[n]
	from := toSockaddr(netip.AddrPortFrom(g.addr, 0))
	delete(i.groups.m, n)
	g.tell(step{event: groupLeft})
	i.p.lib.events.Lock()
	defer i.p.lib.events.Unlock()
	return errno(C.rn_leave_multicast(i.c, from.pointer()))
}

func (q *qp) AttachMcast(gid ibv.GID, lid uint16) error {
	return q.mcast("attach to", gid, 1, func(c *C.struct_rn_qp, gid *C.uint8_t) C.int {
		return C.rn_attach_mcast(c, gid, C.uint16_t(lid))
	})
}

func (q *qp) DetachMcast(gid ibv.GID, lid uint16) error {
	return q.mcast("detach from", gid, -1, func(c *C.struct_rn_qp, gid *C.uint8_t) C.int {
		return C.rn_detach_mcast(c, gid, C.uint16_t(lid))
	})
}

// mcast calls f, which changes the groups of the queue pair.
func (q *qp) mcast(what string, gid ibv.GID, change int, f func(*C.struct_rn_qp, *C.uint8_t) C.int) error {
	q.id.mu.Lock()
	defer q.id.mu.Unlock()
	var err error
	switch {
	case !q.dev.attr.Caps.Has(ibv.CapMulticast):
		err = q.dev.errNoMulticast()
	case q.sq.c == nil:
		err = net.ErrClosed
	case !q.ud:
		err = fmt.Errorf("queue pair of a connection: %w", syscall.EINVAL)
	default:
		if err = errno(f(q.sq.c, (*C.uint8_t)(unsafe.Pointer(&gid)))); err == nil {
			q.attached += change
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %s %v: %w", q.dev.name, what, gid, groupError(err))
	}
	return nil
}
