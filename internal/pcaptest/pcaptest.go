// Package pcaptest reads packet captures for tests, and puts the TCP streams in them
// together. It supports what these captures need: classic pcap, Ethernet, IPv4 without
// fragments, IPv6 without extension headers.
package pcaptest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"
)

// Frame is one captured Ethernet frame.
type Frame struct {
	Time time.Time
	Data []byte
}

const (
	linkEthernet   = 1
	fileHeaderLen  = 24
	frameHeaderLen = 16
	maxFrame       = 256 << 10
)

// Read returns the frames of a capture file. It fails if the file is not of Ethernet, if it
// ends inside a frame, or if frames were cut when they were captured.
func Read(r io.Reader) ([]Frame, error) {
	var head [fileHeaderLen]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("pcap: file header: %w", err)
	}
	order, unit, err := fileFormat(head[:4])
	if err != nil {
		return nil, err
	}
	if link := order.Uint32(head[20:]) & 0x0fffffff; link != linkEthernet {
		return nil, fmt.Errorf("pcap: link type %d is not Ethernet", link)
	}

	var frames []Frame
	for {
		var h [frameHeaderLen]byte
		if _, err := io.ReadFull(r, h[:]); err == io.EOF {
			return frames, nil
		} else if err != nil {
			return nil, fmt.Errorf("pcap: frame %d: %w", len(frames)+1, err)
		}
		kept, whole := order.Uint32(h[8:]), order.Uint32(h[12:])
		if kept != whole || kept > maxFrame {
			return nil, fmt.Errorf("pcap: frame %d: %d of %d bytes captured", len(frames)+1, kept, whole)
		}
		data := make([]byte, kept)
		if _, err := io.ReadFull(r, data); err != nil {
			return nil, fmt.Errorf("pcap: frame %d: %w", len(frames)+1, err)
		}
		at := time.Unix(int64(order.Uint32(h[0:])), int64(order.Uint32(h[4:]))*int64(unit))
		frames = append(frames, Frame{at, data})
	}
}

// fileFormat returns the byte order, and the unit of the times, from the magic number.
func fileFormat(magic []byte) (binary.ByteOrder, time.Duration, error) {
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		switch order.Uint32(magic) {
		case 0xa1b2c3d4:
			return order, time.Microsecond, nil
		case 0xa1b23c4d:
			return order, time.Nanosecond, nil
		}
	}
	return nil, 0, fmt.Errorf("pcap: unknown magic number % x", magic)
}

// Conn is one TCP connection. It has what each side sent, in order and without
// retransmissions.
type Conn struct {
	Client, Server         netip.AddrPort // Client is the end that sent the first SYN.
	FromClient, FromServer []byte
}

// Load reads the capture at path. It returns the connections to port, in the order of their
// first frames. It ends the test on an error, and if there are no connections.
func Load(tb testing.TB, path string, port uint16) []Conn {
	tb.Helper()
	file, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer file.Close()
	frames, err := Read(file)
	if err != nil {
		tb.Fatalf("%s: %v", path, err)
	}
	conns, err := Conns(frames)
	if err != nil {
		tb.Fatalf("%s: %v", path, err)
	}
	conns = slices.DeleteFunc(conns, func(c Conn) bool { return c.Server.Port() != port })
	if len(conns) == 0 {
		tb.Fatalf("%s: no TCP connection to port %d", path, port)
	}
	return conns
}

// Conns puts together the TCP connections in frames, and ignores everything else. Each
// connection must start with its SYN. Conns fails if bytes are missing in the middle, or if
// a retransmission has other bytes.
func Conns(frames []Frame) ([]Conn, error) {
	var open []*tracked // The newest is the last one, because ports are reused.
	find := func(s segment) *tracked {
		for _, t := range slices.Backward(open) {
			if t.client == s.src && t.server == s.dst || t.client == s.dst && t.server == s.src {
				return t
			}
		}
		return nil
	}
	for i, f := range frames {
		s, ok, err := parseTCP(f.Data)
		if err != nil {
			return nil, fmt.Errorf("frame %d: %w", i+1, err)
		}
		if !ok {
			continue
		}
		t := find(s)
		if s.flags&(flagSYN|flagACK) == flagSYN && (t == nil || t.up.isn != s.seq) {
			t = &tracked{client: s.src, server: s.dst}
			open = append(open, t)
		}
		if t == nil {
			return nil, fmt.Errorf("frame %d: %v to %v: no SYN before it", i+1, s.src, s.dst)
		}
		side := &t.up
		if s.src == t.server {
			side = &t.down
		}
		side.add(s)
	}

	var conns []Conn
	for _, t := range open {
		up, err := t.up.bytes()
		if err != nil {
			return nil, fmt.Errorf("%v to %v: %w", t.client, t.server, err)
		}
		down, err := t.down.bytes()
		if err != nil {
			return nil, fmt.Errorf("%v to %v: %w", t.server, t.client, err)
		}
		conns = append(conns, Conn{t.client, t.server, up, down})
	}
	return conns, nil
}

