package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/fabric"
	"github.com/rdmanet/rdmanet/internal/udconn"
)

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// groupNet is a packetNet, and the interface and groups to take there.
type groupNet struct {
	packetNet
	ifi  *net.Interface
	a, b netip.Addr
}

// eachGroupNet runs f over every device and family that has groups. Those that have none
// must say so.
func eachGroupNet(t *testing.T, f func(t *testing.T, gn groupNet)) {
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		gn := groupNet{packetNet: pn, a: netip.MustParseAddr("239.82.68.1"), b: netip.MustParseAddr("239.82.68.2")}
		if pn.network == "udp6" {
			gn.a, gn.b = netip.MustParseAddr("ff02::7264:6d61"), netip.MustParseAddr("ff02::7264:6d62")
		}
		host, _, err := net.SplitHostPort(pn.address)
		require.NoError(t, err)
		gn.ifi = interfaceWith(t, netip.MustParseAddr(host))
		if pn.name == "udp" && pn.network == "udp6" && !gn.findRoute(t) {
			return
		}
		p, err := gn.tryMember(gn.a, 0)
		if pn.name == "rdma" && pn.network == "udp6" && err != nil {
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "IPv6 groups")
			requirePacketError(t, err, "listen")
			return
		}
		require.NoError(t, err)
		require.NoError(t, p.Close())
		f(t, gn)
	})
}

// interfaceWith finds the interface that has an address.
func interfaceWith(t testing.TB, addr netip.Addr) *net.Interface {
	t.Helper()
	ifis, err := net.Interfaces()
	require.NoError(t, err)
	for _, ifi := range ifis {
		addrs, err := ifi.Addrs()
		require.NoError(t, err)
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			if ok && (n.IP.Equal(addr.AsSlice()) || n.IP.IsLoopback() && n.Contains(addr.AsSlice())) {
				return &ifi
			}
		}
	}
	t.Fatalf("no interface has %v", addr)
	return nil
}

// findRoute takes an interface that has routes to groups of IPv6; the loopback interface
// has none on Linux. Where no other has either, nothing can be sent, which must be told.
func (gn *groupNet) findRoute(t *testing.T) bool {
	t.Helper()
	ifis, err := net.Interfaces()
	require.NoError(t, err)
	for _, ifi := range ifis {
		if ifi.Flags&net.FlagUp == 0 {
			continue
		}
		if c, err := net.DialUDP("udp6", nil, &net.UDPAddr{IP: gn.a.AsSlice(), Port: 9, Zone: ifi.Name}); err == nil {
			c.Close()
			gn.ifi = &ifi
			return true
		}
	}
	p, err := gn.tryMember(gn.a, 0)
	require.NoError(t, err)
	_, err = p.WriteToUDPAddrPort(nil, netip.AddrPortFrom(gn.a.WithZone(gn.ifi.Name), 9))
	requirePacketError(t, err, "write")
	require.NoError(t, p.Close())
	return false
}

// awayFromLoopback takes another interface than that for UDP, if there is one.
func (gn *groupNet) awayFromLoopback(t *testing.T) {
	t.Helper()
	if gn.overVerbs() || gn.ifi.Flags&net.FlagLoopback == 0 {
		return
	}
	ifis, err := net.Interfaces()
	require.NoError(t, err)
	for _, ifi := range ifis {
		addrs, err := ifi.Addrs()
		require.NoError(t, err)
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && ifi.Flags&(net.FlagUp|net.FlagLoopback) == net.FlagUp {
				gn.ifi = &ifi
				return
			}
		}
	}
}

func (gn groupNet) tryMember(group netip.Addr, port uint16) (*PacketConn, error) {
	return (&ListenConfig{Config: gn.cfg}).ListenMulticast(tctx, gn.network, gn.ifi, udpAddr(netip.AddrPortFrom(group, port)))
}

