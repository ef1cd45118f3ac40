package fabric

import (
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

var (
	addr4 = netip.MustParseAddr("127.0.0.1")
	addr6 = netip.IPv6Loopback()
)

// The device keeps every rule of package ibv, for connections and for datagrams.
func TestProvider(t *testing.T) {
	verbstest.TestProvider(t, func(*testing.T) verbstest.Env {
		return verbstest.Env{Passive: New(1024, addr4, addr6), Addr: addr4}
	})
}

func TestProviderIPv6(t *testing.T) {
	verbstest.TestAddress(t, func(*testing.T) verbstest.Env {
		return verbstest.Env{Passive: New(1024, addr4, addr6), Addr: addr6}
	})
}
