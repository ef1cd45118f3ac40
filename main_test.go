package rdmanet

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

var tctx = context.Background()

// patience is how long a test waits for what must come to pass. Nothing waits
// so long unless it fails, also on a busy machine. RDMA devices are emulated, ten
// times slower.
var patience = func() time.Duration {
	if onRDMA {
		return 90 * time.Second
	}
	return time.Minute
}()

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

// within fails the test when f does not return within patience, and shows where
// everybody is.
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
		t.Fatalf("%s hangs\n\n%s", what, stacks())
	}
}

// inTime has f try with a time, and with twice as much for as long as f says that it was
// too short for what must happen in it: a busy machine may be slow.
func inTime(t testing.TB, d time.Duration, f func(d time.Duration) bool) {
	t.Helper()
	for ; !f(d); d *= 2 {
		require.Less(t, d, patience, "it never happens")
	}
}

// checkLeaks fails the test if goroutines, domains, chunks of scratch memory or
// Buffers are left when it is over that were not there before. It goes first, so
// that it looks last.
func checkLeaks(t testing.TB) {
	t.Helper()
	before, memoryBefore := goroutines(), regmem.InUse()
	servedBefore := served()
	t.Cleanup(func() {
		var left []string
		gone := eventually(func() bool {
			left = left[:0]
			for id, stack := range goroutines() {
				if _, old := before[id]; !old {
					left = append(left, stack)
				}
			}
			memory := regmem.InUse()
			return len(left) == 0 && memory.Domains <= memoryBefore.Domains && memory.Chunks <= memoryBefore.Chunks &&
				memory.Spans <= memoryBefore.Spans && served() <= servedBefore && !polls()
		})
		if !gone {
			defect.Leak(t, "%+v in use where there were %+v, %d connections being served (%d), %d goroutines more:\n\n%s",
				regmem.InUse(), memoryBefore, served(), servedBefore, len(left), strings.Join(left, "\n\n"))
		}
	})
}

// newSwitch puts a switch in front of a provider, nil for the software device,
// and checks at the end that nothing is left of what it handed out. For as long
// as the test runs domains and scratch memory go with their last user, not a while
// later.
func newSwitch(t testing.TB, p ibv.Provider) *verbstest.Switch {
	t.Helper()
	setDomainIdle(t, 0)
	setScratchIdle(t, 0)
	if p == nil {
		p = newProvider(t)
	}
	sw := verbstest.NewSwitch(p)
	t.Cleanup(func() { requireReleased(t, sw) })
	return sw
}

// requireReleased checks that all objects and all memory are given back, which Close,
// and a dial that was cut short, leave to be done behind them.
func requireReleased(t testing.TB, sw *verbstest.Switch) bool {
	t.Helper()
	ok := eventually(func() bool { return len(sw.Live()) == 0 && sw.RegisteredBytes() == 0 })
	if !ok {
		defect.Leak(t, "left behind: %v, %d bytes of registered memory", sw.Live(), sw.RegisteredBytes())
	}
	return ok
}

func setDomainIdle(t testing.TB, d time.Duration) {
	old := regmem.SetDomainIdle(d)
	t.Cleanup(func() { regmem.SetDomainIdle(old) })
}

func setScratchIdle(t testing.TB, d time.Duration) {
	old := regmem.SetChunkIdle(d)
	t.Cleanup(func() { regmem.SetChunkIdle(old) })
}

func countScratch() int { return regmem.InUse().Chunks }

// goroutines returns the stacks of all goroutines but the caller's by their
// number, which the runtime gives away once only.
func goroutines() map[string]string {
	m := make(map[string]string)
	for i, stack := range strings.Split(stacks(), "\n\n") {
		// The first line is "goroutine 7 [state]:", and the caller comes first.
		if f := strings.Fields(stack); i > 0 && len(f) > 1 {
			m[f[1]] = stack
		}
	}
	return m
}

func stacks() string {
	for buf := make([]byte, 1<<18); ; buf = make([]byte, 2*len(buf)) {
		if n := runtime.Stack(buf, true); n < len(buf) {
			return string(buf[:n])
		}
	}
}
