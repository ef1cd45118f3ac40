package deadline

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A timer that fires for a deadline which was moved since changes nothing.
func TestDeadlineMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var d Deadline
		fired := 0
		fire := func() {
			mu.Lock()
			defer mu.Unlock()
			if d.Check() {
				fired++
			}
		}
		set := func(in time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			at := time.Time{}
			if in != 0 {
				at = time.Now().Add(in)
			}
			d.Init(fire)
			d.Set(at)
		}
		state := func(after time.Duration) (bool, int) {
			time.Sleep(after)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			return d.Expired(), fired
		}
		requireState := func(after time.Duration, expired bool, times int) {
			t.Helper()
			e, n := state(after)
			require.Equal(t, expired, e)
			require.Equal(t, times, n)
		}
		set(time.Second)
		requireState(999*time.Millisecond, false, 0)
		set(time.Second) // moved on
		requireState(999*time.Millisecond, false, 0)
		requireState(time.Millisecond, true, 1)
		set(0) // taken back
		requireState(time.Hour, false, 1)
		set(-time.Second)
		requireState(0, true, 1) // known at once, without a timer
		set(time.Hour)
		set(time.Second) // moved up
		requireState(time.Second, true, 2)
		set(time.Second)
		d.Stop()
		requireState(time.Hour, false, 2)

		// A timer that comes early, as when the wall clock was set, waits on.
		set(time.Second)
		mu.Lock()
		require.False(t, d.Check())
		mu.Unlock()
		requireState(time.Second, true, 3)
	})
}
