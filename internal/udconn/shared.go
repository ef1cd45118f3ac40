package udconn

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// shared is what all parts of a Conn have in common.
type shared struct {
	Settings
	endpoint
	lifetime
	counters
}

// endpoint is the addresses of a Conn, and which devices it is open on. It changes only
// while the Conn is opened, with receiver.mu and sender.mu held.
type endpoint struct {
	local    netip.AddrPort // local is the address that the Conn is bound to.
	laddr    *net.UDPAddr   // laddr is local.
	remote   netip.AddrPort // remote is the only peer of a connected Conn, else the zero value.
	raddr    *net.UDPAddr   // raddr is remote, nil for the zero value.
	bound    netip.Addr     // bound is the address that was asked for; the zero value means both families.
	limit    int            // limit is the greatest length of a datagram, in bytes.
	overRDMA bool           // overRDMA is set if RDMA devices serve.
	overUDP  bool           // overUDP is set if the UDP socket is open.
}

func (e *endpoint) bind(local netip.AddrPort) {
	e.local, e.laddr = local, net.UDPAddrFromAddrPort(local)
}

func (e *endpoint) connect(remote netip.AddrPort) {
	e.remote, e.raddr = remote, net.UDPAddrFromAddrPort(remote)
}

func (e *endpoint) connected() bool { return e.remote.IsValid() }

// onlyUDP reports whether datagrams to an address leave by the UDP socket alone.
func (e *endpoint) onlyUDP(to netip.AddrPort) bool {
	return !e.overRDMA || e.overUDP && IsGroup(to.Addr())
}

// check returns why a datagram cannot be sent.
func (s *shared) check(b []byte, to netip.AddrPort) error {
	switch {
	case s.connected() && to != s.remote:
		return net.ErrWriteToConnected
	case len(b) > s.limit:
		return errTooLong
	case !to.IsValid() || to.Port() == 0 || to.Addr().IsUnspecified():
		return errno.EDESTADDRREQ
	case s.bound.IsValid() && s.bound.Is4() != to.Addr().Is4():
		return syscall.EAFNOSUPPORT
	case to.Addr() == broadcast4 && !s.onlyUDP(to):
		return errNoBroadcast(s.Software)
	}
	return nil
}

// lifetime is the time from the opening of a Conn to its end.
type lifetime struct {
	ctx    context.Context // ctx ends with Close.
	cancel context.CancelFunc
	closed atomic.Bool    // closed is set with receiver.mu and sender.mu held.
	wg     sync.WaitGroup // wg counts the goroutines that Close waits for.
	start  time.Time
}

func (l *lifetime) begin() {
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.start = time.Now()
}

// now returns the time since the Conn was opened.
func (l *lifetime) now() time.Duration { return time.Since(l.start) }
