package rdmanet

import (
	"context"
	"encoding/binary"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/fabric"
)

// forged is a datagram that passes for one of p's peer.
func forged(p *PacketConn, from netip.AddrPort, qpn uint32) fabric.Packet {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	return fabric.Packet{From: from.Addr(), To: p.local.Addr(), SrcQPN: qpn, DstQPN: p.ud.links[0].qp.QPN(), QKey: ibv.QKeyUDP,
		Imm: immediateOf(from.Port()), HasImm: true, Payload: []byte("forged")}
}

// What nobody can be answered for ends nowhere, and is counted.
func TestPacketForgedHeaders(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for name, spoil := range map[string]func(*fabric.Packet){
			"no header":       func(p *fabric.Packet) { p.NoGRH = true },
			"port 0":          func(p *fabric.Packet) { p.Imm = immediateOf(0) },
			"other mark":      func(p *fabric.Packet) { p.Imm ^= 1 << 31 },
			"no immediate":    func(p *fabric.Packet) { p.HasImm = false },
			"its own number":  func(p *fabric.Packet) { p.Imm = p.SrcQPN },
			"from multicast":  func(p *fabric.Packet) { p.From = netip.MustParseAddr("224.0.0.1") },
			"from multicast6": func(p *fabric.Packet) { p.From = netip.MustParseAddr("ff02::1") },
			"from nowhere":    func(p *fabric.Packet) { p.From = netip.IPv6Unspecified() },
			"from broadcast":  func(p *fabric.Packet) { p.From = broadcast4 },
		} {
			before := server.Stats()
			bad := forged(server, addrPort(client.LocalAddr()), 9999)
			spoil(&bad)
			pn.fabric.Inject(&bad)
			require.True(t, eventually(func() bool { return server.Stats().Strays == before.Strays+1 }), name)
			require.Equal(t, before.DatagramsReceived, server.Stats().DatagramsReceived)
		}
		for name, spoil := range map[string]func(*fabric.Packet){
			"wrong key":     func(p *fabric.Packet) { p.QKey++ },
			"no queue pair": func(p *fabric.Packet) { p.DstQPN += 1000 },
		} {
			lost := pn.fabric.Lost()
			bad := forged(server, addrPort(client.LocalAddr()), 9999)
			spoil(&bad)
			pn.fabric.Inject(&bad)
			require.Equal(t, lost+1, pn.fabric.Lost(), name)
		}
		pingPong(t, client, server)
	})
}

// A datagram with a forged sender is received, as over UDP, but the answer goes to who has
// the address.
func TestPacketForgedSender(t *testing.T) {
	impatient(t)
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		thief := newPlainPeer(t, pn.cfg.Provider, client.local.Addr())
		defer thief.close()
		for range 10 {
			thief.expect()
		}
		for i := range byte(10) {
			bad := forged(server, client.local, thief.qp.QPN())
			pn.fabric.Inject(&bad)
			got, from := readFrom(t, server)
			require.Equal(t, "forged", string(got))
			_, err := server.WriteToUDPAddrPort([]byte{i}, from)
			require.NoError(t, err)
			got, _ = readFrom(t, client)
			require.Equal(t, []byte{i}, got)
		}
		var wcs [1]ibv.WC
		n, err := thief.cq.Poll(wcs[:])
		require.NoError(t, err)
		require.Zero(t, n, "the thief got an answer")
	})
}

// Datagrams from ever new senders, and questions in their names, leave nothing behind that
// grows.
func TestPacketFloodOfSenders(t *testing.T) {
	set(t, &maxPeers, 8)
	set(t, &maxAsked, 8)
	set(t, &resolvers, 2)
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		// Answered, every one of them.
		for i := range uint32(300) {
			var host [16]byte
			host[0] = 0xfd
			binary.BigEndian.PutUint32(host[4:], i)
			bad := forged(server, netip.AddrPortFrom(netip.AddrFrom16(host), 7), i)
			pn.fabric.Inject(&bad)
			_, from := readFrom(t, server)
			server.WriteToUDPAddrPort([]byte("who is there?"), from)
		}
		id, err := pn.cfg.Provider.ResolveUD(tctx, netip.AddrPort{}, server.local)
		require.NoError(t, err)
		require.NoError(t, id.Close())
		for i := range 300 {
			server.ud.peers.ask(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 7))
			server.ud.peers.heardSoft(netip.AddrPortFrom(netip.IPv6Loopback(), uint16(i)), 0)
		}
		require.LessOrEqual(t, server.Stats().Peers, maxPeers)
		require.LessOrEqual(t, len(server.ud.peers.asked), maxAsked)
		require.LessOrEqual(t, len(server.ud.peers.heard), maxHeard)
		until(t, client, func() error {
			server.WriteTo([]byte("hello"), client.LocalAddr())
			return nil
		})
	})
}

// Longer than any receive: the queue pair breaks, as some devices have it, and is replaced.
func TestPacketTooLongForReceive(t *testing.T) {
	impatient(t)
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		bad := forged(server, client.local, 9999)
		bad.Payload = make([]byte, udSlot)
		pn.fabric.Inject(&bad)
		until(t, server, func() error {
			_, err := client.Write([]byte("hello"))
			return err
		})
	})
}

