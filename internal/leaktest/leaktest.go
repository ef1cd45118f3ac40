// Package leaktest finds what a test leaves behind: goroutines that still run
// and, where /proc tells (Linux), file descriptors that are still open.
package leaktest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// patience is how long leftovers get to go away: an object may be closed a
// moment before the last goroutine that served it returns.
const patience = time.Minute

// Check fails the test if, when it and the cleanups registered after this call
// are over, something is left that was not there before. Tests that run in
// parallel would be blamed for each other.
func Check(t testing.TB) {
	t.Helper()
	before := Take()
	t.Cleanup(func() {
		t.Helper()
		before.Check(t)
	})
}

// A Snapshot is what a process holds at one moment.
type Snapshot struct {
	goroutines  map[string]string // stacks by goroutine number
	descriptors map[string]bool
}

// Take makes a snapshot. The calling goroutine is not in it.
func Take() *Snapshot {
	return &Snapshot{goroutines(), descriptors()}
}

// Check fails the test if there is something that was not there when the
// snapshot was taken and that does not go away within a minute.
func (s *Snapshot) Check(t testing.TB) {
	t.Helper()
	if left := s.Left(patience); len(left) > 0 {
		t.Errorf("%d goroutines and descriptors left:\n\n%s", len(left), strings.Join(left, "\n\n"))
	}
}

// Left waits up to d for all that came after the snapshot to go away and
// describes what did not.
func (s *Snapshot) Left(d time.Duration) []string {
	deadline := time.Now().Add(d)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		left := s.since(Take())
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		// Sleeping rather than yielding: on one processor a spinning goroutine
		// keeps the runtime from looking at the network.
		time.Sleep(pause)
	}
}

// since lists what is in now and not in s.
func (s *Snapshot) since(now *Snapshot) (left []string) {
	for id, stack := range now.goroutines {
		if _, old := s.goroutines[id]; !old {
			left = append(left, stack)
		}
	}
	for fd := range now.descriptors {
		if !s.descriptors[fd] {
			left = append(left, "descriptor "+fd)
		}
	}
	return left
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

// descriptors names the open descriptors by number and by what they refer to;
// a socket has a number of its own there. The map is empty where /proc is not
// to be had.
func descriptors() map[string]bool {
	fds := make(map[string]bool)
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fds
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || strings.HasSuffix(target, "/fd") {
			continue // closed since, or the directory that is being read
		}
		if strings.HasPrefix(target, "anon_inode:[event") {
			continue // the runtime's poller, made at its first use and kept
		}
		fds[fmt.Sprintf("%s (%s)", e.Name(), target)] = true
	}
	return fds
}
