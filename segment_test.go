package rdmanet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"syscall"
	"testing"
)

// wireSegment builds a message of size bytes field by field, so that headers
// can be wrong in ways that put would not write. The payload bytes count up.
func wireSegment(size int, h segmentHeader) []byte {
	b := make([]byte, max(size, dataHeaderLen))
	for i := range b {
		b[i] = byte(i)
	}
	le := binary.LittleEndian
	le.PutUint16(b[0:], h.CreditsRequested)
	le.PutUint16(b[2:], h.CreditsGranted)
	le.PutUint16(b[4:], h.Flags)
	le.PutUint16(b[6:], 0)
	le.PutUint32(b[8:], h.Remaining)
	le.PutUint32(b[12:], h.DataOffset)
	le.PutUint32(b[16:], h.DataLength)
	return b[:size]
}

func TestSegmentPut(t *testing.T) {
	const filler = 0xee
	for _, tt := range []struct {
		name string
		h    segmentHeader
		want []byte
	}{
		{
			name: "every field",
			h: segmentHeader{
				CreditsRequested: 0x0102, CreditsGranted: 0x0304, Flags: 0x8001,
				Remaining: 0x05060708, DataOffset: 24, DataLength: 0x090a0b0c,
			},
			want: []byte{
				0x02, 0x01, 0x04, 0x03, 0x01, 0x80, 0, 0,
				0x08, 0x07, 0x06, 0x05, 24, 0, 0, 0, 0x0c, 0x0b, 0x0a, 0x09,
				0, 0, 0, 0,
			},
		},
		{
			name: "empty is not padded",
			h:    segmentHeader{CreditsRequested: 255, CreditsGranted: 1, Flags: flagResponseRequested},
			want: []byte{255, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		},
		{
			name: "long padding",
			h:    segmentHeader{CreditsRequested: 1, DataOffset: 32, DataLength: 1},
			want: append([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 1, 0, 0, 0}, make([]byte, 12)...),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := bytes.Repeat([]byte{filler}, 40)
			n := tt.h.put(b)
			if !bytes.Equal(b[:n], tt.want) {
				t.Errorf("put wrote\n% x, want\n% x", b[:n], tt.want)
			}
			if rest := b[n:]; !bytes.Equal(rest, bytes.Repeat([]byte{filler}, len(rest))) {
				t.Errorf("put wrote behind its end: % x", rest)
			}
		})
	}
}

