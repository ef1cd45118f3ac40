package neterr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func timeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

func TestSetup(t *testing.T) {
	for _, cause := range []error{context.DeadlineExceeded, os.ErrDeadlineExceeded} {
		err := Setup(fmt.Errorf("connect: %w", cause))
		require.ErrorIs(t, err, cause)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.True(t, timeout(err))
		require.EqualError(t, err, "i/o timeout: connect: "+cause.Error())
	}
	err := Setup(fmt.Errorf("connect: %w", context.Canceled))
	require.ErrorIs(t, err, context.Canceled)
	require.False(t, timeout(err))
	err = Setup(fmt.Errorf("resolve: %w", syscall.ETIMEDOUT))
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	require.True(t, timeout(err))
	other := errors.New("other")
	require.Same(t, other, Setup(other))
	require.NoError(t, Setup(nil))
}

func TestInner(t *testing.T) {
	wrapped := &net.OpError{Op: "write", Err: os.NewSyscallError("sendto", syscall.EPERM)}
	require.Equal(t, syscall.EPERM, Inner(wrapped))
	require.Equal(t, net.ErrClosed, Inner(&net.OpError{Op: "read", Err: net.ErrClosed}))
	require.Equal(t, os.ErrDeadlineExceeded, Inner(fmt.Errorf("read: %w", os.ErrDeadlineExceeded)))
	require.NoError(t, Inner(nil))
}
