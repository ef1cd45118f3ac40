package shim

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// requireEcho sends some bytes there and back between what dial returns and the next
// connection of l.
func requireEcho(t *testing.T, l net.Listener, dial func() (net.Conn, error)) net.Conn {
	t.Helper()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		io.Copy(c, c)
	}()
	c, err := dial()
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	_, err = c.Write([]byte("there and back"))
	require.NoError(t, err)
	got := make([]byte, len("there and back"))
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	defect.Bytes(t, "there and back", got)
	return c
}

func TestDialAndListen(t *testing.T) {
	t.Setenv("RDMANET_DEVICE", "iwarp")
	l, err := Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	addr := l.Addr().(*net.TCPAddr)
	require.Equal(t, "127.0.0.1", addr.IP.String())
	for name, dial := range map[string]func() (net.Conn, error){
		"Dial":    func() (net.Conn, error) { return Dial("tcp", addr.String()) },
		"DialTCP": func() (net.Conn, error) { return DialTCP("tcp", nil, addr) },
		"Dialer": func() (net.Conn, error) {
			return (&Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}).Dial("tcp", addr.String())
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.IsType(t, new(rdmanet.Conn), requireEcho(t, l, dial))
		})
	}
	_, err = DialTimeout("tcp4", addr.String(), -1)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

// TestUnix checks that other networks are package net's.
func TestUnix(t *testing.T) {
	name := filepath.Join(t.TempDir(), "socket")
	l, err := Listen("unix", name)
	require.NoError(t, err)
	defer l.Close()
	require.IsType(t, new(net.UnixConn), requireEcho(t, l, func() (net.Conn, error) { return Dial("unix", name) }))
}

func TestHTTPTestServers(t *testing.T) {
	t.Setenv("RDMANET_DEVICE", "iwarp")
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "hello")
	})
	get := func(t *testing.T, client *http.Client, url string) {
		t.Helper()
		resp, err := client.Get(url)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, "hello", string(body))
	}
	s := HTTPTestServer(h)
	defer s.Close()
	get(t, HTTPTestClient(s.Client()), s.URL)
	get(t, HTTPTestClient(s.Client()), s.URL)
	get(t, http.DefaultClient, s.URL)
	get(t, &http.Client{Transport: Transport(&http.Transport{DisableKeepAlives: true})}, s.URL)

	secure := HTTPTestTLSServer(h)
	defer secure.Close()
	get(t, HTTPTestClient(secure.Client()), secure.URL)
}

func TestCount(t *testing.T) {
	// The first connection of this process, if there was one, has settled where it counts.
	name := filepath.Join(t.TempDir(), "connections")
	t.Setenv(CountEnv, name)
	t.Setenv("RDMANET_DEVICE", "iwarp")
	old := countFile
	t.Cleanup(func() { countFile = old })
	countFile = openCountFile
	l, err := Listen("tcp", "[::1]:0")
	require.NoError(t, err)
	defer l.Close()
	for range 2 {
		requireEcho(t, l, func() (net.Conn, error) { return Dial("tcp6", l.Addr().String()) })
	}
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, 2, bytes.Count(text, []byte("iwarp\n")))
}

func TestAddresses(t *testing.T) {
	device4, device6 = netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("fd77::1")
	t.Cleanup(func() { device4, device6 = netip.Addr{}, netip.Addr{} })
	for _, tt := range []struct {
		network, address string
		dial             bool
		want             string
	}{
		{"tcp", "127.0.0.1:5", false, "10.77.0.1:5"},
		{"tcp", "localhost:5", true, "10.77.0.1:5"},
		{"tcp6", "localhost:5", true, "[fd77::1]:5"},
		{"tcp", "[::1]:5", true, "[fd77::1]:5"},
		{"tcp", "[::ffff:127.0.0.1]:5", true, "10.77.0.1:5"},
		{"tcp", ":5", true, "10.77.0.1:5"},
		{"tcp", "[::]:5", true, "10.77.0.1:5"},
		{"tcp", ":5", false, ":5"},
		{"tcp", "0.0.0.0:5", false, "0.0.0.0:5"},
		{"tcp", "192.0.2.1:5", true, "192.0.2.1:5"},
		{"tcp", "example.com:5", true, "example.com:5"},
		{"tcp", "no port", true, "no port"},
	} {
		require.Equal(t, tt.want, toDevice(tt.network, tt.address, tt.dial), "%+v", tt)
	}
	for from, want := range map[string]string{
		"10.77.0.1:5": "127.0.0.1:5", "[fd77::1]:5": "[::1]:5", "[::]:5": "[::]:5", "192.0.2.1:5": "192.0.2.1:5",
	} {
		addr := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))
		require.Equal(t, want, fromDevice(addr).String())
	}
}

func TestNoBubble(t *testing.T) {
	t.Setenv(OutsideEnv, "TestNoBubble")
	SynctestTest(t, func(t *testing.T) {
		requireNoBubble()
	})
	t.Setenv(OutsideEnv, "TestNo")
	SynctestTest(t, func(t *testing.T) {
		require.Panics(t, func() { Listen("tcp", "127.0.0.1:0") })
		require.Panics(t, func() { Dial("tcp", "127.0.0.1:1") })
	})
}
