package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// renumbered returns the packets of another connection between the same ports, or
// QPs, that carries the same: n is added to the numbers of both its sides. The
// checksums of RoCE are then wrong.
func renumbered(ps []Packet, n uint32) []Packet {
	be := binary.BigEndian
	add24 := func(b []byte) {
		v := uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2])
		v = (v + n) & psnMask
		b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v)
	}
	var out []Packet
	for _, p := range ps {
		p.Data = bytes.Clone(p.Data)
		var d datagram
		if d.decode(&p) == decoded {
			switch b := d.payload; {
			case d.proto == protoTCP:
				be.PutUint32(b[4:], be.Uint32(b[4:])+n)
				if b[13]&tcpACK != 0 {
					be.PutUint32(b[8:], be.Uint32(b[8:])+n)
				}
			case d.proto == protoUDP && b[8] != 0x64:
				add24(b[8+9:])
			case d.proto == protoUDP:
				mad := b[8+bthLen+8:]
				switch CMAttribute(be.Uint16(mad[16:])) {
				case CMConnect:
					add24(mad[madHeader+44:])
				case CMReply:
					add24(mad[madHeader+20:])
				}
			}
		}
		out = append(out, p)
	}
	return out
}

// wholeOnes returns the messages that are complete, in any order.
func wholeOnes(tb testing.TB, ps []Packet) (list []string) {
	tb.Helper()
	for _, m := range run(tb, Config{Data: true, IgnoreChecksums: true}, ps).messages {
		if m.Complete && m.Kind != Management {
			list = append(list, fmt.Sprintf("%v of %d bytes, %s", m.Kind, m.Size, digest(m.Data)))
		}
	}
	slices.Sort(list)
	return list
}

// A capture begins in the middle of a connection, and there is a later one that
// has its ports or QPs: what either carries comes out, and once.
func TestLaterConnection(t *testing.T) {
	for _, file := range []string{"siw-rping.pcap", "siw-crc-p2p-rping.pcap", "siw-smbdirect-frag.pcap", "siw-smbdirect.pcap",
		"rxe-rping.pcap", "rxe-nfs.pcap"} {
		ps := frames(t, file)
		for _, count := range []int{2, 20, len(ps) - 16} {
			old := ps[12 : 12+count]
			for _, n := range []uint32{0x01400000, 0x40123456, 0xc0edcba9} {
				want := slices.Concat(wholeOnes(t, old), wholeOnes(t, ps))
				slices.Sort(want)
				if got := wholeOnes(t, slices.Concat(old, renumbered(ps, n))); !slices.Equal(got, want) {
					t.Errorf("%s, %d packets, numbers 0x%x on: %d messages, want %d", file, count, n, len(got), len(want))
				}
			}
		}
	}
}

// The same the other way round: the later one was captured from its middle on.
func TestLaterConnectionFromItsMiddle(t *testing.T) {
	for _, file := range []string{"siw-rping.pcap", "siw-crc-p2p-rping.pcap", "siw-smbdirect-frag.pcap", "siw-smbdirect.pcap",
		"rxe-rping.pcap", "rxe-nfs.pcap"} {
		ps := frames(t, file)
		for _, closed := range []bool{true, false} {
			old := ps
			if !closed {
				old = ps[:len(ps)-8] // the FINs of iWARP are among these
			}
			for _, n := range []uint32{0x40923456, 0x80100000, 0xc0edcba9, 0xfe100000} {
				want := slices.Concat(wholeOnes(t, old), wholeOnes(t, ps[12:]))
				slices.Sort(want)
				if got := wholeOnes(t, slices.Concat(old, renumbered(ps[12:], n))); !slices.Equal(got, want) {
					t.Errorf("%s, closed %v, numbers 0x%x on: %d messages, want %d", file, closed, n, len(got), len(want))
				}
			}
		}
	}
}

// Of neither connection was the beginning captured, and of the first not much.
func TestConnectionsFromTheirMiddle(t *testing.T) {
	for _, file := range []string{"siw-crc-p2p-rping.pcap", "siw-smbdirect-frag.pcap"} {
		ps := frames(t, file)
		old := ps[12:32]
		for _, n := range []uint32{0x50923456, 0x80100000, 0xc0edcba9, 0xfe100000} {
			want := slices.Concat(wholeOnes(t, old), wholeOnes(t, ps[14:]))
			slices.Sort(want)
			if got := wholeOnes(t, slices.Concat(old, renumbered(ps[14:], n))); !slices.Equal(got, want) {
				t.Errorf("%s, numbers 0x%x on: %d messages, want %d", file, n, len(got), len(want))
			}
		}
	}
}

