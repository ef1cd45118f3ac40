package udconn

import (
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/fabric"
	"github.com/rdmanet/rdmanet/internal/leaktest"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// patience is how long a test waits for what must come to pass.
const patience = 90 * time.Second

// testNet is a fabric with one address, and the settings of the Conns there.
type testNet struct {
	fab      *fabric.Fabric
	sw       *verbstest.Switch
	host     netip.Addr
	settings Settings
}

// newTestNet puts a switch in front of a fabric. It checks at the end of the test that nothing
// is left.
func newTestNet(t testing.TB, fab *fabric.Fabric, host string) *testNet {
	t.Helper()
	leaktest.Check(t)
	_, before := cqwait.Polling()
	t.Cleanup(func() {
		if !eventually(func() bool { polls, served := cqwait.Polling(); return !polls && served <= before }) {
			defect.Leak(t, "a Conn polls, or counts as being served")
		}
	})
	old := regmem.SetDomainIdle(0)
	t.Cleanup(func() { regmem.SetDomainIdle(old) })
	n := &testNet{fab: fab, sw: verbstest.NewSwitch(fab), host: netip.MustParseAddr(host)}
	t.Cleanup(func() {
		if !eventually(func() bool { return len(n.sw.Live()) == 0 && n.sw.RegisteredBytes() == 0 }) {
			defect.Leak(t, "left behind: %v, %d bytes of registered memory", n.sw.Live(), n.sw.RegisteredBytes())
		}
	})
	n.settings = Settings{Log: slog.New(slog.DiscardHandler), Linger: 5 * time.Second, Software: "udp", Bounds: DefaultBounds(2 * time.Second)}
	return n
}

// eachFamily runs f over a fabric of either family.
func eachFamily(t *testing.T, f func(t *testing.T, n *testNet)) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			f(t, newTestNet(t, fabric.New(1024, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()), host))
		})
	}
}

// listen opens a Conn that is closed with the test.
func (n *testNet) listen(t testing.TB) *Conn {
	t.Helper()
	c, err := Listen(t.Context(), n.settings, Devices{RDMA: n.sw}, netip.AddrPortFrom(n.host, 0), netip.Addr{})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// dial opens a connected Conn that is closed with the test.
func (n *testNet) dial(t testing.TB, to netip.AddrPort) *Conn {
	t.Helper()
	c, err := Dial(t.Context(), n.settings, Devices{RDMA: n.sw}, netip.AddrPort{}, to)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// pair opens two Conns, the first one connected to the second one, that know each other.
func (n *testNet) pair(t testing.TB) (client, server *Conn) {
	t.Helper()
	server = n.listen(t)
	client = n.dial(t, at(server))
	pingPong(t, client, server)
	return client, server
}

func at(c *Conn) netip.AddrPort { return c.LocalAddr().AddrPort() }

// pingPong sends a datagram each way.
func pingPong(t testing.TB, client, server *Conn) {
	t.Helper()
	require.NoError(t, client.WritePeer([]byte("ping")))
	got, from := read(t, server)
	defect.Bytes(t, "ping", got)
	require.Equal(t, at(client), from)
	require.NoError(t, server.Write([]byte("pong"), from))
	got, _ = read(t, client)
	defect.Bytes(t, "pong", got)
}

// read reads one datagram.
func read(t testing.TB, c *Conn) ([]byte, netip.AddrPort) {
	t.Helper()
	b := make([]byte, 5000)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	n, from, err := c.Read(b)
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	return b[:n], from
}

// forged returns a datagram to c that passes for one of a peer that is rdmanet.
func forged(c *Conn, from netip.AddrPort, qpn uint32) fabric.Packet {
	return fabric.Packet{From: from.Addr(), To: at(c).Addr(), SrcQPN: qpn, DstQPN: c.Info()[0].QPN, QKey: ibv.QKeyUDP,
		Imm: Immediate(from.Port()), HasImm: true, Payload: []byte("forged")}
}

// pattern returns n random bytes that depend on seed.
func pattern(seed uint64, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b)
	return b
}

// eventually tries until ok holds or patience is over.
func eventually(ok func() bool) bool {
	deadline := time.Now().Add(patience)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if ok() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
}
