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
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/fabric"
	"github.com/rdmanet/rdmanet/internal/udconn"
	"github.com/rdmanet/rdmanet/internal/udpeer"
)

// forged is a datagram that passes for one of p's peer.
func forged(p *PacketConn, from netip.AddrPort, qpn uint32) fabric.Packet {
	return forgedTo(p.Info()[0].QPN, p, from, qpn)
}

func forgedTo(dst uint32, p *PacketConn, from netip.AddrPort, qpn uint32) fabric.Packet {
	return fabric.Packet{From: from.Addr(), To: at(p).Addr(), SrcQPN: qpn, DstQPN: dst, QKey: ibv.QKeyUDP,
		Imm: udconn.Immediate(from.Port()), HasImm: true, Payload: []byte("forged")}
}

// privateOf is the private data of a request or a reply, as docs/protocol.md has it.
func privateOf(port uint16, qpn uint32) []byte {
	return udconn.PrivateData{Port: port, QPN: qpn}.Append(nil)
}

// reopen returns the number of the queue pair. If the last one has failed, a request for the
// address has another one made.
func reopen(t testing.TB, fab *fabric.Fabric, p *PacketConn) uint32 {
	t.Helper()
	for {
		if infos := p.Info(); len(infos) > 0 {
			return infos[0].QPN
		}
		require.NoError(t, udpeer.Ask(t, fab, netip.AddrPort{}, at(p), privateOf(1, 1)).Close())
	}
}

// What nobody can be answered for ends nowhere, and is counted.
func TestPacketForgedHeaders(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for name, spoil := range map[string]func(*fabric.Packet){
			"no header":       func(p *fabric.Packet) { p.NoGRH = true },
			"port 0":          func(p *fabric.Packet) { p.Imm = udconn.Immediate(0) },
			"other mark":      func(p *fabric.Packet) { p.Imm ^= 1 << 31 },
			"no immediate":    func(p *fabric.Packet) { p.HasImm = false },
			"its own number":  func(p *fabric.Packet) { p.Imm = p.SrcQPN },
			"from multicast":  func(p *fabric.Packet) { p.From = netip.MustParseAddr("224.0.0.1") },
			"from multicast6": func(p *fabric.Packet) { p.From = netip.MustParseAddr("ff02::1") },
			"from nowhere":    func(p *fabric.Packet) { p.From = netip.IPv6Unspecified() },
			"from broadcast":  func(p *fabric.Packet) { p.From = broadcast },
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
		thief := udpeer.New(t, pn.cfg.Provider, at(client).Addr())
		defer thief.Close()
		for range 10 {
			thief.Expect()
		}
		for i := range byte(10) {
			bad := forged(server, at(client), thief.QP.QPN())
			pn.fabric.Inject(&bad)
			got, from := readFrom(t, server)
			defect.Bytes(t, "forged", got)
			_, err := server.WriteToUDPAddrPort([]byte{i}, from)
			require.NoError(t, err)
			got, _ = readFrom(t, client)
			require.Equal(t, []byte{i}, got)
		}
		_, ok := thief.Poll()
		require.False(t, ok, "the thief got an answer")
	})
}

// Longer than any receive: the queue pair breaks, as some devices have it, and is replaced.
func TestPacketTooLongForReceive(t *testing.T) {
	impatient(t)
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		bad := forged(server, at(client), 9999)
		bad.Payload = make([]byte, udconn.SlotSize)
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
	f.Add(append([]byte{255, 12}, privateOf(9, 9)...))
	f.Add([]byte{254, 0, 3, 127, 0, 0, 1, 0x52, 0x44, 0, 9, 3, 'a', 'b', 'c', 255, 0, 1, 4, 127, 0, 0, 1, 0, 0, 0, 4, 0})
	fab := newFabric()
	pn := packetNet{name: "fabric", network: "udp4", address: "127.0.0.1:0", cfg: Config{Provider: fab}, fabric: fab}
	set(f, &packetBounds.MinSilence, 20*time.Millisecond)
	set(f, &packetBounds.MaxSilence, 40*time.Millisecond)
	set(f, &packetBounds.Timeouts, []time.Duration{20 * time.Millisecond, patience})
	f.Add([]byte{253, 20, 0, 0, 0, 40, 'R', 'D', 'N', 'D', 1, 0, 0, 9, 0, 0, 0, 40, 253, 1, 1, 253, 0})
	f.Add([]byte{32, 7, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 2, 'h', 'i', 64, 7, 0, 7, 1, 'x'})
	f.Add([]byte{16, 3, 4, 2, 'h', 'i', 28, 3, 127, 0, 0, 1, 1, 0, 0, 9, 0})
	group := netip.MustParseAddr("239.82.68.1")
	lo := interfaceWith(f, netip.MustParseAddr("127.0.0.1"))
	f.Fuzz(func(t *testing.T, in []byte) {
		client, server := pn.pair(t)
		ln, err := fab.ListenUD(tctx, netip.AddrPortFrom(at(client).Addr(), 0), 0)
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
				id, err := fab.ResolveUD(tctx, netip.AddrPort{}, at(server))
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
			p := forgedTo(reopen(t, fab, server), server, at(client), uint32(take(1)[0]))
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
				p.Payload = append(p.Payload, make([]byte, udconn.SlotSize-ibv.GRHLen-1)...)
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
			return err == nil && from == at(client) && string(b[:n]) == "over"
		}))
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
	})
}
