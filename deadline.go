package rdmanet

import "time"

// deadline is the read or the write deadline of a connection. Its fields are
// guarded by the lock of whoever holds it.
type deadline struct {
	at      time.Time
	expired bool
	timer   *time.Timer
	fire    func() // called after it has passed; must call check under the lock
}

// set moves the deadline; a zero t is none.
func (d *deadline) set(t time.Time) {
	d.at, d.expired = t, false
	if t.IsZero() {
		if d.timer != nil {
			d.timer.Stop()
		}
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		d.expired = true
		if d.timer != nil {
			d.timer.Stop()
		}
		return
	}
	if d.timer == nil {
		d.timer = time.AfterFunc(wait, d.fire)
	} else {
		d.timer.Reset(wait)
	}
}

// check updates expired when the timer has fired. A firing that was meant for
// an earlier deadline, or that comes early because the wall clock was set,
// changes nothing but waits on.
func (d *deadline) check() bool {
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

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
	}
}
