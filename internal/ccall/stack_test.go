//go:build linux && cgo && (amd64 || arm64) && !race && !asan && !msan && !rdmanet_cgocall

package ccall

import (
	"runtime"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// A stack that the pool lets go is given back to the system.
func TestStackGivenBack(t *testing.T) {
	addr := uintptr(unsafe.Pointer(&newStack().mem[0]))
	require.Eventually(t, func() bool {
		runtime.GC()
		var in [stackSize / 4096]byte
		_, _, e := syscall.Syscall(syscall.SYS_MINCORE, addr, stackSize, uintptr(unsafe.Pointer(&in)))
		return e == syscall.ENOMEM
	}, 10*time.Second, time.Millisecond)
}
