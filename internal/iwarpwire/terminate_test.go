package iwarpwire

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// reasons restates the IANA registry, independent of the variables' making.
var reasons = []struct {
	err              *TermError
	layer, typ, code uint8
	text             string
}{
	{ErrLocalCatastrophic, 0, 0, 0x00, "RDMAP local catastrophic error"},
	{ErrRemoteInvalidSTag, 0, 1, 0x00, "RDMAP remote protection error: invalid STag"},
	{ErrRemoteBounds, 0, 1, 0x01, "RDMAP remote protection error: base or bounds violation"},
	{ErrRemoteAccess, 0, 1, 0x02, "RDMAP remote protection error: access rights violation"},
	{ErrSTagNotAssociated, 0, 1, 0x03, "RDMAP remote protection error: STag not associated with this stream"},
	{ErrTOWrap, 0, 1, 0x04, "RDMAP remote protection error: tagged offset wraps"},
	{ErrCannotInvalidate, 0, 1, 0x09, "RDMAP remote protection error: STag cannot be invalidated"},
	{ErrProtectionUnspecified, 0, 1, 0xff, "RDMAP remote protection error: unspecified"},
	{ErrRDMAPVersion, 0, 2, 0x05, "RDMAP remote operation error: unknown RDMAP version"},
	{ErrUnexpectedOpcode, 0, 2, 0x06, "RDMAP remote operation error: unexpected opcode"},
	{ErrCatastrophic, 0, 2, 0x07, "RDMAP remote operation error: catastrophic for this stream"},
	{ErrCatastrophicGlobal, 0, 2, 0x08, "RDMAP remote operation error: catastrophic for all streams"},
	{ErrOperationCannotInvalidate, 0, 2, 0x09, "RDMAP remote operation error: STag cannot be invalidated"},
	{ErrOperationUnspecified, 0, 2, 0xff, "RDMAP remote operation error: unspecified"},
	{ErrDDPCatastrophic, 1, 0, 0x00, "DDP local catastrophic error"},
	{ErrInvalidSTag, 1, 1, 0x00, "DDP tagged buffer error: invalid STag"},
	{ErrBaseBounds, 1, 1, 0x01, "DDP tagged buffer error: base or bounds violation"},
	{ErrTaggedNotAssociated, 1, 1, 0x02, "DDP tagged buffer error: STag not associated with this stream"},
	{ErrTaggedWrap, 1, 1, 0x03, "DDP tagged buffer error: tagged offset wraps"},
	{ErrTaggedVersion, 1, 1, 0x04, "DDP tagged buffer error: unknown DDP version"},
	{ErrBadQN, 1, 2, 0x01, "DDP untagged buffer error: invalid queue number"},
	{ErrNoBuffer, 1, 2, 0x02, "DDP untagged buffer error: no buffer for the message"},
	{ErrMSNRange, 1, 2, 0x03, "DDP untagged buffer error: message sequence number out of range"},
	{ErrBadMO, 1, 2, 0x04, "DDP untagged buffer error: invalid message offset"},
	{ErrTooLong, 1, 2, 0x05, "DDP untagged buffer error: message too long for its buffer"},
	{ErrUntaggedVersion, 1, 2, 0x06, "DDP untagged buffer error: unknown DDP version"},
	{ErrTCPLost, 2, 0, 0x01, "MPA error: TCP connection lost"},
	{ErrBadCRC, 2, 0, 0x02, "MPA error: CRC mismatch"},
	{ErrMarker, 2, 0, 0x03, "MPA error: marker and ULPDU length do not match"},
	{ErrBadStart, 2, 0, 0x04, "MPA error: invalid Request or Reply frame"},
	{ErrMPALocalCatastrophic, 2, 0, 0x05, "MPA error: local catastrophic"},
	{ErrInsufficientIRD, 2, 0, 0x06, "MPA error: insufficient IRD"},
	{ErrNoRTR, 2, 0, 0x07, "MPA error: no matching RTR"},
}

func TestTermError(t *testing.T) {
	if len(reasons) != len(names) {
		t.Errorf("%d reasons are tested, %d exist", len(reasons), len(names))
	}
	for _, test := range reasons {
		if want := (TermError{test.layer, test.typ, test.code}); *test.err != want {
			t.Errorf("%v is %+v, want %+v", test.err, *test.err, want)
		}
		if test.err.Error() != test.text {
			t.Errorf("text %q, want %q", test.err, test.text)
		}
	}
}

func TestTermErrorIs(t *testing.T) {
	for _, a := range reasons {
		same := TermError{a.layer, a.typ, a.code}
		for _, err := range []error{a.err, same, &same, fmt.Errorf("stream: %w", a.err), fmt.Errorf("stream: %w", same)} {
			for _, b := range reasons {
				if errors.Is(err, b.err) != (a.err == b.err) || errors.Is(err, *b.err) != (a.err == b.err) {
					t.Errorf("%v (%T) against %v", err, err, b.err)
				}
			}
			if errors.Is(err, ErrKey) || errors.Is(err, (*TermError)(nil)) {
				t.Errorf("%v (%T) is any error", err, err)
			}
		}
	}
}

