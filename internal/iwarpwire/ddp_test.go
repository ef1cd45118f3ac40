package iwarpwire

import (
	"bytes"
	"testing"
)

var headers = []struct {
	name   string
	wire   string
	header Header
}{
	{"zero-length Write", "c140 00000001 0000000000000000",
		Header{Tagged: true, Last: true, Op: Write, STag: 1}},
	{"Write, more to come", "8140 12345678 0102030405060708",
		Header{Tagged: true, Op: Write, STag: 0x12345678, TO: 0x0102030405060708}},
	{"Read Response", "8142 fedcba98 ffffffffffffffff",
		Header{Tagged: true, Op: ReadResponse, STag: 0xfedcba98, TO: 1<<64 - 1}},
	{"Read Response, last", "c142 fedcba98 8000000000000000",
		Header{Tagged: true, Last: true, Op: ReadResponse, STag: 0xfedcba98, TO: 1 << 63}},
	{"Read Request", "4141 00000000 00000001 00000007 00000000",
		Header{Last: true, Op: ReadRequest, QN: QNReadRequest, MSN: 7}},
	{"Send", "4143 00000000 00000000 00000001 00000000",
		Header{Last: true, Op: Send, MSN: 1}},
	{"Send, more to come", "0143 00000000 00000000 00000001 00000590",
		Header{Op: Send, MSN: 1, MO: 1424}},
	{"Send with Invalidate", "4144 aabbccdd 00000000 ffffffff fffffffe",
		Header{Last: true, Op: SendInv, InvSTag: 0xaabbccdd, MSN: 1<<32 - 1, MO: 1<<32 - 2}},
	{"Send with Solicited Event", "4145 00000000 00000000 00000002 00000000",
		Header{Last: true, Op: SendSE, MSN: 2}},
	{"Send with Solicited Event and Invalidate", "4146 00000100 00000000 00000003 00000000",
		Header{Last: true, Op: SendSEInv, InvSTag: 0x100, MSN: 3}},
	{"Terminate", "4147 00000000 00000002 00000001 00000000",
		Header{Last: true, Op: Terminate, QN: QNTerminate, MSN: 1}},
}

func TestHeader(t *testing.T) {
	for _, test := range headers {
		t.Run(test.name, func(t *testing.T) {
			wire := unhex(t, test.wire)
			got := bytes.Repeat([]byte{0xaa}, 20) // no octet may stay as it was
			n := test.header.Put(got)
			if !bytes.Equal(got[:n], wire) || !bytes.Equal(got[n:], bytes.Repeat([]byte{0xaa}, 20-n)) {
				t.Errorf("encoded % x, %d bytes, want % x", got, n, wire)
			}

			h := Header{InvSTag: 9, STag: 9, TO: 9, QN: 9, MSN: 9, MO: 9} // nor any field
			n, refused := h.Parse(append(wire, 0xaa))
			if refused != nil || n != len(wire) || h != test.header {
				t.Errorf("decoded %+v, %d bytes, %v", h, n, refused)
			}

			for n := range wire {
				h := Header{MSN: 9}
				if _, refused := h.Parse(wire[:n]); refused != ErrMarker || h != (Header{MSN: 9}) {
					t.Errorf("cut to %d bytes: %+v, %v", n, h, refused)
				}
			}
		})
	}
}

func TestHeaderIgnoresReserved(t *testing.T) {
	var h Header
	n, refused := h.Parse(unhex(t, "7d73 ffffffff 00000000 00000001 00000000"))
	if want := (Header{Last: true, Op: Send, MSN: 1}); refused != nil || n != UntaggedLen || h != want {
		t.Errorf("%+v, %d bytes, %v", h, n, refused)
	}
}

func TestHeaderWritesReservedAsZero(t *testing.T) {
	h := Header{Last: true, Op: Send, InvSTag: 5, MSN: 1}
	b := make([]byte, UntaggedLen)
	h.Put(b)
	if want := unhex(t, "4143 00000000 00000000 00000001 00000000"); !bytes.Equal(b, want) {
		t.Errorf("% x, want % x", b, want)
	}
}

