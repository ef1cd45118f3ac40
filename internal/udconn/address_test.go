package udconn

import (
	"net"
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// loopback returns the loopback interface.
func loopback(t testing.TB) *net.Interface {
	t.Helper()
	ifis, err := net.Interfaces()
	require.NoError(t, err)
	for _, ifi := range ifis {
		if hasAddr(&ifi, netip.IPv6Loopback()) {
			return &ifi
		}
	}
	t.Fatal("no interface has ::1")
	return nil
}

func TestNormal(t *testing.T) {
	lo := loopback(t)
	for in, want := range map[string]string{
		"::1%lo": "::1", "10.0.0.1": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1",
		"fe80::1": "fe80::1", "fe80::1%none": "fe80::1%none", "fe80::1%99999": "fe80::1%99999",
		"fe80::1%" + strconv.Itoa(lo.Index): "fe80::1%" + lo.Name, "ff02::1%" + strconv.Itoa(lo.Index): "ff02::1%" + lo.Name,
	} {
		require.Equal(t, netip.AddrPortFrom(netip.MustParseAddr(want), 7), Normal(netip.AddrPortFrom(netip.MustParseAddr(in), 7)))
	}
	named := netip.AddrPortFrom(netip.MustParseAddr("fe80::1%"+lo.Name), 7)
	require.Zero(t, testing.AllocsPerRun(100, func() { Normal(named) }))
}

func TestBroadcast(t *testing.T) {
	loopback(t)
	require.True(t, isNetBroadcast(netip.MustParseAddr("127.255.255.255")))
	require.False(t, isNetBroadcast(netip.MustParseAddr("127.0.0.1")))
	require.False(t, isNetBroadcast(netip.IPv6Loopback()))
	for a, group := range map[string]bool{"255.255.255.255": true, "239.82.68.1": true, "ff02::1": true, "127.255.255.255": false, "fe80::1": false} {
		require.Equal(t, group, IsGroup(netip.MustParseAddr(a)), a)
	}
}
