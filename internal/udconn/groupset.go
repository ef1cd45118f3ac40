package udconn

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// groupSet is the multicast groups that a queue pair sends to, or is a member of. Each is
// joined by an ID of its own, which is bound to the address that datagrams to the group are
// from: the address of the queue pair may be of the other family. groups.mu guards it.
type groupSet struct {
	qp     ibv.QP
	id     ibv.ID // id is that of the queue pair.
	recv   *recvQueue
	event  func(ibv.Event)
	joined map[netip.Addr]*joinedGroup
}

// joinedGroup is one group of a groupSet.
type joinedGroup struct {
	id     ibv.ID
	to     ibv.UDParam
	member bool // member is false for a group that is only sent to.
}

// join joins a group by an ID, which it takes over. from is the address of the ID.
func (s *groupSet) join(ctx context.Context, id ibv.ID, from, group netip.Addr, member bool) (ibv.UDParam, error) {
	g := &joinedGroup{id: id, member: member}
	if err := s.attach(ctx, g, group); err != nil {
		return ibv.UDParam{}, errors.Join(err, id.Close())
	}
	if s.joined == nil {
		s.joined = make(map[netip.Addr]*joinedGroup)
	}
	s.joined[group] = g
	s.recv.joined(from, group, member)
	return g.to, nil
}

func (s *groupSet) attach(ctx context.Context, g *joinedGroup, group netip.Addr) (err error) {
	if g.id.Device() != s.id.Device() || g.id.Port() != s.id.Port() {
		return fmt.Errorf("the address has moved to %s: %w", g.id.Device().Name(), errno.EADDRNOTAVAIL)
	}
	how := ibv.JoinSendOnly
	if g.member {
		how = ibv.JoinFullMember
	}
	if g.to, err = g.id.JoinMulticast(ctx, group, how); err != nil {
		return err
	}
	if g.member {
		if err := s.qp.AttachMcast(g.to.AH.GID, g.to.AH.DLID); err != nil {
			return err
		}
	}
	g.id.Notify(s.event)
	return nil
}

// leave leaves a group, if it was joined. Nothing may be sent to it any more.
func (s *groupSet) leave(group netip.Addr) (err error) {
	g := s.joined[group]
	if g == nil {
		return nil
	}
	delete(s.joined, group)
	s.recv.left(group)
	if g.member {
		err = s.qp.DetachMcast(g.to.AH.GID, g.to.AH.DLID)
	}
	return errors.Join(err, g.id.Close())
}

// leaveAll leaves all groups.
func (s *groupSet) leaveAll() (err error) {
	for group := range s.joined {
		err = errors.Join(err, s.leave(group))
	}
	return err
}