func TestHeaderRefuses(t *testing.T) {
	const tagged = " 00000001 0000000000000000 00000000"
	const untagged = " 00000000 00000000 00000001 00000000"
	for _, test := range []struct {
		name string
		wire string
		want *TermError
	}{
		{"DDP version 0, tagged", "c040" + tagged, ErrTaggedVersion},
		{"DDP version 2, tagged", "c240" + tagged, ErrTaggedVersion},
		{"DDP version 0, untagged", "4043" + untagged, ErrUntaggedVersion},
		{"DDP version 3, untagged", "4343" + untagged, ErrUntaggedVersion},
		{"DDP before RDMAP version", "4003" + untagged, ErrUntaggedVersion},
		{"RDMAP version 0", "4103" + untagged, ErrRDMAPVersion},
		{"RDMAP version 2", "c180" + tagged, ErrRDMAPVersion},
		{"RDMAP version 3", "41c3" + untagged, ErrRDMAPVersion},
		{"RDMAP version before opcode", "410f" + untagged, ErrRDMAPVersion},
		{"Immediate Data", "4148" + untagged, ErrUnexpectedOpcode},
		{"Atomic Request", "414a" + untagged, ErrUnexpectedOpcode},
		{"opcode 15", "c14f" + tagged, ErrUnexpectedOpcode},
		{"untagged Write", "4140" + untagged, ErrUnexpectedOpcode},
		{"untagged Read Response", "4142" + untagged, ErrUnexpectedOpcode},
		{"tagged Read Request", "c141" + tagged, ErrUnexpectedOpcode},
		{"tagged Send", "c143" + tagged, ErrUnexpectedOpcode},
		{"tagged Terminate", "c147" + tagged, ErrUnexpectedOpcode},
		{"Send on queue 1", "4143 00000000 00000001 00000001 00000000", ErrBadQN},
		{"Send on queue 3", "4143 00000000 00000003 00000001 00000000", ErrBadQN},
		{"Send on queue 2^24", "4146 00000000 01000000 00000001 00000000", ErrBadQN},
		{"Read Request on queue 0", "4141" + untagged, ErrBadQN},
		{"Read Request on queue 2", "4141 00000000 00000002 00000001 00000000", ErrBadQN},
		{"Terminate on queue 0", "4147" + untagged, ErrBadQN},
		{"version seen although cut", "4043", ErrUntaggedVersion},
		{"opcode seen although cut", "414f", ErrUnexpectedOpcode},
	} {
		before := Header{Tagged: true, STag: 5, MSN: 6}
		h := before
		if n, refused := h.Parse(unhex(t, test.wire)); refused != test.want || n != 0 || h != before {
			t.Errorf("%s: %+v, %d, %v, want %v", test.name, h, n, refused, test.want)
		}
	}
}

func TestHeaderPutPanicsOnShortBuffer(t *testing.T) {
	for _, h := range []Header{{Tagged: true, Op: Write}, {Op: Send}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v fits in %d bytes", h.Op, TaggedLen-1)
				}
			}()
			h.Put(make([]byte, TaggedLen-1))
		}()
	}
}

func TestReadReq(t *testing.T) {
	want := ReadReq{SinkSTag: 0x01020304, SinkTO: 0x1112131415161718, Size: 0x21222324, SrcSTag: 0x31323334, SrcTO: 0x4142434445464748}
	wire := unhex(t, "01020304 1112131415161718 21222324 31323334 4142434445464748")
	got := bytes.Repeat([]byte{0xaa}, ReadReqLen+1)
	if n := want.Put(got); n != ReadReqLen || !bytes.Equal(got[:n], wire) || got[n] != 0xaa {
		t.Errorf("encoded % x, %d bytes", got, n)
	}
	var r ReadReq
	if refused := r.Parse(wire); refused != nil || r != want {
		t.Errorf("decoded %+v, %v", r, refused)
	}
	for n := range wire {
		if refused := r.Parse(wire[:n]); refused != ErrCatastrophic || r != want {
			t.Errorf("cut to %d bytes: %+v, %v", n, r, refused)
		}
	}
	if refused := r.Parse(append(wire, 0)); refused != ErrTooLong || r != want {
		t.Errorf("one byte more: %+v, %v", r, refused)
	}
	if ReadRequestLen != 46 {
		t.Errorf("a Read Request has %d bytes", ReadRequestLen)
	}
}

func TestOpcode(t *testing.T) {
	for _, test := range []struct {
		op          Opcode
		number      uint8
		name        string
		invalidates bool
	}{
		{Write, 0, "RDMA Write", false},
		{ReadRequest, 1, "RDMA Read Request", false},
		{ReadResponse, 2, "RDMA Read Response", false},
		{Send, 3, "Send", false},
		{SendInv, 4, "Send with Invalidate", true},
		{SendSE, 5, "Send with Solicited Event", false},
		{SendSEInv, 6, "Send with Solicited Event and Invalidate", true},
		{Terminate, 7, "Terminate", false},
		{Terminate + 1, 8, "opcode 8", false},
		{255, 255, "opcode 255", false},
	} {
		if uint8(test.op) != test.number || test.op.String() != test.name || test.op.Invalidates() != test.invalidates {
			t.Errorf("opcode %d, %q, invalidates %v, want %+v", uint8(test.op), test.op, test.op.Invalidates(), test)
		}
	}
}

// The way of data must not make garbage, not even to refuse.
func TestAllocations(t *testing.T) {
	b := make([]byte, ReadRequestLen+CRCLen)
	h := Header{Last: true, Op: ReadRequest, QN: QNReadRequest, MSN: 1}
	r := ReadReq{Size: 1}
	var failed bool
	allocs := testing.AllocsPerRun(100, func() {
		n := h.Put(b)
		r.Put(b[n:])
		PutCRC(b[ReadRequestLen:], CRC(0, b[:ReadRequestLen]))
		if _, refused := h.Parse(b[:ReadRequestLen]); refused != nil {
			failed = true
		}
		if refused := r.Parse(b[n:ReadRequestLen]); refused != nil {
			failed = true
		}
		if _, refused := h.Parse(b[:n-1]); refused != ErrMarker {
			failed = true
		}
	})
	if allocs != 0 || failed {
		t.Errorf("%v allocations, failed %v", allocs, failed)
	}
}
