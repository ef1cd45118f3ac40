package ibv

import (
	"errors"
	"fmt"
)

// These are errors that devices return, bare or wrapped.
var (
	ErrQueueFull   = errors.New("work queue full: poll completions first")
	ErrBusy        = errors.New("object still in use: release what depends on it first")
	ErrInterrupted = errors.New("wait interrupted")
	ErrCQOverrun   = errors.New("completion queue overrun: completions were lost")
	ErrLimit       = errors.New("more than the device can do")
	ErrState       = errors.New("wrong state for this call")
)

// Unsupported returns the error for something that a device lacks. It matches
// errors.ErrUnsupported.
func Unsupported(device, what string) error {
	return fmt.Errorf("%s: %s: %w", device, what, errors.ErrUnsupported)
}

// RejectError is the error of a connection that the peer refused.
type RejectError struct {
	Reason  int    // Reason is the transport's code, 0 if it has none.
	Private []byte // Private is the private data of the refusal, at most some hundred bytes.
	Text    string // Text describes the reason.
	Err     error  // Err is syscall.ECONNREFUSED.
}

// Error describes the reason.
func (e *RejectError) Error() string {
	return fmt.Sprintf("connection rejected by the peer: %s", e.Text)
}

// Unwrap returns Err.
func (e *RejectError) Unwrap() error { return e.Err }