// member opens one that hears a group, at any port for 0.
func (gn groupNet) member(t testing.TB, group netip.Addr, port uint16) *PacketConn {
	t.Helper()
	p, err := gn.tryMember(group, port)
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// sender opens one that sends by the interface.
func (gn groupNet) sender(t testing.TB) *PacketConn {
	t.Helper()
	p := gn.listenAt(t, ":0")
	require.NoError(t, p.SetMulticastInterface(gn.ifi))
	return p
}

func portOfConn(p *PacketConn) uint16 { return addrPort(p.LocalAddr()).Port() }

func castTo(t testing.TB, p *PacketConn, group netip.Addr, port uint16, msg string) {
	t.Helper()
	n, err := p.WriteToUDPAddrPort([]byte(msg), netip.AddrPortFrom(group, port))
	require.NoError(t, err)
	require.Equal(t, len(msg), n)
}

func requireHears(t testing.TB, p *PacketConn, msg string) netip.AddrPort {
	t.Helper()
	got, from := readFrom(t, p)
	require.Equal(t, msg, string(got)) // Another one may have been lost, or come late.
	return from
}

// requireHearsNothing checks that no datagram waits, or arrives within a moment.
func requireHearsNothing(t testing.TB, p *PacketConn) {
	t.Helper()
	require.NoError(t, p.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	n, _, err := p.ReadFromUDPAddrPort(make([]byte, 100))
	require.Zero(t, n)
	requireTimeout(t, err)
	require.NoError(t, p.SetReadDeadline(time.Time{}))
}

// Two members on one port hear one that is none, and can answer it.
func TestGroupMembers(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		a := gn.member(t, gn.a, 0)
		port := portOfConn(a)
		b := gn.member(t, gn.a, port)
		require.Equal(t, port, portOfConn(b))
		sender := gn.sender(t)
		for i := range 10 {
			msg := fmt.Sprintf("to all, %d", i)
			castTo(t, sender, gn.a, port, msg)
			for _, m := range []*PacketConn{a, b} {
				from := requireHears(t, m, msg)
				require.Equal(t, portOfConn(sender), from.Port())
				require.False(t, from.Addr().IsMulticast())
				_, err := m.WriteToUDPAddrPort([]byte("heard it"), from)
				require.NoError(t, err)
				requireHears(t, sender, "heard it")
			}
		}
		limit := sender.MaxDatagramSize()
		for _, size := range []int{0, 64, 65, min(limit, a.MaxDatagramSize())} {
			msg := string(pattern(uint64(size), size))
			castTo(t, sender, gn.a, port, msg)
			requireHears(t, a, msg)
			requireHears(t, b, msg)
		}
		_, err := sender.WriteToUDPAddrPort(make([]byte, limit+1), netip.AddrPortFrom(gn.a, port))
		require.ErrorIs(t, err, syscall.EMSGSIZE)
		require.Zero(t, a.Stats().Strays+b.Stats().Strays+sender.Stats().Strays)
	})
}

// What a member sends comes back to it as it says.
func TestGroupLoopback(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		gn.awayFromLoopback(t)
		p := gn.member(t, gn.a, 0)
		port := portOfConn(p)
		unwanted := func(n int) {
			castTo(t, p, gn.a, port, "unwanted")
			switch {
			case gn.overVerbs():
				require.True(t, eventually(func() bool { return p.Stats().Looped == uint64(n) }))
			case gn.ifi.Flags&net.FlagLoopback != 0: // where it cannot be helped
				requireHears(t, p, "unwanted")
			}
		}
		unwanted(1)
		require.NoError(t, p.SetMulticastLoopback(true))
		castTo(t, p, gn.a, port, "wanted")
		requireHears(t, p, "wanted")
		require.NoError(t, p.SetMulticastLoopback(false))
		unwanted(2)
		require.NoError(t, p.SetMulticastLoopback(true))
		castTo(t, p, gn.a, port, "wanted again")
		requireHears(t, p, "wanted again")

		// One that has joined hears itself from the start.
		q := gn.sender(t)
		require.NoError(t, q.JoinGroup(gn.ifi, udpAddr(netip.AddrPortFrom(gn.a, 0))))
		castTo(t, q, gn.a, portOfConn(q), "mine")
		require.Equal(t, portOfConn(q), requireHears(t, q, "mine").Port())
	})
}

