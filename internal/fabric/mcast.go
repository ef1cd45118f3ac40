package fabric

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// JoinMulticast joins a group, of either family. Members receive their own, too.
func (i *udID) JoinMulticast(ctx context.Context, group netip.Addr, how ibv.JoinFlags) (ibv.UDParam, error) {
	group = group.WithZone("")
	err := ctx.Err()
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	_, joined := i.groups[group]
	switch {
	case err != nil:
	case i.closed:
		err = net.ErrClosed
	case !i.bound:
		err = ibv.ErrState
	case i.f.removed:
		err = errno.ENODEV
	case !group.IsMulticast() || how > ibv.JoinSendOnly:
		err = syscall.EINVAL
	case joined:
		err = errno.EADDRINUSE
	case len(i.groups) >= maxGroups:
		err = ibv.ErrLimit
	}
	if err != nil {
		return ibv.UDParam{}, fmt.Errorf("%s: join %v: %w", deviceName, group, err)
	}
	if i.groups == nil {
		i.groups = make(map[netip.Addr]ibv.JoinFlags)
	}
	i.groups[group] = how
	return ibv.UDParam{QPN: ibv.MulticastQPN, QKey: ibv.QKeyUDP,
		AH: ibv.AHAttr{Port: i.Port(), Global: true, GID: ibv.GIDFromAddr(group)}}, nil
}

func (i *udID) LeaveMulticast(group netip.Addr) error {
	group = group.WithZone("")
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if _, joined := i.groups[group]; !joined {
		return fmt.Errorf("%s: leave %v: %w", deviceName, group, errno.EADDRNOTAVAIL)
	}
	delete(i.groups, group)
	return nil
}

// member reports whether the ID is a full member of any group. Called with f.mu held.
func (i *udID) member() bool {
	for _, how := range i.groups {
		if how == ibv.JoinFullMember {
			return true
		}
	}
	return false
}

// hears reports whether the queue pair is attached to a group. Called with f.mu held.
func (q *udQP) hears(group netip.Addr) bool {
	how, joined := q.id.groups[group]
	return joined && how == ibv.JoinFullMember || q.attached[ibv.GIDFromAddr(group)]
}

func (q *udQP) AttachMcast(gid ibv.GID, _ uint16) error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if q.closed {
		return net.ErrClosed
	}
	if q.attached == nil {
		q.attached = make(map[ibv.GID]bool)
	}
	q.attached[gid] = true
	return nil
}

func (q *udQP) DetachMcast(gid ibv.GID, _ uint16) error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if !q.attached[gid] {
		return syscall.EINVAL
	}
	delete(q.attached, gid)
	return nil
}