func TestSegmentParse(t *testing.T) {
	const size = 128
	// h returns a good header, changed.
	h := func(change func(*segmentHeader)) segmentHeader {
		h := segmentHeader{CreditsRequested: 1, DataOffset: 24, DataLength: size - 24}
		change(&h)
		return h
	}
	for _, tt := range []struct {
		name string
		size int
		h    segmentHeader
		want error
		n    int // bytes of payload
	}{
		{"full", size, h(func(h *segmentHeader) {}), nil, size - 24},
		{"empty", 20, segmentHeader{CreditsRequested: 1}, nil, 0},
		{"empty, 24 bytes", 24, segmentHeader{CreditsRequested: 1}, nil, 0},
		{"empty, with offset", 24, segmentHeader{CreditsRequested: 1, DataOffset: 24}, nil, 0},
		{"empty, offset in the header", 20, segmentHeader{CreditsRequested: 1, DataOffset: 8}, nil, 0},
		{"empty, offset behind the end", 20, segmentHeader{CreditsRequested: 1, DataOffset: 24}, errDataBeyondEnd, 0},
		{"empty, more to come", 20, segmentHeader{CreditsRequested: 1, Remaining: 1}, nil, 0},
		{"bytes behind the payload", size, h(func(h *segmentHeader) { h.DataLength = 1 }), nil, 1},
		{"payload at a later offset", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = 64, 64 }), nil, 64},
		{"one byte at the end", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = size-8, 8 }), nil, 8},
		{"unknown flags", size, h(func(h *segmentHeader) { h.Flags = 0xfffe }), nil, size - 24},
		{"all credits", size, h(func(h *segmentHeader) { h.CreditsRequested, h.CreditsGranted = 65535, 65535 }), nil, size - 24},
		{"any remainder", size, h(func(h *segmentHeader) { h.Remaining = math.MaxUint32 }), nil, size - 24},

		{"nothing", 0, segmentHeader{}, errSegmentShort, 0},
		{"one byte", 1, segmentHeader{CreditsRequested: 1}, errSegmentShort, 0},
		{"one byte short of a header", 19, segmentHeader{CreditsRequested: 1}, errSegmentShort, 0},
		{"no credits requested", size, h(func(h *segmentHeader) { h.CreditsRequested = 0 }), errCreditsRequested, 0},
		{"empty, no credits requested", 20, segmentHeader{CreditsGranted: 1}, errCreditsRequested, 0},

		{"offset 0", size, h(func(h *segmentHeader) { h.DataOffset = 0 }), errOffsetInHeader, 0},
		{"offset 1", size, h(func(h *segmentHeader) { h.DataOffset = 1 }), errOffsetAlignment, 0},
		{"offset 8", size, h(func(h *segmentHeader) { h.DataOffset = 8 }), errOffsetInHeader, 0},
		{"offset 16", size, h(func(h *segmentHeader) { h.DataOffset = 16 }), errOffsetInHeader, 0},
		{"offset 19", size, h(func(h *segmentHeader) { h.DataOffset = 19 }), errOffsetAlignment, 0},
		{"offset 20", size, h(func(h *segmentHeader) { h.DataOffset = 20 }), errOffsetAlignment, 0},
		{"offset 23", size, h(func(h *segmentHeader) { h.DataOffset = 23 }), errOffsetAlignment, 0},
		{"offset 28", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = 28, 8 }), errOffsetAlignment, 0},
		{"offset 32, one byte too many", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = 32, 97 }), errDataBeyondEnd, 0},
		{"offset at the end", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = size, 1 }), errDataBeyondEnd, 0},
		{"offset at the end, empty", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = size, 0 }), nil, 0},
		{"offset behind the end", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = size+8, 0 }), errDataBeyondEnd, 0},
		{"offset 2^31", size, h(func(h *segmentHeader) { h.DataOffset = 1 << 31 }), errDataBeyondEnd, 0},
		{"offset 2^32-1", size, h(func(h *segmentHeader) { h.DataOffset = math.MaxUint32 }), errOffsetAlignment, 0},
		{"offset 2^32-8, sum wraps", size, h(func(h *segmentHeader) { h.DataOffset, h.DataLength = math.MaxUint32-7, 32 }), errDataBeyondEnd, 0},

		{"length one too many", size, h(func(h *segmentHeader) { h.DataLength++ }), errDataBeyondEnd, 0},
		{"length of the message", size, h(func(h *segmentHeader) { h.DataLength = size }), errDataBeyondEnd, 0},
		{"length 2^31", size, h(func(h *segmentHeader) { h.DataLength = 1 << 31 }), errDataBeyondEnd, 0},
		{"length 2^32-1", size, h(func(h *segmentHeader) { h.DataLength = math.MaxUint32 }), errDataBeyondEnd, 0},
		{"length 2^32-24, sum wraps to 0", size, h(func(h *segmentHeader) { h.DataLength = math.MaxUint32 - 23 }), errDataBeyondEnd, 0},
		{"header only, one byte promised", 20, segmentHeader{CreditsRequested: 1, DataLength: 1}, errOffsetInHeader, 0},
		{"header only, payload promised", 20, segmentHeader{CreditsRequested: 1, DataOffset: 24, DataLength: 1}, errDataBeyondEnd, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := wireSegment(tt.size, tt.h)
			var got segmentHeader
			payload, err := got.parse(b)
			if err != tt.want {
				t.Fatalf("parse = %v, want %v", err, tt.want)
			}
			if len(payload) != tt.n {
				t.Errorf("payload of %d bytes, want %d", len(payload), tt.n)
			}
			if err != nil {
				return
			}
			if got != tt.h {
				t.Errorf("parse = %+v, want %+v", got, tt.h)
			}
			if tt.n > 0 && &payload[0] != &b[tt.h.DataOffset] {
				t.Error("the payload is not where DataOffset points")
			}
			if cap(payload) != len(payload) {
				t.Error("appending to the payload would overwrite the receive buffer")
			}
		})
	}
}

