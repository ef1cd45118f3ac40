package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

func TestListenInUse(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		ln, err := tr.listen(tr.network, tr.address)
		require.NoError(t, err)
		defer ln.Close()
		l, err := tr.listen(tr.network, ln.Addr().String())
		require.True(t, l == nil, "no typed nil")
		oe := requireOpError(t, tr, err, "listen")
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		require.Equal(t, ln.Addr().String(), oe.Addr.String())
		require.NoError(t, ln.Close())
		ln, err = tr.listen(tr.network, ln.Addr().String())
		require.NoError(t, err, "the port is free again")
		require.NoError(t, ln.Close())
	})
}

type deadliner interface {
	net.Listener
	SetDeadline(time.Time) error
}

func TestAcceptDeadline(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		l, err := tr.listen(tr.network, tr.address)
		require.NoError(t, err)
		ln := l.(deadliner)
		defer ln.Close()
		expect := func() {
			t.Helper()
			c, err := ln.Accept()
			require.True(t, c == nil, "no typed nil")
			oe := requireOpError(t, tr, err, "accept")
			require.Equal(t, ln.Addr(), oe.Addr)
			requireTimeout(t, err)
		}
		for _, at := range []time.Time{past, time.Now().Add(time.Millisecond)} {
			require.NoError(t, ln.SetDeadline(at))
			expect()
			expect()
		}
		require.NoError(t, ln.SetDeadline(time.Now().Add(time.Hour)))
		ended := make(chan error, 1)
		go func() {
			_, err := ln.Accept()
			ended <- err
		}()
		require.NoError(t, ln.SetDeadline(past)) // before or while it waits
		within(t, "accept", func() { err = <-ended })
		requireTimeout(t, err)

		require.NoError(t, ln.SetDeadline(time.Time{}))
		go func() {
			c, err := tr.dial(tr.network, ln.Addr().String())
			if err == nil {
				err = c.Close()
			}
			ended <- err
		}()
		c, err := ln.Accept()
		require.NoError(t, err)
		require.NoError(t, c.Close())
		require.NoError(t, <-ended)
	})
}

func TestListenerClose(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		l, err := tr.listen(tr.network, tr.address)
		require.NoError(t, err)
		ln := l.(deadliner)
		ended := make(chan error, 3)
		for range cap(ended) {
			go func() {
				_, err := ln.Accept()
				ended <- err
			}()
		}
		require.NoError(t, ln.Close())
		for range cap(ended) {
			within(t, "accept", func() { err = <-ended })
			requireOpError(t, tr, err, "accept")
			require.ErrorIs(t, err, net.ErrClosed)
		}
		err = ln.Close()
		requireOpError(t, tr, err, "close")
		require.ErrorIs(t, err, net.ErrClosed)
		err = ln.SetDeadline(past)
		if tr.rdma { // net leaves this one bare
			requireOpError(t, tr, err, "set")
		}
		require.ErrorIs(t, err, net.ErrClosed)
		_, err = tr.dial(tr.network, ln.Addr().String())
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
	})
}

// Connections that nobody accepted end with the listener; those that somebody
// did go on.
func TestListenerCloseWithUnaccepted(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	cfg := Config{Provider: sw}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	dial := func() net.Conn {
		c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
		require.NoError(t, err)
		return c
	}
	first := dial()
	accepted, err := ln.Accept()
	require.NoError(t, err)
	var waiting []net.Conn
	for range 10 {
		waiting = append(waiting, dial())
	}
	within(t, "close", func() { err = ln.Close() })
	require.NoError(t, err)
	for _, c := range waiting {
		_, err := c.Read(make([]byte, 1))
		require.True(t, err == io.EOF || errors.Is(err, syscall.ECONNRESET), "%v", err)
		require.NoError(t, c.Close())
	}
	exchange(t, first, accepted, 10<<10)
	require.NoError(t, first.Close())
	require.NoError(t, accepted.Close())
	requireReleased(t, sw)
}

// Close in the midst of dials ends each of them, one way or the other.
func TestListenerCloseDuringDials(t *testing.T) {
	checkLeaks(t)
	for n := range heavy(20) {
		sw := newSwitch(t, nil)
		cfg := Config{Provider: sw}
		ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
		require.NoError(t, err)
		const dials = 10
		done := make(chan error, dials)
		for range dials {
			go func() {
				c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
				if err == nil {
					c.Read(make([]byte, 1))
					err = c.Close()
				} else {
					err = nil
				}
				done <- err
			}()
		}
		for range n % 4 {
			c, err := ln.Accept()
			require.NoError(t, err)
			require.NoError(t, c.Close())
		}
		within(t, "close and dials", func() {
			err = ln.Close()
			for range dials {
				err = errors.Join(err, <-done)
			}
		})
		require.NoError(t, err)
		requireReleased(t, sw)
	}
}

// Silent peers hold up neither others nor Close.
func TestListenerWithSilentPeers(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma4", local4)
	require.NoError(t, err)
	for range 20 {
		if overIWARP(t) {
			c, err := net.Dial("tcp4", ln.Addr().String())
			require.NoError(t, err)
			defer c.Close()
		}
		dialRaw(t, ln.Addr(), nil)
	}
	client, err := Dial("rdma4", ln.Addr().String())
	require.NoError(t, err)
	server, err := ln.Accept()
	require.NoError(t, err)
	exchange(t, client, server, 1<<10)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
	within(t, "close", func() { err = ln.Close() })
	require.NoError(t, err)
}

