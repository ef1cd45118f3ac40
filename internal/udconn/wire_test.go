package udconn

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

func TestImmediate(t *testing.T) {
	require.EqualValues(t, 0x5244_0035, Immediate(53))
	for _, port := range []uint16{1, 53, 65535} {
		got, ok := PortOf(Immediate(port))
		require.True(t, ok)
		require.Equal(t, port, got)
	}
	for _, imm := range []uint32{0, 17, maxQPN, Immediate(0), 0x5243_0035, 0x0044_0035, 0xffffffff} {
		_, ok := PortOf(imm)
		require.False(t, ok, "%#x", imm)
	}
}

func TestPrivateData(t *testing.T) {
	g := PrivateData{Port: 4791, QPN: 0x123456}
	b := g.Append(nil)
	require.Len(t, b, privateDataLen)
	got, ok := ParsePrivateData(append(b, 0, 0, 0)) // devices pad
	require.True(t, ok)
	require.Equal(t, g, got)
	b[5] = 7 // reserved
	_, ok = ParsePrivateData(b)
	require.True(t, ok)
	for i, change := range map[int]byte{0: 'X', 3: 'T', 4: 2, 8: 1} {
		bad := bytes.Clone(b)
		bad[i] = change
		_, ok := ParsePrivateData(bad)
		require.False(t, ok, "byte %d", i)
	}
	binary.BigEndian.PutUint16(b[6:], 0)
	_, ok = ParsePrivateData(b)
	require.False(t, ok, "port 0")
	for n := range privateDataLen {
		_, ok := ParsePrivateData(g.Append(nil)[:n])
		require.False(t, ok, "%d bytes", n)
	}
}

// header4 returns what RoCE puts in front of a datagram over IPv4.
func header4(src, dst string) []byte {
	b := make([]byte, ibv.GRHLen)
	h := b[20:]
	h[0] = 0x45
	s, d := netip.MustParseAddr(src).As4(), netip.MustParseAddr(dst).As4()
	copy(h[12:], s[:])
	copy(h[16:], d[:])
	return b
}

// header6 returns what RoCE puts in front of a datagram over IPv6.
func header6(src, dst string) []byte {
	b := make([]byte, ibv.GRHLen)
	b[0] = 0x60
	s, d := netip.MustParseAddr(src).As16(), netip.MustParseAddr(dst).As16()
	copy(b[8:], s[:])
	copy(b[24:], d[:])
	return b
}

func TestOpenDatagram(t *testing.T) {
	for _, c := range []struct {
		name   string
		header []byte
		flags  ibv.WCFlags
		length int // 0 is all
		want   string
	}{
		{"IPv4", header4("10.0.0.1", "10.0.0.2"), ibv.WCGRH, 0, "10.0.0.1"},
		{"IPv6", header6("fd00::1", "fd00::2"), ibv.WCGRH, 0, "fd00::1"},
		{"IPv4 in IPv6", header6("::ffff:10.0.0.1", "fd00::2"), ibv.WCGRH, 0, "10.0.0.1"},
		{"empty", header4("10.0.0.1", "10.0.0.2"), ibv.WCGRH, ibv.GRHLen, "10.0.0.1"},
		{"no header", header4("10.0.0.1", "10.0.0.2"), 0, 0, ""},
		{"cut", header4("10.0.0.1", "10.0.0.2"), ibv.WCGRH, ibv.GRHLen - 1, ""},
		{"longer than the buffer", header4("10.0.0.1", "10.0.0.2"), ibv.WCGRH, 1 << 20, ""},
		{"neither", make([]byte, ibv.GRHLen), ibv.WCGRH, 0, ""},
		{"from multicast", header4("224.0.0.1", "10.0.0.2"), ibv.WCGRH, 0, ""},
		{"from IPv6 multicast", header6("ff02::1", "fd00::2"), ibv.WCGRH, 0, ""},
		{"from broadcast", header4("255.255.255.255", "10.0.0.2"), ibv.WCGRH, 0, ""},
		{"from nowhere", header4("0.0.0.0", "10.0.0.2"), ibv.WCGRH, 0, ""},
		{"from IPv6 nowhere", header6("::", "fd00::2"), ibv.WCGRH, 0, ""},
	} {
		b := append(bytes.Clone(c.header), "payload"...)
		wc := ibv.WC{Flags: c.flags, ByteLen: uint32(len(b))}
		if c.length > 0 {
			wc.ByteLen = uint32(c.length)
		}
		from, to, payload, ok := openDatagram(&wc, b)
		require.Equal(t, c.want != "", ok, c.name)
		if ok {
			require.Equal(t, c.want, from.String(), c.name)
			require.Equal(t, c.header[0]>>4 == 6, to.Is6(), c.name)
			require.Equal(t, b[ibv.GRHLen:wc.ByteLen], payload, c.name)
		}
	}
}

// FuzzPrivateData also compares what was parsed with its encoded form.
func FuzzPrivateData(f *testing.F) {
	f.Add(PrivateData{Port: 1, QPN: 2}.Append(nil))
	f.Add([]byte("RDND"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, ok := ParsePrivateData(b); ok {
			again := g.Append(nil)
			again[5] = b[5]
			if !bytes.Equal(again, b[:privateDataLen]) {
				t.Errorf("% x is written as % x", b, again)
			}
		}
	})
}

func FuzzOpenDatagram(f *testing.F) {
	f.Add(append(header4("10.0.0.1", "10.0.0.2"), 1), uint8(ibv.WCGRH), uint32(41))
	f.Add(append(header6("fd00::1", "fd00::2"), 1), uint8(ibv.WCGRH), uint32(41))
	f.Fuzz(func(t *testing.T, b []byte, flags uint8, n uint32) {
		from, to, payload, ok := openDatagram(&ibv.WC{Flags: ibv.WCFlags(flags), ByteLen: n}, b)
		if ok && (!to.IsValid() || to.Is4In6() || !bytes.Equal(payload, b[ibv.GRHLen:n])) {
			t.Errorf("to %v, %d bytes", to, len(payload))
		}
		if ok && (!from.IsValid() || from.Is4In6() || from.IsUnspecified() || from.IsMulticast() || len(payload) != int(n)-ibv.GRHLen) {
			t.Errorf("from %v, %d bytes", from, len(payload))
		}
	})
}