// Groups are joined and left one by one.
func TestGroupJoinLeave(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		p, sender := gn.listenAt(t, ":0"), gn.sender(t)
		port := portOfConn(p)
		a, b := &net.UDPAddr{IP: gn.a.AsSlice()}, &net.IPAddr{IP: gn.b.AsSlice()}
		require.NoError(t, p.JoinGroup(gn.ifi, a))
		require.NoError(t, p.JoinGroup(gn.ifi, b))
		for i := range 3 {
			castTo(t, sender, gn.a, port, "to a")
			requireHears(t, p, "to a")
			require.NoError(t, p.LeaveGroup(gn.ifi, a))
			castTo(t, sender, gn.a, port, "to nobody")
			castTo(t, sender, gn.b, port, fmt.Sprint("to b ", i))
			requireHears(t, p, fmt.Sprint("to b ", i))
			require.NoError(t, p.JoinGroup(gn.ifi, a))
		}
		// It sends to a group that it has left, too.
		require.NoError(t, sender.JoinGroup(gn.ifi, a))
		castTo(t, sender, gn.a, port, "as a member")
		requireHears(t, p, "as a member")
		require.NoError(t, sender.LeaveGroup(gn.ifi, a))
		castTo(t, sender, gn.a, port, "as none")
		requireHears(t, p, "as none")

		// One that is bound to an address needs no interface to be named.
		if gn.overVerbs() {
			q := gn.listen(t)
			require.NoError(t, q.JoinGroup(nil, a))
			castTo(t, sender, gn.a, portOfConn(q), "to one address")
			requireHears(t, q, "to one address")
			castTo(t, q, gn.a, port, "from there")
			require.Equal(t, addrPort(q.LocalAddr()), requireHears(t, p, "from there"))
			require.NoError(t, q.LeaveGroup(nil, a))
		}
	})
}

// A datagram to a group costs no allocation.
func TestGroupWithoutGarbage(t *testing.T) {
	for _, pn := range packetNets(t) {
		host, _, err := net.SplitHostPort(pn.address)
		require.NoError(t, err)
		gn := groupNet{packetNet: pn, a: netip.MustParseAddr("239.82.68.1"), ifi: interfaceWith(t, netip.MustParseAddr(host))}
		p, sender := gn.member(t, gn.a, 0), gn.sender(t)
		require.NoError(t, p.SetReadDeadline(time.Now().Add(patience)))
		to, msg, b := netip.AddrPortFrom(gn.a, portOfConn(p)), make([]byte, 100), make([]byte, 2000)
		turn := func() {
			_, err := sender.WriteToUDPAddrPort(msg, to)
			if err == nil {
				_, _, err = p.ReadFromUDPAddrPort(b)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for range 300 {
			turn()
		}
		require.Zero(t, testing.AllocsPerRun(heavy(1000), turn), pn.name)
	}
}

// By default both devices are there: a group is heard by either, and written to by UDP.
func TestGroupByDefault(t *testing.T) {
	if !hasUD(t) {
		return // TestGroupBothDevices has its say
	}
	checkLeaks(t)
	t.Setenv(deviceEnv, "")
	ifi, group := interfaceWith(t, netip.MustParseAddr(host4)), netip.MustParseAddrPort("239.82.68.11:7778")
	p, err := ListenMulticast("udp4", ifi, udpAddr(group))
	require.NoError(t, err)
	defer p.Close()
	require.Len(t, p.Info(), 2)
	for _, cfg := range []Config{{}, {RequireRDMA: true}, {Device: software.Name()}} {
		pc, err := (&ListenConfig{Config: cfg}).ListenPacket(tctx, "udp4", ":0")
		require.NoError(t, err)
		sender := pc.(*PacketConn)
		require.NoError(t, sender.SetMulticastInterface(ifi))
		castTo(t, sender, group.Addr(), group.Port(), "hello")
		from := requireHears(t, p, "hello")
		require.Equal(t, netip.AddrPortFrom(netip.MustParseAddr(host4), portOfConn(sender)), from)
		_, err = p.WriteToUDPAddrPort([]byte("answer"), from)
		require.NoError(t, err)
		requireHears(t, sender, "answer")
		require.NoError(t, sender.Close())
	}
	d := Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(host4)}, Timeout: patience}
	c, err := d.Dial("udp4", group.String())
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, software.Name(), c.(*PacketConn).Info()[0].Device)
	_, err = c.Write([]byte("dialled"))
	require.NoError(t, err)
	requireHears(t, p, "dialled")
	requireHearsNothing(t, p) // A datagram could be doubled.
}

// What is for another port, or another group, is not heard.
func TestGroupOfAnother(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		p, other, sender := gn.member(t, gn.a, 0), gn.member(t, gn.a, 0), gn.sender(t)
		port := portOfConn(p)
		third := gn.member(t, gn.b, port)
		castTo(t, sender, gn.a, portOfConn(other), "to the other port")
		castTo(t, sender, gn.b, port, "to the other group")
		castTo(t, sender, gn.a, port, "to it")
		requireHears(t, p, "to it")
		requireHears(t, other, "to the other port")
		requireHears(t, third, "to the other group")
		if gn.overVerbs() {
			require.EqualValues(t, 1, p.Stats().Strays)
		}
		requireHearsNothing(t, p)
		requireHearsNothing(t, third)
	})
}

