package ibv

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

// header4 is the GRH area of a datagram over IPv4 behind a first half that the
// device left as it was.
func header4(before byte, sum ...byte) []byte {
	b := make([]byte, GRHLen)
	for i := range 20 {
		b[i] = before
	}
	// 10.77.0.1 to 10.77.0.2, UDP, 60 bytes.
	copy(b[20:], []byte{0x45, 0, 0, 60, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 77, 0, 1, 10, 77, 0, 2})
	copy(b[30:], sum)
	return b
}

func header6(src, dst string) []byte {
	b := make([]byte, GRHLen)
	b[0] = 6 << 4
	s, d := netip.MustParseAddr(src).As16(), netip.MustParseAddr(dst).As16()
	copy(b[8:], s[:])
	copy(b[24:], d[:])
	return b
}

func TestGRHAddrs(t *testing.T) {
	right := []byte{0x26, 0x14} // the checksum of header4
	for name, tt := range map[string]struct {
		b        []byte
		src, dst string
	}{
		"IPv4":                           {header4(0, right...), "10.77.0.1", "10.77.0.2"},
		"IPv4 without a checksum":        {header4(0), "10.77.0.1", "10.77.0.2"},
		"IPv4 behind what may be IPv6":   {header4(0x66, right...), "10.77.0.1", "10.77.0.2"},
		"IPv6":                           {header6("fd77::1", "fd77::2"), "fd77::1", "fd77::2"},
		"IPv6 with bytes as of IPv4":     {header6("fd77::4500:1", "fd77::2"), "fd77::4500:1", "fd77::2"},
		"IPv4 in GIDs, as RoCE 1 has it": {header6("::ffff:10.77.0.1", "::ffff:10.77.0.2"), "10.77.0.1", "10.77.0.2"},
		"longer than the header":         {append(header4(0, right...), 1, 2, 3), "10.77.0.1", "10.77.0.2"},
	} {
		src, dst, ok := GRHAddrs(tt.b)
		assert.True(t, ok, name)
		assert.Equal(t, tt.src, src.String(), name)
		assert.Equal(t, tt.dst, dst.String(), name)
	}
	for _, b := range [][]byte{nil, make([]byte, GRHLen), make([]byte, GRHLen-1), header4(0, right...)[:39]} {
		_, _, ok := GRHAddrs(b)
		assert.False(t, ok, "%x", b)
	}
}
