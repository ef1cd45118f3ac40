package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// freePort returns a port on which nobody listens.
func freePort(t testing.TB, tr transport) string {
	t.Helper()
	ln, err := tr.listen(tr.network, tr.address)
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

func TestDialRefused(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		address := freePort(t, tr)
		c, err := tr.dial(tr.network, address)
		require.True(t, c == nil, "no typed nil")
		oe := requireOpError(t, tr, err, "dial")
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.Equal(t, address, oe.Addr.String())
		require.False(t, oe.Timeout())
	})
}

// What cannot be dialled, or listened on, is the same to rdmanet as to net: the
// inner errors have the same types.
func TestBadAddresses(t *testing.T) {
	same := func(t *testing.T, op string, ours, nets error) {
		t.Helper()
		oe := requireOpError(t, transports[0], ours, op)
		var ne *net.OpError
		require.ErrorAs(t, nets, &ne)
		require.IsType(t, ne.Err, oe.Err)
		require.ErrorContains(t, oe, ne.Err.Error())
	}
	for _, bad := range []struct{ network, address string }{
		{"bogus", "127.0.0.1:80"},
		{"tcp", "127.0.0.1"},
		{"tcp", "127.0.0.1:80:80"},
		{"tcp", "[::1"},
		{"tcp", "::1:80"},
		{"tcp", "127.0.0.1:nosuchservice"},
		{"tcp", "127.0.0.1:65536"},
		{"tcp", "127.0.0.1:-1"},
		{"tcp4", "[::1]:80"},
		{"tcp6", "127.0.0.1:80"},
	} {
		t.Run(bad.network+" "+bad.address, func(t *testing.T) {
			_, ours := Dial(bad.network, bad.address)
			_, nets := net.Dial(bad.network, bad.address)
			same(t, "dial", ours, nets)
			_, ours = Listen(bad.network, bad.address)
			_, nets = net.Listen(bad.network, bad.address)
			same(t, "listen", ours, nets)
		})
	}
	for _, network := range []string{"unix", "udp5", "ip"} {
		_, err := Dial(network, "127.0.0.1:80")
		var unknown net.UnknownNetworkError
		require.ErrorAs(t, err, &unknown)
		require.EqualValues(t, network, unknown)
	}
}

// An unspecified address is this machine to a dial, and the connection tells which
// address that was.
func TestDialUnspecified(t *testing.T) {
	t.Setenv(deviceEnv, iwarp.Name) // no RDMA device leads to the loopback
	for _, tr := range []transport{{name: "rdma", network: "rdma", rdma: true}, {name: "tcp", network: "tcp"}} {
		for _, c := range []struct{ listen, host, dial, remote string }{
			{"", "", "", "127.0.0.1"},
			{"", "0.0.0.0", "", "127.0.0.1"},
			{"", "::", "", "::1"},
			{"4", "::", "", "127.0.0.1"},
			{"", "::", "4", "127.0.0.1"},
			{"", "::", "6", "::1"},
		} {
			t.Run(tr.name+c.listen+" "+c.host+" "+c.dial, func(t *testing.T) {
				checkLeaks(t)
				ln, err := tr.listen(tr.network+c.listen, ":0")
				require.NoError(t, err)
				defer ln.Close()
				_, port, err := net.SplitHostPort(ln.Addr().String())
				require.NoError(t, err)
				conn, err := tr.dial(tr.network+c.dial, net.JoinHostPort(c.host, port))
				require.NoError(t, err)
				require.Equal(t, net.JoinHostPort(c.remote, port), conn.RemoteAddr().String())
				require.NoError(t, conn.Close())
			})
		}
	}
	_, ours := Dial("tcp", "")
	_, nets := net.Dial("tcp", "")
	require.EqualError(t, ours.(*net.OpError).Err, nets.(*net.OpError).Err.Error())
}

