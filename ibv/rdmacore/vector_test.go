//go:build linux && cgo

package rdmacore

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestVectors creates more completion queues than the device has vectors: each vector
// is used, and the device takes it.
func TestVectors(t *testing.T) {
	d := guestIDs(t, 1)[0].Device().(*device)
	n := int(d.c.num_comp_vectors)
	require.GreaterOrEqual(t, n, runtime.NumCPU(), "the device has a vector for each processor")
	used := make(map[int]bool)
	for range n {
		used[d.vector()] = true
	}
	require.Len(t, used, n)
	for range 2 * n {
		cq, err := d.CreateCQ(1)
		require.NoError(t, err)
		defer cq.Close()
	}
}
