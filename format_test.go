package rdmanet

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

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
	printedtest.Check(t, map[string]any{
		"Buffer": b, "Config": cfg, "Conn": client, "Conn that is read": server, "Dialer": &Dialer{Config: cfg},
		"LingerStats":  Lingering(),
		"ListenConfig": &ListenConfig{Config: cfg}, "Listener": l, "MsgFlags": Expedited, "PendingMessage": send,
		"PacketConn": packets, "PacketConn with a peer": sender, "PacketStats": packets.(*PacketConn).Stats(), "PacketInfo": packetInfo,
		"Datagram": Datagram{Buf: payload, N: 100, Addr: netip.MustParseAddrPort("192.0.2.1:53")}, "Stats": client.(*Conn).Stats(), "Info": info, "Extensions": info.Extensions, "TransferMode": info.Extensions.SendTransfers,
	})
}
