package capture

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// tcpBuilder makes the segments of a TCP connection that carries iWARP.
type tcpBuilder struct {
	ends    [2]netip.AddrPort
	next    [2]uint32
	stream  [2]uint64 // bytes since the first FPDU
	crc     bool
	markers bool
	depth   uint16 // Reads at a time, if that is negotiated
	now     time.Time
	packets []Packet
}

func newTCPBuilder() *tcpBuilder {
	x := &tcpBuilder{
		ends: [2]netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:40000"), netip.MustParseAddrPort("192.0.2.2:5000")},
		next: [2]uint32{0xfffffff0, 77}, // one of them wraps soon
		now:  time.Unix(1700000000, 0),
	}
	x.add(0, tcpSYN, nil)
	x.next[0]++
	x.add(1, tcpSYN|tcpACK, nil)
	x.next[1]++
	return x
}

func (x *tcpBuilder) add(side int, flags byte, data []byte) {
	be := binary.BigEndian
	b := make([]byte, 14+20+20, 14+20+20+len(data))
	be.PutUint16(b[12:], etherIPv4)
	ip, tcp := b[14:34], b[34:]
	ip[0], ip[9] = 0x45, protoTCP
	be.PutUint16(ip[2:], uint16(40+len(data)))
	from, to := x.ends[side], x.ends[1-side]
	copy(ip[12:], from.Addr().AsSlice())
	copy(ip[16:], to.Addr().AsSlice())
	be.PutUint16(tcp, from.Port())
	be.PutUint16(tcp[2:], to.Port())
	be.PutUint32(tcp[4:], x.next[side])
	be.PutUint32(tcp[8:], x.next[1-side])
	tcp[12], tcp[13] = 5<<4, flags
	x.now = x.now.Add(time.Microsecond)
	x.packets = append(x.packets, Packet{Time: x.now, Link: LinkEthernet, Data: append(b, data...)})
	x.next[side] += uint32(len(data))
}

// begin exchanges the start frames.
func (x *tcpBuilder) begin(t *testing.T) {
	t.Helper()
	for side := range 2 {
		s := iwarpwire.Start{Reply: side == 1, Rev: 1, CRC: x.crc, Markers: x.markers, Private: []byte("private")}
		if x.depth > 0 {
			s.Rev, s.Enhanced, s.IRD, s.ORD = 2, true, x.depth, x.depth
		}
		b, err := s.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		x.add(side, tcpACK, b)
	}
}

// fpdu returns an FPDU, with markers where the stream has them.
func (x *tcpBuilder) fpdu(side int, h iwarpwire.Header, payload []byte) []byte {
	var head [iwarpwire.UntaggedLen]byte
	n := h.Put(head[:])
	content := binary.BigEndian.AppendUint16(nil, uint16(n+len(payload)))
	content = append(append(content, head[:n]...), payload...)
	content = append(content, make([]byte, iwarpwire.Pad(n+len(payload)))...)
	content = append(content, 0xee, 0xee, 0xee, 0xee) // room for the CRC
	var out []byte
	start := x.stream[side]
	for len(content) > 0 {
		if x.markers && x.stream[side]%markerInterval == 0 {
			out = binary.BigEndian.AppendUint32(out, uint32(x.stream[side]-start))
			x.stream[side] += markerLen
		}
		k := 4
		out = append(out, content[:k]...)
		content = content[k:]
		x.stream[side] += uint64(k)
	}
	crc := uint32(0)
	if x.crc {
		crc = iwarpwire.CRC(0, out[:len(out)-4])
	}
	iwarpwire.PutCRC(out[len(out)-4:], crc)
	return out
}

func sendHeader(msn, mo uint32, last bool) iwarpwire.Header {
	return iwarpwire.Header{Op: iwarpwire.Send, MSN: msn, MO: mo, Last: last}
}

// FPDUs may begin and end anywhere in TCP's segments, and have markers in them.
func TestFraming(t *testing.T) {
	for _, tt := range []struct {
		name         string
		crc, markers bool
	}{{"plain", false, false}, {"CRC", true, false}, {"markers", false, true}, {"CRC and markers", true, true}} {
		for _, cut := range []int{1, 3, 64, 511, 1460, 9000} {
			x := newTCPBuilder()
			x.crc, x.markers = tt.crc, tt.markers
			x.begin(t)
			var want [][]byte
			var stream []byte
			for i := range 12 {
				data := pattern(i*i*60+i, i)
				want = append(want, data)
				for mo := 0; ; mo += 1000 {
					end := min(mo+1000, len(data))
					stream = append(stream, x.fpdu(0, sendHeader(uint32(i+1), uint32(mo), end == len(data)), data[mo:end])...)
					if end == len(data) {
						break
					}
				}
			}
			for len(stream) > 0 {
				n := min(cut, len(stream))
				x.add(0, tcpACK, stream[:n])
				stream = stream[n:]
			}
			ps := x.packets
			if cut == 64 {
				ps = shuffle(rand.New(rand.NewPCG(1, 1)), ps, 20)
			}
			res := run(t, Config{Data: true}, ps)
			var got [][]byte
			for _, m := range kinds(res, Send) {
				if m.Complete {
					got = append(got, m.Data)
				}
			}
			if !slices.EqualFunc(got, want, bytes.Equal) || len(res.losses) > 0 {
				t.Errorf("%s, segments of %d: %d Sends of %d, losses %v", tt.name, cut, len(got), len(want), res.losses)
			}
			if s := res.stats; tt.crc && s.GoodCRC == 0 || s.BadCRC > 0 || s.BadHeader > 0 {
				t.Errorf("%s, segments of %d: %+v", tt.name, cut, s)
			}
		}
	}
}

