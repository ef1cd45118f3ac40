package rdmanet

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// locked is f with mu held. It is for tests of what nobody can see from outside.
func (c *conn) locked(f func() bool) func() bool {
	return func() bool {
		c.mu.Lock()
		defer c.unlock()
		return f()
	}
}

// requireAsleep waits until the leader sleeps and f holds. It is for the tests of poller,
// which decides whether a leader sleeps.
func requireAsleep(t testing.TB, c *Conn, f func() bool) {
	t.Helper()
	require.True(t, eventually(c.locked(func() bool { return c.wait.Sleeping() && f() })))
}
