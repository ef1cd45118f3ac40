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
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/fabric"
	"github.com/rdmanet/rdmanet/internal/udconn"
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
	defect.Bytes(t, "ping", buf[:n])
	require.Equal(t, client.LocalAddr(), from)
	_, err = server.WriteTo([]byte("pong"), from)
	require.NoError(t, err)
	n, err = client.Read(buf[:])
	require.NoError(t, err)
	defect.Bytes(t, "pong", buf[:n])
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

// at returns the local address.
func at(p *PacketConn) netip.AddrPort { return addrPort(p.LocalAddr()) }

func TestPacketPingPong(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for i := range 100 {
			msg := pattern(uint64(i), i*5)
			_, err := client.Write(msg)
			require.NoError(t, err)
			got, from := readFrom(t, server)
			defect.Bytes(t, msg, got)
			_, err = server.WriteToUDPAddrPort(got, from)
			require.NoError(t, err)
			got, _ = readFrom(t, client)
			defect.Bytes(t, msg, got)
		}
		s := client.Stats()
		require.EqualValues(t, 101, s.DatagramsSent)
		require.EqualValues(t, 101, s.DatagramsReceived)
		require.Zero(t, s.Overruns+s.Strays+s.Unsent)
	})
}

// rdmaTransport makes requireOpError look at our errors.
var rdmaTransport = transport{rdma: true}

func requirePacketError(t testing.TB, err error, op string) {
	t.Helper()
	requireOpError(t, rdmaTransport, err, op)
}

// Every length from nothing to the limit goes in one piece; one byte more is refused, on
// a connected one and on another.
func TestPacketSizes(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		limit := client.MaxDatagramSize()
		require.Equal(t, limit, server.MaxDatagramSize())
		require.GreaterOrEqual(t, limit, 256)
		if pn.overVerbs() {
			require.LessOrEqual(t, limit, 4096)
		}
		for _, n := range []int{0, 1, 63, 64, 65, 255, 256, limit - 1, limit} {
			msg := pattern(uint64(n), n)
			sent, err := client.Write(msg)
			require.NoError(t, err)
			require.Equal(t, n, sent)
			got, from := readFrom(t, server)
			defect.Bytes(t, msg, got)
			sent, err = server.WriteToUDPAddrPort(msg, from)
			require.NoError(t, err)
			require.Equal(t, n, sent)
			got, _ = readFrom(t, client)
			defect.Bytes(t, msg, got)
		}
		before := client.Stats()
		n, err := client.Write(make([]byte, limit+1))
		require.Zero(t, n)
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.EMSGSIZE)
		n, err = server.WriteTo(make([]byte, limit+1), client.LocalAddr())
		require.Zero(t, n)
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.EMSGSIZE)
		require.Equal(t, before.DatagramsSent, client.Stats().DatagramsSent)
		pingPong(t, client, server)
	})
}

// A datagram that is longer than the reader's buffer loses the rest, and only that.
func TestPacketTruncated(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		for _, msg := range []string{"0123456789", "abc"} {
			_, err := client.Write([]byte(msg))
			require.NoError(t, err)
		}
		var b [4]byte
		server.SetReadDeadline(time.Now().Add(patience))
		n, _, err := server.ReadFrom(b[:])
		require.NoError(t, err)
		require.Equal(t, "0123", string(b[:n])) // The first one may be lost.
		n, _, err = server.ReadFrom(b[:])
		require.NoError(t, err)
		require.Equal(t, "abc", string(b[:n]))
	})
}

// Datagrams to one peer arrive in the order in which they were written, by several
// writers each in its own order.
func TestPacketOrder(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		const writers, window = 4, 8
		each := heavy(2000)
		client, server := pn.pair(t)
		credits := make(chan struct{}, window) // so that none is lost for want of room
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				msg := make([]byte, 100)
				for i := range each {
					credits <- struct{}{}
					msg[0] = byte(w)
					copy(msg[1:], fmt.Sprintf("%08d", i))
					if _, err := client.Write(msg[:9+i%91]); err != nil {
						t.Error(err)
					}
				}
			})
		}
		var next [writers]int
		b := make([]byte, 200)
		server.SetReadDeadline(time.Now().Add(patience))
		for range writers * each {
			n, _, err := server.ReadFromUDPAddrPort(b)
			require.NoError(t, err)
			w := b[0]
			require.Equal(t, fmt.Sprintf("%08d", next[w]), string(b[1:9]))
			require.Equal(t, 9+next[w]%91, n)
			next[w]++
			<-credits
		}
		wg.Wait()
	})
}

// One that is connected hears its peer alone.
func TestPacketConnectedHearsPeerOnly(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		stranger := pn.listen(t)
		_, err := stranger.WriteTo([]byte("hello"), client.LocalAddr())
		require.NoError(t, err)
		pingPong(t, client, server)
		_, err = server.WriteTo([]byte("from the peer"), client.LocalAddr())
		require.NoError(t, err)
		got, from := readFrom(t, client)
		defect.Bytes(t, "from the peer", got)
		require.Equal(t, addrPort(server.LocalAddr()), from)
	})
}

