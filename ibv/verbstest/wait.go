package verbstest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// Patience is how long the suite waits for anything that must happen. It is far
// more than a device needs, even an emulated one.
const Patience = time.Minute

// shortly is how long the suite waits for what must not happen. A device that
// is wrong but slow may get past it; one that is right never fails by it.
const shortly = 30 * time.Millisecond

// await returns the next completion. It sleeps the way that ibv.CQ prescribes,
// so a lost event shows as a timeout.
func await(cq ibv.CQ) (ibv.WC, error) {
	var wc [1]ibv.WC
	deadline := time.Now().Add(Patience)
	for {
		if n, err := cq.Poll(wc[:]); n > 0 || err != nil {
			return wc[0], err
		}
		if err := cq.Arm(false); err != nil {
			return wc[0], fmt.Errorf("arm: %w", err)
		}
		if n, err := cq.Poll(wc[:]); n > 0 || err != nil {
			return wc[0], err
		}
		if err := cq.Wait(deadline); err != nil {
			return wc[0], fmt.Errorf("wait for a completion: %w", err)
		}
	}
}

// expect awaits the next completion, which must be that of request id, done well.
func expect(cq ibv.CQ, id uint64) (ibv.WC, error) {
	wc, err := await(cq)
	if err == nil && (wc.ID != id || wc.Status != ibv.WCSuccess) {
		err = fmt.Errorf("completion %+v (%v), want success of %d", wc, wc.Status, id)
	}
	return wc, err
}

// next returns the next completion of cq, using events.
func next(t testing.TB, cq ibv.CQ) ibv.WC {
	t.Helper()
	wc, err := await(cq)
	if err != nil {
		t.Fatal(err)
	}
	return wc
}

// polled returns the next completion of cq without ever arming it.
func polled(cq ibv.CQ) (ibv.WC, error) {
	var wc [1]ibv.WC
	var n int
	var err error
	if !eventually(func() bool { n, err = cq.Poll(wc[:]); return n > 0 || err != nil }) {
		err = errors.New("no completion came")
	}
	return wc[0], err
}

// pollNext is polled for the test's goroutine.
func pollNext(t testing.TB, cq ibv.CQ) ibv.WC {
	t.Helper()
	wc, err := polled(cq)
	if err != nil {
		t.Fatal(err)
	}
	return wc
}

// noCompletion fails the test if cq holds a completion now.
func noCompletion(t testing.TB, cq ibv.CQ) {
	t.Helper()
	var wc [1]ibv.WC
	n, err := cq.Poll(wc[:])
	if err != nil {
		t.Fatalf("Poll: %v", err)
	}
	if n != 0 {
		t.Fatalf("unexpected completion %+v", wc[0])
	}
}

// eventLog collects the events of a connection.
type eventLog struct {
	mu     sync.Mutex
	events []ibv.Event
}

// add is the function for ID.Notify.
func (l *eventLog) add(ev ibv.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, ev)
}

func (l *eventLog) all() []ibv.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.events)
}

// wait returns the first event of the kind once it is there.
func (l *eventLog) wait(t testing.TB, kind ibv.EventKind) ibv.Event {
	t.Helper()
	var found ibv.Event
	ok := eventually(func() bool {
		for _, ev := range l.all() {
			if ev.Kind == kind {
				found = ev
				return true
			}
		}
		return false
	})
	if !ok {
		t.Fatalf("event %q never came; there were %v", kind, l.all())
	}
	return found
}

// together runs the functions at the same time and ends the test if one of them
// fails. They should return when stop is closed.
func together(t testing.TB, run ...func(stop <-chan struct{}) error) {
	t.Helper()
	stop := make(chan struct{})
	results := make(chan error)
	for _, f := range run {
		go func() { results <- f(stop) }()
	}
	var first error
	for range run {
		if err := <-results; err != nil && first == nil {
			first = err
			close(stop)
		}
	}
	if first != nil {
		t.Fatal(first)
	}
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
