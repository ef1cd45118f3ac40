package udconn

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// rdmaGroups joins multicast groups on RDMA devices. groups.mu is held in all calls.
type rdmaGroups struct {
	*shared
	qps   *queuePairs
	peers *peerTable
	send  *sender
}

// join has the queue pair that an interface leads to become a member of a group.
func (r *rdmaGroups) join(ifi *net.Interface, group netip.Addr) (*queuePair, error) {
	ctx, cancel := context.WithTimeout(r.ctx, r.Bounds.JoinTimeout)
	defer cancel()
	q, at, err := r.toward(ctx, ifi, group)
	if err != nil {
		return nil, err
	}
	if g := q.groups.joined[group]; g != nil && g.member {
		return nil, errno.EADDRINUSE
	}
	_, err = r.joinBy(ctx, q, at, group, true)
	return q, err
}

// leave ends a membership. If the Conn sends to the group, the queue pair joins it anew.
func (r *rdmaGroups) leave(q *queuePair, group netip.Addr) error {
	r.dropPaths(q, group)
	return q.groups.leave(group)
}

// path returns the path to a port of a group. It takes no request.
func (r *rdmaGroups) path(ctx context.Context, ifi *net.Interface, to netip.AddrPort) (*path, error) {
	if r.local.Port() < minGroupPort {
		return nil, errLowPort
	}
	ctx, cancel := context.WithTimeout(ctx, r.Bounds.JoinTimeout)
	defer cancel()
	if zone := to.Addr().Zone(); zone != "" {
		var err error
		if ifi, err = net.InterfaceByName(zone); err != nil {
			return nil, err
		}
	}
	q, at, err := r.toward(ctx, ifi, to.Addr())
	if err != nil {
		return nil, err
	}
	param, err := r.joinBy(ctx, q, at, to.Addr().WithZone(""), false)
	if err != nil {
		return nil, err
	}
	return &path{qp: q, destination: destination{to: param, group: to.Port()}}, nil
}

// dropPaths has the paths to groups looked for anew: by one queue pair to one group, or all
// with a nil q.
func (r *rdmaGroups) dropPaths(q *queuePair, group netip.Addr) {
	r.send.mu.Lock()
	defer r.send.mu.Unlock()
	r.peers.dropPaths(func(pe *peer) bool {
		return pe.path.group != 0 && (q == nil || pe.path.qp == q && pe.addr.Addr().WithZone("") == group)
	})
}

// toward returns the queue pair by which groups are reached through an interface, and the
// address there.
func (r *rdmaGroups) toward(ctx context.Context, ifi *net.Interface, group netip.Addr) (q *queuePair, at netip.Addr, err error) {
	local := r.local.Addr()
	if ifi == nil {
		if local.IsUnspecified() {
			if local, err = sourceFor(group); err != nil {
				return nil, local, err
			}
		}
		q, err = r.qps.open(ctx, local)
		return q, local, err
	}
	addrs, err := ifi.Addrs()
	if err != nil {
		return nil, at, err
	}
	err = fmt.Errorf("interface %s has no such address: %w", ifi.Name, errno.EADDRNOTAVAIL)
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		at, _ = netip.AddrFromSlice(n.IP)
		at = at.Unmap()
		if at.Is4() != group.Is4() || !local.IsUnspecified() && at != local.WithZone("") {
			continue
		}
		if at.Is6() && at.IsLinkLocalUnicast() {
			at = at.WithZone(ifi.Name)
		}
		if q, err = r.qps.open(ctx, at); err == nil {
			return q, at, nil
		}
	}
	return nil, at, err
}

// joinBy has a queue pair join a group from an address of the device, to send to it or as a
// member.
func (r *rdmaGroups) joinBy(ctx context.Context, q *queuePair, at, group netip.Addr, member bool) (ibv.UDParam, error) {
	if g := q.groups.joined[group]; g != nil {
		if g.member || !member {
			return g.to, nil
		}
		if err := q.groups.leave(group); err != nil {
			return g.to, err
		}
	}
	if !r.makeRoom(q) {
		return ibv.UDParam{}, fmt.Errorf("%d groups: %w", len(q.groups.joined), errno.ENOBUFS)
	}
	id, err := r.qps.provider.BindUD(ctx, netip.AddrPortFrom(at, 0))
	if err != nil {
		return ibv.UDParam{}, err
	}
	return q.groups.join(ctx, id, at, group, member)
}

// makeRoom has a queue pair that has joined too many groups leave one that is only sent to.
func (r *rdmaGroups) makeRoom(q *queuePair) bool {
	if len(q.groups.joined) < 2*r.Bounds.Groups {
		return true
	}
	for group, g := range q.groups.joined {
		if !g.member {
			r.leave(q, group)
			return true
		}
	}
	return false
}
