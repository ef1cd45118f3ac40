//go:build amd64 || arm64

package rdmanet

import (
	"io"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// sameHostPair returns both ends of a connection of the software device.
func sameHostPair(t *testing.T, dial, listen string) (client, server *Conn, err error) {
	t.Helper()
	ln, err := (&ListenConfig{Config: Config{Device: "iwarp", SameHost: listen}}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return dialTo(t, ln, ln.Addr().String(), dial)
}

func dialTo(t *testing.T, ln net.Listener, address, sameHost string) (client, server *Conn, err error) {
	t.Helper()
	c, err := (&Dialer{Config: Config{Device: "iwarp", SameHost: sameHost}}).Dial("rdma4", address)
	if err != nil {
		return nil, nil, err
	}
	t.Cleanup(func() { c.Close() })
	s, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return c.(*Conn), s.(*Conn), nil
}

// Shared memory is on by default, and either end can have it off. A connection that has
// something to carry moves to it, and one that must use it begins with it. Info tells, and
// says why not.
func TestSameHost(t *testing.T) {
	t.Setenv(deviceEnv, "iwarp")
	for _, tt := range []struct {
		name, dial, listen, env string
		reason                  [2]string
		fails                   string
		atOnce                  bool
	}{
		{name: "by default"},
		{name: "on by the environment", env: "on"},
		{name: "on", dial: "on", listen: "on", env: "off"},
		{name: "off", dial: "off", listen: "off", reason: [2]string{"switched off", "switched off"}},
		{name: "off by the environment", env: "off", reason: [2]string{"switched off", "switched off"}},
		{name: "off at the dialler", dial: "off", listen: "on", reason: [2]string{"switched off", "does not offer"}},
		{name: "off at the dialler only", dial: "off", reason: [2]string{"switched off", "does not offer"}},
		{name: "off at the listener", dial: "on", listen: "off", reason: [2]string{"has not accepted", "switched off"}},
		{name: "off at the listener only", listen: "off", reason: [2]string{"has not accepted", "switched off"}},
		{name: "required", dial: "require", listen: "require", atOnce: true},
		{name: "required by the environment", env: "require", atOnce: true},
		{name: "required by the dialler", dial: "require", listen: "on", atOnce: true},
		{name: "required by the listener", dial: "on", listen: "require", atOnce: true},
		{name: "required by the dialler in vain", dial: "require", listen: "off", fails: "shared memory is required, but the peer has not accepted it"},
		{name: "required by the listener in vain", dial: "off", listen: "require", fails: "refused"},
		{name: "no such mode", dial: "perhaps", listen: "on", fails: `Config.SameHost must be on, off or require, and is "perhaps"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// The device of the package has read the environment when the process began.
			old := software
			t.Cleanup(func() { software = old })
			t.Setenv(iwarp.SameHostEnv, tt.env)
			software = iwarp.New(iwarp.Config{})
			checkLeaks(t)
			c, s, err := sameHostPair(t, tt.dial, tt.listen)
			if tt.fails != "" {
				require.ErrorContains(t, err, tt.fails)
				return
			}
			require.NoError(t, err)
			moved := func() bool { return c.Info().Link == "shared memory" && s.Info().Link == "shared memory" }
			if !tt.atOnce && tt.reason[0] == "" {
				require.Equal(t, "tcp", c.Info().Link)
				require.Contains(t, c.Info().LinkReason, "too little")
			}
			for range 100 {
				pass(t, c, s)
				pass(t, s, c)
			}
			for i, end := range []*Conn{c, s} {
				if tt.reason[i] != "" {
					require.Equal(t, "tcp", end.Info().Link)
					require.Contains(t, end.Info().LinkReason, tt.reason[i])
				}
			}
			if tt.reason[0] == "" {
				require.True(t, eventually(func() bool { // A direction moves with a write.
					pass(t, c, s)
					pass(t, s, c)
					return moved()
				}), "%v %v", c.Info(), s.Info())
				require.Empty(t, c.Info().LinkReason)
				exchange(t, c, s, 16<<20)
			}
			require.NoError(t, c.CloseWrite())
			_, err = io.ReadAll(s)
			require.NoError(t, err)
			require.NoError(t, c.Close())
			require.NoError(t, s.Close())
		})
	}
}

// A value of the environment that cannot be read is an error of Dial and of Listen.
func TestSameHostEnvironment(t *testing.T) {
	t.Setenv(deviceEnv, "iwarp")
	t.Setenv(iwarp.SameHostEnv, "perhaps")
	const want = `RDMANET_SAMEHOST must be on, off or require, and is "perhaps"`
	cfg := Config{Device: "iwarp"}
	_, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.ErrorContains(t, err, want)
	_, err = (&Dialer{Config: cfg}).Dial("rdma4", "127.0.0.1:1")
	require.ErrorContains(t, err, want)
}

// There is room for a writer also if what it has written first has used up the receives before the
// end that does not read has learned that the connection has moved to shared memory.
func TestRoomWhileMoving(t *testing.T) {
	t.Setenv(deviceEnv, "iwarp")
	for _, first := range []int{16 << 10, 400 << 10, 512 << 10} {
		t.Run(strconv.Itoa(first), func(t *testing.T) {
			checkLeaks(t)
			c, s, err := sameHostPair(t, "on", "on")
			require.NoError(t, err)
			src := pattern(1, 1<<20)
			_, err = c.Write(src[:first])
			require.NoError(t, err)
			require.NoError(t, c.SetWriteDeadline(time.Now().Add(patience)))
			at := first
			write := func(n int) {
				n, err := c.Write(src[at:min(at+n, len(src))])
				at += n
				require.NoError(t, err, "%d bytes were taken", at)
			}
			if first >= 64<<10 { // The connection moves with a write.
				require.True(t, eventually(func() bool {
					write(1)
					return c.Info().Link == "shared memory"
				}))
			}
			for at < len(src) {
				write(16 << 10)
			}
			got := make([]byte, len(src))
			_, err = io.ReadFull(s, got)
			require.NoError(t, err)
			defect.Bytes(t, src, got)
			require.NoError(t, c.Close())
			require.NoError(t, s.Close())
		})
	}
}

// Nothing goes past a proxy, also one on the same host.
func TestSameHostProxy(t *testing.T) {
	t.Setenv(deviceEnv, "iwarp")
	checkLeaks(t)
	ln, err := (&ListenConfig{Config: Config{Device: "iwarp", SameHost: "on"}}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	proxy := newFrozenLink(t, ln.Addr())
	c, s, err := dialTo(t, ln, proxy.ln.Addr().String(), "on")
	require.NoError(t, err)
	for range 100 {
		pass(t, c, s)
		pass(t, s, c)
	}
	require.Contains(t, c.Info().LinkReason, "proxy")
	require.Contains(t, s.Info().LinkReason, "proxy")
	require.NoError(t, c.Close())
	require.NoError(t, s.Close())
}