// fuzzAnswers has whoever asks for an address told what a peer likes: data is a byte of flags,
// the number of a queue pair, and private data.
func fuzzAnswers(ln ibv.Listener, data *atomic.Pointer[[]byte]) {
	for {
		id, err := ln.Accept(tctx)
		if err != nil {
			return
		}
		b := append(*data.Load(), 0, 0, 0, 0)
		if private := b[4:]; b[0]&1 != 0 {
			id.Reject(private)
		} else if b[0]&2 == 0 { // else nothing is said
			id.Accept(tctx, ibv.ConnParam{QPN: uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3]), Private: private})
		}
		id.Close()
	}
}

// FuzzPacketConn lets a peer send what it likes, datagrams, questions and answers, to one
// that answers. Then the others still get through.
func FuzzPacketConn(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20})
	f.Add(append([]byte{255, 12}, greeting{port: 9, qpn: 9}.append(nil)...))
	f.Add([]byte{254, 0, 3, 127, 0, 0, 1, 0x52, 0x44, 0, 9, 3, 'a', 'b', 'c', 255, 0, 1, 4, 127, 0, 0, 1, 0, 0, 0, 4, 0})
	fab := newFabric()
	pn := packetNet{name: "fabric", network: "udp4", address: "127.0.0.1:0", cfg: Config{Provider: fab}, fabric: fab}
	set(f, &minPatience, 20*time.Millisecond)
	set(f, &maxPatience, 40*time.Millisecond)
	set(f, &questionTimes, []time.Duration{20 * time.Millisecond, patience})
	f.Add([]byte{253, 20, 0, 0, 0, 40, 'R', 'D', 'N', 'D', 1, 0, 0, 9, 0, 0, 0, 40, 253, 1, 1, 253, 0})
	f.Add([]byte{32, 7, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 2, 'h', 'i', 64, 7, 0, 7, 1, 'x'})
	f.Add([]byte{16, 3, 4, 2, 'h', 'i', 28, 3, 127, 0, 0, 1, 1, 0, 0, 9, 0})
	group := netip.MustParseAddr("239.82.68.1")
	lo := interfaceWith(f, netip.MustParseAddr("127.0.0.1"))
	f.Fuzz(func(t *testing.T, in []byte) {
		client, server := pn.pair(t)
		ln, err := fab.ListenUD(tctx, netip.AddrPortFrom(client.local.Addr(), 0), 0)
		require.NoError(t, err)
		defer ln.Close()
		var answer atomic.Pointer[[]byte]
		go fuzzAnswers(ln, &answer)
		require.NoError(t, server.JoinGroup(lo, udpAddr(netip.AddrPortFrom(group, 0))))
		take := func(n int) []byte {
			b := make([]byte, n)
			in = in[copy(b, in):]
			return b
		}
		for len(in) > 0 {
			op := take(1)[0]
			if op == 255 {
				id, err := fab.ResolveUD(tctx, netip.AddrPort{}, server.local)
				require.NoError(t, err)
				ctx, cancel := context.WithTimeout(tctx, patience)
				require.NoError(t, id.Connect(ctx, ibv.ConnParam{Private: take(int(take(1)[0]) % 137)}))
				cancel()
				require.NoError(t, id.Close())
				continue
			}
			if op == 253 {
				b := take(int(take(1)[0]) % 137)
				answer.Store(&b)
				server.WriteToUDPAddrPort([]byte("who are you?"), ln.Addr())
				continue
			}
			_, err := server.ud.open(tctx, server.local.Addr()) // it may be broken by now
			require.NoError(t, err)
			p := forged(server, client.local, uint32(take(1)[0]))
			p.NoGRH, p.HasImm = op&1 != 0, op&2 == 0
			if op&4 != 0 {
				p.From = netip.AddrFrom4([4]byte(take(4)))
			}
			if op&8 != 0 {
				p.Imm = binary.BigEndian.Uint32(take(4))
			}
			if op&16 != 0 {
				p.To, p.DstQPN = group, ibv.MulticastQPN
			}
			if op&32 != 0 {
				p.From = netip.AddrFrom16([16]byte(take(16)))
			}
			p.Payload = take(int(take(1)[0]))
			if op&64 != 0 {
				p.Payload = append(p.Payload, make([]byte, udSlot-ibv.GRHLen-1)...)
			}
			fab.Inject(&p)
			server.SetReadDeadline(time.Now().Add(time.Millisecond))
			var b [300]byte
			if n, from, err := server.ReadFromUDPAddrPort(b[:]); err == nil {
				server.WriteToUDPAddrPort(b[:n], from)
			}
		}
		server.SetReadDeadline(time.Time{})
		require.True(t, eventually(func() bool {
			client.Write([]byte("over"))
			server.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			var b [300]byte
			n, from, err := server.ReadFromUDPAddrPort(b[:])
			return err == nil && from == client.local && string(b[:n]) == "over"
		}))
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
	})
}