// One segment with a number that makes no sense does not disturb the stream.
func TestStrangeSegment(t *testing.T) {
	ps := frames(t, "siw-smbdirect-frag.pcap")
	want := wholeOnes(t, ps)
	for at := 10; at < len(ps); at += 9 {
		for _, n := range []uint32{0x60000000, 0xa0000000, 0xf0000000} {
			some := slices.Insert(slices.Clone(ps), at, renumbered(ps[at-1:at], n)...)
			some = slices.Insert(some, at, renumbered(ps[at-5:at-4], n+12345)...)
			if got := wholeOnes(t, some); !slices.Equal(got, want) {
				t.Errorf("0x%x on at packet %d: %d messages, want %d", n, at, len(got), len(want))
			}
		}
	}
}

// A SYN whose number is wrong, as in a damaged file, costs no message behind the
// first few segments.
func TestWrongSYN(t *testing.T) {
	for _, n := range []uint32{1000, 0x8000, 0x700000} {
		ps := slices.Clone(frames(t, "siw-smbdirect-frag.pcap"))
		ps[0].Data = renumbered(ps[:1], n)[0].Data
		ps = slices.Delete(ps, 1, 2) // the answer tells the number, too
		res := run(t, Config{Data: true}, ps)
		if n := len(kinds(res, Send)); n != 95 {
			t.Errorf("%d Sends, losses %v", n, res.losses)
		}
	}
}

// A SYN that its own first segments have overtaken begins no other connection.
func TestLateSYN(t *testing.T) {
	ps := frames(t, "siw-rping.pcap")
	want := run(t, Config{Data: true}, ps)
	for at := 1; at < 12; at++ {
		late := slices.Insert(slices.Clone(ps[1:]), at, ps[0])
		res := run(t, Config{Data: true}, late)
		if len(res.losses) != 0 || len(res.messages) != len(want.messages) || res.stats.Conns != 1 {
			t.Errorf("SYN behind packet %d: %d messages, want %d; losses %v", at, len(res.messages), len(want.messages), res.losses)
		}
	}
}

// Offsets and counts of 2 GiB and more, as any peer may send them, are beyond an
// int of 32 bits.
func TestLengthsBeyondInt(t *testing.T) {
	for _, mo := range []uint32{1<<31 - 8, 1 << 31, 3 << 30, 1<<32 - 16} {
		x := newTCPBuilder()
		x.begin(t)
		x.add(0, tcpACK, x.fpdu(0, sendHeader(1, mo, true), pattern(32, 1)))
		res := run(t, Config{Data: true}, x.packets)
		sends := kinds(res, Send)
		if len(sends) != 1 || sends[0].Complete || sends[0].Size != uint64(mo)+32 || !sends[0].Overflow {
			t.Errorf("at %d: %+v", mo, sends)
		}
	}
	for _, off := range []uint32{1 << 31, 3 << 30} {
		x := newTCPBuilder()
		x.begin(t)
		q := iwarpwire.ReadReq{SinkSTag: 1, SinkTO: 0, Size: 1<<32 - 1, SrcSTag: 2, SrcTO: 0}
		var b [iwarpwire.ReadReqLen]byte
		q.Put(b[:])
		x.add(0, tcpACK, x.fpdu(0, iwarpwire.Header{Op: iwarpwire.ReadRequest, QN: iwarpwire.QNReadRequest, MSN: 1, Last: true}, b[:]))
		x.add(1, tcpACK, x.fpdu(1, iwarpwire.Header{Op: iwarpwire.ReadResponse, Tagged: true, STag: 1, TO: uint64(off), Last: true}, pattern(32, 2)))
		res := run(t, Config{Data: true}, x.packets)
		if reads := kinds(res, Read); len(reads) != 1 || reads[0].Complete || reads[0].Got != 32 {
			t.Errorf("at %d: %+v", off, reads)
		}
	}
	for _, n := range []uint32{1 << 31, 1<<32 - 1} { // segments in a write chunk
		b := []byte{}
		for _, w := range []uint32{1, 1, 32, 0, 0, 1, n} {
			b = binary.BigEndian.AppendUint32(b, w)
		}
		var h rpcHeader
		if err := h.parse(append(b, make([]byte, 64)...)); err == nil {
			t.Errorf("%d segments: no error", n)
		}
	}
}
