package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/ibv"
)

func examine(t *testing.T, dial bool, addresses ...string) (out string, ok bool) {
	t.Helper()
	var b strings.Builder
	d := doctor{out: &b, timeout: 5 * time.Second, dial: dial}
	d.devices()
	ok = true
	for _, a := range addresses {
		ok = d.address(a) && ok
	}
	return b.String(), ok
}

func TestDevices(t *testing.T) {
	out, ok := examine(t, false)
	require.True(t, ok)
	require.Contains(t, out, "Limit of locked memory")
	require.Contains(t, out, "iwarp (provider iwarp): iWARP")
	require.Contains(t, out, "what is registered stays in ordinary memory")
	if !strings.Contains(out, "provider rdma") {
		require.NotContains(t, out, "quirks", "the software device has none")
	}
}

func TestQuirks(t *testing.T) {
	require.Empty(t, quirks(ibv.Quirks{}))
	require.Equal(t, "SendsBuffered, VagueErrors", quirks(ibv.Quirks{SendsBuffered: true, VagueErrors: true}))
}

func TestAddress(t *testing.T) {
	ln, err := rdmanet.Listen("rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		for {
			if c, err := ln.Accept(); err == nil {
				c.Close()
			} else {
				return
			}
		}
	}()
	out, ok := examine(t, true, ln.Addr().String())
	require.True(t, ok, out)
	require.Contains(t, out, "dial: connected")

	out, ok = examine(t, false, "127.0.0.1")
	require.False(t, ok)
	require.Contains(t, out, "missing port")
	addr := ln.Addr().String()
	ln.Close()
	out, ok = examine(t, true, addr)
	require.False(t, ok)
	require.Contains(t, out, "refused")
}

// RDMANET_DEVICE decides here as it does in Dial.
func TestAddressOfPinnedDevice(t *testing.T) {
	t.Setenv(deviceEnv, "iwarp")
	out, ok := examine(t, false, "127.0.0.1:1")
	require.True(t, ok)
	require.Contains(t, out, "because RDMANET_DEVICE says so")

	t.Setenv(deviceEnv, "nosuch0")
	out, ok = examine(t, false, "127.0.0.1:1")
	require.False(t, ok)
	require.Contains(t, out, "127.0.0.1:1: none")
	_, err := rdmanet.Dial("rdma", "127.0.0.1:1")
	require.ErrorContains(t, err, "nosuch0")
}