// Dialer's fields mean what those of net.Dialer do where they are odd.
func TestDialOptions(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma", ":0")
	require.NoError(t, err)
	defer ln.Close()
	port := ln.Addr().(*net.TCPAddr).Port
	// The ports of RDMA devices are not those of TCP, so a listener of the same devices finds one.
	free := func(t *testing.T) int {
		l, err := Listen("rdma", ":0")
		require.NoError(t, err)
		defer l.Close()
		return l.Addr().(*net.TCPAddr).Port
	}
	for _, host := range []string{host4, host6} {
		address := net.JoinHostPort(host, fmt.Sprint(port))
		for name, ip := range map[string]net.IP{"no IP": nil, "0.0.0.0": net.IPv4zero, "::": net.IPv6zero} {
			t.Run(host+" "+name, func(t *testing.T) {
				local := &net.TCPAddr{IP: ip, Port: free(t)}
				c, err := (&Dialer{LocalAddr: local}).Dial("rdma", address)
				require.NoError(t, err)
				require.Equal(t, local.Port, c.LocalAddr().(*net.TCPAddr).Port)
				require.NoError(t, c.Close())
			})
		}
		c, err := (&Dialer{LocalAddr: (*net.TCPAddr)(nil)}).Dial("rdma", address)
		require.NoError(t, err, "no LocalAddr, in the way that net's own calls give it")
		require.NoError(t, c.Close())
		_, err = DialTimeout("rdma", address, -1)
		_, nets := net.DialTimeout("tcp", address, -1)
		for _, err := range []error{err, nets} {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.True(t, err.(net.Error).Timeout())
		}
	}
	_, err = (&Dialer{LocalAddr: (*net.TCPAddr)(nil)}).Dial("bogus", "127.0.0.1:1")
	require.Nil(t, requireOpError(t, transports[0], err, "dial").Source)
}

// deadEnd is a device that nobody answers on by the addresses of one family.
type deadEnd struct {
	ibv.Provider
	to    string
	asked chan struct{} // one for each
	over  chan struct{} // closed when that is known
}

func (p *deadEnd) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	if remote.Addr().String() != p.to {
		return p.Provider.Resolve(ctx, local, remote)
	}
	p.asked <- struct{}{}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-p.over:
		return nil, syscall.ENETDOWN
	}
}

// A family that leads nowhere does not hold up the other one.
func TestDialFallback(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, iwarp.New(iwarp.Config{}))
	ln, err := (&ListenConfig{Config: Config{Provider: sw}}).Listen(tctx, "rdma", ":0")
	require.NoError(t, err)
	defer ln.Close()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	require.NoError(t, err)
	for _, c := range []struct{ host, dead, alive string }{{"", "127.0.0.1", "::1"}, {"::", "::1", "127.0.0.1"}} {
		p := &deadEnd{Provider: sw, to: c.dead, asked: make(chan struct{}, 1), over: make(chan struct{})}
		address := net.JoinHostPort(c.host, port)
		dial := func(d Dialer) (conn net.Conn, err error) {
			d.Provider = p
			within(t, "dial", func() { conn, err = d.Dial("tcp", address) })
			<-p.asked
			return conn, err
		}
		conn, err := dial(Dialer{FallbackDelay: time.Millisecond})
		require.NoError(t, err)
		require.Equal(t, c.alive, conn.RemoteAddr().(*net.TCPAddr).IP.String())
		require.NoError(t, conn.Close())

		// In order, the first one has all the time there is.
		_, err = dial(Dialer{FallbackDelay: -1, Timeout: 50 * time.Millisecond})
		require.True(t, requireOpError(t, transports[0], err, "dial").Timeout())
		require.ErrorContains(t, err, c.dead)

		// Where both fail, both say why.
		refused := sw.FailNth(1, syscall.EHOSTUNREACH, verbstest.Connect)
		go func() {
			eventually(refused.Fired)
			close(p.over)
		}()
		_, err = dial(Dialer{FallbackDelay: time.Millisecond})
		require.ErrorIs(t, err, syscall.ENETDOWN)
		require.ErrorIs(t, err, syscall.EHOSTUNREACH)
		require.Equal(t, net.JoinHostPort(c.dead, port), err.(*net.OpError).Addr.String())
	}
	require.NoError(t, ln.Close())
	requireReleased(t, sw)
}

