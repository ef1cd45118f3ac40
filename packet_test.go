package rdmanet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/fabric"
)

// packetNet is a device for datagrams, and an address on it.
type packetNet struct {
	name    string
	network string
	address string // host:0
	cfg     Config
	fabric  *fabric.Fabric // if it is that
}

// fabricMTU is small enough that datagrams of both kinds, inline and not, are tried
// cheaply.
const fabricMTU = 1024

func newFabric() *fabric.Fabric {
	return fabric.New(fabricMTU, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback())
}

// hasUD reports whether the RDMA device that the tests run over has datagrams.
func hasUD(t testing.TB) bool {
	t.Helper()
	return onRDMA && testDevice(t).Attr().Caps.Has(ibv.CapUD)
}

// eachPacketNet runs f over the software device, the fabric and, where there is one, an
// RDMA device, with both families, and looks for leaks.
func eachPacketNet(t *testing.T, f func(t *testing.T, pn packetNet)) {
	type device struct {
		name  string
		hosts [2]string
		net   func(t *testing.T) packetNet
	}
	local := [2]string{"127.0.0.1", "::1"}
	devices := []device{
		{"udp", local, func(t *testing.T) packetNet {
			return packetNet{cfg: Config{Provider: newSwitch(t, iwarp.New(iwarp.Config{}))}}
		}},
		{"fabric", local, func(t *testing.T) packetNet {
			fab := newFabric()
			return packetNet{cfg: Config{Provider: newSwitch(t, fab)}, fabric: fab}
		}},
	}
	if hasUD(t) {
		devices = append(devices, device{"rdma", [2]string{host4, host6}, func(t *testing.T) packetNet {
			return packetNet{cfg: Config{Provider: newSwitch(t, nil)}}
		}})
	}
	for _, dev := range devices {
		for i, network := range []string{"udp4", "udp6"} {
			t.Run(dev.name+"/"+network, func(t *testing.T) {
				checkLeaks(t)
				pn := dev.net(t)
				pn.name, pn.network, pn.address = dev.name, network, net.JoinHostPort(dev.hosts[i], "0")
				f(t, pn)
			})
		}
	}
}

// overVerbs reports whether datagrams go by queue pairs.
func (pn packetNet) overVerbs() bool { return pn.name != "udp" }

// listen opens a PacketConn that is closed with the test.
func (pn packetNet) listen(t testing.TB) *PacketConn { return pn.listenAt(t, pn.address) }

func (pn packetNet) listenAt(t testing.TB, address string) *PacketConn {
	t.Helper()
	p, err := (&ListenConfig{Config: pn.cfg}).ListenPacket(tctx, pn.network, address)
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p.(*PacketConn)
}

func (pn packetNet) dial(t testing.TB, to net.Addr) *PacketConn {
	t.Helper()
	c, err := (&Dialer{Config: pn.cfg, Timeout: patience}).Dial(pn.network, to.String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c.(*PacketConn)
}

// pair is one that listens and one that is connected to it, which have both heard of
// each other.
func (pn packetNet) pair(t testing.TB) (client, server *PacketConn) {
	t.Helper()
	server = pn.listen(t)
	client = pn.dial(t, server.LocalAddr())
	pingPong(t, client, server)
	return client, server
}

// pingPong sends a datagram each way, and again until it arrives.
func pingPong(t testing.TB, client, server *PacketConn) {
	t.Helper()
	var buf [100]byte
	server.SetReadDeadline(time.Now().Add(patience))
	client.SetReadDeadline(time.Now().Add(patience))
	_, err := client.Write([]byte("ping"))
	require.NoError(t, err)
	n, from, err := server.ReadFrom(buf[:])
	require.NoError(t, err)
	require.Equal(t, "ping", string(buf[:n]))
	require.Equal(t, client.LocalAddr(), from)
	_, err = server.WriteTo([]byte("pong"), from)
	require.NoError(t, err)
	n, err = client.Read(buf[:])
	require.NoError(t, err)
	require.Equal(t, "pong", string(buf[:n]))
	server.SetReadDeadline(time.Time{})
	client.SetReadDeadline(time.Time{})
}

// readFrom reads one datagram, of any length.
func readFrom(t testing.TB, p *PacketConn) ([]byte, netip.AddrPort) {
	t.Helper()
	b := make([]byte, 1<<16)
	require.NoError(t, p.SetReadDeadline(time.Now().Add(patience)))
	n, from, err := p.ReadFromUDPAddrPort(b)
	require.NoError(t, err)
	return b[:n], from
}

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.UDPAddr).AddrPort() }

func TestPacketPingPong(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for i := range 100 {
			msg := pattern(uint64(i), i*5)
			_, err := client.Write(msg)
			require.NoError(t, err)
			got, from := readFrom(t, server)
			require.Equal(t, msg, got)
			_, err = server.WriteToUDPAddrPort(got, from)
			require.NoError(t, err)
			got, _ = readFrom(t, client)
			require.Equal(t, msg, got)
		}
		s := client.Stats()
		require.EqualValues(t, 101, s.DatagramsSent)
		require.EqualValues(t, 101, s.DatagramsReceived)
		require.Zero(t, s.Overruns+s.Strays+s.Unsent)
	})
}

var _ = []any{errors.Is, fmt.Sprint, os.ErrClosed, slices.Max[[]int], sync.OnceFunc, syscall.EINVAL}
