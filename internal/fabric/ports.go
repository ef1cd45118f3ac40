package fabric

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// portSpace is the port space of TCP or of UDP, after enum rdma_port_space. Fabric.mu
// guards it.
type portSpace struct {
	bound map[netip.AddrPort]*listener // nil for an ID's address
	last  uint16                       // the latest port that was chosen
}

// Ports are chosen from firstPort on, in the space of UDP from firstPortUD on. So a port that
// was chosen in one space is free in the other for a while.
const (
	firstPort   = 40000
	firstPortUD = 50000
)

func newPortSpace(first uint16) portSpace {
	return portSpace{bound: make(map[netip.AddrPort]*listener), last: first}
}

// bind takes a port of an address, a free one for port 0. l is nil for an ID. The caller
// holds mu.
func (f *Fabric) bind(s *portSpace, local netip.AddrPort, l *listener) (netip.AddrPort, error) {
	if f.removed {
		return local, errno.ENODEV
	}
	if local.Port() == 0 {
		local = s.choose(local.Addr())
	}
	if local.Port() == 0 {
		return local, errno.EADDRNOTAVAIL
	}
	if s.taken(local) {
		return local, errno.EADDRINUSE
	}
	s.bound[local] = l
	return local, nil
}

// choose returns a free port of an address, or port 0 if there is none.
func (s *portSpace) choose(a netip.Addr) netip.AddrPort {
	for range 1<<16 - firstPort {
		if s.last++; s.last < firstPort {
			s.last = firstPort
		}
		if try := netip.AddrPortFrom(a, s.last); !s.taken(try) {
			return try
		}
	}
	return netip.AddrPortFrom(a, 0)
}

func (s *portSpace) taken(a netip.AddrPort) bool {
	for b := range s.bound {
		if a.Port() == b.Port() && (covers(a.Addr(), b.Addr()) || covers(b.Addr(), a.Addr())) {
			return true
		}
	}
	return false
}

// listening returns the listener of an address, or nil.
func (s *portSpace) listening(a netip.AddrPort) *listener {
	for b, l := range s.bound {
		if l != nil && b.Port() == a.Port() && covers(b.Addr(), a.Addr()) {
			return l
		}
	}
	return nil
}

// covers reports whether a listener on local serves the address a. An unspecified address
// stands for its family, and the zero Addr for both families.
func covers(local, a netip.Addr) bool {
	return !local.IsValid() || local == a || local.IsUnspecified() && a.IsValid() && local.Is4() == a.Is4()
}

// has reports whether the device has the address.
func (f *Fabric) has(a netip.Addr) bool { return slices.Contains(f.addrs, a) }

// route returns the address from which remote is reached, or an error if there is no way.
func (f *Fabric) route(local, remote netip.AddrPort) (netip.AddrPort, error) {
	switch {
	case remote.Port() == 0:
		return local, errno.EADDRNOTAVAIL
	case !f.has(remote.Addr()):
		return local, errno.EHOSTUNREACH
	case f.has(local.Addr()):
		return local, nil
	case local.Addr().IsValid() && !local.Addr().IsUnspecified():
		return local, errno.EADDRNOTAVAIL
	}
	for _, a := range f.addrs {
		if a.Is4() == remote.Addr().Is4() {
			return netip.AddrPortFrom(a, local.Port()), nil
		}
	}
	return local, errno.EHOSTUNREACH
}

// resolve takes a port of the address from which remote is reached.
func (f *Fabric) resolve(ctx context.Context, space *portSpace, local, remote netip.AddrPort) (netip.AddrPort, error) {
	if err := ctx.Err(); err != nil {
		return local, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	local, err := f.route(local, remote)
	if err == nil {
		local, err = f.bind(space, local, nil)
	}
	if err != nil {
		return local, fmt.Errorf("%s: resolve %v: %w", providerName, remote, err)
	}
	return local, nil
}
