package rdmanet

import (
	"sync"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
)

// The receive buffers that a device's connections have beyond what an idle one keeps are
// bounded together, by Config.ReceiveMemory: a peer may hold on to the credits that it was
// given for as long as it likes, and there may be any number of peers.

// windowMemory is what the windows of a device have grown by.
type windowMemory struct {
	used  atomic.Int64 // bytes
	users int          // domains; below windowsOf.mu
}

var windowsOf struct {
	mu      sync.Mutex
	devices map[ibv.Device]*windowMemory
}

// acquireWindows returns the device's, for a domain, to be released once.
func acquireWindows(dev ibv.Device) *windowMemory {
	windowsOf.mu.Lock()
	defer windowsOf.mu.Unlock()
	w := windowsOf.devices[dev]
	if w == nil {
		w = new(windowMemory)
		if windowsOf.devices == nil {
			windowsOf.devices = make(map[ibv.Device]*windowMemory)
		}
		windowsOf.devices[dev] = w
	}
	w.users++
	return w
}

func (w *windowMemory) release(dev ibv.Device) {
	windowsOf.mu.Lock()
	defer windowsOf.mu.Unlock()
	if w.users--; w.users == 0 {
		delete(windowsOf.devices, dev)
	}
}

// charge is one connection's share. The zero value is bounded by nothing.
type charge struct {
	memory *windowMemory
	bound  int64 // bytes of all connections' together that this one goes up to
	size   int64 // bytes of a receive
	n      int   // receives that are charged
}

// raise charges for up to n receives and returns for how many it is charged.
func (c *charge) raise(n int) int {
	if c.memory == nil {
		return n
	}
	for c.n < n {
		used := c.memory.used.Load()
		more := min(int64(n-c.n), (c.bound-used)/c.size)
		if more <= 0 {
			break
		}
		if c.memory.used.CompareAndSwap(used, used+more*c.size) {
			c.n += int(more)
		}
	}
	return c.n
}

// lower gives back what is charged for more than n.
func (c *charge) lower(n int) {
	if n = max(n, 0); c.memory != nil && c.n > n {
		c.memory.used.Add(-int64(c.n-n) * c.size)
		c.n = n
	}
}
