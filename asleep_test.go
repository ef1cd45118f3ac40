package rdmanet

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/scripted"
)

// requireSleeper waits until somebody sleeps till the next completion and f holds.
func requireSleeper(t testing.TB, e *scripted.Endpoint, f func() bool) {
	t.Helper()
	require.True(t, eventually(func() bool { return e.Asleep() && f() }), "nobody sleeps in that state\n\n%s", stacks())
}

// parked runs f in a goroutine, and returns when f waits for something or has returned.
// done is closed when it has returned.
func parked(t testing.TB, f func()) (done chan struct{}) {
	t.Helper()
	c := start(f)
	c.park(t)
	return c.done
}

// call is a function that runs in a goroutine of its own.
type call struct {
	goroutine uint64
	done      chan struct{} // closed when it has returned
}

func start(f func()) *call {
	c := &call{done: make(chan struct{})}
	began := make(chan uint64)
	go func() {
		defer close(c.done)
		began <- scripted.Goroutine()
		f()
	}()
	c.goroutine = <-began
	return c
}

// park waits until the call waits for something, or has returned.
func (c *call) park(t testing.TB) {
	t.Helper()
	require.True(t, eventually(func() bool { return c.over() || c.waits() }), "the call runs on and on\n\n%s", stacks())
}

func (c *call) over() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// waits reports whether the call waits for another goroutine or for a device. Waiting for a
// lock is none of that: it takes no time.
func (c *call) waits() bool {
	switch c.state() {
	case "chan receive", "select", "sync.Cond.Wait", "IO wait":
		return true
	}
	return false
}

// block waits until the call waits for a lock, or has returned.
func (c *call) block(t testing.TB) {
	t.Helper()
	require.True(t, eventually(func() bool { return c.over() || c.state() == "sync.Mutex.Lock" }), "the call waits for no lock\n\n%s", stacks())
}

// state is the state of the call's goroutine as stack traces show it.
func (c *call) state() string {
	head, _, _ := strings.Cut(goroutines()[strconv.FormatUint(c.goroutine, 10)], "\n")
	_, state, _ := strings.Cut(head, "[")
	state, _, _ = strings.Cut(state, "]")
	state, _, _ = strings.Cut(state, ",")
	return strings.TrimSuffix(state, " (durable)") // as it is in a bubble of testing/synctest
}

// running reports how many goroutines are inside a function whose name, as stack traces show
// it, contains this.
func running(name string) (n int) {
	for _, stack := range goroutines() {
		if strings.Contains(stack, name) {
			n++
		}
	}
	return n
}
