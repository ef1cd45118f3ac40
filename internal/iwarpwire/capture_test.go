package iwarpwire

import (
	"bytes"
	"encoding/binary"
	"maps"
	"path/filepath"
	"testing"

	"github.com/rdmanet/rdmanet/internal/pcaptest"
)

// captures are connections of Linux siw with itself. The counts are those of
// tshark's dissector.
var captures = []struct {
	file    string
	port    uint16
	request Start
	reply   Start
	fpdus   map[Opcode]int
}{
	{
		file: "siw-rping.pcap", port: 7174,
		request: Start{Rev: 2, Enhanced: true, IRD: 1, ORD: 1},
		reply:   Start{Rev: 2, Enhanced: true, IRD: 1, ORD: 1},
		fpdus:   map[Opcode]int{Write: 4, ReadRequest: 4, ReadResponse: 4, Send: 16},
	},
	{
		file: "siw-crc-p2p-rping.pcap", port: 7174,
		request: Start{Rev: 2, Enhanced: true, CRC: true, IRD: 1, ORD: 1, P2P: true, RTRWrite: true, RTRRead: true},
		reply:   Start{Rev: 2, Enhanced: true, CRC: true, IRD: 1, ORD: 1, P2P: true, RTRWrite: true},
		fpdus:   map[Opcode]int{Write: 7, ReadRequest: 3, ReadResponse: 6, Send: 12},
	},
	{
		file: "siw-terminate.pcap", port: 18600,
		request: Start{Rev: 2, Enhanced: true, IRD: 1, ORD: 1},
		reply:   Start{Rev: 2, Enhanced: true, IRD: 1, ORD: 1},
		fpdus:   map[Opcode]int{ReadRequest: 1, ReadResponse: 7, Send: 1, Terminate: 1},
	},
	{
		file: "siw-smbdirect-frag.pcap", port: 5445,
		request: Start{Rev: 2, Enhanced: true, IRD: 32, Private: []byte{0x20, 0, 0, 0, 1, 0, 0, 0}},
		reply:   Start{Rev: 2, Enhanced: true, IRD: 1, ORD: 8, Private: []byte{0, 0, 0, 1, 0, 0, 0, 8}},
		fpdus:   map[Opcode]int{Send: 95},
	},
}

func loadCapture(tb testing.TB, file string, port uint16) []pcaptest.Conn {
	tb.Helper()
	return pcaptest.Load(tb, filepath.Join("..", "..", "testdata", "captures", file), port)
}

// fpdu is one FPDU of a stream.
type fpdu struct {
	raw     []byte // length field to CRC
	header  Header
	payload []byte
}

// splitStream decodes one direction of a connection to its last byte.
func splitStream(tb testing.TB, stream []byte, reply bool) (Start, []fpdu) {
	tb.Helper()
	privateLen, err := ParseStartHeader(stream, reply)
	if err != nil {
		tb.Fatal(err)
	}
	start, err := ParseStart(stream[:StartLen+privateLen], reply)
	if err != nil {
		tb.Fatal(err)
	}
	var fpdus []fpdu
	for at := StartLen + privateLen; at < len(stream); {
		rest := stream[at:]
		if len(rest) < LengthLen {
			tb.Fatalf("%d bytes left over", len(rest))
		}
		ulpduLen := int(binary.BigEndian.Uint16(rest))
		total := FPDULen(ulpduLen)
		if len(rest) < total {
			tb.Fatalf("FPDU %d at %d: %d of %d bytes", len(fpdus), at, len(rest), total)
		}
		ulpdu := rest[LengthLen:][:ulpduLen]
		f := fpdu{raw: rest[:total]}
		n, refused := f.header.Parse(ulpdu)
		if refused != nil {
			tb.Fatalf("FPDU %d at %d: %v", len(fpdus), at, refused)
		}
		f.payload = ulpdu[n:]
		fpdus = append(fpdus, f)
		at += total
	}
	return start, fpdus
}

func TestCaptures(t *testing.T) {
	for _, test := range captures {
		t.Run(test.file, func(t *testing.T) {
			conns := loadCapture(t, test.file, test.port)
			if len(conns) != 1 {
				t.Fatalf("%d connections", len(conns))
			}
			counts := map[Opcode]int{}
			for _, side := range []struct {
				stream []byte
				start  Start
				reply  bool
			}{{conns[0].FromClient, test.request, false}, {conns[0].FromServer, test.reply, true}} {
				start, fpdus := splitStream(t, side.stream, side.reply)
				side.start.Reply = side.reply
				encoded, err := start.Append(nil)
				if want, _ := side.start.Append(nil); err != nil || !bytes.Equal(encoded, want) || !bytes.HasPrefix(side.stream, want) {
					t.Errorf("start frame %+v, want %+v", start, side.start)
				}
				checkFPDUs(t, fpdus, test.request.CRC)
				for _, f := range fpdus {
					counts[f.header.Op]++
				}
			}
			if !maps.Equal(counts, test.fpdus) {
				t.Errorf("FPDUs %v, want %v", counts, test.fpdus)
			}
		})
	}
}

