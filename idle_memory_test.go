package rdmanet

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// setTrimEvery has pools look for memory to give back more often than they do.
func setTrimEvery(t testing.TB, d time.Duration) {
	old := regmem.SetTrimInterval(d)
	t.Cleanup(func() { regmem.SetTrimInterval(old) })
}

// idleFor has the timer look at the connection as if nothing had moved for that long. It sets what
// the timer goes by: the time itself passes in tests over the device in memory, but what memory an
// idle connection takes must be seen on the device that gives pages back, or has pinned them, and
// would take seconds for each.
func (c *conn) idleFor(d time.Duration) {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	c.idle.moved, c.idle.movedAt, c.idle.checkedAt = c.stats.moved(), now.Add(-d), now.Add(-d)
	c.runTimer(now)
}

// idleReceives is how many receives an idle connection keeps: twice Config.InitialReceiveCredits.
const idleReceives = 2 * 4

// poolMemory is what the pools of some domains take: what is registered where that pins
// it, else what is resident.
func poolMemory(t testing.TB, conns ...*Conn) (n int) {
	doms := make(map[*regmem.Domain]bool)
	for _, c := range conns {
		doms[c.dom] = true
	}
	for d := range doms {
		d.EachSlab(func(mem []byte) {
			if regmem.PinsMemory(d.Dev) {
				n += len(mem)
			} else {
				n += residentBytes(t, mem)
			}
		})
	}
	return n
}

// ping sends one byte each way.
func ping(t testing.TB, a, b *Conn) {
	t.Helper()
	pass(t, a, b)
	pass(t, b, a)
}

// A connection that has moved much, and moves nothing any more, takes what a fresh one
// takes, while others live: on devices that pin their memory, and on those that do not.
func TestIdleMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("what is resident is looked up in /proc, or by mincore")
	}
	var own []limitedDevice
	if !onRDMA {
		own = []limitedDevice{{1 << 20, 1 << 14, false, false}, {64, 1 << 14, false, false}, {64, 1 << 14, false, true}, {64, 1 << 14, true, true}}
	} else {
		own = []limitedDevice{{}}
	}
	for _, l := range own {
		t.Run(fmt.Sprintf("%+v", l), func(t *testing.T) {
			checkLeaks(t)
			setTrimEvery(t, 10*time.Millisecond)
			cfg := Config{Provider: newProvider(t), KeepAlive: -1, TransferSize: -1}
			if !onRDMA {
				cfg.Provider = l.provider(t)
			}
			a, b := pipeOn(t, cfg)
			ping(t, a, b)
			all := []*Conn{a, b}
			fresh := poolMemory(t, all...)
			for range 4 {
				a, b := pipeOn(t, cfg)
				exchange(t, a, b, heavy(4<<20))
				all = append(all, a, b)
			}
			require.Greater(t, poolMemory(t, all...), 2*5*fresh, "they have grown")
			for _, c := range all {
				c.idleFor(idleAfter)
			}
			if !eventually(func() bool { return poolMemory(t, all...) <= 5*fresh*12/10 }) {
				t.Errorf("10 ends take %d bytes, 2 fresh ones %d", poolMemory(t, all...), fresh)
				for _, c := range all {
					t.Logf("%+v", c.Stats())
				}
			}
			for i := 0; i < len(all); i += 2 {
				require.True(t, eventually(func() bool { return all[i].Stats().ReceiveCredits <= idleReceives }))
				exchange(t, all[i], all[i+1], 1<<20) // and they go on
				closeBoth(t, all[i], all[i+1])
			}
		})
	}
}

// Receives that stay posted, as the peer does not use up their credits, take no pages on the
// software device.
func TestIdleMemoryOfUnwilling(t *testing.T) {
	if runtime.GOOS != "linux" || onRDMA {
		t.Skip("on Linux, and on the software device alone, can pages of what is posted be given back")
	}
	checkLeaks(t)
	setTrimEvery(t, 10*time.Millisecond)
	a, b := pipeOn(t, withCredits(t, Config{KeepAlive: -1}))
	exchangeOneWay(t, a, b, 8<<20)
	require.Greater(t, poolMemory(t, b), 1<<20)
	b.idleFor(idleAfter) // and a, which is asked for nothing, keeps its credits
	require.True(t, eventually(func() bool { return poolMemory(t, b) <= 16*regmem.PageSize }), "%d bytes stay resident", poolMemory(t, b))
	require.Greater(t, b.Stats().ReceiveCredits, idleReceives)
	exchange(t, a, b, 4<<20)
	closeBoth(t, a, b)
}

// Pools of sizes that peers have asked for once are given back when nobody uses them.
func TestOddPoolsAreGivenBack(t *testing.T) {
	if !sharedDomain(t) {
		t.Skip("a connection that has a domain to itself takes its pools with it")
	}
	checkLeaks(t)
	setTrimEvery(t, 10*time.Millisecond)
	p := newProvider(t)
	keep, other := pipeOn(t, Config{Provider: p})
	for i := range 20 {
		size := 9000 + 4096*i
		a, b := pipeOn(t, Config{Provider: p, MaxSendSize: size, MaxReceiveSize: size})
		exchange(t, a, b, 1<<20)
		closeBoth(t, a, b)
	}
	require.True(t, eventually(func() bool {
		slabs := 0
		keep.dom.EachSlab(func([]byte) { slabs++ })
		return slabs <= 2 // receives, and perhaps the set-up's
	}))
	closeBoth(t, keep, other)
}

// A connection holds on to no memory of the program's after a call.
func TestMemoryOfCallsIsCollected(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, Config{})
	collected := make(chan struct{})
	func() {
		p := make([]byte, 3<<20)
		runtime.AddCleanup(&p[0], func(c chan struct{}) { close(c) }, collected)
		done := make(chan error, 1)
		go func() {
			done <- defect.ReadFull(b, make([]byte, 3<<20))
		}()
		_, err := a.Write(p)
		require.NoError(t, err)
		require.NoError(t, <-done)
	}()
	require.True(t, eventually(func() bool {
		runtime.GC()
		select {
		case <-collected:
			return true
		default:
			return false
		}
	}), "the connection keeps what was written")
	closeBoth(t, a, b)
}