// Both families may answer: one connection is handed out, the other one closed.
func TestDialRace(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, iwarp.New(iwarp.Config{}))
	cfg := Config{Provider: sw}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma", ":0")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	require.NoError(t, err)
	for i := range 20 {
		d := Dialer{Config: cfg, FallbackDelay: time.Duration(i*i) * 5 * time.Microsecond}
		c, err := d.Dial("rdma", ":"+port)
		require.NoError(t, err)
		_, err = c.Write([]byte("x"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 1))
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	require.NoError(t, ln.Close())
	requireReleased(t, sw)
}

// What the device calls a timeout is one for who asks net.Error, also among the errors
// of several addresses.
func TestDialSilence(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, iwarp.New(iwarp.Config{}))
	d := Dialer{Config: Config{Provider: sw}}
	address := freePort(t, transports[0])
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	for _, address := range []string{address, ":" + port} {
		sw.FailNth(1, fmt.Errorf("connect: %w", syscall.ETIMEDOUT), verbstest.Connect)
		_, err := d.Dial("rdma", address)
		require.True(t, requireOpError(t, transports[0], err, "dial").Timeout(), "%v", err)
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "no deadline has passed")
	}
}

// silent is a listener that takes connections and says nothing: of TCP where that
// is what the device connects by, else one that does not answer requests.
// accepted hears of each.
func silent(t testing.TB) (address string, accepted <-chan struct{}) {
	t.Helper()
	if overIWARP(t) {
		return silentTCP(t)
	}
	ln := listenRaw(t)
	return ln.Addr().String(), hold(t, ln, func() (io.Closer, error) { return ln.Accept(tctx) })
}

func silentTCP(t testing.TB) (address string, accepted <-chan struct{}) {
	t.Helper()
	ln, err := net.Listen("tcp4", local4)
	require.NoError(t, err)
	return ln.Addr().String(), hold(t, ln, func() (io.Closer, error) { return ln.Accept() })
}

// hold accepts what comes, tells of it, and keeps it to the end of the test.
func hold(t testing.TB, ln io.Closer, accept func() (io.Closer, error)) (accepted <-chan struct{}) {
	ch := make(chan struct{}, 100)
	var held []io.Closer
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := accept()
			if err != nil {
				return
			}
			held = append(held, c)
			ch <- struct{}{}
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
		for _, c := range held {
			c.Close()
		}
	})
	return ch
}

// mute is a listener whose queue pairs come up, and then say nothing.
func mute(t testing.TB) (address string) {
	t.Helper()
	ln := listenRaw(t)
	done := make(chan struct{})
	var setups []*setup
	go func() {
		defer close(done)
		for {
			id, err := ln.Accept(tctx)
			if err != nil {
				return
			}
			s, err := begin(new(Config), id, true)
			if onRDMA && errors.Is(err, syscall.EINVAL) {
				continue // the dial is over already
			}
			if err != nil {
				t.Error(err)
				return
			}
			setups = append(setups, s)
			if err := s.expect(1, negotiateBuf); err != nil {
				t.Error(err)
				return
			}
			s.id.Accept(tctx, s.param(nil)) // or the dial is over
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
		for _, s := range setups {
			s.abandon()
		}
	})
	return ln.Addr().String()
}

