package verbstest

import (
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/printed/printedtest"
)

func TestPrinted(t *testing.T) {
	s := NewSwitch(iwarp.New(iwarp.Config{}))
	env := Env{Passive: s, Addr: netip.MustParseAddr("127.0.0.1")}
	pair := NewPair(t, env, PairConfig{})
	e := pair.Active
	mem := e.Register(t, printedtest.Payload(64<<10), ibv.AccessLocalWrite)
	l := env.listen(t)
	fault := s.FailNth(100, nil, PostSend)
	defer fault.Cancel()
	printedtest.Check(t, map[string]any{
		"Switch": s, "Counts": Counts{}, "Fault": fault, "Kind": PostSend, "Mem": mem, "PairConfig": PairConfig{}, "Pair": pair, "End": e, "Env": env,
		"device": e.Dev, "PD": e.PD, "MR": mem.MR, "CQ": e.RecvCQ, "QP": e.QP, "ID": e.ID, "listener": l,
	})
}