func TestGroupErrors(t *testing.T) {
	set(t, &packetBounds.Groups, 3)
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		p := gn.member(t, gn.a, 0)
		a, b := udpAddr(netip.AddrPortFrom(gn.a, 1)), udpAddr(netip.AddrPortFrom(gn.b, 1))
		fails := func(err error, op string, want error) {
			t.Helper()
			requirePacketError(t, err, op)
			require.ErrorIs(t, err, want)
		}
		fails(p.JoinGroup(gn.ifi, a), "join", syscall.EADDRINUSE)
		fails(p.LeaveGroup(gn.ifi, b), "leave", syscall.EADDRNOTAVAIL)
		for _, bad := range []net.Addr{nil, (*net.UDPAddr)(nil), (*net.IPAddr)(nil), &net.UDPAddr{}, &net.TCPAddr{IP: a.IP},
			&net.UDPAddr{IP: net.IPv4(10, 0, 0, 1)}, &net.UDPAddr{IP: net.IPv4bcast}} {
			fails(p.JoinGroup(gn.ifi, bad), "join", syscall.EINVAL)
			fails(p.LeaveGroup(gn.ifi, bad), "leave", syscall.EINVAL)
		}
		wrong := map[string]string{"udp4": "ff02::1234", "udp6": "224.0.0.77"}[gn.network]
		if gn.network == "udp4" {
			fails(p.JoinGroup(gn.ifi, &net.UDPAddr{IP: net.ParseIP(wrong)}), "join", syscall.EAFNOSUPPORT)
		}
		lc := ListenConfig{Config: gn.cfg}
		_, err := lc.ListenMulticast(tctx, gn.network, gn.ifi, &net.UDPAddr{IP: net.ParseIP(wrong), Port: 9})
		requirePacketError(t, err, "listen")
		_, err = lc.ListenMulticast(tctx, "tcp", gn.ifi, a)
		fails(err, "listen", net.UnknownNetworkError("tcp"))
		_, err = lc.ListenMulticast(tctx, gn.network, gn.ifi, nil)
		fails(err, "listen", syscall.EINVAL)
		_, err = lc.ListenPacket(tctx, gn.network, a.String())
		fails(err, "listen", errors.ErrUnsupported)
		_, err = lc.ListenMulticast(tctx, gn.network, &net.Interface{Index: 1 << 20, Name: "gone"}, a)
		requirePacketError(t, err, "listen")

		for i := range 2 {
			require.NoError(t, p.JoinGroup(gn.ifi, &net.UDPAddr{IP: append(gn.b.AsSlice()[:len(gn.b.AsSlice())-1], byte(10+i))}))
		}
		fails(p.JoinGroup(gn.ifi, b), "join", syscall.ENOBUFS)
		require.NoError(t, p.LeaveGroup(gn.ifi, a))
		require.NoError(t, p.JoinGroup(gn.ifi, b))

		server := gn.listen(t)
		c := gn.dial(t, server.LocalAddr())
		fails(c.JoinGroup(gn.ifi, a), "join", syscall.EISCONN)
		if !gn.overVerbs() {
			fails(server.JoinGroup(gn.ifi, a), "join", syscall.EADDRNOTAVAIL)
		}

		require.NoError(t, p.Close())
		fails(p.JoinGroup(gn.ifi, a), "join", net.ErrClosed)
		fails(p.LeaveGroup(gn.ifi, b), "leave", net.ErrClosed)
		fails(p.SetMulticastLoopback(true), "set", net.ErrClosed)
		fails(p.SetMulticastInterface(gn.ifi), "set", net.ErrClosed)
		_, err = p.WriteTo(nil, a)
		fails(err, "write", net.ErrClosed)
	})
}

// A connected one sends to the group, and hears nobody.
func TestGroupDial(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		p := gn.member(t, gn.a, 0)
		d := Dialer{Config: gn.cfg, Timeout: patience}
		group := gn.a
		if gn.name == "udp" && gn.network == "udp6" {
			group = group.WithZone(gn.ifi.Name)
		} else {
			local, err := net.ResolveUDPAddr(gn.network, gn.address)
			require.NoError(t, err)
			d.LocalAddr = local
		}
		to := netip.AddrPortFrom(group, portOfConn(p))
		c, err := d.Dial(gn.network, to.String())
		require.NoError(t, err)
		defer c.Close()
		require.Equal(t, to.String(), c.RemoteAddr().String())
		_, err = c.Write([]byte("hello"))
		require.NoError(t, err)
		from := requireHears(t, p, "hello")
		require.Equal(t, portOfConn(c.(*PacketConn)), from.Port())
	})
}