// Whatever bounds a dial, it ends with it when the peer says nothing, or nothing
// of SMB Direct.
func TestDialDeadline(t *testing.T) {
	checkLeaks(t)
	const bound = 20 * time.Millisecond
	silent, _ := silent(t)
	for peer, address := range map[string]string{"silent": silent, "mute": mute(t)} {
		for name, dial := range map[string]func() (net.Conn, error){
			"Timeout":  func() (net.Conn, error) { return DialTimeout("rdma", address, bound) },
			"Deadline": func() (net.Conn, error) { return (&Dialer{Deadline: time.Now().Add(bound)}).Dial("rdma", address) },
			"context": func() (net.Conn, error) {
				ctx, cancel := context.WithTimeout(tctx, bound)
				defer cancel()
				return DialContext(ctx, "rdma", address)
			},
			"NegotiateTimeout": func() (net.Conn, error) {
				return (&Dialer{Config: Config{NegotiateTimeout: bound}}).Dial("rdma", address)
			},
		} {
			t.Run(peer+"/"+name, func(t *testing.T) {
				start := time.Now()
				var err error
				within(t, "dial", func() { _, err = dial() })
				requireOpError(t, transports[0], err, "dial")
				requireTimeout(t, err)
				require.GreaterOrEqual(t, time.Since(start), bound)
				// The device's own bound is 10 s.
				require.Less(t, time.Since(start), 8*time.Second)
			})
		}
		_, err := (&Dialer{Deadline: past}).Dial("rdma", address)
		requireOpError(t, transports[0], err, "dial")
		requireTimeout(t, err)
	}
}

func TestDialCancel(t *testing.T) {
	checkLeaks(t)
	address, accepted := silent(t)
	ctx, cancel := context.WithCancel(tctx)
	go func() {
		<-accepted
		cancel()
	}()
	for range 2 { // while it waits, and before it began
		_, err := DialContext(ctx, "rdma", address)
		requireOpError(t, transports[0], err, "dial")
		require.ErrorIs(t, err, context.Canceled)
		var ne net.Error
		require.ErrorAs(t, err, &ne)
		require.False(t, ne.Timeout())
	}
	//lint:ignore SA1012 a nil context is what is tested
	require.Panics(t, func() { DialContext(nil, "rdma", address) }) //nolint:staticcheck // as net has it
}

// The context is for dialling only.
func TestDialContextAfterwards(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	ctx, cancel := context.WithCancel(tctx)
	client, err := DialContext(ctx, "rdma4", ln.Addr().String())
	require.NoError(t, err)
	server, err := ln.Accept()
	require.NoError(t, err)
	cancel()
	exchange(t, client, server, 10<<10)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// Every address is tried; the first that answers is taken. The addresses are
// those of the loopback, to which the software device alone leads.
func TestDialTriesAll(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, iwarp.New(iwarp.Config{}))
	cfg := Config{Provider: sw}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma", ":0")
	require.NoError(t, err)
	defer ln.Close()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	require.NoError(t, err)
	// Without a host both loopback addresses are meant, IPv4 first.
	for n, want := range []string{"127.0.0.1", "::1"} {
		for _, kind := range []verbstest.Kind{verbstest.Resolve, verbstest.CreateQP, verbstest.Connect} {
			for k := range n {
				sw.FailNth(k+1, nil, kind)
			}
			c, err := (&Dialer{Config: cfg}).Dial("rdma", ":"+port)
			require.NoError(t, err)
			require.Equal(t, want, c.RemoteAddr().(*net.TCPAddr).IP.String())
			require.NoError(t, c.Close())
		}
	}
	first, second := errors.New("the first one"), errors.New("the second one")
	sw.FailNth(1, first, verbstest.Connect)
	sw.FailNth(2, second, verbstest.Connect)
	_, err = (&Dialer{Config: cfg}).Dial("rdma", ":"+port)
	require.ErrorIs(t, err, first)
	require.ErrorIs(t, err, second)
	require.NoError(t, ln.Close())
	requireReleased(t, sw)
}

