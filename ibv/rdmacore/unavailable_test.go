//go:build !linux || !cgo

package rdmacore_test

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/rdmacore"
)

// In a build without devices New and all methods say why, and the error can be told apart.
func TestUnavailable(t *testing.T) {
	_, err := rdmacore.New(rdmacore.Config{})
	require.ErrorIs(t, err, errors.ErrUnsupported)
	var p rdmacore.Provider
	var addr netip.AddrPort
	require.Equal(t, "rdma", p.Name())
	for name, call := range map[string]func() error{
		"Devices":   func() error { _, err := p.Devices(); return err },
		"Unusable":  p.Unusable,
		"Resolve":   func() error { _, err := p.Resolve(t.Context(), addr, addr); return err },
		"Listen":    func() error { _, err := p.Listen(t.Context(), addr, 0); return err },
		"BindUD":    func() error { _, err := p.BindUD(t.Context(), addr); return err },
		"ResolveUD": func() error { _, err := p.ResolveUD(t.Context(), addr, addr); return err },
		"ListenUD":  func() error { _, err := p.ListenUD(t.Context(), addr, 0); return err },
	} {
		require.EqualError(t, call(), err.Error(), name)
	}
}