// Close leaves, and what is opened afterwards is a member by its own deed only.
func TestGroupCloseLeaves(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		p, sender := gn.member(t, gn.a, 0), gn.sender(t)
		port := portOfConn(p)
		castTo(t, sender, gn.a, port, "one")
		requireHears(t, p, "one")
		require.NoError(t, p.Close())
		if gn.fabric != nil {
			require.Zero(t, gn.fabric.Members(gn.a))
		}
		q := gn.member(t, gn.b, port)
		castTo(t, sender, gn.a, port, "two")
		castTo(t, sender, gn.b, port, "three")
		requireHears(t, q, "three")
		requireHearsNothing(t, q)
	})
}

// Joining, leaving, writing and reading go on at once, and Close ends them all.
func TestGroupConcurrently(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		p := gn.member(t, gn.a, 0)
		port := portOfConn(p)
		require.NoError(t, p.SetMulticastLoopback(true))
		var wg sync.WaitGroup
		ended := func(err error) bool {
			if err == nil || errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.ECONNREFUSED) {
				return false
			}
			if !errors.Is(err, net.ErrClosed) && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			return true
		}
		begun := make(chan struct{}, 100)
		b := udpAddr(netip.AddrPortFrom(gn.b, 0))
		for _, f := range []func() error{
			func() error { return p.JoinGroup(gn.ifi, b) },
			func() error { return p.LeaveGroup(gn.ifi, b) },
			func() error { return p.SetMulticastInterface(gn.ifi) },
			func() error { return p.SetMulticastLoopback(true) },
			func() error { _, err := p.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(gn.a, port)); return err },
			func() error { _, err := p.WriteToUDPAddrPort([]byte("y"), netip.AddrPortFrom(gn.b, port)); return err },
			func() error { var buf [10]byte; _, _, err := p.ReadFromUDPAddrPort(buf[:]); return err },
		} {
			wg.Go(func() {
				for !ended(f()) {
					select {
					case begun <- struct{}{}:
					default:
					}
				}
			})
		}
		for range 20 {
			<-begun
		}
		require.NoError(t, p.Close())
		within(t, "what was going on", wg.Wait)
	})
}

// A datagram to a group that is not one of ours' ends nowhere, and is counted.
func TestGroupForged(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		if gn.fabric == nil {
			return
		}
		p, sender := gn.member(t, gn.a, 0), gn.sender(t)
		port := portOfConn(p)
		castTo(t, sender, gn.a, port, "before")
		from := requireHears(t, p, "before")
		good := fabric.Packet{From: from.Addr(), To: gn.a, SrcQPN: 9999, DstQPN: ibv.MulticastQPN, QKey: ibv.QKeyUDP,
			Imm: udconn.GroupImmediate(from.Port(), port), HasImm: true, Payload: []byte("good")}
		qpn := p.Info()[0].QPN
		for name, spoil := range map[string]func(*fabric.Packet){
			"no header":             func(d *fabric.Packet) { d.NoGRH = true },
			"no immediate":          func(d *fabric.Packet) { d.HasImm = false },
			"from port 0":           func(d *fabric.Packet) { d.Imm = udconn.GroupImmediate(0, port) },
			"a number of 24 bits":   func(d *fabric.Packet) { d.Imm = udconn.GroupImmediate(255, port) },
			"to port 0":             func(d *fabric.Packet) { d.Imm = udconn.GroupImmediate(from.Port(), 0) },
			"to the next port":      func(d *fabric.Packet) { d.Imm++ },
			"marked as of one peer": func(d *fabric.Packet) { d.Imm = udconn.Immediate(from.Port()) },
			"from a group":          func(d *fabric.Packet) { d.From = gn.b },
			"from itself":           func(d *fabric.Packet) { d.From = gn.a },
			"to a group not joined": func(d *fabric.Packet) { d.To, d.DstQPN = gn.b, qpn },
		} {
			before, bad := p.Stats(), good
			spoil(&bad)
			gn.fabric.Inject(&bad)
			require.True(t, eventually(func() bool { return p.Stats().Strays == before.Strays+1 }), name)
			requireHearsNothing(t, p)
		}
		for name, spoil := range map[string]func(*fabric.Packet){
			"wrong key":      func(d *fabric.Packet) { d.QKey++ },
			"no queue pair":  func(d *fabric.Packet) { d.DstQPN = 77777 },
			"nobody's group": func(d *fabric.Packet) { d.To = gn.b },
		} {
			strays, bad := p.Stats().Strays, good
			spoil(&bad)
			gn.fabric.Inject(&bad)
			require.Equal(t, strays, p.Stats().Strays, name)
		}
		// A datagram that claims to be ours is dropped only with our queue pair's number.
		self := good
		self.SrcQPN = qpn
		gn.fabric.Inject(&self)
		gn.fabric.Inject(&good)
		require.Equal(t, from, requireHears(t, p, "good"))
		castTo(t, sender, gn.a, port, "after")
		requireHears(t, p, "after")
	})
}

