//go:build linux && cgo

package rdmacore_test

import (
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// addrEnv names the address of an RDMA device of this machine; vm/run sets it
// in the guest.
const addrEnv = "RDMANET_VM_ADDR"

func addr(t testing.TB) netip.Addr {
	t.Helper()
	a := os.Getenv(addrEnv)
	if a == "" {
		t.Skipf("%s does not name the address of an RDMA device: make vm runs this where there is one", addrEnv)
	}
	return netip.MustParseAddr(a)
}

func open(t testing.TB, cfg rdmacore.Config) ibv.Provider {
	t.Helper()
	p, err := rdmacore.New(cfg)
	require.NoError(t, err)
	_, err = p.Devices() // which stay open from here on
	require.NoError(t, err)
	return p
}

func TestProvider(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	verbstest.TestProvider(t, func(*testing.T) verbstest.Env { return verbstest.Env{Passive: p, Addr: a} })
}
