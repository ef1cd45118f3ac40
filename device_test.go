package rdmanet

import (
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// The tests run over the software device or, where these variables name the
// addresses of an RDMA device, over that; RDMANET_DEVICE must then say so, too.
var (
	onRDMA = os.Getenv("RDMANET_VM_ADDR") != ""
	host4  = hostFrom("RDMANET_VM_ADDR", "127.0.0.1")
	host6  = hostFrom("RDMANET_VM_ADDR6", "::1")
	local4 = net.JoinHostPort(host4, "0")
	local6 = net.JoinHostPort(host6, "0")
)

func hostFrom(env, otherwise string) string {
	if host := os.Getenv(env); host != "" {
		return host
	}
	return otherwise
}

// newProvider returns the provider of the device that the tests run over.
func newProvider(t testing.TB) ibv.Provider {
	t.Helper()
	if !onRDMA {
		return iwarp.New(iwarp.Config{})
	}
	p, err := rdmaProvider("")
	require.NoError(t, err)
	return p
}

// deviceName is the name of that device.
func deviceName(t testing.TB) string {
	t.Helper()
	devs, err := newProvider(t).Devices()
	require.NoError(t, err)
	return devs[0].Name()
}
