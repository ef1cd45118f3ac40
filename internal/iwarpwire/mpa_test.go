package iwarpwire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// unhex reads hexadecimal digits, blanks between them allowed.
func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// frame puts a key in front of a Start frame's remaining bytes.
func frame(tb testing.TB, key, rest string) []byte {
	tb.Helper()
	return append([]byte(key), unhex(tb, rest)...)
}

// Frames of Linux peers, then each bit on its own.
var startFrames = []struct {
	name  string
	wire  string // behind the key
	start Start
}{
	{"rping request", "10 02 0004 0001 0001", Start{Enhanced: true, Rev: 2, IRD: 1, ORD: 1}},
	{"rping reply", "10 02 0004 0001 0001", Start{Reply: true, Enhanced: true, Rev: 2, IRD: 1, ORD: 1}},
	{"cifs request", "10 02 000c 0020 0000 20000000 01000000",
		Start{Enhanced: true, Rev: 2, IRD: 32, Private: []byte{0x20, 0, 0, 0, 1, 0, 0, 0}}},
	{"ksmbd reply", "10 02 000c 0001 0008 00000001 00000008",
		Start{Reply: true, Enhanced: true, Rev: 2, IRD: 1, ORD: 8, Private: []byte{0, 0, 0, 1, 0, 0, 0, 8}}},
	{"NFS request", "10 02 000c 0080 0000 f6ab0e18 01010303",
		Start{Enhanced: true, Rev: 2, IRD: 128, Private: []byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3}}},
	{"CRC and peer-to-peer request", "50 02 0004 8001 c001",
		Start{CRC: true, Enhanced: true, Rev: 2, IRD: 1, ORD: 1, P2P: true, RTRWrite: true, RTRRead: true}},
	{"CRC and peer-to-peer reply", "50 02 0004 8001 8001",
		Start{Reply: true, CRC: true, Enhanced: true, Rev: 2, IRD: 1, ORD: 1, P2P: true, RTRWrite: true}},

	{"revision 1", "00 01 0000", Start{Rev: 1}},
	{"revision 1, private data", "00 01 0003 616263", Start{Rev: 1, Private: []byte("abc")}},
	{"revision 2, not enhanced", "00 02 0002 6162", Start{Rev: 2, Private: []byte("ab")}},
	{"markers", "80 01 0000", Start{Rev: 1, Markers: true}},
	{"CRC", "40 01 0000", Start{Rev: 1, CRC: true}},
	{"reject", "20 01 0001 2a", Start{Reply: true, Rev: 1, Reject: true, Private: []byte{42}}},
	{"A", "10 02 0004 8000 0000", Start{Rev: 2, Enhanced: true, P2P: true}},
	{"B", "10 02 0004 4000 0000", Start{Rev: 2, Enhanced: true, RTRSend: true}},
	{"C", "10 02 0004 0000 8000", Start{Rev: 2, Enhanced: true, RTRWrite: true}},
	{"D", "10 02 0004 0000 4000", Start{Rev: 2, Enhanced: true, RTRRead: true}},
	{"depths not negotiated", "10 02 0004 3fff 3fff",
		Start{Rev: 2, Enhanced: true, IRD: DepthNotNegotiated, ORD: DepthNotNegotiated}},
}

func key(reply bool) string {
	if reply {
		return "MPA ID Rep Frame"
	}
	return "MPA ID Req Frame"
}

func TestStart(t *testing.T) {
	for _, test := range startFrames {
		t.Run(test.name, func(t *testing.T) {
			wire := frame(t, key(test.start.Reply), test.wire)

			got, err := test.start.Append([]byte("in front"))
			if err != nil || !bytes.Equal(got, append([]byte("in front"), wire...)) {
				t.Errorf("encoded % x, %v, want % x", got, err, wire)
			}

			n, err := ParseStartHeader(wire[:StartLen], test.start.Reply)
			if err != nil || StartLen+n != len(wire) {
				t.Errorf("header: %d bytes of private data, %v", n, err)
			}
			s, err := ParseStart(wire, test.start.Reply)
			if len(s.Private) == 0 {
				s.Private = nil
			}
			if err != nil || !reflect.DeepEqual(s, test.start) {
				t.Errorf("decoded %+v, %v, want %+v", s, err, test.start)
			}

			if _, err := ParseStart(wire, !test.start.Reply); !errors.Is(err, ErrKey) {
				t.Errorf("in the other direction: %v", err)
			}
			for n := range wire {
				if _, err := ParseStart(wire[:n], test.start.Reply); !errors.Is(err, ErrStartLen) {
					t.Errorf("cut to %d bytes: %v", n, err)
				}
			}
			if _, err := ParseStart(append(wire, 0), test.start.Reply); !errors.Is(err, ErrStartLen) {
				t.Errorf("one byte more: %v", err)
			}
		})
	}
}

func TestStartPrivateAliases(t *testing.T) {
	b := frame(t, keyRequest, "00 01 0002 6162")
	s, err := ParseStart(b, false)
	if err != nil {
		t.Fatal(err)
	}
	b[StartLen] = 'x'
	if string(s.Private) != "xb" {
		t.Errorf("Private is %q, a copy", s.Private)
	}
}

