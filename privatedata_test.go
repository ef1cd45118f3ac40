package rdmanet

import (
	"bytes"
	"math"
	"testing"
)

func TestPrivateAppend(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    privateData
		want []byte
	}{
		{
			name: "rdmanet",
			p:    privateData{ird: 16, ord: 8, rdmanet: true, features: 0x0102, maxReceive: 0x03040506},
			want: []byte{0, 0, 0, 16, 0, 0, 0, 8, 'R', 'D', 'N', 'T', 1, 0, 1, 2, 3, 4, 5, 6},
		},
		{
			name: "plain",
			p:    privateData{ird: 32, ord: 1, features: 0xffff, maxReceive: 8192},
			want: []byte{0, 0, 0, 32, 0, 0, 0, 1},
		},
		{
			name: "depths above what verbs carry",
			p:    privateData{ird: 256, ord: math.MaxUint32},
			want: []byte{0, 0, 0, 255, 0, 0, 0, 255},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.p.append([]byte("before"))
			if !bytes.Equal(got, append([]byte("before"), tt.want...)) {
				t.Errorf("append wrote\n% x, want\n% x", got[6:], tt.want)
			}
		})
	}
}

func TestParsePrivate(t *testing.T) {
	ours := privateData{ird: 16, ord: 8, rdmanet: true, features: featureFIN, maxReceive: 8192}
	wire := ours.append(nil)
	plain := privateData{ird: 16, ord: 8}
	// but returns wire with the byte at one place changed.
	but := func(at int, v byte) []byte { b := bytes.Clone(wire); b[at] = v; return b }

	for _, tt := range []struct {
		name string
		b    []byte
		want privateData
	}{
		{"absent", nil, privateData{}},
		{"zero padding only", make([]byte, 56), privateData{}},
		{"ours", wire, ours},
		{"ours, zero-padded to a REQ", append(bytes.Clone(wire), make([]byte, 36)...), ours},
		{"ours, zero-padded to a REP", append(bytes.Clone(wire), make([]byte, 176)...), ours},
		{"ours, more behind", append(bytes.Clone(wire), 1, 2, 3), ours},
		{"reserved byte set", but(13, 0xff), ours},
		{"unknown features are kept for the caller to mask", but(14, 0x80), func() privateData { p := ours; p.features |= 0x8000; return p }()},
		{"other magic", but(8, 'r'), plain},
		{"other end of the magic", but(11, 't'), plain},
		{"version 0", but(12, 0), plain},
		{"version 2", but(12, 2), plain},

		{"seven bytes", wire[:7], privateData{}},
		{"depths alone", wire[:8], plain},
		{"cut in the magic", wire[:11], plain},
		{"cut one byte short", wire[:19], plain},
		{"ksmbd: big-endian", []byte{0, 0, 0, 1, 0, 0, 0, 8}, privateData{ird: 1, ord: 8}},
		{"cifs.ko: order of the host", []byte{0x20, 0, 0, 0, 1, 0, 0, 0}, privateData{ird: 32, ord: 1}},
		{"cifs.ko: padded", append([]byte{0x20, 0, 0, 0, 1, 0, 0, 0}, make([]byte, 48)...), privateData{ird: 32, ord: 1}},
		{"255", []byte{0, 0, 0, 255, 255, 0, 0, 0}, privateData{ird: 255, ord: 255}},
		{"256 is clamped", []byte{0, 0, 1, 0, 0, 1, 0, 0}, privateData{ird: 255, ord: 255}},
		{"65535 is clamped", []byte{0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0}, privateData{ird: 255, ord: 255}},
		{"2^32-1 is clamped", bytes.Repeat([]byte{0xff}, 8), privateData{ird: 255, ord: 255}},
		{"RPC-over-RDMA", []byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3}, privateData{ird: 255, ord: 255}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := parsePrivate(tt.b); got != tt.want {
				t.Errorf("parsePrivate = %+v, want %+v", got, tt.want)
			}
		})
	}
}

// Each depth is found in both byte orders.
func TestParseDepthByteOrders(t *testing.T) {
	for v := range 65536 {
		want := uint32(min(v, 255))
		hi, lo := byte(v>>8), byte(v)
		if be := parseDepth([]byte{0, 0, hi, lo}); be != want {
			t.Fatalf("%d big-endian read as %d", v, be)
		}
		if le := parseDepth([]byte{lo, hi, 0, 0}); le != want {
			t.Fatalf("%d little-endian read as %d", v, le)
		}
	}
}

// FuzzPrivateData parses anything: what comes out stays within bounds and
// survives the way over the wire.
func FuzzPrivateData(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		p := parsePrivate(b)
		if p.ird > 255 || p.ord > 255 {
			t.Fatalf("depths of %+v", p)
		}
		if ours := len(b) >= 20 && bytes.Equal(b[8:13], []byte("RDNT\x01")); ours != p.rdmanet {
			t.Fatalf("rdmanet = %v", p.rdmanet)
		}
		if !p.rdmanet && (p.features != 0 || p.maxReceive != 0) {
			t.Fatalf("a plain peer offers %+v", p)
		}
		wire := p.append(nil)
		if again := parsePrivate(wire); again != p {
			t.Fatalf("%+v became %+v", p, again)
		}
		if p.rdmanet && !bytes.Equal(wire[14:], b[14:20]) {
			t.Fatalf("features and size % x became % x", b[14:20], wire[14:])
		}
		if again := parsePrivate(append(wire, make([]byte, 36)...)); p.rdmanet && again != p {
			t.Fatalf("padded, %+v became %+v", p, again)
		}
	})
}
