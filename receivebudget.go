package rdmanet

import (
	"sync"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
)

// The receive buffers that a device's connections have beyond what an idle one keeps are
// bounded together, by Config.ReceiveMemory: a peer may hold on to the credits that it was
// given for as long as it likes, and there may be any number of peers.

// receiveBudget is what the windows of a device have grown by.
type receiveBudget struct {
	used  atomic.Int64 // bytes
	users int          // domains; below receiveBudgets.mu
}

var receiveBudgets struct {
	mu      sync.Mutex
	devices map[ibv.Device]*receiveBudget
}

// acquireReceiveBudget returns the device's, for a domain, to be released once.
func acquireReceiveBudget(dev ibv.Device) *receiveBudget {
	receiveBudgets.mu.Lock()
	defer receiveBudgets.mu.Unlock()
	w := receiveBudgets.devices[dev]
	if w == nil {
		w = new(receiveBudget)
		if receiveBudgets.devices == nil {
			receiveBudgets.devices = make(map[ibv.Device]*receiveBudget)
		}
		receiveBudgets.devices[dev] = w
	}
	w.users++
	return w
}

func (w *receiveBudget) release(dev ibv.Device) {
	receiveBudgets.mu.Lock()
	defer receiveBudgets.mu.Unlock()
	if w.users--; w.users == 0 {
		delete(receiveBudgets.devices, dev)
	}
}

// budgetShare is one connection's share. The zero value is bounded by nothing.
type budgetShare struct {
	memory *receiveBudget
	bound  int64 // bytes of all connections' together that this one goes up to
	size   int64 // bytes of a receive
	n      int   // receives that are charged
}

// raise charges for up to n receives and returns for how many it is charged.
func (c *budgetShare) raise(n int) int {
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
func (c *budgetShare) lower(n int) {
	if n = max(n, 0); c.memory != nil && c.n > n {
		c.memory.used.Add(-int64(c.n-n) * c.size)
		c.n = n
	}
}
