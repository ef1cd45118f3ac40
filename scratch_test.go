package rdmanet

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// scratchConn is as much of a connection as scratch memory takes.
func scratchConn(dev ibv.Device, chunks int) *Conn {
	return &Conn{&conn{dom: &domain{dev: dev}, set: settings{transferMemory: chunks*scratchBytes + 1}}}
}

func poolOf(dev ibv.Device) *scratchPool {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	return scratches.pools[dev]
}

// scratchDevices returns devices when there is no scratch memory of earlier tests.
func scratchDevices(t *testing.T, n int) (devs []ibv.Device) {
	require.True(t, eventually(func() bool { return countScratch() == 0 }))
	for range n {
		all, err := newSwitch(t, nil).Devices()
		require.NoError(t, err)
		devs = append(devs, all[0])
	}
	return devs
}

// The connections of a device together stay within each one's bound.
func TestScratchBudget(t *testing.T) {
	checkLeaks(t)
	devs := scratchDevices(t, 2)
	setScratchIdle(t, time.Hour)
	a, b, other := scratchConn(devs[0], 3), scratchConn(devs[0], 5), scratchConn(devs[1], 1)
	var held []*scratch
	take := func(c *Conn) bool {
		s := c.getScratch()
		if s != nil {
			require.Len(t, s.b, scratchBytes)
			held = append(held, s)
		}
		return s != nil
	}
	for range 3 {
		require.True(t, take(a))
	}
	require.False(t, take(a))
	require.True(t, take(b))
	require.True(t, take(b))
	require.False(t, take(b))
	require.True(t, take(other), "another device's")
	require.False(t, take(other))
	require.Equal(t, 6, countScratch())
	for i, s := range held {
		for j := range s.b {
			s.b[j] = byte(i)
		}
	}
	for i, s := range held {
		require.Equal(t, byte(i), s.b[0])
		require.Equal(t, byte(i), s.b[scratchBytes-1])
	}
	last := held[4]
	for _, s := range held[:5] {
		s.release()
	}
	require.Equal(t, 6, countScratch(), "kept for the next one")
	require.Same(t, last, a.getScratch(), "the warmest first")
	require.Nil(t, other.getScratch())
	last.release()
	held[5].release()
	for _, c := range []*Conn{a, other} {
		p := poolOf(c.dom.dev)
		setScratchIdle(t, 0)
		p.trim()
		require.Nil(t, poolOf(c.dom.dev), "nothing of a device stays")
	}
}

// What nobody uses goes back to the system, what is in use stays.
func TestScratchIsGivenBack(t *testing.T) {
	checkLeaks(t)
	c := scratchConn(scratchDevices(t, 1)[0], 100)
	before := countScratch()
	setScratchIdle(t, time.Millisecond)
	var chunks []*scratch
	for range 10 {
		chunks = append(chunks, c.getScratch())
	}
	for _, s := range chunks[1:] {
		s.release()
	}
	require.True(t, eventually(func() bool { return countScratch() == before+1 }))
	chunks[0].b[0] = 1
	chunks[0].release()
	require.True(t, eventually(func() bool { return countScratch() == before }))

	setScratchIdle(t, 0)
	s := c.getScratch()
	require.Equal(t, before+1, countScratch())
	s.release()
	require.Equal(t, before, countScratch(), "at once")
}

func TestScratchConcurrent(t *testing.T) {
	checkLeaks(t)
	devs := scratchDevices(t, 2)
	setScratchIdle(t, 50*time.Microsecond)
	var wg sync.WaitGroup
	for g := range 6 {
		c := scratchConn(devs[g%2], 2)
		wg.Go(func() {
			for i := range heavy(2000) {
				if s := c.getScratch(); s != nil {
					s.b[i%scratchBytes] = byte(g)
					if countScratch() > 4 {
						panic("more than the two devices may have")
					}
					s.release()
				}
			}
		})
	}
	wg.Wait()
}
