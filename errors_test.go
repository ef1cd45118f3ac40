package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// Every status of a failed completion has an errno, and both can be found.
func TestStatusErrors(t *testing.T) {
	timeouts := map[ibv.WCStatus]bool{ibv.WCRetryExcErr: true, ibv.WCRNRRetryExcErr: true, ibv.WCRespTimeoutErr: true}
	for status := ibv.WCSuccess + 1; status <= ibv.WCGeneralErr; status++ {
		cause := &ibv.WCError{Status: status, Op: ibv.WCSend, VendorErr: 0x81, Device: "rxe0"}
		err := opError("write", nil, nil, broken(fmt.Errorf("post: %w", cause)))
		want := syscall.ECONNRESET
		if timeouts[status] {
			want = syscall.ETIMEDOUT
		}
		require.ErrorIs(t, err, want, status.String())
		require.ErrorIs(t, err, status)
		require.Equal(t, timeouts[status], err.(net.Error).Timeout(), status.String())
		require.ErrorContains(t, err, "rxe0")
		require.ErrorContains(t, err, "0x81")
		require.ErrorContains(t, err, status.String())
	}
}

// A kernel that has given up a host says why if it knows. To the program that is a timeout
// whatever the reason.
func TestSilentHost(t *testing.T) {
	for _, cause := range []error{syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN} {
		err := opError("read", nil, nil, broken(fmt.Errorf("disconnected: %w", &net.OpError{Op: "read", Err: os.NewSyscallError("read", cause)})))
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		require.ErrorIs(t, err, cause)
		require.True(t, err.(net.Error).Timeout())
	}
	for _, cause := range []error{syscall.ECONNRESET, syscall.EPIPE, io.ErrUnexpectedEOF, os.ErrDeadlineExceeded} {
		require.False(t, broken(cause).(net.Error).Timeout(), "%v", cause)
	}
}

func TestBrokenOnce(t *testing.T) {
	once := broken(io.ErrUnexpectedEOF)
	require.Same(t, once, broken(once))
	require.ErrorIs(t, once, io.ErrUnexpectedEOF)
	require.ErrorIs(t, once, syscall.ECONNRESET)
	require.Same(t, errSilent, broken(errSilent))
	require.Equal(t, syscall.EPIPE.Error(), (&resetError{errno: syscall.EPIPE}).Error())
	require.ErrorIs(t, &resetError{errno: syscall.EPIPE}, syscall.EPIPE)
}

func TestOpErrorLetsEOFThrough(t *testing.T) {
	require.NoError(t, opError("read", nil, nil, nil))
	require.True(t, opError("read", nil, nil, io.EOF) == io.EOF)
	require.ErrorIs(t, opError("read", nil, nil, io.ErrUnexpectedEOF), io.ErrUnexpectedEOF)
}

func TestDialErrors(t *testing.T) {
	timeout := opError("dial", nil, nil, dialError(fmt.Errorf("connect: %w", context.DeadlineExceeded)))
	requireTimeout(t, timeout)
	require.ErrorIs(t, timeout, context.DeadlineExceeded)
	requireTimeout(t, opError("dial", nil, nil, dialError(fmt.Errorf("wait: %w", os.ErrDeadlineExceeded))))
	canceled := opError("dial", nil, nil, dialError(fmt.Errorf("connect: %w", context.Canceled)))
	require.ErrorIs(t, canceled, context.Canceled)
	require.False(t, canceled.(net.Error).Timeout())
	other := errors.New("other")
	require.Same(t, other, dialError(other))
}