// A port that turns out to be taken is replaced, unless it was asked for.
func TestDialPortTaken(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	cfg := Config{Provider: sw}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	for _, taken := range []error{syscall.EADDRINUSE, syscall.EADDRNOTAVAIL} {
		sw.FailNth(1, taken, verbstest.Connect)
		c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
		require.NoError(t, err)
		port := c.LocalAddr().(*net.TCPAddr).Port
		live := sw.Live()["ID"]
		require.NoError(t, c.Close())
		require.True(t, eventually(func() bool { return sw.Live()["ID"] < live }), "the port is not free again")

		sw.FailNth(1, taken, verbstest.Connect)
		_, err = (&Dialer{Config: cfg, LocalAddr: &net.TCPAddr{Port: port}}).Dial("rdma4", ln.Addr().String())
		require.ErrorIs(t, err, taken)
	}
}

// The time left is shared among the tries left, but no try is left too little.
func TestDialShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			left, want time.Duration
			tries      int
		}{
			{time.Minute, time.Minute, 1},
			{time.Minute, 20 * time.Second, 3},
			{5 * time.Second, 2 * time.Second, 5},
			{time.Second, time.Second, 5},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), c.left)
			shared, cancelShared := share(ctx, c.tries)
			at, ok := shared.Deadline()
			require.True(t, ok)
			require.Equal(t, c.want, time.Until(at))
			cancelShared()
			cancel()
		}
		ctx, cancel := share(t.Context(), 3)
		defer cancel()
		_, ok := ctx.Deadline()
		require.False(t, ok)
	})
}

func TestDialLocalAddr(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma", ":0")
	require.NoError(t, err)
	defer ln.Close()
	port := ln.Addr().(*net.TCPAddr).Port
	for _, local := range []string{host4, host6} {
		host := "" // either loopback address, of which the family of LocalAddr is taken
		if onRDMA {
			host = local // no RDMA device leads to the loopback
		}
		d := Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}}
		c, err := d.Dial("rdma", net.JoinHostPort(host, fmt.Sprint(port)))
		require.NoError(t, err)
		require.Equal(t, local, c.LocalAddr().(*net.TCPAddr).IP.String())
		require.Equal(t, local, c.RemoteAddr().(*net.TCPAddr).IP.String())
		require.NoError(t, c.Close())
	}
	_, err = (&Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv6loopback}}).Dial("rdma4", fmt.Sprintf("127.0.0.1:%d", port))
	var ae *net.AddrError
	require.ErrorAs(t, err, &ae)
	_, err = (&Dialer{LocalAddr: &net.UDPAddr{}}).Dial("rdma", fmt.Sprintf(":%d", port))
	require.ErrorAs(t, err, &ae)
}

