package rdmanet

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The connections of a device grow together as far as Config.ReceiveMemory goes. Who finds it
// used up carries data all the same, and grows when others have given some back.
func TestReceiveMemory(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		const bound = 1 << 20
		m := fabricModest(t)
		cfg := Config{Provider: newSwitch(t, m), KeepAlive: -1, TransferSize: -1, ReceiveMemory: bound}
		a, b := pipeOn(t, cfg)
		used := a.dom.Budget.Used
		window := func(c *Conn) int { return c.Stats().ReceiveWindow }
		size := b.pool.Size
		charged := func(conns ...*Conn) (n int) { // by what their windows are, in receives
			for _, c := range conns {
				n += max(0, window(c)-idleReceives)
			}
			return n
		}
		require.True(t, eventually(func() bool { // as far as that goes
			exchangeOneWay(t, a, b, heavy(8<<20))
			require.LessOrEqual(t, used(), int64(bound))
			return charged(a, b) == bound/size
		}), "it never has all of it")

		c, d := pipeOn(t, cfg)
		exchangeOneWay(t, c, d, heavy(8<<20))
		require.LessOrEqual(t, window(d), idleReceives, "nothing is left")

		// b wants fewer, but a holds on to what it was given.
		thaw := freeze(t, m.end(a))
		time.Sleep(2 * idleAfter)
		require.Equal(t, idleReceives/2, window(b))
		require.Greater(t, used(), int64(bound/4), "what the peer holds is not to be had")
		exchangeOneWay(t, c, d, heavy(8<<20))

		thaw()
		require.True(t, eventually(func() bool {
			time.Sleep(idleAfter)
			return used() <= int64(charged(c, d))*int64(size)
		}), "%d bytes are not given back", used())
		require.True(t, eventually(func() bool {
			exchangeOneWay(t, c, d, heavy(8<<20))
			return window(d) > idleReceives
		}))
		for _, x := range []*Conn{c, d, a, b} {
			require.NoError(t, x.Close())
		}
		synctest.Wait()
		require.True(t, eventually(func() bool { return used() == 0 }), "%d bytes are still charged", used()) // Close does not wait for it
	})
}
