package rdmanet

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/fabric"
)

// plainFrom injects what a peer that is not rdmanet sends once it has asked from an address,
// and returns the address that is read.
func plainFrom(t *testing.T, pn packetNet, p *PacketConn, from netip.AddrPort, qpn uint32) netip.AddrPort {
	t.Helper()
	p.ud.peers.ask(from)
	return plainAgain(t, pn, p, from, qpn)
}

func plainAgain(t *testing.T, pn packetNet, p *PacketConn, from netip.AddrPort, qpn uint32) netip.AddrPort {
	t.Helper()
	plain := forged(p, from, qpn)
	plain.HasImm = false
	inject(pn.fabric, plain)
	_, addr := readFrom(t, p)
	return addr
}

func inject(f *fabric.Fabric, p fabric.Packet) { f.Inject(&p) }

// One that asks again, from the same address, may have another queue pair: it is
// answered there.
func TestPacketPlainPeerAsksAgain(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		from := netip.AddrPortFrom(server.local.Addr(), 7)
		first, second := newPlainPeer(t, pn.cfg.Provider, from.Addr()), newPlainPeer(t, pn.cfg.Provider, from.Addr())
		defer first.close()
		defer second.close()
		for _, e := range []*plainPeer{first, second, first, first} {
			require.Equal(t, from, plainFrom(t, pn, server, from, e.qp.QPN()))
			require.True(t, eventually(func() bool { // the handle takes a while
				return server.ud.peers.get(from).qpn.Load() == e.qp.QPN()
			}))
			e.expect()
			_, err := server.WriteToUDPAddrPort([]byte("hello"), from)
			require.NoError(t, err)
			e.next()
		}
	})
}

// Also when our queue pair was replaced meanwhile, and the peer's was not.
func TestPacketPlainPeerAsksAfterFailure(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		from := netip.AddrPortFrom(server.local.Addr(), 7)
		e := newPlainPeer(t, pn.cfg.Provider, from.Addr())
		defer e.close()
		for round := range 3 {
			require.Equal(t, from, plainFrom(t, pn, server, from, e.qp.QPN()))
			require.True(t, eventually(func() bool { return server.ud.peers.get(from).qpn.Load() == e.qp.QPN() }), "round %d", round)
			e.expect()
			_, err := server.WriteToUDPAddrPort([]byte("hello"), from)
			require.NoError(t, err)
			e.next()
			server.wmu.Lock()
			l := server.ud.links[0]
			l.giveUp(nil)
			server.wmu.Unlock()
			require.True(t, eventually(func() bool { return len(server.Info()) == 0 }))
			_, err = server.ud.open(tctx, server.local.Addr())
			require.NoError(t, err)
		}
	})
}

// Whoever asks over and over, under names that are not its own too, does not keep others
// from being heard, and its address handles do not pile up where nothing is sent.
func TestPacketPlainPeersBounded(t *testing.T) {
	set(t, &maxPeers, 4)
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		local := server.local.Addr()
		other := pn.listen(t)
		_, err := server.WriteToUDPAddrPort([]byte("once"), other.local) // and its completion is not looked for
		require.NoError(t, err)
		readFrom(t, other)
		for i := range uint32(40) {
			plainFrom(t, pn, server, netip.AddrPortFrom(local, 7), 1000+i)
		}
		for i := range uint32(40) {
			plainFrom(t, pn, server, netip.AddrPortFrom(local, uint16(100+i)), 2000+i)
		}
		server.ud.peers.mu.RLock()
		require.LessOrEqual(t, len(server.ud.peers.plain), 2*maxPeers)
		server.ud.peers.mu.RUnlock()
		require.True(t, eventually(func() bool {
			server.wmu.Lock()
			defer server.wmu.Unlock()
			return pn.cfg.Provider.(*verbstest.Switch).Live()["AH"] <= 2*maxPeers
		}), "%d address handles", pn.cfg.Provider.(*verbstest.Switch).Live()["AH"])
		last := netip.AddrPortFrom(local, 9)
		plainFrom(t, pn, server, last, 3000)
		require.Equal(t, last, plainAgain(t, pn, server, last, 3000), "still known")
		require.NoError(t, other.Close())
	})
}
