package rdmanet

import (
	"errors"
	"io"
	"net"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/neterr"
)

// This file has the errors of connections and how they are wrapped for the program. Package
// internal/neterr has the errors of set-up, and segment.go those over a peer's messages
// (protocolError).

// netName is the network in the errors and addresses of this package.
const netName = "rdma"

// opError wraps an error for the program, once, in the public methods. A bare io.EOF stays
// as it is, because readers compare it.
func opError(op string, source, addr net.Addr, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return &net.OpError{Op: op, Net: netName, Source: source, Addr: addr, Err: err}
}

// join is errors.Join, but returns a single error itself. net.OpError asks only the error
// directly inside it whether it is a timeout.
func join(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// dialError returns the inner error of a failed Dial or Listen; see [neterr.Setup].
func dialError(err error) error { return neterr.Setup(err) }

// resetError is the error of a broken connection. It matches errno, which is ECONNRESET,
// EPIPE after an end in an orderly way, or ETIMEDOUT for a silent peer. It also matches its
// cause, if it has one.
type resetError struct {
	errno error
	cause error
}

func (e *resetError) Error() string {
	if e.cause == nil {
		return e.errno.Error()
	}
	return e.errno.Error() + ": " + e.cause.Error()
}

func (e *resetError) Timeout() bool   { return e.errno == syscall.ETIMEDOUT }
func (e *resetError) Temporary() bool { return false }

func (e *resetError) Unwrap() []error {
	if e.cause == nil {
		return []error{e.errno}
	}
	return []error{e.errno, e.cause}
}

// broken returns the error of Read and Write for a connection that has ended because of
// cause.
func broken(cause error) error {
	if r, ok := cause.(*resetError); ok {
		return r
	}
	var wc *ibv.WCError
	number := error(errno.ECONNRESET)
	if errors.As(cause, &wc) {
		number = wcErrno(wc.Status)
	} else if errno.HostSilent(cause) {
		number = syscall.ETIMEDOUT
	}
	return &resetError{number, cause}
}

// wcErrno returns the errno for a completion that failed. A device that has given up
// retrying has lost the peer, which TCP reports as a timeout.
func wcErrno(s ibv.WCStatus) error {
	switch s {
	case ibv.WCRetryExcErr, ibv.WCRNRRetryExcErr, ibv.WCRespTimeoutErr:
		return syscall.ETIMEDOUT
	}
	return errno.ECONNRESET
}

var (
	errPeerClosed  = &resetError{errno.EPIPE, errors.New("the peer has closed the connection")}
	errWriteClosed = &resetError{errno.EPIPE, errors.New("CloseWrite was called")}
	errTruncated   = &resetError{errno.ECONNRESET, errors.New("the peer went away in the middle of its stream")}
	errNoReason    = &resetError{errno.ECONNRESET, errors.New("the queue pair failed, and the device did not say why")}
	errSilent      = &resetError{syscall.ETIMEDOUT, errors.New("no answer to keep-alive")}
	errMessageCut  = errors.New("message cut short by an earlier deadline or by bad memory: the connection is unusable")
)
