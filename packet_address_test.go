package rdmanet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// What is no port's number is not cut until it is one.
func TestPacketPortNumbers(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		p := pn.listen(t)
		for _, port := range []int{-1, 1 << 16, 1<<16 + int(at(p).Port())} {
			bad := &net.UDPAddr{IP: p.LocalAddr().(*net.UDPAddr).IP, Port: port}
			_, err := p.WriteTo([]byte("x"), bad)
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, syscall.EINVAL)
			_, err = (&Dialer{Config: pn.cfg, LocalAddr: bad}).Dial(pn.network, p.LocalAddr().String())
			var addrErr *net.AddrError
			require.ErrorAs(t, err, &addrErr)
			group := netip.MustParseAddr("239.82.68.1")
			if at(p).Addr().Is6() {
				group = netip.MustParseAddr("ff05::7264:6d61")
			}
			_, err = (&ListenConfig{Config: pn.cfg}).ListenMulticast(tctx, pn.network, nil, &net.UDPAddr{IP: group.AsSlice(), Port: port})
			requirePacketError(t, err, "listen")
			require.ErrorIs(t, err, syscall.EINVAL)
		}
		require.Zero(t, p.Stats().DatagramsSent)
	})
}

// An address may be written with a zone that it has no use for.
func TestPacketZones(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if pn.network != "udp6" {
			return
		}
		lo := interfaceWith(t, netip.IPv6Loopback())
		server := pn.listen(t)
		if !at(server).Addr().IsLoopback() {
			return // of a device elsewhere
		}
		for _, zone := range []string{lo.Name, strconv.Itoa(lo.Index)} {
			zoned := &net.UDPAddr{IP: net.IPv6loopback, Zone: zone, Port: int(at(server).Port())}
			client := pn.dial(t, zoned)
			pingPong(t, client, server)
			require.Equal(t, server.LocalAddr(), client.RemoteAddr())
			_, err := server.WriteTo([]byte("x"), &net.UDPAddr{IP: net.IPv6loopback, Zone: zone, Port: int(at(client).Port())})
			require.NoError(t, err)
			got, _ := readFrom(t, client)
			defect.Bytes(t, "x", got)
		}
	})
}

// One that is open for a family does not write to another, from an address that would lead
// answers nowhere.
func TestPacketFamilies(t *testing.T) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		here, there := pn.listenAt(t, ":0"), pn.listen(t)
		other := "::1"
		if at(there).Addr().Is6() {
			other = "127.0.0.1"
		}
		for _, p := range []*PacketConn{here, there} {
			_, err := p.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(netip.MustParseAddr(other), 9))
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, syscall.EAFNOSUPPORT)
			require.Zero(t, p.Stats().DatagramsSent)
		}
	})
}

// withOther has another device behind its own, which has no datagrams.
type withOther struct {
	ibv.Provider
	other ibv.Device
}

func (p withOther) Devices() ([]ibv.Device, error) {
	devs, err := p.Provider.Devices()
	return append(devs, p.other), err
}

type noDatagrams struct{ ibv.Device }

func (noDatagrams) Name() string { return "siw0" }
func (noDatagrams) Attr() ibv.DeviceAttr {
	return ibv.DeviceAttr{Transport: ibv.TransportIWARP, Ports: 1}
}

// A device without datagrams does not keep another from having them.
func TestPacketBesideOtherDevices(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		pn.cfg.Provider = withOther{pn.cfg.Provider, noDatagrams{}}
		server := pn.listenAt(t, ":0")
		host, _, err := net.SplitHostPort(pn.address)
		require.NoError(t, err)
		to := net.JoinHostPort(host, strconv.Itoa(int(at(server).Port())))
		c, err := (&Dialer{Config: pn.cfg, Timeout: patience}).Dial(pn.network, to)
		require.NoError(t, err)
		defer c.Close()
		pingPong(t, c.(*PacketConn), server)
	})
}

// doomed is a device whose queue pairs have failed before anybody asks.
type doomed struct{ ibv.Provider }