// Behind a gap the next FPDU is found again, and what was lost is known by
// message number and offset.
func TestResync(t *testing.T) {
	for _, crc := range []bool{false, true} {
		x := newTCPBuilder()
		x.crc = crc
		x.begin(t)
		at := len(x.packets)
		for i := range uint32(30) {
			x.add(0, tcpACK, x.fpdu(0, sendHeader(i+1, 0, false), pattern(1000, int(i))))
			x.add(0, tcpACK, x.fpdu(0, sendHeader(i+1, 1000, false), pattern(1000, int(i)+50)))
			x.add(0, tcpACK, x.fpdu(0, sendHeader(i+1, 2000, true), pattern(1000, int(i)+100)))
		}
		// The middle of one, and all of another.
		ps := slices.Concat(x.packets[:at+16], x.packets[at+17:at+30], x.packets[at+33:])
		res := run(t, Config{Data: true, Window: 8}, ps)
		s := kinds(res, Send)
		if len(s) != 29 || len(res.losses) != 2 {
			t.Fatalf("CRC %v: %d Sends, losses %v", crc, len(s), res.losses)
		}
		for _, m := range s {
			if (m.msn != 6) != m.Complete {
				t.Errorf("CRC %v: %d: complete %v", crc, m.msn, m.Complete)
			}
			if m.msn == 6 && (!slices.Equal(m.Missing, []Range{{1000, 2000}}) || m.HeadLost || m.TailLost) {
				t.Errorf("CRC %v: missing %v", crc, m.Missing)
			}
		}
	}
}

// A capture that begins in the middle of a connection finds the FPDUs.
func TestMidStream(t *testing.T) {
	for _, file := range []string{"siw-smbdirect-frag.pcap", "siw-crc-p2p-rping.pcap", "siw-rping.pcap"} {
		ps := frames(t, file)
		want := summarise(run(t, Config{Data: true}, ps))
		res := run(t, Config{Data: true}, ps[12:])
		got := summarise(res)
		n := 0
		for d, list := range got.messages {
			if !within(list, want.messages[d]) {
				t.Errorf("%s: %s: other messages than in the whole", file, d)
			}
			n += len(list)
		}
		if len(kinds(res, Send)) < 8 || n < 10 {
			t.Errorf("%s: %d messages", file, n)
		}
	}
}

// Whoever reads into one buffer again and again must not get the answer to one
// Read for that of another, whatever is missing.
func TestSameSink(t *testing.T) {
	for lose := range 80 {
		x := newTCPBuilder()
		x.depth = uint16(lose / 40) // with, and without, the number of Reads negotiated
		lose %= 40
		x.begin(t)
		at := len(x.packets)
		var want [][]byte
		for i := range uint32(10) {
			q := iwarpwire.ReadReq{SinkSTag: 5, SinkTO: 4096, Size: 2000, SrcSTag: 6, SrcTO: uint64(i) * 2000}
			var b [iwarpwire.ReadReqLen]byte
			q.Put(b[:])
			x.add(0, tcpACK, x.fpdu(0, iwarpwire.Header{Op: iwarpwire.ReadRequest, QN: 1, MSN: i + 1, Last: true}, b[:]))
			data := pattern(2000, int(i))
			want = append(want, data)
			h := iwarpwire.Header{Op: iwarpwire.ReadResponse, Tagged: true, STag: 5, TO: 4096}
			x.add(1, tcpACK, x.fpdu(1, h, data[:1000]))
			h.TO, h.Last = h.TO+1000, true
			x.add(1, tcpACK, x.fpdu(1, h, data[1000:]))
		}
		ps := slices.Clone(x.packets)
		first := at + lose%30
		ps = slices.Delete(ps, first, min(first+1+lose/30*2, len(ps)))
		complete := 0
		for _, m := range kinds(run(t, Config{Data: true, Window: 4}, ps), Read) {
			if !m.Complete {
				continue
			}
			complete++
			if i := m.Addr / 2000; !bytes.Equal(m.Data, want[i]) {
				t.Fatalf("without packet %d: Read %d has the bytes of another", lose, i)
			}
		}
		if complete == 10 || complete < 7 && lose < 30 || complete < 6 && x.depth > 0 {
			t.Errorf("without packet %d: %d Reads complete", lose, complete)
		}
	}
}