// A queue pair that fails is replaced, and its groups are joined again, of which another
// attempt may be needed.
func TestGroupRejoined(t *testing.T) {
	impatient(t)
	set(t, &packetBounds.RejoinPause, time.Millisecond)
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		if gn.fabric == nil {
			return
		}
		p, sender := gn.member(t, gn.a, 0), gn.sender(t)
		sw := gn.cfg.Provider.(*verbstest.Switch)
		for _, kind := range []verbstest.Kind{verbstest.Wait, verbstest.JoinMulticast, verbstest.BindUD} {
			f := sw.FailNth(1, nil, kind)
			breakQP(t, gn, p)
			require.True(t, eventually(func() bool { return gn.fabric.Members(gn.a) == 1 && f.Fired() || kind == verbstest.Wait }))
			f.Cancel()
			require.True(t, eventually(func() bool { return gn.fabric.Members(gn.a) == 1 }))
			until(t, p, func() error {
				_, err := sender.WriteToUDPAddrPort([]byte("again"), netip.AddrPortFrom(gn.a, portOfConn(p)))
				return err
			})
		}
	})
}

// breakQP has the queue pair of a member fail.
func breakQP(t *testing.T, gn groupNet, p *PacketConn) {
	t.Helper()
	var infos []PacketInfo
	require.True(t, eventually(func() bool { // The next queue pair may be on its way after an earlier failure.
		infos = p.Info()
		return len(infos) > 0
	}))
	gn.fabric.Inject(&fabric.Packet{From: netip.MustParseAddr("10.0.0.1"), To: gn.a, DstQPN: infos[0].QPN, QKey: ibv.QKeyUDP,
		Payload: make([]byte, udconn.SlotSize)})
	require.True(t, eventually(func() bool {
		now := p.Info()
		return len(now) == 0 || now[0].QPN != infos[0].QPN
	}))
}

// Groups that are written to are bounded, and those that are joined stay.
func TestGroupSendersBounded(t *testing.T) {
	set(t, &packetBounds.Groups, 2)
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		if !gn.overVerbs() {
			return
		}
		p, sender := gn.member(t, gn.a, 0), gn.sender(t)
		require.NoError(t, sender.JoinGroup(gn.ifi, udpAddr(netip.AddrPortFrom(gn.b, 0))))
		before := gn.cfg.Provider.(*verbstest.Switch).Live()["ID"] - 1 // sender is a member of one group.
		for i := range 20 {
			castTo(t, sender, gn.a, portOfConn(p), fmt.Sprint(i))
			requireHears(t, p, fmt.Sprint(i))
			b := gn.b.AsSlice()
			b[len(b)-1] = byte(100 + i)
			other, _ := netip.AddrFromSlice(b)
			castTo(t, sender, other, portOfConn(p), "to nobody")
		}
		groups := gn.cfg.Provider.(*verbstest.Switch).Live()["ID"] - before // Each group has an ID.
		require.LessOrEqual(t, groups, 2*packetBounds.Groups)
		castTo(t, p, gn.b, portOfConn(sender), "to the member")
		requireHears(t, sender, "to the member")
	})
}

