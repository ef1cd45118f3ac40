//go:build linux && cgo

package rdmacore

import (
	"errors"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestLibraryMissing(t *testing.T) {
	err := loadNamed("libno_such_verbs.so.1", "libno_such_cm.so.1")
	assert.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "libno_such_verbs.so.1")
	assert.ErrorContains(t, err, "install rdma-core")
}

// TestLibraryOther loads something that is not libibverbs.
func TestLibraryOther(t *testing.T) {
	err := loadNamed("libc.so.6", "libc.so.6")
	assert.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "libc.so.6 has no function ibv_")
}

func TestChannelError(t *testing.T) {
	for err, advice := range map[error]string{
		syscall.ENOENT: "modprobe rdma_ucm",
		syscall.ENODEV: "modprobe rdma_ucm",
		syscall.EACCES: "group",
		syscall.EPERM:  "group",
	} {
		got := channelError(err)
		assert.ErrorIs(t, got, err)
		assert.ErrorContains(t, got, advice)
	}
}

// TestNoDevice looks at what is said where there is none, or none that can be used.
func TestNoDevice(t *testing.T) {
	err := noDevice(syscall.ENODEV)
	assert.ErrorIs(t, err, syscall.ENODEV)
	if Present() {
		assert.ErrorContains(t, err, "load ib_uverbs")
	} else {
		assert.ErrorContains(t, err, "the kernel has no RDMA device")
	}
}