type doomedID struct{ ibv.ID }

func (p doomed) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	id, err := p.Provider.BindUD(ctx, local)
	return doomedID{id}, err
}

func (i doomedID) Notify(f func(ibv.Event)) {
	f(ibv.Event{Kind: ibv.EventQPFatal, Err: errors.New("doomed")})
	time.Sleep(10 * time.Millisecond)
}

// A queue pair that fails while it is made is given up, too.
func TestPacketFailsAtOnce(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		pn.cfg.Provider = doomed{pn.cfg.Provider}
		p := pn.listen(t)
		require.True(t, eventually(func() bool { return len(p.Info()) == 0 }))
	})
}

// What waits for an address when the connection is closed is counted as dropped.
func TestPacketUnsentAtClose(t *testing.T) {
	set(t, &packetBounds.Resolvers, 0) // nobody's turn comes
	onFabric(t, func(t *testing.T, pn packetNet) {
		p := pn.listen(t)
		for range 3 {
			_, err := p.WriteTo([]byte("x"), p.LocalAddr())
			require.NoError(t, err)
		}
		require.NoError(t, p.Close())
		require.EqualValues(t, 3, p.Stats().Unsent)
	})
}

// slowJoins is a provider whose IDs join no group before release is closed.
type slowJoins struct {
	ibv.Provider
	release chan struct{}
}

type slowJoinID struct {
	ibv.ID
	release chan struct{}
}

func (p slowJoins) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	id, err := p.Provider.BindUD(ctx, local)
	return slowJoinID{id, p.release}, err
}

func (i slowJoinID) JoinMulticast(ctx context.Context, group netip.Addr, how ibv.JoinFlags) (ibv.UDParam, error) {
	<-i.release
	return i.ID.JoinMulticast(ctx, group, how)
}

// A write to a group that cannot be joined yet heeds its deadline, and Close.
func TestGroupWriteDeadline(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		release := make(chan struct{})
		group := netip.MustParseAddrPort("239.82.68.1:9999")
		if pn.network == "udp6" {
			group = netip.MustParseAddrPort("[ff05::7264:6d61]:9999")
		}
		pn.cfg.Provider = slowJoins{pn.cfg.Provider, release}
		p := pn.listen(t)
		for range 2 {
			require.NoError(t, p.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
			within(t, "WriteTo", func() {
				_, err := p.WriteToUDPAddrPort([]byte("x"), group)
				requireTimeout(t, err)
			})
		}
		require.NoError(t, p.SetWriteDeadline(time.Time{}))
		done := make(chan error, 1)
		go func() {
			_, err := p.WriteToUDPAddrPort([]byte("x"), group)
			done <- err
		}()
		closed := make(chan error, 1)
		go func() {
			time.Sleep(20 * time.Millisecond)
			closed <- p.Close()
		}()
		within(t, "WriteTo", func() { require.ErrorIs(t, <-done, net.ErrClosed) })
		close(release)
		require.NoError(t, <-closed)
	})
}

// Questions in a peer's name that tell of another queue pair have it asked for once in a
// while, not at every write.
func TestPacketForgedQuestions(t *testing.T) {
	set(t, &packetBounds.SuspicionPause, time.Hour)
	set(t, &packetBounds.MinSilence, time.Hour)
	onFabric(t, func(t *testing.T, pn packetNet) {
		client, server := pn.pair(t)
		before := server.Stats()
		for i := range uint32(50) {
			id, err := pn.cfg.Provider.ResolveUD(tctx, netip.AddrPort{}, at(server))
			require.NoError(t, err)
			require.NoError(t, id.Connect(tctx, ibv.ConnParam{Private: privateOf(at(client).Port(), 5000+i)}))
			require.NoError(t, id.Close())
			_, err = server.WriteToUDPAddrPort([]byte("x"), at(client))
			require.NoError(t, err)
			readFrom(t, client)
		}
		require.LessOrEqual(t, server.Stats().Resolutions-before.Resolutions, uint64(1))
	})
}