// A device that is there is used, by the name that names it, and the choice of
// one that is not says what there is.
func TestDeviceChoice(t *testing.T) {
	checkLeaks(t)
	t.Setenv(deviceEnv, "")
	connect := func(host string, cfg Config) (device string, err error) {
		ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", net.JoinHostPort(host, "0"))
		if err != nil {
			_, derr := (&Dialer{Config: cfg}).Dial("rdma4", net.JoinHostPort(host, "1"))
			requireOpError(t, transports[0], derr, "dial")
			requireOpError(t, transports[0], err, "listen")
			return "", err
		}
		defer ln.Close()
		c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
		if err != nil {
			return "", err
		}
		defer c.Close()
		return c.(*Conn).Info().Device, nil
	}
	requireDevice := func(want, host string, cfg Config) {
		t.Helper()
		got, err := connect(host, cfg)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	requireDevice(deviceName(t), host4, Config{})
	requireDevice(iwarp.Name, "127.0.0.1", Config{}) // to which no RDMA device leads
	requireDevice(iwarp.Name, host4, Config{Device: iwarp.Name})
	if onRDMA {
		requireDevice(deviceName(t), host4, Config{Device: rdmacore.Name})
		requireDevice(deviceName(t), host4, Config{Device: deviceName(t)})
		requireDevice(deviceName(t), host4, Config{RequireRDMA: true})
	}
	_, err := connect("127.0.0.1", Config{RequireRDMA: true})
	require.Error(t, err)
	_, err = connect(host4, Config{RequireRDMA: true, Device: iwarp.Name})
	require.ErrorContains(t, err, `Config.Device is "iwarp"`)
	require.ErrorContains(t, err, "RequireRDMA")
	_, err = connect(host4, Config{Device: "nosuch0"})
	require.ErrorContains(t, err, `Config.Device is "nosuch0" (the software device is "iwarp", any RDMA device "rdma")`)

	t.Setenv(deviceEnv, iwarp.Name)
	requireDevice(iwarp.Name, host4, Config{Device: "nosuch0"})
	_, err = connect(host4, Config{RequireRDMA: true})
	require.ErrorContains(t, err, `RDMANET_DEVICE is "iwarp"`)
	t.Setenv(deviceEnv, "nosuch1")
	_, err = connect(host4, Config{Device: iwarp.Name})
	require.ErrorContains(t, err, `RDMANET_DEVICE is "nosuch1"`)
}

// A thousand connections at once, each used, all closed: nothing is left.
func TestManyConns(t *testing.T) {
	checkLeaks(t)
	const workers = 50
	conns := heavy(20) * workers
	sw := newSwitch(t, nil)
	cfg := Config{Provider: sw}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	var servers sync.WaitGroup
	servers.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			servers.Go(func() {
				defer c.Close()
				if b := make([]byte, 8); readFull(c, b) == nil {
					c.Write(b)
				}
				c.Read(make([]byte, 1))
			})
		}
	})
	errs := make(chan error, workers)
	open := make(chan *Conn, conns)
	for w := range workers {
		go func() {
			for i := range conns / workers {
				nc, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
				if err != nil {
					errs <- err
					return
				}
				open <- nc.(*Conn)
				want := fmt.Sprintf("%8d", w*1000+i)
				if _, err := nc.Write([]byte(want)); err != nil {
					errs <- err
					return
				}
				if err := defect.ReadFull(nc, want); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range workers {
		require.NoError(t, <-errs)
	}
	require.Equal(t, 2*conns, sw.Live()["QP"])
	domains := 1
	if !testDevice(t).Attr().Caps.Has(ibv.CapQPRegion) {
		domains = 2 * conns
	}
	require.Equal(t, domains, sw.Live()["PD"])
	var wg sync.WaitGroup
	for range conns {
		c := <-open
		wg.Go(func() { c.Close() })
	}
	within(t, "close", wg.Wait)
	require.NoError(t, ln.Close())
	within(t, "close", servers.Wait)
	requireReleased(t, sw)
}

func readFull(c net.Conn, b []byte) error {
	for len(b) > 0 {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func TestResolveFamilies(t *testing.T) {
	v4, v6 := netip.MustParseAddrPort("127.0.0.1:7"), netip.MustParseAddrPort("[::1]:7")
	for _, c := range []struct {
		network, address string
		listening        bool
		want             []netip.AddrPort
	}{
		{"rdma", ":7", false, []netip.AddrPort{v4, v6}},
		{"rdma4", ":7", false, []netip.AddrPort{v4}},
		{"rdma6", ":7", false, []netip.AddrPort{v6}},
		{"tcp", ":7", true, []netip.AddrPort{netip.AddrPortFrom(netip.Addr{}, 7)}},
		{"tcp4", ":7", true, []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:7")}},
		{"tcp6", ":7", true, []netip.AddrPort{netip.MustParseAddrPort("[::]:7")}},
		{"rdma", "[::ffff:127.0.0.1]:7", false, []netip.AddrPort{v4}},
		{"rdma4", "[::ffff:127.0.0.1]:7", false, []netip.AddrPort{v4}},
		{"rdma", "127.0.0.1:echo", false, []netip.AddrPort{v4}},
		{"rdma6", "[::1]:7", false, []netip.AddrPort{v6}},
	} {
		n, err := parseNetwork(c.network)
		require.NoError(t, err)
		got, err := resolve(tctx, net.DefaultResolver, n, c.address, c.listening)
		require.NoError(t, err, "%v", c)
		require.Equal(t, c.want, got, "%v", c)
	}
}
