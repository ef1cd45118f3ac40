package rdmanet

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The connections of a device grow together as far as Config.ReceiveMemory goes. Who finds it
// used up carries data all the same, and grows when others have given some back.
func TestReceiveMemory(t *testing.T) {
	checkLeaks(t)
	const bound = 1 << 20
	cfg := Config{Provider: newSwitch(t, nil), KeepAlive: -1, TransferSize: -1, ReceiveMemory: bound}
	a, b := pipeOn(t, cfg)
	used := a.dom.Budget.Used
	window := func(c *Conn) (n int) {
		c.locked(func() bool { n = c.credits.window; return true })()
		return n
	}
	size := b.pool.Size
	charged := func(conns ...*Conn) (n int) { // by what their windows are, in receives
		for _, c := range conns {
			n += max(0, window(c)-c.credits.idleReceives())
		}
		return n
	}
	require.True(t, eventually(func() bool { // as far as that goes
		exchangeOneWay(t, a, b, heavy(8<<20))
		require.LessOrEqual(t, used(), int64(bound))
		return charged(a, b) == bound/size
	}), "it never has all of it")
	for _, x := range []*Conn{a, b} {
		x.mu.Lock()
		x.live.timer.Stop() // it does not idle before it is told to
		x.unlock()
	}

	c, d := pipeOn(t, cfg)
	exchangeOneWay(t, c, d, heavy(8<<20))
	require.LessOrEqual(t, window(d), d.credits.idleReceives(), "nothing is left")

	// b wants fewer, but a holds on to what it was given.
	b.idleFor(idleAfter)
	require.Equal(t, b.set.initial, window(b))
	require.Greater(t, used(), int64(bound/4), "what the peer holds is not to be had")
	exchangeOneWay(t, c, d, heavy(8<<20))

	require.True(t, eventually(func() bool {
		a.idleFor(idleAfter) // once more for credits that b grants when a has used up most of its own
		b.idleFor(idleAfter)
		return used() <= int64(charged(c, d))*int64(size)
	}), "%d bytes are not given back", used())
	require.True(t, eventually(func() bool {
		exchangeOneWay(t, c, d, heavy(8<<20))
		return window(d) > d.credits.idleReceives()
	}))
	for _, x := range []*Conn{c, d, a, b} {
		require.NoError(t, x.Close())
	}
	require.True(t, eventually(func() bool { return used() == 0 }), "%d bytes are still charged", used()) // Close does not wait for it
}
