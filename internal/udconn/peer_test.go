package udconn

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// A peer that answers is not resolved again. One that is silent is, less and less often, and
// goes on being sent to.
func TestResolvesSilentPeers(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		n.settings.Bounds.MinSilence, n.settings.Bounds.MaxSilence = 5*time.Millisecond, 10*time.Millisecond
		client, server := n.pair(t)
		before := client.Stats().Resolutions
		require.True(t, eventually(func() bool {
			require.NoError(t, client.WritePeer([]byte("hm")))
			got, _ := read(t, server)
			defect.Bytes(t, "hm", got)
			return client.Stats().Resolutions >= before+3
		}))
		require.Zero(t, client.Stats().Unsent)
		client.send.mu.Lock()
		defer client.send.mu.Unlock()
		require.Equal(t, n.settings.Bounds.MaxSilence, client.rdma.peers.get(client.remote).staleAfter)
	})
}

// The table of peers is bounded, and their address handles with it.
func TestManyPeers(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		const peers = 3
		n.settings.Bounds.Peers = peers
		server := n.listen(t)
		for range 3 {
			for range 4 {
				client := n.listen(t)
				for range 2 {
					require.NoError(t, server.Write([]byte("hello"), at(client)))
					read(t, client)
				}
				require.NoError(t, client.Close())
				require.LessOrEqual(t, server.Stats().Peers, peers)
			}
		}
		server.send.mu.Lock()
		defer server.send.mu.Unlock()
		require.LessOrEqual(t, n.sw.Live()["AH"], peers+len(server.rdma.qps.all[0].send.retired))
	})
}

// An address handle that a staged send names is not closed before it is sent.
func TestStagedKeepsHandle(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		client, server := n.pair(t)
		client.send.mu.Lock()
		pe := client.rdma.peers.get(at(server))
		q := &pe.path.qp.send
		staged := q.stage([]byte("x"), &pe.path.destination)
		pe.dropPath()
		_, err := q.flush()
		client.send.mu.Unlock()
		require.NoError(t, staged)
		require.NoError(t, err)
		got, _ := read(t, server)
		defect.Bytes(t, "x", got)
		pingPong(t, client, server)
	})
}

// Datagrams from ever new senders, and requests in their names, leave nothing behind that
// grows.
func TestFloodOfSenders(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		n.settings.Bounds.Peers, n.settings.Bounds.Requesters, n.settings.Bounds.UDPSenders, n.settings.Bounds.Resolvers = 8, 8, 16, 2
		client, server := n.pair(t)
		for i := range uint32(300) { // Each of them is answered.
			var host [16]byte
			host[0] = 0xfd
			binary.BigEndian.PutUint32(host[4:], i)
			bad := forged(server, netip.AddrPortFrom(netip.AddrFrom16(host), 7), i)
			n.fab.Inject(&bad)
			_, from := read(t, server)
			server.Write([]byte("who is there?"), from)
		}
		peers := server.rdma.peers
		for i := range 300 { // The fabric has no such addresses to ask from.
			peers.addRequester(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 7))
			peers.receivedByUDP(netip.AddrPortFrom(netip.IPv6Loopback(), uint16(i)), 0)
		}
		require.LessOrEqual(t, server.Stats().Peers, 8)
		peers.mu.RLock()
		require.LessOrEqual(t, len(peers.requesters), 8)
		require.LessOrEqual(t, len(peers.udpSenders), 16)
		peers.mu.RUnlock()
		require.True(t, eventually(func() bool {
			server.Write([]byte("hello"), at(client))
			require.NoError(t, client.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
			_, _, err := client.Read(make([]byte, 10))
			return err == nil
		}))
	})
}