// Every pair of offset and length that ever went wrong in an implementation,
// at several message sizes, against the rules written down once more.
func TestSegmentParseCorners(t *testing.T) {
	for _, size := range []int{20, 21, 24, 25, 32, 127, 128, 1364} {
		n := uint32(size)
		corners := []uint32{
			0, 1, 7, 8, 16, 19, 20, 23, 24, 25, 32, n - 24, n - 20, n - 8, n - 1, n, n + 1, n + 8,
			1<<31 - 1, 1 << 31, 1<<31 + 8, math.MaxUint32 - 23, math.MaxUint32 - 7, math.MaxUint32,
		}
		for _, offset := range corners {
			for _, length := range corners {
				for _, remaining := range []uint32{0, 1, math.MaxUint32} {
					h := segmentHeader{CreditsRequested: 1, Remaining: remaining, DataOffset: offset, DataLength: length}
					b := wireSegment(size, h)
					legal := offset%8 == 0 && int64(offset)+int64(length) <= int64(size) &&
						(length == 0 || offset >= 20)

					var got segmentHeader
					payload, err := got.parse(b)
					if legal != (err == nil) {
						t.Fatalf("%d bytes, offset %d, length %d: %v", size, offset, length, err)
					}
					if err == nil && !bytes.Equal(payload, b[offset:offset+length]) {
						t.Fatalf("%d bytes, offset %d, length %d: wrong payload", size, offset, length)
					}
				}
			}
		}
	}
}

// A receiver must not care about what a sender has to zero.
func TestSegmentReservedIgnored(t *testing.T) {
	want := segmentHeader{CreditsRequested: 3, DataOffset: 24, DataLength: 4}
	b := wireSegment(28, want)
	b[6], b[7] = 0xff, 0xff                             // Reserved
	b[20], b[21], b[22], b[23] = 0xff, 0xff, 0xff, 0xff // padding
	var got segmentHeader
	if _, err := got.parse(b); err != nil || got != want {
		t.Errorf("parse = %+v, %v; want %+v", got, err, want)
	}
}

// Messages out of place: a second negotiation is not taken for data.
func TestSegmentFromNegotiation(t *testing.T) {
	req := testLimits.request()
	b := make([]byte, negotiateResponseLen)
	var h segmentHeader
	if _, err := h.parse(b[:req.put(b)]); err == nil {
		t.Errorf("a Negotiate Request passes as %+v", h)
	}

	resp := answer(t, testLimits, testLimits.request(), 255)
	_, err := h.parse(b[:resp.put(b)])
	if err == nil {
		r := reassembler{max: testLimits.maxFragmented}
		_, _, err = r.accept(&h)
	}
	if err == nil {
		t.Errorf("a Negotiate Response passes as %+v", h)
	}
}

func TestSegmentData(t *testing.T) {
	for _, tt := range []struct{ left, maxSend, want int }{
		{1, 128, 1},
		{103, 128, 103},
		{104, 128, 104},
		{105, 128, 104},
		{1 << 30, 128, 104},
		{1340, 1364, 1340},
		{4000, 1364, 1340},
		{1, 1 << 30, 1},
		{1 << 30, 1 << 30, 1<<30 - 24},
	} {
		if got := segmentData(tt.left, tt.maxSend); got != tt.want {
			t.Errorf("segmentData(%d, %d) = %d, want %d", tt.left, tt.maxSend, got, tt.want)
		}
	}
}

func TestCheckMessageLength(t *testing.T) {
	for _, tt := range []struct {
		n    int
		max  uint32
		want error
	}{
		{0, 131072, nil},
		{131071, 131072, nil},
		{131072, 131072, nil},
		{131073, 131072, ErrMessageTooLong},
		{math.MaxInt32, 1 << 30, ErrMessageTooLong},
		{math.MaxInt32, math.MaxUint32, nil},
	} {
		if err := checkMessageLength(tt.n, tt.max); err != tt.want {
			t.Errorf("checkMessageLength(%d, %d) = %v, want %v", tt.n, tt.max, err, tt.want)
		}
	}
	if !errors.Is(ErrMessageTooLong, syscall.EMSGSIZE) {
		t.Error("ErrMessageTooLong does not match EMSGSIZE")
	}
}

