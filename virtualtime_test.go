package rdmanet

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// inVirtualTime runs f in a bubble of testing/synctest, where time passes only while every
// goroutine waits, and at once then. What f uses must not wait in the system: connections go
// over package fabric. f must not call t.Run.
func inVirtualTime(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	// All connections share the goroutine that looks for those without a leader. A bubble
	// needs one of its own, which starts when none runs.
	require.True(t, eventually(func() bool { return running("vacancy.(*Sweeper).run") == 0 }), "connections are in use\n\n%s", stacks())
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(time.Hour) }) // timers that are left go off, and that goroutine ends
		f(t)
	})
}
