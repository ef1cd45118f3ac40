package ibv

import "time"

// A CQ is a completion queue with its own channel for events. Poll, Arm and
// Interrupt may be called by several goroutines at once; only one may be in
// Wait.
//
// The way to sleep without losing a completion is: Arm, Poll once more, and
// only when that found nothing Wait.
type CQ interface {
	// Depth is the number of completions that fit.
	Depth() int

	// Poll moves up to len(wcs) completions into wcs and returns how many. It
	// never blocks; none is no error. When completions were lost because the
	// queue was full the error matches [ErrCQOverrun], for good.
	Poll(wcs []WC) (int, error)

	// Arm asks for one event at the next completion that is added; with
	// solicitedOnly only for a receive whose send was [SendSolicited] or for
	// any failure, where the device has [CapSolicited], else for all.
	// Completions already there raise none. Arming again may only
	// widen what is asked for until the event came; see ibv_req_notify_cq(3).
	Arm(solicitedOnly bool) error

	// Wait blocks until the event that Arm asked for, and takes it. A zero
	// deadline means for ever. Errors: os.ErrDeadlineExceeded at the deadline,
	// [ErrInterrupted] after Interrupt, net.ErrClosed after Close.
	//
	// A software device may use the calling goroutine to move data meanwhile.
	Wait(deadline time.Time) error

	// Interrupt makes the Wait in progress, or the next one if none is,
	// return [ErrInterrupted].
	Interrupt()

	// Close releases the queue, or fails with [ErrBusy] while a queue pair
	// uses it.
	Close() error
}
