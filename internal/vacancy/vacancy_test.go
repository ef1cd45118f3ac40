package vacancy

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestFilledOnceWhenLeft(t *testing.T) {
	sw := &Sweeper{Min: time.Millisecond, Max: 4 * time.Millisecond}
	filled := make(chan struct{}, 10)
	var s Seat
	s.Init(sw, func() { filled <- struct{}{} })
	for range 3 {
		s.Taken()
		s.Vacant()
		<-filled
	}
	if len(filled) != 0 {
		t.Fatal("filled more often than left")
	}
}

func TestNotFilledWhileTaken(t *testing.T) {
	sw := &Sweeper{Min: time.Millisecond, Max: 4 * time.Millisecond}
	var s, marker Seat
	s.Init(sw, func() { t.Error("filled an occupied seat") })
	s.Taken()
	s.Vacant()
	s.Taken()
	// A second seat shows that the sweeper has looked twice meanwhile.
	done := make(chan struct{})
	marker.Init(sw, func() { close(done) })
	marker.Vacant()
	<-done
}

// Whatever the interleaving with the sweeper, the last vacancy is noticed.
func TestLastVacancyIsNoticed(t *testing.T) {
	sw := &Sweeper{Min: 100 * time.Microsecond, Max: 400 * time.Microsecond}
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var role sync.Mutex
			var s Seat
			var fills atomic.Int64
			filled := make(chan struct{}, 1)
			s.Init(sw, func() {
				if role.TryLock() {
					s.Taken()
					role.Unlock()
					fills.Add(1)
					select {
					case filled <- struct{}{}:
					default:
					}
				}
			})
			for i := range 300 {
				role.Lock()
				s.Taken()
				s.Vacant()
				role.Unlock()
				if i%30 == 0 {
					<-filled
				}
			}
			select {
			case <-filled:
			case <-time.After(30 * time.Second):
				t.Error("vacancy never noticed")
			}
		}()
	}
	wg.Wait()
}
