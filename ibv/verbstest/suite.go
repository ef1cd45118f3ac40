package verbstest

import (
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// Env is what [TestProvider] runs against.
type Env struct {
	// Passive listens and accepts; Active connects to it. A nil Active means
	// that Passive does both.
	Passive ibv.Provider
	Active  ibv.Provider

	// Addr is the address that Passive can listen on and Active can reach.
	Addr netip.Addr
}

// A subtest is one rule, or some that belong together.
type subtest struct {
	name string
	run  func(t *testing.T, env Env)
}

var groups = []struct {
	name     string
	subtests []subtest
}{
	{"Device", deviceTests},
	{"Setup", setupTests},
	{"Refusal", refusalTests},
	{"Send", sendTests},
	{"Inline", inlineTests},
	{"Queue", queueTests},
	{"RDMA", rdmaTests},
	{"Invalidate", invalidateTests},
	{"Optional", optionalTests},
	{"CQ", cqTests},
	{"Events", eventTests},
	{"Access", accessTests},
	{"Local", localTests},
	{"Receive", receiveTests},
	{"Flush", flushTests},
	{"Teardown", teardownTests},
	{"Disconnect", disconnectTests},
	{"Stress", stressTests},
}

// TestProvider checks that the devices of a provider keep the rules of package
// ibv. It calls open for every subtest; what open needs to undo belongs in
// t.Cleanup, which runs after the suite has closed all its objects.
func TestProvider(t *testing.T, open func(t *testing.T) Env) {
	// Most of what follows would only run into its deadlines if no message
	// gets through at all.
	basic := func(t *testing.T) { isolated(t, open, testOneMessage) }
	if !t.Run("Basic", basic) {
		return
	}
	for _, g := range groups {
		t.Run(g.name, func(t *testing.T) {
			for _, s := range g.subtests {
				t.Run(s.name, func(t *testing.T) { isolated(t, open, s.run) })
			}
		})
	}
}

// isolated runs one subtest on a provider of its own and checks afterwards that
// nothing is left of it: cleanups run in reverse order, so first the objects are
// closed, then the switch is looked at, then the provider is closed and at last
// goroutines and descriptors are counted.
func isolated(t *testing.T, open func(t *testing.T) Env, run func(t *testing.T, env Env)) {
	leaktest.Check(t)
	env := open(t)
	shared := env.Active == nil || env.Active == env.Passive
	passive := NewSwitch(env.Passive)
	active := passive
	if !shared {
		active = NewSwitch(env.Active)
	}
	t.Cleanup(func() {
		for _, s := range []*Switch{passive, active} {
			if live := s.Live(); len(live) > 0 {
				t.Errorf("%s: objects left open: %v", s.Name(), live)
			}
		}
	})
	run(t, Env{Passive: passive, Active: active, Addr: env.Addr})
}

// testOneMessage sends a message each way.
func testOneMessage(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	p.Active.transfer(t, p.Passive, pattern(100, 1))
	p.Passive.transfer(t, p.Active, pattern(100, 2))
}