// Every value that fits on the wire has a text, a registered one its own.
func TestTermErrorText(t *testing.T) {
	known := map[TermError]bool{}
	for _, test := range reasons {
		known[*test.err] = true
	}
	for i := range 1 << 16 {
		e := TermError{uint8(i >> 12), uint8(i >> 8 & 0x0f), uint8(i)}
		catastrophic := e.Layer < 2 && e.Type == 0 // whatever the code
		if text := e.Error(); strings.Contains(text, "unknown error") == (known[e] || catastrophic) || text == "" {
			t.Errorf("%+v: %q", e, text)
		}
	}
}

const (
	taggedHeader   = "8142 00001234 0000000000005678"
	untaggedHeader = "4143 00000000 00000000 00000009 00000000"
	readReqHeader  = "4141 00000000 00000001 00000002 00000000"
	readReq        = "00000011 0000000000000022 00000033 00000044 0000000000000055"
)

func TestTerminate(t *testing.T) {
	for _, test := range []struct {
		name     string
		straight string
		siw      string // the same message from siw, if it would say so
		err      *TermError
		segLen   int // -1: none
		ddp      string
		rdmap    string
	}{
		{"no header", "20 02 00 00", "02 02 00 00", ErrBadCRC, -1, "", ""},
		{"only siw makes sense", "12 06 00 00", "21 06 00 00", ErrUntaggedVersion, -1, "", ""},
		{"catastrophic for all streams", "02 08 00 00", "20 08 00 00", ErrCatastrophicGlobal, -1, "", ""},
		{"same either way", "11 04 00 00", "", ErrTaggedVersion, -1, "", ""},
		{"local catastrophic", "00 00 00 00", "", ErrLocalCatastrophic, -1, "", ""},
		{"ambiguous without headers", "20 06 00 00", "", ErrInsufficientIRD, -1, "", ""},
		{"tagged", "11 01 c0 00 0594" + taggedHeader, "11 01 03 00 0594" + taggedHeader, ErrBaseBounds, 0x594, taggedHeader, ""},
		{"untagged", "12 02 c0 00 0022" + untaggedHeader, "21 02 03 00 0022" + untaggedHeader, ErrNoBuffer, 0x22, untaggedHeader, ""},
		{"Read Request", "01 02 e0 00 002e" + readReqHeader + readReq, "10 02 07 00 002e" + readReqHeader + readReq,
			ErrRemoteAccess, 46, readReqHeader, readReq},
		{"length only", "02 07 80 00 ffff", "20 07 01 00 ffff", ErrCatastrophic, 65535, "", ""},
		{"header without length", "12 04 40 00" + untaggedHeader, "21 04 02 00" + untaggedHeader, ErrBadMO, -1, untaggedHeader, ""},
		{"RDMAP header only", "01 01 20 00" + readReq, "10 01 04 00" + readReq, ErrRemoteBounds, -1, "", readReq},
	} {
		t.Run(test.name, func(t *testing.T) {
			check := func(wire []byte, siw bool) {
				m, err := ParseTerminate(append(wire[:len(wire):len(wire)], 0xaa))
				if err != nil || m.Err != *test.err || m.Siw != siw ||
					m.HasSegLen != (test.segLen >= 0) ||
					!bytes.Equal(m.DDP, unhex(t, test.ddp)) || !bytes.Equal(m.RDMAP, unhex(t, test.rdmap)) {
					t.Errorf("% x: %+v, %v", wire, m, err)
				}
				if m.HasSegLen && int(m.SegLen) != test.segLen {
					t.Errorf("% x: segment of %d bytes, want %d", wire, m.SegLen, test.segLen)
				}
				for n := range wire {
					m, err := ParseTerminate(wire[:n])
					if !errors.Is(err, ErrTerminateLen) || n >= 4 && m.Err != *test.err {
						t.Errorf("% x, cut to %d bytes: %+v, %v", wire, n, m, err)
					}
				}
			}
			straight := unhex(t, test.straight)
			check(straight, false)
			if test.siw != "" {
				check(unhex(t, test.siw), true)
			}

			m := TermMsg{Err: *test.err, DDP: unhex(t, test.ddp), RDMAP: unhex(t, test.rdmap)}
			if test.segLen >= 0 {
				m.HasSegLen, m.SegLen = true, uint16(test.segLen)
			}
			if got := m.Append([]byte("in front")); !bytes.Equal(got, append([]byte("in front"), straight...)) {
				t.Errorf("encoded % x, want % x", got, straight)
			}
		})
	}
}

// siw marks the headers of an erroneous segment in its own bit order; flags of
// both orders together are the RFC's, the rest of that octet is reserved.
func TestTerminateMixedFlags(t *testing.T) {
	m, err := ParseTerminate(unhex(t, "12 02 87 00 0022"))
	if err != nil || m.Siw || m.Err != *ErrNoBuffer || m.SegLen != 0x22 || m.DDP != nil || m.RDMAP != nil {
		t.Errorf("%+v, %v", m, err)
	}
}
