package regmem

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// The users of a device share a domain where a key can belong to one queue pair, and the
// last one frees it. Elsewhere each has one of its own.
func TestDomainUsers(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, l *limited) {
		checkLeaks(t)
		sw := newSwitch(t, l)
		before := InUse().Domains
		a, b := acquire(t, sw), acquire(t, sw)
		require.Equal(t, sharesDomains(l), a == b)
		require.Equal(t, sharesDomains(l), !a.Private)
		require.Same(t, a.Budget, b.Budget)
		require.Equal(t, before+sw.Live()["PD"], InUse().Domains)
		a.Retain()
		require.NoError(t, a.Release())
		require.NoError(t, a.Release())
		buf, err := b.Pool(100).Get()
		require.NoError(t, err)
		require.Equal(t, 1, sw.Live()["PD"])
		buf.Release()
		require.NoError(t, b.Release())
		require.Empty(t, sw.Live())
		require.Zero(t, sw.RegisteredBytes())
		require.Equal(t, before, InUse().Domains)
	})
}

// sharesDomains reports whether the users of the device share a domain.
func sharesDomains(l *limited) bool {
	devs, err := l.Devices()
	return err == nil && devs[0].Attr().Caps.Has(ibv.CapQPRegion)
}

// A lasting domain outlives its last user, and is found by the next one meanwhile.
func TestDomainLasts(t *testing.T) {
	l := keyDevice(0)
	if !sharesDomains(l) {
		t.Skip("the device has no domains that are shared")
	}
	checkLeaks(t)
	sw := newSwitch(t, l)
	setDomainIdle(t, time.Hour)
	devs, err := sw.Devices()
	require.NoError(t, err)
	a, err := Acquire(devs[0], true, advice)
	require.NoError(t, err)
	require.NoError(t, a.Release())
	require.Equal(t, 1, sw.Live()["PD"])
	b, err := Acquire(devs[0], true, advice)
	require.NoError(t, err)
	require.Same(t, a, b)
	setDomainIdle(t, 0)
	require.NoError(t, b.Release())
	require.True(t, eventually(func() bool { return len(sw.Live()) == 0 }))
}

// A domain that the device does not give is an error, and nothing is left.
func TestDomainRefused(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, l *limited) {
		checkLeaks(t)
		sw := newSwitch(t, l)
		devs, err := sw.Devices()
		require.NoError(t, err)
		sw.FailNth(1, nil, verbstest.AllocPD)
		_, err = Acquire(devs[0], true, advice)
		require.ErrorIs(t, err, verbstest.ErrInjected)
		require.Empty(t, budgets.devices)
	})
}
