//go:build linux && cgo

package rdmacore

import (
	"net/netip"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// TestGroupLost loses a group after it was joined, as InfiniBand's managers have it.
func TestGroupLost(t *testing.T) {
	g := &group{addr: netip.MustParseAddr("239.82.68.6"), event: make(chan step, 1)}
	i := &id{ud: true, groups: groups{m: map[uintptr]*group{1: g}}}
	var heard []ibv.Event
	i.Notify(func(e ibv.Event) { heard = append(heard, e) })
	i.grouped(1, step{event: cmMulticastJoin})
	assert.Equal(t, cmMulticastJoin, (<-g.event).event)
	assert.Empty(t, heard)
	i.grouped(1, step{event: cmMulticastError, status: -int(syscall.ENETRESET)})
	require.Len(t, heard, 1)
	assert.Equal(t, ibv.EventMulticastError, heard[0].Kind)
	assert.ErrorIs(t, heard[0].Err, syscall.ENETRESET)
	assert.ErrorContains(t, heard[0].Err, "239.82.68.6")
}
