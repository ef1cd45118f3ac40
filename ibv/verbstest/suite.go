package verbstest

import (
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
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
	{"QPRegion", qpRegionTests},
	{"Local", localTests},
	{"Receive", receiveTests},
	{"Flush", flushTests},
	{"Teardown", teardownTests},
	{"Disconnect", disconnectTests},
	{"Stress", stressTests},
	{"Datagram", udTests},
	{"DatagramSetup", udSetupTests},
	{"Multicast", mcastTests},
}

// TestProvider checks that the devices of a provider keep the rules of package
// ibv. It calls open for every subtest; what open needs to undo belongs in
// t.Cleanup, which runs after the suite has closed all its objects.
func TestProvider(t *testing.T, open func(t *testing.T) Env) {
	if !testBasic(t, open) {
		return
	}
	for _, g := range groups {
		testGroup(t, open, g.name, g.subtests)
	}
}

// TestAddress is the part of [TestProvider] that depends on Env.Addr, for
// further addresses of a device that has passed all of it.
func TestAddress(t *testing.T, open func(t *testing.T) Env) {
	if testBasic(t, open) {
		testGroup(t, open, "Setup", setupTests)
		testGroup(t, open, "Datagram", udTests)
		testGroup(t, open, "DatagramSetup", udSetupTests)
		testGroup(t, open, "Multicast", mcastTests)
	}
}

// testBasic reports whether a message gets through at all: if not, most of the
// other tests would only run into their deadlines.
func testBasic(t *testing.T, open func(t *testing.T) Env) bool {
	return t.Run("Basic", func(t *testing.T) { isolated(t, open, testOneMessage) })
}

func testGroup(t *testing.T, open func(t *testing.T) Env, name string, subtests []subtest) {
	t.Run(name, func(t *testing.T) {
		for _, s := range subtests {
			t.Run(s.name, func(t *testing.T) { isolated(t, open, s.run) })
		}
	})
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
				defect.Leak(t, "%s: objects left open: %v", s.Name(), live)
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