type tracked struct {
	client, server netip.AddrPort
	up, down       side
}

// side is one direction of a connection.
type side struct {
	isn    uint32
	pieces []piece
}

type piece struct {
	off  int // off counts from the first byte of the stream.
	data []byte
}

func (s *side) add(seg segment) {
	seq := seg.seq
	if seg.flags&flagSYN != 0 {
		s.isn = seq
		seq++ // The SYN uses a number too.
	}
	if len(seg.data) == 0 {
		return
	}
	s.pieces = append(s.pieces, piece{int(int32(seq - s.isn - 1)), seg.data})
}

func (s *side) bytes() ([]byte, error) {
	slices.SortStableFunc(s.pieces, func(a, b piece) int { return cmp.Compare(a.off, b.off) })
	var out []byte
	for _, p := range s.pieces {
		if p.off < 0 { // A keep-alive probe repeats the number before the stream.
			p.off, p.data = 0, p.data[min(-p.off, len(p.data)):]
		}
		if p.off > len(out) {
			return nil, fmt.Errorf("tcp: %d bytes missing at offset %d", p.off-len(out), len(out))
		}
		known := min(len(out)-p.off, len(p.data))
		if !bytes.Equal(out[p.off:p.off+known], p.data[:known]) {
			return nil, fmt.Errorf("tcp: retransmission at offset %d differs", p.off)
		}
		out = append(out, p.data[known:]...)
	}
	return out, nil
}

const (
	flagSYN = 0x02
	flagACK = 0x10

	ethernetLen = 14
	typeIPv4    = 0x0800
	typeIPv6    = 0x86dd
	ipv6Len     = 40
	protoTCP    = 6
)

type segment struct {
	src, dst netip.AddrPort
	seq      uint32
	flags    byte
	data     []byte
}

var errShort = errors.New("header cut off")

// parseTCP returns the TCP segment in a frame. ok is false if there is none.
func parseTCP(frame []byte) (s segment, ok bool, err error) {
	if len(frame) < ethernetLen {
		return s, false, fmt.Errorf("ethernet: %w", errShort)
	}
	var src, dst netip.Addr
	var tcp []byte
	switch ip := frame[ethernetLen:]; binary.BigEndian.Uint16(frame[12:]) {
	case typeIPv4:
		src, dst, tcp, err = parseIPv4(ip)
	case typeIPv6:
		src, dst, tcp, err = parseIPv6(ip)
	}
	if tcp == nil || err != nil {
		return s, false, err
	}
	if len(tcp) < 20 {
		return s, false, fmt.Errorf("tcp: %w", errShort)
	}
	off := int(tcp[12]>>4) * 4
	if off < 20 || off > len(tcp) {
		return s, false, fmt.Errorf("tcp: %w", errShort)
	}
	return segment{
		src:   netip.AddrPortFrom(src, binary.BigEndian.Uint16(tcp[0:])),
		dst:   netip.AddrPortFrom(dst, binary.BigEndian.Uint16(tcp[2:])),
		seq:   binary.BigEndian.Uint32(tcp[4:]),
		flags: tcp[13],
		data:  tcp[off:],
	}, true, nil
}

// parseIPv4 returns the addresses of an IPv4 packet and its payload, nil if that is not
// TCP.
func parseIPv4(ip []byte) (src, dst netip.Addr, tcp []byte, err error) {
	if len(ip) < 20 {
		return src, dst, nil, fmt.Errorf("ipv4: %w", errShort)
	}
	if ip[9] != protoTCP {
		return src, dst, nil, nil
	}
	head, total := int(ip[0]&0x0f)*4, int(binary.BigEndian.Uint16(ip[2:]))
	if ip[0]>>4 != 4 || head < 20 || total < head || total > len(ip) {
		return src, dst, nil, fmt.Errorf("ipv4: %w", errShort)
	}
	if binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 { // The packet is a fragment.
		return src, dst, nil, errors.New("ipv4: fragment")
	}
	// Ethernet's padding may follow behind total.
	return netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:])), ip[head:total], nil
}

// parseIPv6 is like parseIPv4, for IPv6.
func parseIPv6(ip []byte) (src, dst netip.Addr, tcp []byte, err error) {
	if len(ip) < ipv6Len {
		return src, dst, nil, fmt.Errorf("ipv6: %w", errShort)
	}
	if ip[6] != protoTCP {
		return src, dst, nil, nil
	}
	total := ipv6Len + int(binary.BigEndian.Uint16(ip[4:]))
	if ip[0]>>4 != 6 || total > len(ip) {
		return src, dst, nil, fmt.Errorf("ipv6: %w", errShort)
	}
	return netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:])), ip[ipv6Len:total], nil
}
