// Package neterr gives errors the form in which package net reports them.
package neterr

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"
)

// Setup returns the error of an operation that a context bounds, such as Dial, Listen or
// the resolution of an address. The end of the context reads as in package net, and a
// timeout of the system or of the device has the method Timeout. Other errors, and nil,
// stay as they are.
func Setup(err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return timeoutError{err}
	case errors.Is(err, context.Canceled):
		return canceledError{err}
	case errors.Is(err, syscall.ETIMEDOUT):
		return silenceError{err}
	}
	return err
}

// Inner returns the error that package net has wrapped for its own callers in a
// *net.OpError, and package os in a *os.SyscallError.
func Inner(err error) error {
	if op, ok := err.(*net.OpError); ok {
		err = op.Err
	}
	if sys, ok := err.(*os.SyscallError); ok {
		return sys.Err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return os.ErrDeadlineExceeded
	}
	return err
}

// timeoutError is a timeout as package net reports it: Timeout is true, and the error
// matches context.DeadlineExceeded and os.ErrDeadlineExceeded.
type timeoutError struct{ err error }

func (e timeoutError) Error() string        { return "i/o timeout: " + e.err.Error() }
func (e timeoutError) Timeout() bool        { return true }
func (e timeoutError) Temporary() bool      { return true }
func (e timeoutError) Unwrap() error        { return e.err }
func (e timeoutError) Is(target error) bool { return target == os.ErrDeadlineExceeded }

// silenceError is a timeout that no deadline has set.
type silenceError struct{ err error }

func (e silenceError) Error() string   { return e.err.Error() }
func (e silenceError) Timeout() bool   { return true }
func (e silenceError) Temporary() bool { return true }
func (e silenceError) Unwrap() error   { return e.err }

// canceledError is the end of a context that was canceled.
type canceledError struct{ err error }

func (e canceledError) Error() string { return "operation was canceled: " + e.err.Error() }
func (e canceledError) Unwrap() error { return e.err }