// What a receiver leaves unchecked: reserved bits, one of which siw uses, R in a
// Request and S before revision 2.
func TestStartIgnores(t *testing.T) {
	for _, test := range []struct {
		name  string
		wire  string
		start Start
	}{
		{"siw's large FPDUs", "18 02 0004 0001 0001", Start{Rev: 2, Enhanced: true, IRD: 1, ORD: 1, Private: []byte{}}},
		{"all reserved bits", "0f 01 0000", Start{Rev: 1, Private: []byte{}}},
		{"R in a Request", "20 01 0000", Start{Rev: 1, Private: []byte{}}},
		{"S in revision 1", "10 01 0004 80018001", Start{Rev: 1, Private: []byte{0x80, 1, 0x80, 1}}},
	} {
		s, err := ParseStart(frame(t, keyRequest, test.wire), false)
		if err != nil || !reflect.DeepEqual(s, test.start) {
			t.Errorf("%s: %+v, %v", test.name, s, err)
		}
	}
}

func TestParseStartErrors(t *testing.T) {
	for _, test := range []struct {
		name string
		b    []byte
		want error
	}{
		{"key in lower case", frame(t, "mpa id req frame", "00 01 0000"), ErrKey},
		{"key ends otherwise", frame(t, "MPA ID Req Fram\x00", "00 01 0000"), ErrKey},
		{"another protocol", []byte("GET / HTTP/1.1\r\nHost: x"), ErrKey},
		{"revision 0", frame(t, keyRequest, "00 00 0000"), ErrRevision},
		{"revision 3", frame(t, keyRequest, "00 03 0000"), ErrRevision},
		{"513 bytes of private data", append(frame(t, keyRequest, "00 01 0201"), make([]byte, 513)...), ErrPrivateLen},
		{"65535 bytes of private data", frame(t, keyRequest, "00 01 ffff"), ErrPrivateLen},
		{"enhanced, 0 bytes", frame(t, keyRequest, "10 02 0000"), ErrControl},
		{"enhanced, 3 bytes", frame(t, keyRequest, "10 02 0003 000000"), ErrControl},
	} {
		if s, err := ParseStart(test.b, false); !errors.Is(err, test.want) {
			t.Errorf("%s: %+v, %v", test.name, s, err)
		}
	}
}

func TestStartLimits(t *testing.T) {
	full, fuller := make([]byte, MaxPrivate), make([]byte, MaxPrivate+1)
	for _, test := range []struct {
		name  string
		start Start
		want  error
	}{
		{"512 bytes", Start{Rev: 1, Private: full}, nil},
		{"513 bytes", Start{Rev: 1, Private: fuller}, ErrPrivateLen},
		{"508 bytes, enhanced", Start{Rev: 2, Enhanced: true, Private: full[4:]}, nil},
		{"509 bytes, enhanced", Start{Rev: 2, Enhanced: true, Private: full[3:]}, ErrPrivateLen},
		{"revision 0", Start{}, ErrRevision},
		{"revision 3", Start{Rev: 3}, ErrRevision},
		{"enhanced in revision 1", Start{Rev: 1, Enhanced: true}, ErrRevision},
		{"IRD above 14 bits", Start{Rev: 2, Enhanced: true, IRD: 0x4000}, ErrDepth},
		{"ORD above 14 bits", Start{Rev: 2, Enhanced: true, ORD: 0x8000}, ErrDepth},
	} {
		b, err := test.start.Append([]byte("in front"))
		if !errors.Is(err, test.want) {
			t.Errorf("%s: %v", test.name, err)
		}
		if err != nil {
			if string(b) != "in front" {
				t.Errorf("%s: left %q behind", test.name, b)
			}
			continue
		}
		s, err := ParseStart(b[len("in front"):], false)
		if err != nil || len(s.Private) != len(test.start.Private) {
			t.Errorf("%s: came back with %d bytes, %v", test.name, len(s.Private), err)
		}
	}
}

func TestFPDULen(t *testing.T) {
	for _, test := range []struct{ ulpdu, pad, total int }{
		{0, 2, 8},
		{1, 1, 8},
		{2, 0, 8},
		{3, 3, 12},
		{TaggedLen, 0, 20},   // zero-length RDMA Write
		{UntaggedLen, 0, 24}, // empty Send
		{UntaggedLen + 16, 0, 40},
		{TaggedLen + 1, 3, 24},
		{ReadRequestLen, 0, 52},
		{TaggedLen + 1428, 0, 1448}, // siw's largest at an MTU of 1500
		{MaxULPDU - 1, 0, 65540},
		{MaxULPDU, 3, 65544},
	} {
		if pad, total := Pad(test.ulpdu), FPDULen(test.ulpdu); pad != test.pad || total != test.total {
			t.Errorf("ULPDU of %d: pad %d, FPDU of %d, want %d and %d", test.ulpdu, pad, total, test.pad, test.total)
		}
	}
}

// The examples of RFC 3720, appendix B.4, and the usual check value.
func TestCRC(t *testing.T) {
	rising := make([]byte, 32)
	for i := range rising {
		rising[i] = byte(i)
	}
	for _, test := range []struct {
		b    []byte
		wire string
	}{
		{nil, "00000000"},
		{make([]byte, 32), "aa36918a"},
		{bytes.Repeat([]byte{0xff}, 32), "43aba862"},
		{rising, "4e79dd46"},
		{[]byte("123456789"), "839206e3"},
	} {
		want := unhex(t, test.wire)
		for cut := range len(test.b) + 1 {
			crc := CRC(CRC(0, test.b[:cut]), test.b[cut:])
			got := make([]byte, CRCLen)
			PutCRC(got, crc)
			if !bytes.Equal(got, want) || GetCRC(got) != crc {
				t.Errorf("CRC of % x in two parts at %d: % x, want % x", test.b, cut, got, want)
			}
		}
	}
}
