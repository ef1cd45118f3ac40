// Package leaktest finds what a test has not released: goroutines that still run and, if
// there is /proc (Linux), file descriptors that are still open.
package leaktest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// patience is how long goroutines and descriptors have to end. An object may be closed a
// moment before the last goroutine that served it returns.
const patience = time.Minute

// Check looks when the test, and the cleanups that were registered after this call, are
// over. It fails the test if something is left that was not there before. Of tests that run
// in parallel it would find the things of the others.
func Check(t testing.TB) {
	t.Helper()
	before := Take()
	t.Cleanup(func() {
		t.Helper()
		before.Check(t)
	})
}

// A Snapshot has the goroutines and descriptors of a process at one moment.
type Snapshot struct {
	goroutines  map[string]string // goroutines has the stacks by goroutine number.
	descriptors map[string]bool
}

// Take makes a snapshot. The calling goroutine is not in it.
func Take() *Snapshot {
	return &Snapshot{goroutines(), descriptors()}
}

// Check fails the test if there is something that was not there when the snapshot was
// taken, and that does not end within a minute.
func (s *Snapshot) Check(t testing.TB) {
	t.Helper()
	if left := s.Left(patience); len(left) > 0 {
		defect.Leak(t, "%d goroutines and descriptors left:\n\n%s", len(left), strings.Join(left, "\n\n"))
	}
}

// Left waits up to d until everything that came after the snapshot has ended. It describes
// what has not.
func (s *Snapshot) Left(d time.Duration) []string {
	deadline := time.Now().Add(d)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		left := s.since(Take())
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		// It sleeps and does not yield: on one processor a spinning goroutine keeps the
		// runtime from looking at the network.
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

// goroutines returns the stacks of all goroutines except the caller's, by their number. The
// runtime never uses a number again.
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
		if i == 0 { // The first one is the caller.
			continue
		}
		// The first line is "goroutine 7 [state]:".
		if f := strings.Fields(stack); len(f) > 1 {
			stacks[f[1]] = stack
		}
	}
	return stacks
}

// descriptors returns what the open descriptors refer to, by their number. A socket has a
// number of its own there. Without /proc the map is empty.
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
			continue // It was closed since, or it is the directory that is being read.
		}
		if strings.HasPrefix(target, "anon_inode:[event") {
			continue // It is the runtime's poller, which is made at its first use and kept.
		}
		fds[fmt.Sprintf("%s (%s)", e.Name(), target)] = true
	}
	return fds
}
