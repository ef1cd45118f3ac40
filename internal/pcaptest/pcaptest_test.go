package pcaptest

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"
	"time"
)

var (
	client = netip.MustParseAddrPort("10.0.0.2:40000")
	server = netip.MustParseAddrPort("10.0.0.1:7174")
)

// frame builds an Ethernet frame, padded to 60 bytes as on a wire.
func frame(src, dst netip.AddrPort, seq uint32, flags byte, data string) Frame {
	b := make([]byte, 54, 60)
	binary.BigEndian.PutUint16(b[12:], typeIPv4)
	ip := b[14:]
	ip[0] = 0x45
	binary.BigEndian.PutUint16(ip[2:], uint16(40+len(data)))
	binary.BigEndian.PutUint16(ip[6:], 0x4000) // do not fragment
	ip[9] = protoTCP
	copy(ip[12:], src.Addr().AsSlice())
	copy(ip[16:], dst.Addr().AsSlice())
	tcp := ip[20:]
	binary.BigEndian.PutUint16(tcp[0:], src.Port())
	binary.BigEndian.PutUint16(tcp[2:], dst.Port())
	binary.BigEndian.PutUint32(tcp[4:], seq)
	tcp[12] = 5 << 4
	tcp[13] = flags
	b = append(b, data...)
	for len(b) < 60 {
		b = append(b, 0xee)
	}
	return Frame{Data: b}
}

func up(seq uint32, data string) Frame   { return frame(client, server, seq, flagACK, data) }
func down(seq uint32, data string) Frame { return frame(server, client, seq, flagACK, data) }

// over6 is a frame with IPv6 in the place of IPv4.
func over6(f Frame) Frame {
	old := f.Data[14:]
	tcp := old[20:binary.BigEndian.Uint16(old[2:])]
	b := make([]byte, 54, 54+len(tcp))
	binary.BigEndian.PutUint16(b[12:], typeIPv6)
	ip := b[14:]
	ip[0] = 0x60
	binary.BigEndian.PutUint16(ip[4:], uint16(len(tcp)))
	ip[6] = protoTCP
	src, dst := ipv6(old[12:16]), ipv6(old[16:20])
	copy(ip[8:], src[:])
	copy(ip[24:], dst[:])
	return Frame{Data: append(b, tcp...)}
}

// ipv6 is the IPv6 address that stands for one of IPv4.
func ipv6(addr []byte) [16]byte {
	return [16]byte{0: 0xfd, 12: addr[0], 13: addr[1], 14: addr[2], 15: addr[3]}
}

// handshake makes the first bytes of the streams 101 and 1.
var handshake = []Frame{
	frame(client, server, 100, flagSYN, ""),
	frame(server, client, 0, flagSYN|flagACK, ""),
	frame(client, server, 101, flagACK, ""),
}

func TestConns(t *testing.T) {
	for _, test := range []struct {
		name     string
		frames   []Frame
		up, down string
	}{
		{"nothing sent", nil, "", ""},
		{"in order, both ways", []Frame{up(101, "ab"), down(1, "xyz"), up(103, "c")}, "abc", "xyz"},
		{"reordered", []Frame{up(104, "def"), up(101, "abc")}, "abcdef", ""},
		{"retransmitted", []Frame{up(101, "abc"), up(101, "abc"), up(104, "d")}, "abcd", ""},
		{"overlapping", []Frame{up(101, "abc"), up(102, "bcde"), up(101, "ab")}, "abcde", ""},
		{"keep-alive probe", []Frame{up(100, "\x00"), up(101, "a")}, "a", ""},
		{"far before the stream", []Frame{up(90, "??"), up(101, "a")}, "a", ""},
		{"SYN sent twice", []Frame{handshake[0], up(101, "a")}, "a", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			conns, err := Conns(append(handshake[:3:3], test.frames...))
			if err != nil || len(conns) != 1 {
				t.Fatalf("%d connections, %v", len(conns), err)
			}
			c := conns[0]
			if c.Client != client || c.Server != server {
				t.Errorf("client %v, server %v", c.Client, c.Server)
			}
			if string(c.FromClient) != test.up || string(c.FromServer) != test.down {
				t.Errorf("streams %q and %q, want %q and %q", c.FromClient, c.FromServer, test.up, test.down)
			}
		})
	}
}

func TestConnsIPv6(t *testing.T) {
	var frames []Frame
	for _, f := range append(handshake[:3:3], up(101, "ab"), down(1, "xyz"), up(103, "c")) {
		frames = append(frames, over6(f))
	}
	conns, err := Conns(frames)
	if err != nil || len(conns) != 1 || string(conns[0].FromClient) != "abc" || string(conns[0].FromServer) != "xyz" {
		t.Fatalf("%v, %v", conns, err)
	}
	if want := netip.MustParseAddrPort("[fd00::a00:2]:40000"); conns[0].Client != want {
		t.Errorf("client %v, want %v", conns[0].Client, want)
	}
}

func TestConnsSequenceWraps(t *testing.T) {
	conns, err := Conns([]Frame{
		frame(client, server, 1<<32-3, flagSYN, ""), up(1<<32-2, "abc"), up(1, "def"),
	})
	if err != nil || len(conns) != 1 || string(conns[0].FromClient) != "abcdef" {
		t.Errorf("%v, %v", conns, err)
	}
}

