package iwarp_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/printed/printedtest"
)

func TestPrinted(t *testing.T) {
	p := iwarp.New(iwarp.Config{})
	pair := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: netip.MustParseAddr("127.0.0.1")}, verbstest.PairConfig{})
	e := pair.Passive
	payload := printedtest.Payload(64 << 10)
	mem := e.Register(t, payload, ibv.AccessLocalWrite)
	for i := range 10 { // which the queue keeps, with their memory
		_, err := e.QP.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{mem.SGE(0, len(payload))}}})
		require.NoError(t, err)
	}
	l, err := p.Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	printedtest.CheckMethods(t, map[string]any{
		"Config": iwarp.Config{}, "Provider": p, "RemoteError": &iwarp.RemoteError{}, "SameHost": iwarp.SameHostOn,
		"device": e.Dev, "PD": e.PD, "MR": mem.MR, "CQ": e.RecvCQ, "QP": e.QP, "ID": e.ID, "listener": l,
	})
}