// checkFPDUs holds one direction of a stream against what both specifications
// and siw promise: CRC, numbering and re-encoding.
func checkFPDUs(t *testing.T, fpdus []fpdu, crc bool) {
	t.Helper()
	msn := map[uint32]uint32{} // messages finished, by queue
	mo := map[uint32]uint32{}  // bytes of the unfinished one
	for i, f := range fpdus {
		body, field := f.raw[:len(f.raw)-CRCLen], f.raw[len(f.raw)-CRCLen:]
		want := uint32(0) // CRC off
		if crc {
			want = CRC(0, body)
		}
		if GetCRC(field) != want {
			t.Errorf("FPDU %d: CRC %08x, want %08x", i, GetCRC(field), want)
		}

		again := make([]byte, UntaggedLen)
		if n := f.header.Put(again); !bytes.HasPrefix(f.raw[LengthLen:], again[:n]) {
			t.Errorf("FPDU %d: %+v encodes as % x", i, f.header, again[:n])
		}

		h := f.header
		if h.Tagged {
			continue
		}
		if h.MSN != msn[h.QN]+1 || h.MO != mo[h.QN] {
			t.Errorf("FPDU %d, %v: MSN %d, MO %d, want %d and %d", i, h.Op, h.MSN, h.MO, msn[h.QN]+1, mo[h.QN])
		}
		mo[h.QN] += uint32(len(f.payload))
		if h.Last {
			msn[h.QN]++
			mo[h.QN] = 0
		}
	}
}

// rping: the server reads the client's buffer, then writes the same bytes into
// another one. The Read Requests say where the responses go and how long they are.
func TestCaptureReads(t *testing.T) {
	for _, test := range captures[:2] {
		t.Run(test.file, func(t *testing.T) {
			conn := loadCapture(t, test.file, test.port)[0]
			_, fromClient := splitStream(t, conn.FromClient, false)
			_, fromServer := splitStream(t, conn.FromServer, true)

			var responses []fpdu
			var read []byte
			for _, f := range fromClient {
				if f.header.Op == ReadResponse {
					responses = append(responses, f)
					read = append(read, f.payload...)
				}
			}
			var written []byte
			asked := 0
			for _, f := range fromServer {
				switch f.header.Op {
				case Write:
					written = append(written, f.payload...)
				case ReadRequest:
					var r ReadReq
					if refused := r.Parse(f.payload); refused != nil {
						t.Fatal(refused)
					}
					asked += int(r.Size)
					responses = checkResponses(t, r, responses)
				}
			}
			if asked == 0 || asked != len(read) || !bytes.Equal(read, written) {
				t.Errorf("asked for %d bytes, read %d, wrote %d", asked, len(read), len(written))
			}
		})
	}
}

// checkResponses takes the responses to r off the front of responses, which are
// in the order of their requests.
func checkResponses(t *testing.T, r ReadReq, responses []fpdu) []fpdu {
	t.Helper()
	for got := uint64(0); got < uint64(r.Size); {
		if len(responses) == 0 {
			t.Fatalf("%+v: only %d bytes came", r, got)
		}
		h := responses[0].header
		if h.STag != r.SinkSTag || h.TO != r.SinkTO+got {
			t.Errorf("response %+v at %d of %+v", h, got, r)
		}
		got += uint64(len(responses[0].payload))
		if h.Last != (got == uint64(r.Size)) {
			t.Errorf("response %+v ends at %d of %d bytes", h, got, r.Size)
		}
		responses = responses[1:]
	}
	return responses
}

// The server finds the client's Read Response longer than its buffer.
func TestCaptureTerminate(t *testing.T) {
	test := captures[2]
	conn := loadCapture(t, test.file, test.port)[0]
	_, fromClient := splitStream(t, conn.FromClient, false)
	_, fromServer := splitStream(t, conn.FromServer, true)

	last := fromServer[len(fromServer)-1]
	if want := (Header{Last: true, Op: Terminate, QN: QNTerminate, MSN: 1}); last.header != want {
		t.Fatalf("last FPDU is %+v", last.header)
	}
	m, err := ParseTerminate(last.payload)
	if err != nil || !m.Siw || m.Err != *ErrBaseBounds || !m.HasSegLen || m.RDMAP != nil {
		t.Fatalf("%+v, %v", m, err)
	}
	var blamed Header
	if n, refused := blamed.Parse(m.DDP); refused != nil || n != len(m.DDP) {
		t.Fatalf("% x: %v", m.DDP, refused)
	}
	for _, f := range fromClient {
		if f.header == blamed {
			if int(m.SegLen) != len(f.payload) {
				t.Errorf("segment length %d, the payload has %d bytes", m.SegLen, len(f.payload))
			}
			return
		}
	}
	t.Errorf("the client sent no segment with header %+v", blamed)
}