// What fails on the way to a membership leaves nothing behind.
func TestGroupFaults(t *testing.T) {
	impatient(t)
	onFabric(t, func(t *testing.T, pn packetNet) {
		host, _, _ := net.SplitHostPort(pn.address)
		ifi := interfaceWith(t, netip.MustParseAddr(host))
		group := &net.UDPAddr{IP: net.IPv4(239, 82, 68, 1), Port: 7777}
		if pn.network == "udp6" {
			group.IP = net.ParseIP("ff02::7264:6d61")
		}
		sw := pn.cfg.Provider.(*verbstest.Switch)
		for _, kind := range []verbstest.Kind{verbstest.ListenUD, verbstest.BindUD, verbstest.JoinMulticast, verbstest.CreateQP, verbstest.CreateCQ} {
			f := sw.FailNth(1, nil, kind)
			_, err := (&ListenConfig{Config: pn.cfg}).ListenMulticast(tctx, pn.network, ifi, group)
			requirePacketError(t, err, "listen")
			require.ErrorIs(t, err, verbstest.ErrInjected)
			require.True(t, f.Fired())
			requireReleased(t, sw)
		}
		p := pn.listenAt(t, ":0")
		require.NoError(t, p.SetMulticastInterface(ifi))
		for _, kind := range []verbstest.Kind{verbstest.JoinMulticast, verbstest.CreateAH} {
			sw.FailNth(1, nil, kind)
			_, err := p.WriteTo([]byte("x"), group)
			requirePacketError(t, err, "write")
			require.ErrorIs(t, err, verbstest.ErrInjected, "the write that asked for it is told")
			require.True(t, eventually(func() bool { _, err := p.WriteTo([]byte("x"), group); return err == nil }))
			require.NoError(t, p.SetMulticastInterface(ifi)) // which forgets the way
		}
	})
}

// One that has both devices hears groups by either, and sends to them by UDP.
func TestGroupBothDevices(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		if pn.network != "udp4" {
			return
		}
		gn := groupNet{packetNet: pn, a: netip.MustParseAddr("239.82.68.1"), ifi: interfaceWith(t, netip.MustParseAddr("127.0.0.1"))}
		soft := iwarp.New(iwarp.Config{})
		all := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
		both := pn.listenBoth(t, soft, all)
		defer both.Close()
		require.NoError(t, both.SetMulticastInterface(gn.ifi))
		require.NoError(t, both.SetMulticastLoopback(true))
		require.NoError(t, both.JoinGroup(gn.ifi, udpAddr(netip.AddrPortFrom(gn.a, 0))))
		port := portOfConn(both)
		castTo(t, gn.sender(t), gn.a, port, "by RDMA")
		requireHears(t, both, "by RDMA")
		udp := groupNet{packetNet: packetNet{network: "udp4", cfg: Config{Provider: soft}}, ifi: gn.ifi}.sender(t)
		castTo(t, udp, gn.a, port, "by UDP")
		requireHears(t, both, "by UDP")
		castTo(t, both, gn.a, port, "its own")
		requireHears(t, both, "its own")
		requireHearsNothing(t, both)                                                // A datagram could be doubled.
		_, err := both.WriteToUDPAddrPort(nil, netip.AddrPortFrom(broadcast, port)) // It goes by UDP, too, if the network has broadcast.
		require.NotErrorIs(t, err, errors.ErrUnsupported)
		require.NoError(t, both.LeaveGroup(gn.ifi, udpAddr(netip.AddrPortFrom(gn.a, 0))))
		require.Zero(t, pn.fabric.Members(gn.a))
	})
}

// To a port below 256 everybody may send, but from one nobody to a group over RDMA: what
// they say would pass for a queue pair's number.
func TestGroupLowPort(t *testing.T) {
	eachGroupNet(t, func(t *testing.T, gn groupNet) {
		if gn.fabric == nil {
			return
		}
		low := gn.listenAt(t, ":123")
		require.NoError(t, low.JoinGroup(gn.ifi, udpAddr(netip.AddrPortFrom(gn.a, 0))))
		require.NoError(t, low.SetMulticastInterface(gn.ifi))
		castTo(t, gn.sender(t), gn.a, 123, "what time is it?")
		requireHears(t, low, "what time is it?")
		_, err := low.WriteToUDPAddrPort(nil, netip.AddrPortFrom(gn.a, 123))
		requirePacketError(t, err, "write")
		require.ErrorIs(t, err, errors.ErrUnsupported)
	})
}

