//go:build linux && cgo && !race

package ccall

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/ccall/ccalltest"
)

// Without the race detector, under which a sync.Pool forgets on purpose.
func TestCallAllocatesNothing(t *testing.T) {
	require.Zero(t, testing.AllocsPerRun(100, func() {
		s := ccalltest.NewSum(1, 2)
		Call(ccalltest.AddUp, unsafe.Pointer(&s))
	}))
}