func TestPacketErrors(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		var b [10]byte

		_, err := client.WriteTo(b[:], server.LocalAddr())
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, net.ErrWriteToConnected)
		_, err = server.Write(b[:])
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.EDESTADDRREQ)
		_, err = server.WriteToUDPAddrPort(b[:], netip.AddrPort{})
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, syscall.EDESTADDRREQ)
		for _, bad := range []net.Addr{nil, (*net.UDPAddr)(nil), &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}} {
			_, err = server.WriteTo(b[:], bad)
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, syscall.EINVAL)
		}
		requirePacketError(t, server.SetReadBuffer(-1), "set")
		require.NoError(t, server.SetReadBuffer(1<<20))
		require.NoError(t, server.SetWriteBuffer(1<<20))

		for _, p := range []*PacketConn{client, server} {
			require.IsType(t, (*net.UDPAddr)(nil), p.LocalAddr())
			require.NoError(t, p.Close())
			for op, err := range map[string]error{
				"close": p.Close(),
				"set":   errors.Join(p.SetDeadline(time.Time{})),
			} {
				require.ErrorIs(t, err, net.ErrClosed, op)
			}
			requirePacketError(t, p.Close(), "close")
			requirePacketError(t, p.SetReadDeadline(time.Time{}), "set")
			requirePacketError(t, p.SetWriteDeadline(time.Time{}), "set")
			requirePacketError(t, p.SetReadBuffer(1), "set")
			requirePacketError(t, p.SetWriteBuffer(1), "set")
			_, _, err = p.ReadFrom(b[:])
			requirePacketError(t, err, "read")
			require.ErrorIs(t, err, net.ErrClosed)
			_, err = p.Read(b[:])
			require.ErrorIs(t, err, net.ErrClosed)
		}
		_, err = client.Write(b[:])
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, net.ErrClosed)
		_, err = server.WriteTo(b[:], client.LocalAddr())
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, net.ErrClosed)
		require.Nil(t, server.RemoteAddr())
		require.Equal(t, server.LocalAddr(), client.RemoteAddr())
	})
}

func TestPacketOpenErrors(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		lc, d := ListenConfig{Config: pn.cfg}, Dialer{Config: pn.cfg, Timeout: patience}
		_, err := lc.ListenPacket(tctx, pn.network, server.LocalAddr().String())
		requirePacketError(t, err, "listen")
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		_, err = lc.ListenPacket(tctx, "tcp", pn.address)
		requirePacketError(t, err, "listen")
		require.ErrorIs(t, err, net.UnknownNetworkError("tcp"))
		_, err = d.Dial("udp5", pn.address)
		require.ErrorIs(t, err, net.UnknownNetworkError("udp5"))
		_, err = lc.Listen(tctx, pn.network, pn.address)
		require.ErrorIs(t, err, net.UnknownNetworkError(pn.network))
		_, err = lc.ListenPacket(tctx, pn.network, "no port")
		requirePacketError(t, err, "listen")
		bad := lc
		bad.MaxSendSize = 1
		_, err = bad.ListenPacket(tctx, pn.network, pn.address)
		requirePacketError(t, err, "listen")
		d.LocalAddr = &net.TCPAddr{}
		_, err = d.Dial(pn.network, server.LocalAddr().String())
		requirePacketError(t, err, "dial")

		// From a port that was chosen, of which the peer then hears.
		free := pn.listen(t)
		d.LocalAddr = free.LocalAddr()
		_, err = d.Dial(pn.network, server.LocalAddr().String())
		requirePacketError(t, err, "dial")
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		require.NoError(t, free.Close())
		c, err := d.Dial(pn.network, server.LocalAddr().String())
		require.NoError(t, err)
		defer c.Close()
		pingPong(t, c.(*PacketConn), server)
		require.Equal(t, free.LocalAddr(), c.LocalAddr())
	})
}

// The networks mean the same whether they are named after RDMA or UDP.
func TestPacketNetworks(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		family := pn.network[3:]
		for _, network := range []string{"rdma" + family, "udp" + family, "udp"} {
			p, err := (&ListenConfig{Config: pn.cfg}).ListenPacket(tctx, network, pn.address)
			require.NoError(t, err)
			c := pn.dial(t, p.LocalAddr())
			pingPong(t, c, p.(*PacketConn))
			require.NoError(t, p.Close())
			require.NoError(t, c.Close())
		}
		other := map[string]string{"4": "udp6", "6": "udp4"}[family]
		_, err := (&ListenConfig{Config: pn.cfg}).ListenPacket(tctx, other, pn.address)
		requirePacketError(t, err, "listen")
	})
}

