package regmem

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// The tests run over the software device or, where this variable names the address of an
// RDMA device, over that.
var host = os.Getenv("RDMANET_VM_ADDR")

var onRDMA = host != ""

// provider is that of the device. One of RDMA devices stays for good.
var provider ibv.Provider

// patience is how long a test waits for what must come to pass.
const patience = 90 * time.Second

// advice names settings that no program has.
var advice = Advice{Buffers: "the number of buffers", Transfers: "the memory of transfers"}

// TestMain fails, too, when the tests leave resources of the device behind.
func TestMain(m *testing.M) {
	domains.idle, chunkPools.idle = 10*time.Millisecond, 10*time.Millisecond // checkLeaks waits for that
	device := ""
	if onRDMA {
		p, err := rdmacore.New(rdmacore.Config{})
		if err == nil {
			_, err = p.Devices()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		provider, device = p, os.Getenv("RDMANET_VM_DEVICE")
	} else {
		host = "127.0.0.1"
		provider = iwarp.New(iwarp.Config{})
	}
	os.Exit(leaktest.Main(m, device, host, func() (ibv.Provider, error) {
		if !onRDMA {
			return nil, errors.New("no RDMA device")
		}
		return provider, nil
	}))
}

// heavy returns n, which is there for volume only, or a part of it over RDMA devices,
// which are emulated where these tests run.
func heavy(n int) int {
	if onRDMA {
		return max(1, n/8)
	}
	return n
}

// pattern returns n random bytes that depend on seed.
func pattern(seed uint64, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed)}).Read(b)
	return b
}

// eventually tries until ok holds or patience is over.
func eventually(ok func() bool) bool {
	deadline := time.Now().Add(patience)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if ok() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
}

// within fails the test when f does not return within patience.
func within(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s hangs", what)
	}
}

// checkLeaks fails the test if goroutines, descriptors or parts of the package are in use
// when it is over that were not before. It goes first, so that it looks last.
func checkLeaks(t testing.TB) {
	t.Helper()
	leaktest.Check(t)
	before := InUse()
	t.Cleanup(func() {
		if !eventually(func() bool {
			now := InUse()
			return now.Domains <= before.Domains && now.Chunks <= before.Chunks && now.Spans <= before.Spans
		}) {
			defect.Leak(t, "in use: %+v where it was %+v", InUse(), before)
		}
	})
}

// newSwitch puts a switch in front of a provider, nil for that of the device, and checks
// at the end that nothing is left of what it handed out. For as long as the test runs
// domains and chunks go with their last user, and not later.
func newSwitch(t testing.TB, p ibv.Provider) *verbstest.Switch {
	t.Helper()
	setDomainIdle(t, 0)
	setChunkIdle(t, 0)
	if p == nil {
		p = provider
	}
	sw := verbstest.NewSwitch(p)
	t.Cleanup(func() { requireReleased(t, sw) })
	return sw
}

// requireReleased checks that all objects and all memory are given back.
func requireReleased(t testing.TB, sw *verbstest.Switch) {
	t.Helper()
	if !eventually(func() bool { return len(sw.Live()) == 0 && sw.RegisteredBytes() == 0 }) {
		defect.Leak(t, "left behind: %v, %d bytes of registered memory", sw.Live(), sw.RegisteredBytes())
	}
}

// acquire is Acquire of the first device of a switch.
func acquire(t testing.TB, sw *verbstest.Switch) *Domain {
	t.Helper()
	devs, err := sw.Devices()
	require.NoError(t, err)
	d, err := Acquire(devs[0], false, advice)
	require.NoError(t, err)
	return d
}

func setDomainIdle(t testing.TB, d time.Duration) {
	old := SetDomainIdle(d)
	t.Cleanup(func() { SetDomainIdle(old) })
}

func setChunkIdle(t testing.TB, d time.Duration) {
	old := SetChunkIdle(d)
	t.Cleanup(func() { SetChunkIdle(old) })
}