// Broadcast is the software device's. RDMA devices say what to do instead.
func TestPacketBroadcast(t *testing.T) {
	impatient(t)
	eachPacketNet(t, func(t *testing.T, pn packetNet) {
		if pn.network != "udp4" {
			return
		}
		p := pn.listenAt(t, ":0")
		host, _, _ := net.SplitHostPort(pn.address)
		network := map[string]string{"127.0.0.1": "127.255.255.255"}[host]
		if network == "" {
			network = "10.77.0.255"
		}
		directed := netip.AddrPortFrom(netip.MustParseAddr(network), portOfConn(p))
		_, err := (&ListenConfig{Config: pn.cfg}).ListenPacket(tctx, "udp4", "255.255.255.255:9")
		requirePacketError(t, err, "listen")
		require.ErrorIs(t, err, errors.ErrUnsupported)
		if !pn.overVerbs() {
			castTo(t, p, directed.Addr(), directed.Port(), "to all")
			require.Equal(t, portOfConn(p), requireHears(t, p, "to all").Port())
			return
		}
		refused := func(err error, op string) {
			t.Helper()
			requirePacketError(t, err, op)
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "multicast group")
		}
		_, err = p.WriteToUDPAddrPort(nil, netip.AddrPortFrom(broadcast, 9))
		refused(err, "write")
		_, err = (&Dialer{Config: pn.cfg}).Dial("udp4", "255.255.255.255:9")
		refused(err, "dial")
		require.True(t, eventually(func() bool {
			_, err = p.WriteToUDPAddrPort(nil, directed)
			return err != nil
		}))
		refused(err, "write")
	})
}

// mckey is rdma-core's example for groups: it receives, or sends, ten datagrams of 100
// bytes, and says its queue pair's number beside each.
func TestGroupMckey(t *testing.T) {
	if !hasUD(t) {
		return
	}
	checkLeaks(t)
	const group = "239.82.68.9"
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	run := func(arg ...string) (done chan struct{}) {
		cmd := exec.CommandContext(ctx, "mckey", append(arg, "-m", group, "-b", host4)...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		require.NoError(t, cmd.Start())
		done = make(chan struct{})
		go func() {
			defer close(done)
			if err := cmd.Wait(); err != nil || !bytes.Contains(out.Bytes(), []byte("data transfers complete")) {
				t.Errorf("mckey: %v\n%s", err, &out)
			}
		}()
		return done
	}
	p, err := ListenMulticast("rdma4", interfaceWith(t, netip.MustParseAddr(host4)), &net.UDPAddr{IP: net.ParseIP(group), Port: 7777})
	require.NoError(t, err)
	defer p.Close()
	to := netip.MustParseAddrPort(group + ":7777")

	receiver := run()
	for ended := false; !ended; {
		select {
		case <-receiver:
			ended = true
		case <-time.After(time.Millisecond):
			castTo(t, p, to.Addr(), to.Port(), string(make([]byte, 100)))
		}
	}
	// As a sender it ends before its datagrams have left, so that some are lost.
	before := p.Stats().Strays
	require.True(t, eventually(func() bool {
		<-run("-s")
		return p.Stats().Strays > before
	}), "of a sender that says no port")
	require.NoError(t, p.SetMulticastLoopback(true))
	castTo(t, p, to.Addr(), to.Port(), "after them")
	requireHears(t, p, "after them")
}

// TestGuestGroup is for two guests: each sends to the group until it has heard the other,
// and had an answer of it, and heard that the other has had one too.
func TestGuestGroup(t *testing.T) {
	peer := os.Getenv("RDMANET_VM_PEER")
	if peer == "" {
		return // vm/test runs it in two guests
	}
	checkLeaks(t)
	ifi, to := interfaceWith(t, netip.MustParseAddr(host4)), netip.MustParseAddrPort("239.82.68.10:7777")
	p, err := ListenMulticast("rdma4", ifi, udpAddr(to))
	if !hasUD(t) {
		require.ErrorIs(t, err, errors.ErrUnsupported)
		return
	}
	require.NoError(t, err)
	defer p.Close()
	buf := make([]byte, 100)
	var heard, answered, done bool
	for deadline := time.Now().Add(patience); !heard || !answered || !done; {
		require.True(t, time.Now().Before(deadline), "heard %t, answered %t, the other is done %t", heard, answered, done)
		castTo(t, p, to.Addr(), to.Port(), fmt.Sprint("hello ", heard && answered))
		p.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		n, from, err := p.ReadFromUDPAddrPort(buf)
		if err != nil {
			requireTimeout(t, err)
			continue
		}
		require.Equal(t, peer, from.Addr().String())
		require.Equal(t, to.Port(), from.Port())
		switch string(buf[:n]) {
		case "answer":
			answered = true
		case "hello true":
			done = true
			fallthrough
		default:
			heard = true
			p.WriteToUDPAddrPort([]byte("answer"), from) // who may be done and gone
		}
	}
	for range 20 { // the other may wait for that
		castTo(t, p, to.Addr(), to.Port(), "hello true")
	}
}
