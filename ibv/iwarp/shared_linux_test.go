//go:build amd64 || arm64

package iwarp

import (
	"net"
	"net/netip"
	"sync"
)

// sharedKinds are the openers of links in shared memory: shared begins there, and sharing
// moves there on its way.
func sharedKinds() map[string]opener {
	return map[string]opener{"shared": (&sharedNet{now: true}).open, "sharing": (&sharedNet{}).open}
}

// sharedNet opens links as if MPA start-up had agreed on shared memory. The responder's
// link is opened first.
type sharedNet struct {
	now bool

	mu      sync.Mutex
	meeting meeting
	agreed  map[[2]netip.AddrPort]handover // agreed is by the dialler's addresses.
}

func (n *sharedNet) open(conn net.Conn, s *setup) (link, error) {
	n.mu.Lock()
	local, remote := unmapped(conn.LocalAddr()), unmapped(conn.RemoteAddr())
	var h handover
	if s.awaits {
		h.passive, h.Now = true, n.now
		if err := n.meeting.prepare(&h.SameHostAnswer); err != nil {
			return nil, err
		}
		if n.agreed == nil {
			n.agreed = make(map[[2]netip.AddrPort]handover)
		}
		n.agreed[[2]netip.AddrPort{remote, local}] = h
	} else {
		key := [2]netip.AddrPort{local, remote}
		h = n.agreed[key]
		h.passive = false
		delete(n.agreed, key)
	}
	n.mu.Unlock()
	s.handover, s.meeting = &h, &n.meeting
	return openShared(conn, s)
}