// Of three Reads into one buffer the second request was captured only in part, and
// perhaps not all of the first answer. What answered the second is never taken for
// the answer to the first.
func TestCutRequest(t *testing.T) {
	const (
		headers = 14 + 20 + 20 // Ethernet, IP, TCP
		payload = headers + iwarpwire.LengthLen + iwarpwire.UntaggedLen
		whole   = payload + iwarpwire.ReadReqLen + iwarpwire.CRCLen
	)
	for _, tt := range []struct {
		name string
		kept int // bytes of the packet with the second request
		lost int // packets with the first answer, of two
	}{
		{"none of it, both answers", headers, 0},
		{"none of it, half an answer", headers, 1},
		{"none of it, one answer", headers, 2},
		{"half of the header, one answer", headers + 10, 2},
		{"all of the header, one answer", payload, 2},
		{"half of the payload, both answers", payload + 14, 0},
		{"half of the payload, half an answer", payload + 14, 1},
		{"half of the payload, one answer", payload + 14, 2},
		{"all but the checksum, one answer", whole - iwarpwire.CRCLen, 2},
		{"all of it, both answers", whole, 0},
		{"all of it, half an answer", whole, 1},
		{"all of it, one answer", whole, 2},
	} {
		x := newTCPBuilder()
		x.begin(t)
		for msn := range uint32(3) {
			q := iwarpwire.ReadReq{SinkSTag: 5, SinkTO: 4096, Size: 2000, SrcSTag: 6, SrcTO: uint64(msn) * 2000}
			var b [iwarpwire.ReadReqLen]byte
			q.Put(b[:])
			x.add(0, tcpACK, x.fpdu(0, iwarpwire.Header{Op: iwarpwire.ReadRequest, QN: 1, MSN: msn + 1, Last: true}, b[:]))
			if p := &x.packets[len(x.packets)-1]; msn == 1 {
				p.Data, p.Length = p.Data[:tt.kept], len(p.Data)
			}
			before := len(x.packets)
			data := pattern(2000, int(msn))
			h := iwarpwire.Header{Op: iwarpwire.ReadResponse, Tagged: true, STag: 5, TO: 4096}
			x.add(1, tcpACK, x.fpdu(1, h, data[:1000]))
			h.TO, h.Last = h.TO+1000, true
			x.add(1, tcpACK, x.fpdu(1, h, data[1000:]))
			if msn == 0 {
				x.packets = slices.Delete(x.packets, before, before+tt.lost)
			}
		}
		got := map[uint64]bool{}
		for _, m := range kinds(run(t, Config{Data: true, Window: 1}, x.packets), Read) {
			if got[m.Addr/2000] = m.Complete; m.Complete && !bytes.Equal(m.Data, pattern(2000, int(m.Addr/2000))) {
				t.Errorf("%s: Read %d has the bytes of another", tt.name, m.msn)
			}
		}
		if got[0] != (tt.lost == 0) || got[1] && tt.kept < whole-iwarpwire.CRCLen {
			t.Errorf("%s: complete are %v", tt.name, got)
		}
	}
}

func TestTerminate(t *testing.T) {
	res := run(t, Config{Data: true}, frames(t, "siw-terminate.pcap"))
	m := kinds(res, Terminate)
	if len(m) != 1 || !errors.Is(m[0].Reason, iwarpwire.ErrBaseBounds) || m[0].From != Responder {
		t.Errorf("%+v", m)
	}
}

// What is not iWARP is dropped at once.
func TestForeignTCP(t *testing.T) {
	x := newTCPBuilder()
	for range 100 {
		x.add(0, tcpACK, []byte("GET / HTTP/1.1\r\n\r\n"))
		x.add(1, tcpACK, pattern(1400, 1))
	}
	for _, ps := range [][]Packet{x.packets, x.packets[10:]} {
		res := run(t, Config{Data: true}, ps)
		if len(res.messages) != 0 || res.stats.Conns != 0 || len(res.losses) != 0 {
			t.Errorf("%d messages, losses %v", len(res.messages), res.losses)
		}
	}
}

// A damaged FPDU is not used, and does not take others with it.
func TestBadCRC(t *testing.T) {
	x := newTCPBuilder()
	x.crc = true
	x.begin(t)
	for i := range uint32(5) {
		b := x.fpdu(0, sendHeader(i+1, 0, true), pattern(500, int(i)))
		if i == 2 {
			b[100] ^= 1
		}
		x.add(0, tcpACK, b)
	}
	res := run(t, Config{Data: true}, x.packets)
	if s := kinds(res, Send); len(s) != 4 || res.stats.BadCRC != 1 || len(res.losses) != 1 {
		t.Errorf("%d Sends, %+v, losses %v", len(s), res.stats, res.losses)
	}
	if s := kinds(run(t, Config{IgnoreChecksums: true}, x.packets), Send); len(s) != 5 {
		t.Errorf("%d Sends without checksums", len(s))
	}
}
