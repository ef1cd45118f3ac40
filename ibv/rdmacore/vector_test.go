//go:build linux && cgo

package rdmacore

import (
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestVectors creates more completion queues than the device has vectors: each vector
// is used, and the device takes it.
func TestVectors(t *testing.T) {
	a := os.Getenv("RDMANET_VM_ADDR")
	if a == "" {
		t.Skip("RDMANET_VM_ADDR does not name the address of an RDMA device: make vm runs this where there is one")
	}
	p, err := New(Config{})
	require.NoError(t, err)
	l, err := p.Listen(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(a), 0), 0)
	require.NoError(t, err)
	defer l.Close()
	id, err := p.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
	require.NoError(t, err)
	defer id.Close()
	d := id.Device().(*device)
	n := int(d.c.num_comp_vectors)
	require.Greater(t, n, 1, "the device has a vector for each processor")
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