// fragment cuts message into segments of at most maxSend bytes, whole messages
// as they go out, and calls send with each; b is used again for the next.
func fragment(message []byte, maxSend int, send func(segment []byte)) {
	b := make([]byte, maxSend)
	for len(message) > 0 {
		n := segmentData(len(message), maxSend)
		h := segmentHeader{
			CreditsRequested: 255,
			Remaining:        uint32(len(message) - n),
			DataOffset:       dataOffset,
			DataLength:       uint32(n),
		}
		at := h.put(b)
		send(b[:at+copy(b[at:], message[:n])])
		message = message[n:]
	}
}

// Whatever the sizes: no segment is larger than maxSend, only the last one may
// be smaller, and what was cut is put together again.
func TestFragmentReassemble(t *testing.T) {
	message := make([]byte, 5000)
	for i := range message {
		message[i] = byte(i * 7)
	}
	for _, maxSend := range []int{128, 129, 136, 1000, 1364, 5024, 8192} {
		for _, length := range []int{1, 103, 104, 105, 1340, 1341, 2680, 4999, 5000} {
			t.Run(fmt.Sprintf("%d in %d", length, maxSend), func(t *testing.T) {
				r := reassembler{max: uint32(length)}
				var got []byte
				var segments, lasts int
				fragment(message[:length], maxSend, func(segment []byte) {
					var h segmentHeader
					payload, err := h.parse(segment)
					if err != nil {
						t.Fatal(err)
					}
					first, last, err := r.accept(&h)
					if err != nil {
						t.Fatal(err)
					}
					if first != (segments == 0) {
						t.Errorf("segment %d: first = %v", segments, first)
					}
					if !last && len(segment) != maxSend {
						t.Errorf("segment %d of %d bytes is not the last", segments, len(segment))
					}
					segments++
					if last {
						lasts++
					}
					got = append(got, payload...)
				})
				if want := (length + maxSend - 25) / (maxSend - 24); segments != want || lasts != 1 {
					t.Errorf("%d segments, %d of them last; want %d, 1", segments, lasts, want)
				}
				if !bytes.Equal(got, message[:length]) {
					t.Error("the message changed")
				}
			})
		}
	}
}

func TestSegmentAllocs(t *testing.T) {
	b := make([]byte, 128)
	out := segmentHeader{CreditsRequested: 1, DataOffset: 24, DataLength: 104}
	r := reassembler{max: 1 << 20}
	n := testing.AllocsPerRun(100, func() {
		out.put(b)
		var in segmentHeader
		if _, err := in.parse(b); err != nil {
			t.Error(err)
		}
		if _, _, err := r.accept(&in); err != nil {
			t.Error(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations a segment, want none", n)
	}
}

func TestProtocolErrorNamesFieldAndRule(t *testing.T) {
	const want = "smb direct: DataOffset: not a multiple of 8"
	if got := errOffsetAlignment.Error(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	var p *protocolError
	if err := fmt.Errorf("receive: %w", errOffsetAlignment); !errors.As(err, &p) || p.field != "DataOffset" {
		t.Errorf("errors.As found %v", p)
	}
}

// FuzzSegment parses anything. What is accepted must lie inside the message and
// encode to the bytes it came from, save for those that a sender has to zero.
func FuzzSegment(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		var h segmentHeader
		payload, err := h.parse(b)
		if err != nil {
			if payload != nil {
				t.Fatalf("payload of a refused message: %v", err)
			}
			return
		}
		if len(payload) != int(h.DataLength) {
			t.Fatalf("payload of %d bytes, DataLength %d", len(payload), h.DataLength)
		}
		end := dataHeaderLen
		if len(payload) > 0 {
			end = int(h.DataOffset) + len(payload)
		}
		want := bytes.Clone(b[:end])
		clear(want[6:8]) // Reserved
		clear(want[dataHeaderLen : end-len(payload)])

		got := make([]byte, end)
		if n := h.put(got) + copy(got[end-len(payload):], payload); n != end {
			t.Fatalf("%d bytes encoded, want %d", n, end)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("encoded again:\n% x, want\n% x", got, want)
		}
	})
}
