package verbstest_test

import (
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

func TestProvider(t *testing.T) {
	verbstest.TestProvider(t, func(t *testing.T) verbstest.Env {
		return verbstest.Env{
			Passive: iwarp.New(iwarp.Config{}),
			Addr:    netip.MustParseAddr("127.0.0.1"),
		}
	})
}
