package ibv

import "time"

// A CQ is a completion queue with its own channel for events. Poll, Arm and Interrupt may
// be called by several goroutines at once. Only one goroutine may be in Wait.
//
// To sleep without missing a completion, call Arm, then Poll once more, and Wait only if
// that found nothing.
type CQ interface {
	// Depth is the number of completions that fit.
	Depth() int

	// Poll moves up to len(wcs) completions into wcs and returns how many. It never
	// blocks, and finding none is no error. If completions were lost because the queue was
	// full, this call and all later ones return an error that matches [ErrCQOverrun].
	Poll(wcs []WC) (int, error)

	// Arm requests one event for the next completion that is added. With solicitedOnly,
	// and if the device has [CapSolicited], the event is only for a receive whose send was
	// [SendSolicited], and for failures. Completions that were added before raise no
	// event. Until the event has come, another Arm can only request more; see
	// ibv_req_notify_cq(3).
	Arm(solicitedOnly bool) error

	// Wait blocks until the event that Arm requested, and takes it. A zero deadline means
	// for ever. The error is os.ErrDeadlineExceeded at the deadline, [ErrInterrupted]
	// after Interrupt, and net.ErrClosed after Close.
	//
	// A software device may use the calling goroutine to move data meanwhile.
	Wait(deadline time.Time) error

	// Interrupt makes the Wait in progress return [ErrInterrupted]. If no Wait is in
	// progress, the next one does.
	Interrupt()

	// Close releases the queue. It fails with [ErrBusy] while a queue pair uses the queue.
	Close() error
}
