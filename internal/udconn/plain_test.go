package udconn

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/udpeer"
)

// plainFrom has a peer that is not rdmanet ask for c from an address, and then send a datagram
// from a queue pair. It returns the address that c reads.
func (n *testNet) plainFrom(t testing.TB, c *Conn, from netip.AddrPort, qpn uint32) netip.AddrPort {
	t.Helper()
	require.NoError(t, udpeer.Ask(t, n.sw, from, at(c), nil).Close())
	return n.plainAgain(t, c, from, qpn)
}

// plainAgain is plainFrom for a peer that has asked before.
func (n *testNet) plainAgain(t testing.TB, c *Conn, from netip.AddrPort, qpn uint32) netip.AddrPort {
	t.Helper()
	plain := forged(c, from, qpn)
	plain.HasImm = false
	n.fab.Inject(&plain)
	_, addr := read(t, c)
	return addr
}

// requireAnswered checks that the peer is answered at its queue pair.
func requireAnswered(t testing.TB, c *Conn, to netip.AddrPort, e *udpeer.Peer) {
	t.Helper()
	require.True(t, eventually(func() bool { // The address handle takes a while, and nothing tells from outside.
		return c.rdma.peers.get(to).qpn.Load() == e.QP.QPN()
	}))
	e.Expect()
	require.NoError(t, c.Write([]byte("hello"), to))
	e.Next()
}

// A peer that asks again, from the same address, may have another queue pair: it is answered
// there.
func TestPlainPeerAsksAgain(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		server := n.listen(t)
		from := netip.AddrPortFrom(n.host, 7)
		first, second := udpeer.New(t, n.sw, n.host), udpeer.New(t, n.sw, n.host)
		defer first.Close()
		defer second.Close()
		for _, e := range []*udpeer.Peer{first, second, first, first} {
			require.Equal(t, from, n.plainFrom(t, server, from, e.QP.QPN()))
			requireAnswered(t, server, from, e)
		}
	})
}

// Also when our queue pair was replaced meanwhile, and the peer's was not.
func TestPlainPeerAsksAfterFailure(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		server := n.listen(t)
		from := netip.AddrPortFrom(n.host, 7)
		e := udpeer.New(t, n.sw, n.host)
		defer e.Close()
		for range 3 {
			require.Equal(t, from, n.plainFrom(t, server, from, e.QP.QPN()))
			requireAnswered(t, server, from, e)
			require.NoError(t, n.fab.Break(server.Info()[0].QPN))
			require.True(t, eventually(func() bool { return len(server.Info()) == 0 }))
			other := PrivateData{Port: 1, QPN: 1}.Append(nil) // A requester that is rdmanet has the next queue pair made.
			require.NoError(t, udpeer.Ask(t, n.sw, netip.AddrPort{}, at(server), other).Close())
		}
	})
}

// Whoever asks over and over, under names that are not its own too, does not keep others from
// being received, and its address handles do not pile up where nothing is sent.
func TestPlainPeersBounded(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		const peers = 4
		n.settings.Bounds.Peers = peers
		server, other := n.listen(t), n.listen(t)
		require.NoError(t, server.Write([]byte("once"), at(other))) // Its completion is not polled for.
		read(t, other)
		for i := range uint32(40) {
			n.plainFrom(t, server, netip.AddrPortFrom(n.host, 7), 1000+i)
		}
		for i := range uint32(40) {
			n.plainFrom(t, server, netip.AddrPortFrom(n.host, uint16(100+i)), 2000+i)
		}
		server.rdma.peers.mu.RLock()
		require.LessOrEqual(t, len(server.rdma.peers.plain), 2*peers)
		server.rdma.peers.mu.RUnlock()
		require.True(t, eventually(func() bool {
			server.send.mu.Lock() // No handle is being replaced.
			defer server.send.mu.Unlock()
			return n.sw.Live()["AH"] <= 2*peers
		}), "%d address handles", n.sw.Live()["AH"])
		last := netip.AddrPortFrom(n.host, 9)
		n.plainFrom(t, server, last, 3000)
		require.Equal(t, last, n.plainAgain(t, server, last, 3000), "still known")
		require.NoError(t, other.Close())
	})
}