// Without a host both families are served, by net and by rdmanet; "4" and "6"
// name one.
func TestListenFamilies(t *testing.T) {
	checkLeaks(t)
	for _, tr := range []transport{{name: "rdma", network: "rdma", rdma: true}, {name: "tcp", network: "tcp"}} {
		for _, family := range []string{"", "4", "6"} {
			t.Run(tr.name+family, func(t *testing.T) {
				ln, err := tr.listen(tr.network+family, ":0")
				require.NoError(t, err)
				defer ln.Close()
				addr := ln.Addr().(*net.TCPAddr)
				require.NotZero(t, addr.Port)
				for host, of := range map[string]string{host4: "4", host6: "6"} {
					c, err := tr.dial(tr.network, net.JoinHostPort(host, fmt.Sprint(addr.Port)))
					if family != "" && family != of {
						require.ErrorIs(t, err, syscall.ECONNREFUSED)
						continue
					}
					require.NoError(t, err)
					s, err := ln.Accept()
					require.NoError(t, err)
					require.Equal(t, c.LocalAddr().String(), s.RemoteAddr().String())
					require.Equal(t, c.RemoteAddr().String(), s.LocalAddr().String())
					require.NoError(t, c.Close())
					require.NoError(t, s.Close())
				}
			})
		}
	}
}

// Addresses are net's own type, as programs assert, and can be dialled again.
// The unspecified addresses mean what they mean to net: all addresses of the families
// that the network has.
func TestListenUnspecified(t *testing.T) {
	checkLeaks(t)
	for _, tr := range []transport{{name: "rdma", network: "rdma", rdma: true}, {name: "tcp", network: "tcp"}} {
		for _, c := range []struct{ family, address, reached string }{
			{"", "", "46"},
			{"", "0.0.0.0:0", "46"},
			{"", "[::]:0", "46"},
			{"", "[::ffff:0.0.0.0]:", "46"},
			{"4", "", "4"},
			{"4", "0.0.0.0:0", "4"},
			{"4", "[::]:0", "4"},
			{"6", "", "6"},
			{"6", "[::]:0", "6"},
		} {
			t.Run(tr.name+c.family+" "+c.address, func(t *testing.T) {
				ln, err := tr.listen(tr.network+c.family, c.address)
				require.NoError(t, err)
				defer ln.Close()
				require.True(t, ln.Addr().(*net.TCPAddr).IP.IsUnspecified())
				_, port, err := net.SplitHostPort(ln.Addr().String())
				require.NoError(t, err)
				reached := ""
				for _, host := range []string{host4, host6} {
					conn, err := tr.dial(tr.network, net.JoinHostPort(host, port))
					if err != nil {
						require.ErrorIs(t, err, syscall.ECONNREFUSED)
						continue
					}
					reached += map[string]string{host4: "4", host6: "6"}[host]
					require.NoError(t, conn.Close())
				}
				require.Equal(t, c.reached, reached)
			})
		}
		_, err := tr.listen(tr.network+"6", "0.0.0.0:0")
		var ae *net.AddrError
		require.ErrorAs(t, err, &ae)
	}
}

// So they do for datagrams.
func TestListenPacketUnspecified(t *testing.T) {
	t.Setenv(deviceEnv, iwarp.Name)
	checkLeaks(t)
	for _, address := range []string{"", "0.0.0.0:0", "[::]:0"} {
		p, err := ListenPacket("udp", address)
		require.NoError(t, err)
		_, port, err := net.SplitHostPort(p.LocalAddr().String())
		require.NoError(t, err)
		for _, host := range []string{"127.0.0.1", "::1"} {
			c, err := Dial("udp", net.JoinHostPort(host, port))
			require.NoError(t, err)
			_, err = c.Write([]byte(host))
			require.NoError(t, err)
			b := make([]byte, 100)
			require.NoError(t, p.SetReadDeadline(time.Now().Add(patience)))
			n, _, err := p.ReadFrom(b)
			require.NoError(t, err, "%q from %s", address, host)
			require.Equal(t, host, string(b[:n]))
			require.NoError(t, c.Close())
		}
		require.NoError(t, p.Close())
	}
}

func TestAddresses(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		ln, err := tr.listen(tr.network, tr.address)
		require.NoError(t, err)
		defer ln.Close()
		la := ln.Addr().(*net.TCPAddr)
		require.Equal(t, "tcp", la.Network())
		c, err := tr.dial(tr.network, la.String())
		require.NoError(t, err)
		defer c.Close()
		s, err := ln.Accept()
		require.NoError(t, err)
		defer s.Close()
		for _, pair := range [][2]net.Addr{{c.LocalAddr(), s.RemoteAddr()}, {c.RemoteAddr(), s.LocalAddr()}, {c.RemoteAddr(), la}} {
			a, b := pair[0].(*net.TCPAddr), pair[1].(*net.TCPAddr)
			require.Equal(t, b.String(), a.String())
			require.True(t, a.IP.Equal(b.IP))
		}
		again, err := tr.dial(tr.network, s.LocalAddr().String())
		require.NoError(t, err)
		require.NoError(t, again.Close())
	})
}

// When the device of its address is gone, Accept says so instead of waiting for
// ever. The device of another provider would go on.
func TestListenerLosesDevice(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	sw.FailNth(1, syscall.ENODEV, verbstest.ListenerAccept)
	ln, err := (&ListenConfig{Config: Config{Provider: sw}}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	for range 2 {
		within(t, "Accept", func() {
			_, err := ln.Accept()
			require.ErrorIs(t, err, syscall.ENODEV)
		})
	}
	require.NoError(t, ln.Close())
	_, err = ln.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}
