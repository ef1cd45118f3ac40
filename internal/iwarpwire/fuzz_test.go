package iwarpwire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
)

// The seeds in testdata/fuzz are frames from the captures; those added here are
// the tables' and what no well-behaved peer sends.

// Whatever is accepted encodes to the same octets again, but for bits that a
// receiver ignores. Whatever is refused breaks one of the rules, restated here.
func FuzzStart(f *testing.F) {
	for _, test := range startFrames {
		f.Add(frame(f, key(test.start.Reply), test.wire), test.start.Reply)
	}
	f.Fuzz(func(t *testing.T, b []byte, reply bool) {
		s, err := ParseStart(b, reply)
		if valid := validStart(b, reply); valid != (err == nil) {
			t.Fatalf("% x: valid %v, but %v", b, valid, err)
		}
		if err != nil {
			return
		}
		if n, err := ParseStartHeader(b[:StartLen], reply); err != nil || StartLen+n != len(b) {
			t.Errorf("the header alone: %d, %v", n, err)
		}
		want := bytes.Clone(b)
		want[16] &= 0xf0
		if !reply {
			want[16] &^= 0x20
		}
		if s.Rev == 1 {
			want[16] &^= 0x10
		}
		if got, err := s.Append(nil); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%+v encodes as % x, %v, came from % x", s, got, err, b)
		}
	})
}

func validStart(b []byte, reply bool) bool {
	if len(b) < 20 || !bytes.HasPrefix(b, []byte(key(reply))) {
		return false
	}
	size := int(b[18])<<8 | int(b[19])
	enhanced := b[17] == 2 && b[16]&0x10 != 0
	return (b[17] == 1 || b[17] == 2) && size <= 512 && size == len(b)-20 && !(enhanced && size < 4)
}

// The input is a stream of FPDUs, as much of it as is whole.
func FuzzFPDU(f *testing.F) {
	for _, test := range headers {
		ulpdu := append(unhex(f, test.wire), "payload"...)
		b := binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu)))
		b = append(append(b, ulpdu...), make([]byte, Pad(len(ulpdu))+CRCLen)...)
		PutCRC(b[len(b)-CRCLen:], CRC(0, b[:len(b)-CRCLen]))
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		for len(stream) >= LengthLen {
			ulpduLen := int(binary.BigEndian.Uint16(stream))
			total := FPDULen(ulpduLen)
			if total%4 != 0 || total < LengthLen+ulpduLen+CRCLen || total > LengthLen+ulpduLen+3+CRCLen {
				t.Fatalf("an FPDU of %d bytes around a ULPDU of %d", total, ulpduLen)
			}
			if len(stream) < total {
				return
			}
			body := stream[:total-CRCLen]
			if whole, parts := CRC(0, body), CRC(CRC(0, body[:2]), body[2:]); whole != parts {
				t.Fatalf("CRC %08x whole, %08x in two parts", whole, parts)
			}
			checkULPDU(t, stream[LengthLen:][:ulpduLen])
			stream = stream[total:]
		}
	})
}

func checkULPDU(t *testing.T, ulpdu []byte) {
	t.Helper()
	var h Header
	n, refused := h.Parse(ulpdu)
	if want := refusal(ulpdu); refused != want {
		t.Fatalf("% x: %v, want %v", ulpdu, refused, want)
	}
	if refused != nil {
		if n != 0 || h != (Header{}) {
			t.Fatalf("% x: refused, but %d bytes and %+v", ulpdu, n, h)
		}
		return
	}
	again := make([]byte, UntaggedLen)
	if m := h.Put(again); m != n {
		t.Fatalf("%+v encodes in %d bytes, came in %d", h, m, n)
	}
	want := bytes.Clone(ulpdu[:n])
	want[0] &= 0xc3
	want[1] &= 0xcf
	if !h.Tagged && h.Op != SendInv && h.Op != SendSEInv {
		clear(want[2:6])
	}
	if !bytes.Equal(again[:n], want) {
		t.Fatalf("%+v encodes as % x, came from % x", h, again[:n], ulpdu[:n])
	}

	switch payload := ulpdu[n:]; h.Op {
	case ReadRequest:
		var r ReadReq
		refused := r.Parse(payload)
		if (refused == nil) != (len(payload) == 28) {
			t.Fatalf("request of %d bytes: %v", len(payload), refused)
		}
		if refused == nil {
			again := make([]byte, ReadReqLen)
			if r.Put(again); !bytes.Equal(again, payload) {
				t.Fatalf("%+v encodes as % x, came from % x", r, again, payload)
			}
		}
	case Terminate:
		checkTerminate(t, payload)
	}
}

// refusal restates which ULPDUs Parse must not take, and why.
func refusal(b []byte) *TermError {
	if len(b) < 2 {
		return ErrMarker
	}
	tagged, version, rdmap, op := b[0] >= 0x80, b[0]%4, b[1]/64, b[1]%16
	switch {
	case version != 1 && tagged:
		return ErrTaggedVersion
	case version != 1:
		return ErrUntaggedVersion
	case rdmap != 1:
		return ErrRDMAPVersion
	case op > 7, tagged != (op == 0 || op == 2):
		return ErrUnexpectedOpcode
	case tagged && len(b) < 14, !tagged && len(b) < 18:
		return ErrMarker
	case tagged:
		return nil
	}
	queue := [4]byte{}
	switch op {
	case 1:
		queue[3] = 1
	case 7:
		queue[3] = 2
	}
	if !bytes.Equal(b[6:10], queue[:]) {
		return ErrBadQN
	}
	return nil
}

func FuzzTerminate(f *testing.F) {
	for _, s := range []string{
		"20 02 00 00", "11 01 c0 00 0594" + taggedHeader, "11 01 03 00 0594" + taggedHeader,
		"12 02 c0 00 0022" + untaggedHeader, "21 02 03 00 0022" + untaggedHeader,
		"01 02 e0 00 002e" + readReqHeader + readReq, "10 02 07 00 002e" + readReqHeader + readReq,
	} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(checkTerminate)
}

// Whatever is understood encodes to the same headers in the RFC's bit order,
// and to the same octets if it came in that order.
func checkTerminate(t *testing.T, b []byte) {
	t.Helper()
	m, err := ParseTerminate(b)
	if err != nil {
		if !errors.Is(err, ErrTerminateLen) || len(b) >= 70 {
			t.Fatalf("% x: %v", b, err) // there is nothing else to complain of
		}
		return
	}
	if m.Err.Error() == "" {
		t.Fatalf("% x: no text for %+v", b, m.Err)
	}
	again := m.Append(nil)
	want := bytes.Clone(b[:len(again)])
	want[2], want[3] = want[2]&0xe0, 0
	if m.Siw {
		want[0] = want[0]<<4 | want[0]>>4
		want[2] = b[2]&1<<7 | b[2]&2<<5 | b[2]&4<<3
	}
	if !bytes.Equal(again, want) {
		t.Fatalf("%+v encodes as % x, came from % x", m, again, b)
	}
	back, err := ParseTerminate(again)
	m.Siw = false
	if err != nil || back.Err != m.Err || back.Siw || back.HasSegLen != m.HasSegLen || back.SegLen != m.SegLen ||
		!bytes.Equal(back.DDP, m.DDP) || !bytes.Equal(back.RDMAP, m.RDMAP) {
		t.Fatalf("%+v came back as %+v, %v", m, back, err)
	}
}
