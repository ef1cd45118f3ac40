// Package deadline has the deadline of the reads or of the writes of a connection.
package deadline

import "time"

// Deadline is a point in time that calls must not outlast. The lock of its owner guards it
// and must be held for all methods but Init. The zero value is no deadline; Init must
// have been called before Set.
type Deadline struct {
	at      time.Time
	expired bool
	timer   *time.Timer
	fire    func()
}

// Init sets the function that a timer calls after the deadline has passed. The function
// must take the owner's lock and call Check.
func (d *Deadline) Init(fire func()) { d.fire = fire }

// Expired reports whether the deadline has passed.
func (d *Deadline) Expired() bool { return d.expired }

// Set moves the deadline; a zero t is none.
func (d *Deadline) Set(t time.Time) {
	d.at, d.expired = t, false
	if t.IsZero() {
		d.Stop()
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		d.expired = true
		d.Stop()
		return
	}
	if d.timer == nil {
		d.timer = time.AfterFunc(wait, d.fire)
	} else {
		d.timer.Reset(wait)
	}
}

// Check updates Expired after the timer has fired, and returns it. A timer that fired for
// an earlier deadline, or early because the wall clock was set, changes nothing and is
// started again.
func (d *Deadline) Check() bool {
	if d.at.IsZero() || d.expired {
		return d.expired
	}
	if wait := time.Until(d.at); wait > 0 {
		d.timer.Reset(wait)
		return false
	}
	d.expired = true
	return true
}

// Stop stops the timer. Expired does not change any more.
func (d *Deadline) Stop() {
	if d.timer != nil {
		d.timer.Stop()
	}
}
