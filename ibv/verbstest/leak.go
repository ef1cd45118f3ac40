package verbstest

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

// checkGoroutines fails the test if, when it is over, goroutines run that did
// not before. They get time to end: an object may be closed a moment before the
// last goroutine that served it returns.
func checkGoroutines(t testing.TB) {
	before := goroutines()
	t.Cleanup(func() {
		var left []string
		eventually(func() bool {
			left = left[:0]
			for id, stack := range goroutines() {
				if _, old := before[id]; !old {
					left = append(left, stack)
				}
			}
			return len(left) == 0
		})
		if len(left) > 0 {
			t.Errorf("%d goroutines left:\n\n%s", len(left), strings.Join(left, "\n\n"))
		}
	})
}

// goroutines returns the stacks of all goroutines but the caller's by their
// number, which the runtime never gives away twice.
func goroutines() map[string]string {
	buf := make([]byte, 1<<16)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	stacks := make(map[string]string)
	for i, stack := range strings.Split(string(buf), "\n\n") {
		if i == 0 { // the caller comes first
			continue
		}
		// The first line is "goroutine 7 [state]:".
		if f := strings.Fields(stack); len(f) > 1 {
			stacks[f[1]] = stack
		}
	}
	return stacks
}

// eventually tries until ok holds or [Patience] is over.
func eventually(ok func() bool) bool {
	deadline := time.Now().Add(Patience)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if ok() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		// Sleeping rather than yielding: on one processor a spinning goroutine
		// keeps the runtime from looking at the network.
		time.Sleep(pause)
	}
}
