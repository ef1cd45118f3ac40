package rdmanet

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/printed/printedtest"
)

func TestPrinted(t *testing.T) {
	checkLeaks(t)
	soft := Config{Provider: iwarp.New(iwarp.Config{})} // whose sockets take all of the payload
	lc, d := &ListenConfig{Config: soft}, &Dialer{Config: soft}
	l, err := lc.Listen(tctx, "rdma", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	client, err := d.Dial("rdma", l.Addr().String())
	require.NoError(t, err)
	defer func() { _ = client.Close() }()
	server, err := l.Accept()
	require.NoError(t, err)
	defer func() { _ = server.Close() }()

	payload := printedtest.Payload(64 << 10)
	_, err = client.Write(payload)
	require.NoError(t, err)
	_, err = server.Read(make([]byte, 10)) // what is behind stays in the connection's memory
	require.NoError(t, err)
	send := server.(*Conn).QueueMsg(payload)

	packets, err := lc.ListenPacket(tctx, "udp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = packets.Close() }()
	sender, err := d.Dial("udp", packets.LocalAddr().String())
	require.NoError(t, err)
	defer func() { _ = sender.Close() }()
	require.NoError(t, packets.(*PacketConn).SetReadBuffer(20<<10))
	unread := func() bool {
		_, err := sender.Write(payload[:1000])
		require.NoError(t, err)
		return packets.(*PacketConn).Stats().Overruns > 0
	}
	require.True(t, eventually(unread))

	b, err := Alloc(len(payload))
	require.NoError(t, err)
	defer b.Free()
	copy(b.Bytes(), payload)

	cfg := Config{Device: "iwarp", Provider: newProvider(t)}
	info, packetInfo := client.(*Conn).Info(), packets.(*PacketConn).Info()
	printedtest.CheckMethods(t, map[string]any{
		"Buffer": b, "Config": cfg, "Conn": client, "Conn that is read": server, "Dialer": Dialer{Config: cfg, Timeout: time.Second, Resolver: net.DefaultResolver},
		"LingerStats":  Lingering(),
		"ListenConfig": ListenConfig{Config: cfg, Backlog: 5}, "Listener": l, "MsgFlags": Expedited, "PendingMessage": send,
		"PacketConn": packets, "PacketConn with a peer": sender, "PacketStats": packets.(*PacketConn).Stats(), "PacketInfo": packetInfo[0],
		"Datagram": Datagram{Buf: payload, N: 100, Addr: netip.MustParseAddrPort("192.0.2.1:53")}, "Stats": client.(*Conn).Stats(), "Info": info, "Extensions": info.Extensions, "TransferMode": info.Extensions.SendTransfers,
	})
}

func TestStrings(t *testing.T) {
	cfg := Config{Device: "iwarp", KeepAlive: time.Minute, Provider: iwarp.New(iwarp.Config{}), Logger: discardLogger}
	for want, v := range map[string]fmt.Stringer{
		"{}": Config{},
		"{Device:iwarp Provider:iwarp KeepAlive:1m0s Logger:set}": cfg,
		"{Device:iwarp Provider:iwarp KeepAlive:1m0s Logger:set Timeout:1s LocalAddr:192.0.2.1:7}": &Dialer{
			Config: cfg, Timeout: time.Second, LocalAddr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 7}},
		"{RequireRDMA:true Backlog:5}":                      ListenConfig{Config: Config{RequireRDMA: true}, Backlog: 5},
		"{BytesSent:5 ReceiveWindow:4}":                     Stats{BytesSent: 5, ReceiveWindow: 4},
		"{Total:2}":                                         LingerStats{Total: 2},
		"{Overruns:1 Peers:3}":                              PacketStats{Overruns: 1, Peers: 3},
		"{Device:iwarp Transport:UDP Port:1}":               PacketInfo{Device: "iwarp", Transport: "UDP", Port: 1},
		"{Device:iwarp LocalGID:::1 Extensions:half-close}": Info{Device: "iwarp", LocalGID: ibv.GID{15: 1}, Extensions: Extensions{HalfClose: true}},
		"Expedited|Partial":                                 Expedited | Partial,
		"Invalidate(0x10)":                                  Invalidate(16).(fmt.Stringer),
	} {
		require.Equal(t, want, v.String())
	}
	printedtest.CheckFlags(t, "MsgFlags", "", func(bit uint64) string { return MsgFlags(bit).String() })
}