func TestConnsPortReused(t *testing.T) {
	conns, err := Conns([]Frame{
		frame(client, server, 100, flagSYN, ""), up(101, "old"),
		frame(client, server, 9000, flagSYN, ""), up(9001, "new"),
	})
	if err != nil || len(conns) != 2 || string(conns[0].FromClient) != "old" || string(conns[1].FromClient) != "new" {
		t.Errorf("%v, %v", conns, err)
	}
}

func TestConnsPassesOver(t *testing.T) {
	arp, udp := up(101, "a"), up(101, "a")
	binary.BigEndian.PutUint16(arp.Data[12:], 0x0806)
	udp.Data[14+9] = 17
	udp6 := over6(up(101, "a"))
	udp6.Data[14+6] = 17
	conns, err := Conns([]Frame{arp, udp, udp6})
	if err != nil || len(conns) != 0 {
		t.Errorf("%v, %v", conns, err)
	}
}

func TestConnsErrors(t *testing.T) {
	edit := func(f Frame, at int, v byte) Frame {
		f.Data[at] = v
		return f
	}
	for _, test := range []struct {
		name   string
		frames []Frame
		want   string
	}{
		{"gap", []Frame{up(101, "a"), up(104, "d")}, "2 bytes missing at offset 1"},
		{"gap from the server", []Frame{down(2, "b")}, "1 bytes missing at offset 0"},
		{"contradiction", []Frame{up(101, "abc"), up(102, "x")}, "retransmission at offset 1 differs"},
		{"no SYN", []Frame{frame(server, netip.MustParseAddrPort("10.0.0.3:1"), 1, flagACK, "")}, "frame 4: 10.0.0.1:7174 to 10.0.0.3:1: no SYN"},
		{"fragment", []Frame{edit(up(101, "a"), 14+6, 0x20)}, "fragment"},
		{"no Ethernet header", []Frame{{Data: make([]byte, 13)}}, "ethernet: header cut off"},
		{"no IP header", []Frame{{Data: up(101, "").Data[:33]}}, "ipv4: header cut off"},
		{"IP longer than its frame", []Frame{edit(up(101, "a"), 14+2, 1)}, "ipv4: header cut off"},
		{"IP shorter than its header", []Frame{edit(up(101, "a"), 14+3, 19)}, "ipv4: header cut off"},
		{"no IPv6 header", []Frame{{Data: over6(up(101, "")).Data[:53]}}, "ipv6: header cut off"},
		{"IPv6 longer than its frame", []Frame{edit(over6(up(101, "a")), 14+4, 1)}, "ipv6: header cut off"},
		{"IPv6 that says IPv4", []Frame{edit(over6(up(101, "a")), 14, 0x40)}, "ipv6: header cut off"},
		{"no TCP header", []Frame{edit(up(101, ""), 14+3, 39)}, "tcp: header cut off"},
		{"TCP options longer than segment", []Frame{edit(up(101, "a"), 34+12, 6<<4)}, "tcp: header cut off"},
	} {
		t.Run(test.name, func(t *testing.T) {
			conns, err := Conns(append(handshake[:3:3], test.frames...))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, error %v, want %q", conns, err, test.want)
			}
		})
	}
}

// capture encodes a file with one frame of three bytes.
func capture(order binary.AppendByteOrder, magic, link, kept, whole uint32) []byte {
	b := order.AppendUint32(nil, magic)
	b = append(b, make([]byte, 16)...)
	b = order.AppendUint32(b, link)
	b = order.AppendUint32(b, 1000) // s
	b = order.AppendUint32(b, 7)    // µs or ns
	b = order.AppendUint32(b, kept)
	b = order.AppendUint32(b, whole)
	return append(b, "abc"...)
}

func TestRead(t *testing.T) {
	for _, test := range []struct {
		order binary.AppendByteOrder
		magic uint32
		want  time.Time
	}{
		{binary.LittleEndian, 0xa1b2c3d4, time.Unix(1000, 7000)},
		{binary.LittleEndian, 0xa1b23c4d, time.Unix(1000, 7)},
		{binary.BigEndian, 0xa1b2c3d4, time.Unix(1000, 7000)},
		{binary.BigEndian, 0xa1b23c4d, time.Unix(1000, 7)},
	} {
		frames, err := Read(bytes.NewReader(capture(test.order, test.magic, linkEthernet, 3, 3)))
		if err != nil || len(frames) != 1 || string(frames[0].Data) != "abc" || !frames[0].Time.Equal(test.want) {
			t.Errorf("%v %x: %v, %v", test.order, test.magic, frames, err)
		}
	}
}

func TestReadErrors(t *testing.T) {
	order := binary.LittleEndian
	good := capture(order, 0xa1b2c3d4, linkEthernet, 3, 3)
	for n := range good {
		_, err := Read(bytes.NewReader(good[:n]))
		if whole := n == fileHeaderLen; (err == nil) != whole {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	for name, b := range map[string][]byte{
		"another format":    capture(order, 0x0a0d0d0a, linkEthernet, 3, 3),
		"another link type": capture(order, 0xa1b2c3d4, 113, 3, 3),
		"frame cut short":   capture(order, 0xa1b2c3d4, linkEthernet, 3, 4),
		"absurd length":     capture(order, 0xa1b2c3d4, linkEthernet, 1<<31, 1<<31),
	} {
		if frames, err := Read(bytes.NewReader(b)); err == nil {
			t.Errorf("%s: no error, %d frames", name, len(frames))
		}
	}
}