// One that listens on every address hears each of them.
func TestPacketEveryAddress(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		for _, network := range []string{pn.network, "udp"} {
			p, err := (&ListenConfig{Config: pn.cfg}).ListenPacket(tctx, network, ":0")
			require.NoError(t, err)
			server := p.(*PacketConn)
			host, _, err := net.SplitHostPort(pn.address)
			require.NoError(t, err)
			to := netip.AddrPortFrom(netip.MustParseAddr(host), addrPort(server.LocalAddr()).Port())
			client := pn.dial(t, udpAddr(to))
			pingPong(t, client, server)
			info := server.Info()
			require.Len(t, info, 1)
			require.Equal(t, pn.overVerbs(), info[0].QPN != 0)
			require.GreaterOrEqual(t, info[0].MTU, server.MaxDatagramSize())

			// And it may be the first to send.
			third := pn.listen(t)
			_, err = server.WriteTo([]byte("hello"), third.LocalAddr())
			require.NoError(t, err)
			got, from := readFrom(t, third)
			defect.Bytes(t, "hello", got)
			require.Equal(t, to, from)
			require.NoError(t, server.Close())
			require.NoError(t, third.Close())
			require.NoError(t, client.Close())
		}
	})
}

// While nobody reads, what is too much is dropped and counted, and what comes later is
// received as ever.
func TestPacketOverrun(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		const room = 50
		size := 100
		require.NoError(t, server.SetReadBuffer(room*(size+udconn.Charge)))
		msg := make([]byte, size)
		sent := 0
		// Without a reader the datagrams are taken all the same.
		require.True(t, eventually(func() bool {
			for range 20 {
				msg[0], msg[1] = byte(sent>>8), byte(sent)
				if _, err := client.Write(msg); err != nil {
					t.Fatal(err)
				}
				sent++
			}
			return server.Stats().Overruns > 0
		}))
		first, _ := readFrom(t, server)
		require.Equal(t, []byte{0, 0}, first[:2])
		for range room - 1 {
			readFrom(t, server)
		}
		last := []byte("still there")
		require.True(t, eventually(func() bool {
			_, err := client.Write(last)
			require.NoError(t, err)
			for {
				got, _ := readFrom(t, server)
				if slices.Equal(got, last) {
					return true
				}
			}
		}))
		s := server.Stats()
		require.Positive(t, s.Overruns)
		require.GreaterOrEqual(t, s.DatagramsReceived, uint64(room))
	})
}

// ListenPacket on a device without datagrams says so, and by default takes the software
// device instead.
func TestPacketUnsupported(t *testing.T) {
	if !onRDMA || hasUD(t) {
		return
	}
	checkLeaks(t)
	for _, network := range []string{"udp4", "udp6"} {
		address := map[string]string{"udp4": local4, "udp6": local6}[network]
		_, err := ListenPacket(network, address)
		requirePacketError(t, err, "listen")
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, os.Getenv("RDMANET_VM_DEVICE"))
		group := net.ParseIP(map[string]string{"udp4": "239.82.68.1", "udp6": "ff02::7264:6d61"}[network])
		_, err = ListenMulticast(network, nil, &net.UDPAddr{IP: group, Port: 7777})
		requirePacketError(t, err, "listen")
		require.ErrorIs(t, err, errors.ErrUnsupported)
		_, err = ListenPacket(network, ":0")
		require.ErrorIs(t, err, errors.ErrUnsupported)
		_, err = Dial(network, map[string]string{"udp4": host4 + ":7", "udp6": "[" + host6 + "]:7"}[network])
		requirePacketError(t, err, "dial")
		require.ErrorIs(t, err, errors.ErrUnsupported)

		t.Setenv(deviceEnv, "")
		_, err = (&ListenConfig{Config: Config{RequireRDMA: true}}).ListenPacket(tctx, network, address)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		p, err := ListenPacket(network, address)
		require.NoError(t, err)
		c, err := Dial(network, p.LocalAddr().String())
		require.NoError(t, err)
		pingPong(t, c.(*PacketConn), p.(*PacketConn))
		require.Equal(t, software.Name(), p.(*PacketConn).Info()[0].Device)
		require.NoError(t, c.Close())
		require.NoError(t, p.Close())
		t.Setenv(deviceEnv, "rdma")
	}
}

// By default an RDMA device serves, and the software device beside it.
func TestPacketDefaultDevices(t *testing.T) {
	if !hasUD(t) {
		return
	}
	checkLeaks(t)
	t.Setenv(deviceEnv, "")
	ln, err := ListenPacket("udp4", local4)
	require.NoError(t, err)
	server := ln.(*PacketConn)
	defer server.Close()
	require.Len(t, server.Info(), 2)
	for device, want := range map[string]int{"": 0, "rdma": 0, software.Name(): 1} {
		d := Dialer{Config: Config{Device: device}, Timeout: patience}
		c, err := d.Dial("udp4", server.LocalAddr().String())
		require.NoError(t, err)
		client := c.(*PacketConn)
		require.Equal(t, server.Info()[want].Device, client.Info()[0].Device)
		pingPong(t, client, server)
		require.NoError(t, client.Close())
	}
}
