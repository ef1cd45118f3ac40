package rdmanet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"testing"
)

// testLimits is one end with values that no other end has by chance.
var testLimits = limits{
	maxSend:          4096,
	maxReceive:       8192,
	maxFragmented:    1 << 20,
	creditsRequested: 200,
	creditsGranted:   100,
	maxReadWrite:     8 << 20,
}

// answer is the response of the passive side to req, with receives posted.
func answer(t *testing.T, passive limits, req negotiateRequest, posted uint16) negotiateResponse {
	t.Helper()
	b := make([]byte, negotiateRequestLen)
	_, resp, status, err := passive.acceptRequest(b[:req.put(b)])
	if err != nil || status != statusOK {
		t.Fatalf("acceptRequest(%+v): status %#x, %v", req, status, err)
	}
	resp.CreditsGranted = posted
	return resp
}

func TestNegotiateRequestWire(t *testing.T) {
	m := negotiateRequest{
		MinVersion: 0x0102, MaxVersion: 0x0304, CreditsRequested: 0x0506,
		PreferredSendSize: 0x0708090a, MaxReceiveSize: 0x0b0c0d0e, MaxFragmentedSize: 0x0f101112,
	}
	want := []byte{
		0x02, 0x01, 0x04, 0x03, 0, 0, 0x06, 0x05,
		0x0a, 0x09, 0x08, 0x07, 0x0e, 0x0d, 0x0c, 0x0b, 0x12, 0x11, 0x10, 0x0f,
	}
	b := bytes.Repeat([]byte{0xee}, 24)
	if n := m.put(b); !bytes.Equal(b[:n], want) {
		t.Errorf("put wrote\n% x, want\n% x", b[:n], want)
	}
	if !bytes.Equal(b[20:], []byte{0xee, 0xee, 0xee, 0xee}) {
		t.Error("put wrote behind its end")
	}
	var got negotiateRequest
	if err := got.parse(want); err != nil || got != m {
		t.Errorf("parse = %+v, %v", got, err)
	}
}

func TestNegotiateResponseWire(t *testing.T) {
	m := negotiateResponse{
		MinVersion: 0x0102, MaxVersion: 0x0304, NegotiatedVersion: 0x0506,
		CreditsRequested: 0x0708, CreditsGranted: 0x090a, Status: 0x0b0c0d0e, MaxReadWriteSize: 0x0f101112,
		PreferredSendSize: 0x13141516, MaxReceiveSize: 0x1718191a, MaxFragmentedSize: 0x1b1c1d1e,
	}
	want := []byte{
		0x02, 0x01, 0x04, 0x03, 0x06, 0x05, 0, 0, 0x08, 0x07, 0x0a, 0x09,
		0x0e, 0x0d, 0x0c, 0x0b, 0x12, 0x11, 0x10, 0x0f,
		0x16, 0x15, 0x14, 0x13, 0x1a, 0x19, 0x18, 0x17, 0x1e, 0x1d, 0x1c, 0x1b,
	}
	b := bytes.Repeat([]byte{0xee}, 36)
	if n := m.put(b); !bytes.Equal(b[:n], want) {
		t.Errorf("put wrote\n% x, want\n% x", b[:n], want)
	}
	if !bytes.Equal(b[32:], []byte{0xee, 0xee, 0xee, 0xee}) {
		t.Error("put wrote behind its end")
	}
	var got negotiateResponse
	if err := got.parse(want); err != nil || got != m {
		t.Errorf("parse = %+v, %v", got, err)
	}
}

func TestRefusal(t *testing.T) {
	want := make([]byte, 32)
	want[1], want[3] = 1, 1
	binary.LittleEndian.PutUint32(want[12:], 0xC00000BB)
	b := make([]byte, 32)
	m := refusal(statusNotSupported)
	if m.put(b); !bytes.Equal(b, want) {
		t.Errorf("refusal is\n% x, want\n% x", b, want)
	}
	_, err := testLimits.acceptResponse(b)
	if err != statusError(statusNotSupported) {
		t.Errorf("acceptResponse(refusal) = %v", err)
	}
}

func TestStatusErrorNamesTheStatus(t *testing.T) {
	for status, want := range map[uint32]string{
		statusNotSupported:          "smb direct: negotiation refused by the peer: STATUS_NOT_SUPPORTED (0xc00000bb)",
		statusInsufficientResources: "smb direct: negotiation refused by the peer: STATUS_INSUFFICIENT_RESOURCES (0xc000009a); it lacks memory or queues, which a limit on locked memory may be the cause of",
		0xC0000022:                  "smb direct: negotiation refused by the peer: status (0xc0000022)",
	} {
		if got := statusError(status).Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestRequestOffersLimits(t *testing.T) {
	want := negotiateRequest{
		MinVersion: 0x0100, MaxVersion: 0x0100, CreditsRequested: 200,
		PreferredSendSize: 4096, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20,
	}
	if got := testLimits.request(); got != want {
		t.Errorf("request = %+v, want %+v", got, want)
	}
}

// ksmbd refuses a peer that offers exactly what the specification asks for, so
// no limits, however small or large, may lead to such an offer.
func TestOffersLieAboveTheMinima(t *testing.T) {
	for _, size := range []uint32{0, 1, 24, 127, 128, 129, 131071, 131072, 131073, 1 << 30, 1<<30 + 1, math.MaxUint32} {
		l := limits{maxSend: size, maxReceive: size, maxFragmented: size}
		req := l.request()
		if req.CreditsRequested == 0 {
			t.Errorf("%d: no credits requested", size)
		}
		if req.PreferredSendSize < 128 || req.MaxReceiveSize <= 128 || req.MaxFragmentedSize <= 131072 {
			t.Errorf("%d: offers too little: %+v", size, req)
		}
		if max(req.PreferredSendSize, req.MaxReceiveSize, req.MaxFragmentedSize) > sizeCeiling {
			t.Errorf("%d: offers too much: %+v", size, req)
		}
		resp := answer(t, l, testLimits.request(), 1)
		if resp.CreditsRequested == 0 || resp.MaxReceiveSize <= 128 || resp.MaxFragmentedSize <= 131072 {
			t.Errorf("%d: answers %+v", size, resp)
		}
	}
}

func TestAcceptRequest(t *testing.T) {
	type outcome int
	const (
		agreed outcome = iota
		refused
		terminated
	)
	// change returns a good request, changed.
	change := func(f func(*negotiateRequest)) []byte {
		m := negotiateRequest{
			MinVersion: 0x0100, MaxVersion: 0x0100, CreditsRequested: 10,
			PreferredSendSize: 1024, MaxReceiveSize: 1024, MaxFragmentedSize: 131072,
		}
		f(&m)
		b := make([]byte, negotiateRequestLen)
		m.put(b)
		return b
	}
	good := change(func(*negotiateRequest) {})
	reserved := bytes.Clone(good)
	reserved[4], reserved[5] = 0xff, 0xff
	for _, tt := range []struct {
		name string
		msg  []byte
		want outcome
		err  error
	}{
		{"good", good, agreed, nil},
		{"nothing", nil, terminated, errRequestShort},
		{"one byte short", good[:19], terminated, errRequestShort},
		{"longer than the structure", append(bytes.Clone(good), make([]byte, 492)...), agreed, nil},
		{"two of them", append(bytes.Clone(good), good...), agreed, nil},
		{"reserved bits", reserved, agreed, nil},

		{"versions 0 to 0xffff", change(func(m *negotiateRequest) { m.MinVersion, m.MaxVersion = 0, 0xffff }), agreed, nil},
		{"versions up to 1.0", change(func(m *negotiateRequest) { m.MinVersion = 0x00ff }), agreed, nil},
		{"versions from 1.0", change(func(m *negotiateRequest) { m.MaxVersion = 0x0200 }), agreed, nil},
		{"newer versions only", change(func(m *negotiateRequest) { m.MinVersion, m.MaxVersion = 0x0101, 0x0200 }), refused, errVersion},
		{"older versions only", change(func(m *negotiateRequest) { m.MinVersion, m.MaxVersion = 0, 0x00ff }), refused, errVersion},
		{"versions reversed", change(func(m *negotiateRequest) { m.MinVersion, m.MaxVersion = 0x0200, 0x0000 }), refused, errVersion},
		{"version before all else", change(func(m *negotiateRequest) { *m = negotiateRequest{MinVersion: 0x0200, MaxVersion: 0x0200} }), refused, errVersion},

		{"no credits", change(func(m *negotiateRequest) { m.CreditsRequested = 0 }), terminated, errCreditsRequested},
		{"one credit", change(func(m *negotiateRequest) { m.CreditsRequested = 1 }), agreed, nil},
		{"all credits", change(func(m *negotiateRequest) { m.CreditsRequested = 65535 }), agreed, nil},
		{"receives nothing", change(func(m *negotiateRequest) { m.MaxReceiveSize = 0 }), terminated, errReceiveSize},
		{"receives 127", change(func(m *negotiateRequest) { m.MaxReceiveSize = 127 }), terminated, errReceiveSize},
		{"receives 128", change(func(m *negotiateRequest) { m.MaxReceiveSize = 128 }), agreed, nil},
		{"receives 2^32-1", change(func(m *negotiateRequest) { m.MaxReceiveSize = math.MaxUint32 }), agreed, nil},
		{"fragments to 0", change(func(m *negotiateRequest) { m.MaxFragmentedSize = 0 }), terminated, errFragmentedSize},
		{"fragments to 131071", change(func(m *negotiateRequest) { m.MaxFragmentedSize = 131071 }), terminated, errFragmentedSize},
		{"fragments to 2^32-1", change(func(m *negotiateRequest) { m.MaxFragmentedSize = math.MaxUint32 }), agreed, nil},
		{"prefers to send 0", change(func(m *negotiateRequest) { m.PreferredSendSize = 0 }), agreed, nil},
		{"prefers to send 2^32-1", change(func(m *negotiateRequest) { m.PreferredSendSize = math.MaxUint32 }), agreed, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, resp, status, err := testLimits.acceptRequest(tt.msg)
			if err != tt.err {
				t.Errorf("error %v, want %v", err, tt.err)
			}
			switch tt.want {
			case agreed:
				if status != statusOK || resp.Status != statusOK || a == (agreement{}) {
					t.Errorf("not agreed: %+v, %+v, status %#x", a, resp, status)
				}
			case refused:
				if status != statusNotSupported || resp != refusal(statusNotSupported) || a != (agreement{}) {
					t.Errorf("not refused: %+v, %+v, status %#x", a, resp, status)
				}
			case terminated:
				if status != statusOK || resp != (negotiateResponse{}) || a != (agreement{}) {
					t.Errorf("not terminated: %+v, %+v, status %#x", a, resp, status)
				}
			}
		})
	}
}

func TestAcceptRequestAgreement(t *testing.T) {
	b := make([]byte, negotiateRequestLen)
	for _, tt := range []struct {
		name string
		own  limits
		req  negotiateRequest
		want agreement
		resp negotiateResponse
	}{
		{
			name: "the smaller of both",
			own:  testLimits,
			req: negotiateRequest{
				MinVersion: 0x0100, MaxVersion: 0x0100, CreditsRequested: 10,
				PreferredSendSize: 1364, MaxReceiveSize: 2048, MaxFragmentedSize: 173910,
			},
			want: agreement{
				maxSend: 2048, maxReceive: 1364, maxFragmentedSend: 173910, maxFragmentedReceive: 1 << 20,
				receiveCreditTarget: 10, maxReadWrite: 8 << 20,
			},
			resp: negotiateResponse{
				MinVersion: 0x0100, MaxVersion: 0x0100, NegotiatedVersion: 0x0100,
				CreditsRequested: 200, MaxReadWriteSize: 8 << 20,
				PreferredSendSize: 2048, MaxReceiveSize: 1364, MaxFragmentedSize: 1 << 20,
			},
		},
		{
			name: "a peer that offers all there is gets ours",
			own:  testLimits,
			req: negotiateRequest{
				MinVersion: 0x0100, MaxVersion: 0x0100, CreditsRequested: math.MaxUint16,
				PreferredSendSize: math.MaxUint32, MaxReceiveSize: math.MaxUint32, MaxFragmentedSize: math.MaxUint32,
			},
			want: agreement{
				maxSend: 4096, maxReceive: 8192, maxFragmentedSend: sizeCeiling, maxFragmentedReceive: 1 << 20,
				receiveCreditTarget: 100, maxReadWrite: 8 << 20,
			},
			resp: negotiateResponse{
				MinVersion: 0x0100, MaxVersion: 0x0100, NegotiatedVersion: 0x0100,
				CreditsRequested: 200, MaxReadWriteSize: 8 << 20,
				PreferredSendSize: 4096, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20,
			},
		},
		{
			name: "a peer that sends next to nothing is still given 128",
			own:  limits{maxSend: 1024, maxReceive: 1024, maxFragmented: 1 << 20, creditsRequested: 1},
			req: negotiateRequest{
				MinVersion: 0x0100, MaxVersion: 0x0100, CreditsRequested: 65535,
				PreferredSendSize: 1, MaxReceiveSize: 128, MaxFragmentedSize: 131072,
			},
			want: agreement{
				maxSend: 128, maxReceive: 128, maxFragmentedSend: 131072, maxFragmentedReceive: 1 << 20,
				receiveCreditTarget: 65535,
			},
			resp: negotiateResponse{
				MinVersion: 0x0100, MaxVersion: 0x0100, NegotiatedVersion: 0x0100,
				CreditsRequested: 1, PreferredSendSize: 128, MaxReceiveSize: 128, MaxFragmentedSize: 1 << 20,
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, resp, status, err := tt.own.acceptRequest(b[:tt.req.put(b)])
			if err != nil || status != statusOK {
				t.Fatalf("status %#x, %v", status, err)
			}
			if a != tt.want {
				t.Errorf("agreement\n%+v, want\n%+v", a, tt.want)
			}
			if resp != tt.resp {
				t.Errorf("response\n%+v, want\n%+v", resp, tt.resp)
			}
		})
	}
}

func TestAcceptResponse(t *testing.T) {
	// change returns a good response, changed.
	change := func(f func(*negotiateResponse)) []byte {
		m := negotiateResponse{
			MinVersion: 0x0100, MaxVersion: 0x0100, NegotiatedVersion: 0x0100,
			CreditsRequested: 10, CreditsGranted: 20, MaxReadWriteSize: 1 << 20,
			PreferredSendSize: 1364, MaxReceiveSize: 1364, MaxFragmentedSize: 131072,
		}
		f(&m)
		b := make([]byte, negotiateResponseLen)
		m.put(b)
		return b
	}
	good := change(func(*negotiateResponse) {})
	reserved := bytes.Clone(good)
	reserved[6], reserved[7] = 0xff, 0xff
	want := agreement{
		maxSend: 1364, maxReceive: 1364, maxFragmentedSend: 131072, maxFragmentedReceive: 1 << 20,
		sendCredits: 20, receiveCreditTarget: 10, maxReadWrite: 1 << 20,
	}
	// but returns want, changed.
	but := func(f func(*agreement)) agreement { a := want; f(&a); return a }

	for _, tt := range []struct {
		name string
		msg  []byte
		want agreement
		err  error
	}{
		{"good", good, want, nil},
		{"nothing", nil, agreement{}, errResponseShort},
		{"length of a request", good[:20], agreement{}, errResponseShort},
		{"one byte short", good[:31], agreement{}, errResponseShort},
		{"longer than the structure", append(bytes.Clone(good), 1, 2, 3), want, nil},
		{"reserved bits", reserved, want, nil},
		{"versions offered do not matter", change(func(m *negotiateResponse) { m.MinVersion, m.MaxVersion = 0, 0 }), want, nil},

		{"version 0", change(func(m *negotiateResponse) { m.NegotiatedVersion = 0 }), agreement{}, errNegotiated},
		{"version 1.1", change(func(m *negotiateResponse) { m.NegotiatedVersion = 0x0101 }), agreement{}, errNegotiated},
		{"receives 127", change(func(m *negotiateResponse) { m.MaxReceiveSize = 127 }), agreement{}, errReceiveSize},
		{"receives 128", change(func(m *negotiateResponse) { m.MaxReceiveSize = 128 }), but(func(a *agreement) { a.maxSend = 128 }), nil},
		{"receives 2^32-1", change(func(m *negotiateResponse) { m.MaxReceiveSize = math.MaxUint32 }), but(func(a *agreement) { a.maxSend = 4096 }), nil},
		{"fragments to 131071", change(func(m *negotiateResponse) { m.MaxFragmentedSize = 131071 }), agreement{}, errFragmentedSize},
		{"fragments to 2^32-1", change(func(m *negotiateResponse) { m.MaxFragmentedSize = math.MaxUint32 }), but(func(a *agreement) { a.maxFragmentedSend = sizeCeiling }), nil},
		{"no credits granted", change(func(m *negotiateResponse) { m.CreditsGranted = 0 }), agreement{}, errCreditsGranted},
		{"one credit granted", change(func(m *negotiateResponse) { m.CreditsGranted = 1 }), but(func(a *agreement) { a.sendCredits = 1 }), nil},
		{"all credits granted", change(func(m *negotiateResponse) { m.CreditsGranted = 65535 }), but(func(a *agreement) { a.sendCredits = 65535 }), nil},
		{"no credits requested", change(func(m *negotiateResponse) { m.CreditsRequested = 0 }), agreement{}, errCreditsRequested},
		{"all credits requested", change(func(m *negotiateResponse) { m.CreditsRequested = 65535 }), but(func(a *agreement) { a.receiveCreditTarget = 100 }), nil},
		{"prefers to send 0", change(func(m *negotiateResponse) { m.PreferredSendSize = 0 }), but(func(a *agreement) { a.maxReceive = 128 }), nil},
		{"prefers to send our limit", change(func(m *negotiateResponse) { m.PreferredSendSize = 8192 }), but(func(a *agreement) { a.maxReceive = 8192 }), nil},
		{"prefers to send more than our limit", change(func(m *negotiateResponse) { m.PreferredSendSize = 8193 }), agreement{}, errPreferredToSend},
		{"prefers to send 2^32-1", change(func(m *negotiateResponse) { m.PreferredSendSize = math.MaxUint32 }), agreement{}, errPreferredToSend},
		{"no RDMA", change(func(m *negotiateResponse) { m.MaxReadWriteSize = 0 }), but(func(a *agreement) { a.maxReadWrite = 0 }), nil},
		{"RDMA to 2^32-1", change(func(m *negotiateResponse) { m.MaxReadWriteSize = math.MaxUint32 }), but(func(a *agreement) { a.maxReadWrite = 8 << 20 }), nil},
		{"refused", change(func(m *negotiateResponse) { m.Status = statusInsufficientResources }), agreement{}, statusError(statusInsufficientResources)},
		{"any status is a refusal", change(func(m *negotiateResponse) { m.Status = 1 }), agreement{}, statusError(1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := testLimits.acceptResponse(tt.msg)
			if err != tt.err {
				t.Errorf("error %v, want %v", err, tt.err)
			}
			if got != tt.want {
				t.Errorf("agreement\n%+v, want\n%+v", got, tt.want)
			}
		})
	}
}

// checkAgreed fails unless a, of the active side, and p, of the passive side,
// fit each other.
func checkAgreed(t *testing.T, a, p agreement) {
	t.Helper()
	for _, d := range []struct {
		name           string
		send, receive  uint32
		msend, mreceiv uint32
	}{
		{"active to passive", a.maxSend, p.maxReceive, a.maxFragmentedSend, p.maxFragmentedReceive},
		{"passive to active", p.maxSend, a.maxReceive, p.maxFragmentedSend, a.maxFragmentedReceive},
	} {
		if d.send > d.receive {
			t.Errorf("%s: a Send of %d bytes meets a receive of %d", d.name, d.send, d.receive)
		}
		if d.msend > d.mreceiv {
			t.Errorf("%s: a message of %d bytes, reassembled are %d", d.name, d.msend, d.mreceiv)
		}
		if segmentData(1, int(d.send)) < 1 || d.send < minReceiveSize {
			t.Errorf("%s: a Send of %d bytes carries nothing", d.name, d.send)
		}
		if max(d.send, d.receive, d.msend, d.mreceiv) > sizeCeiling {
			t.Errorf("%s: above the ceiling: %+v", d.name, d)
		}
	}
	if a.receiveCreditTarget == 0 || p.receiveCreditTarget == 0 || a.sendCredits == 0 || p.sendCredits != 0 {
		t.Errorf("credits: active %+v, passive %+v", a, p)
	}
}

// Any two ends of ours come to terms, whatever they were configured to.
func TestNegotiateBothWays(t *testing.T) {
	sizes := []uint32{0, 128, 129, 1364, 8192, 131072, 131073, 1 << 20, 1 << 30, math.MaxUint32}
	credits := []uint16{0, 1, 255, 65535}
	var ends []limits
	for i, s := range sizes {
		for j := range sizes {
			c := credits[(i+j)%len(credits)]
			ends = append(ends, limits{
				maxSend: s, maxReceive: sizes[j], maxFragmented: sizes[(i+j)%len(sizes)],
				creditsRequested: c, creditsGranted: credits[j%len(credits)], maxReadWrite: s,
			})
		}
	}
	b := make([]byte, negotiateResponseLen)
	for _, active := range ends {
		for _, passive := range ends {
			req := active.request()
			p, resp, status, err := passive.acceptRequest(b[:req.put(b)])
			if err != nil || status != statusOK {
				t.Fatalf("%+v\nto %+v: %v", active, passive, err)
			}
			resp.CreditsGranted = p.receiveCreditTarget
			a, err := active.acceptResponse(b[:resp.put(b)])
			if err != nil {
				t.Fatalf("%+v\nto %+v: %v", active, passive, err)
			}
			checkAgreed(t, a, p)
			if a.sendCredits != p.receiveCreditTarget {
				t.Errorf("%d credits in hand, %d receives posted", a.sendCredits, p.receiveCreditTarget)
			}
			if t.Failed() {
				t.Fatalf("%+v\nto %+v", active, passive)
			}
		}
	}
}

// A Data Transfer message that comes before the negotiation is no negotiation.
func TestNegotiateFromSegment(t *testing.T) {
	b := make([]byte, 128)
	h := segmentHeader{CreditsRequested: 255, CreditsGranted: 254, DataOffset: 24, DataLength: 104}
	h.put(b)
	if _, _, _, err := testLimits.acceptRequest(b); err == nil {
		t.Error("the passive side takes data for a request")
	}
	if _, err := testLimits.acceptResponse(b); err == nil {
		t.Error("the active side takes data for a response")
	}
}

func TestNegotiateAllocs(t *testing.T) {
	b := make([]byte, negotiateResponseLen)
	n := testing.AllocsPerRun(100, func() {
		req := testLimits.request()
		_, resp, _, err := testLimits.acceptRequest(b[:req.put(b)])
		if err != nil {
			t.Error(err)
		}
		resp.CreditsGranted = 1
		if _, err := testLimits.acceptResponse(b[:resp.put(b)]); err != nil {
			t.Error(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations a negotiation, want none", n)
	}
}

// FuzzNegotiate gives its input to both sides as what the peer said.
func FuzzNegotiate(f *testing.F) {
	f.Fuzz(func(t *testing.T, msg []byte) {
		fuzzRequest(t, msg)
		fuzzResponse(t, msg)
	})
}

// fuzzRequest answers msg and has an end with the limits that msg names take
// the answer.
func fuzzRequest(t *testing.T, msg []byte) {
	var req negotiateRequest
	short := req.parse(msg) != nil
	if short != (len(msg) < 20) {
		t.Fatalf("request of %d bytes: short = %v", len(msg), short)
	}
	p, resp, status, err := testLimits.acceptRequest(msg)
	if err != nil {
		var rule *protocolError
		if !errors.As(err, &rule) || p != (agreement{}) {
			t.Fatalf("acceptRequest = %+v, %v", p, err)
		}
		silent := resp == (negotiateResponse{}) && status == statusOK
		said := resp == refusal(statusNotSupported) && status == statusNotSupported
		if !silent && !said {
			t.Fatalf("neither silent nor a refusal: %+v, status %#x", resp, status)
		}
		return
	}
	b := make([]byte, negotiateResponseLen)
	want := bytes.Clone(msg[:negotiateRequestLen])
	clear(want[4:6]) // Reserved
	if got := b[:req.put(b)]; !bytes.Equal(got, want) {
		t.Fatalf("encoded again:\n% x, want\n% x", got, want)
	}

	peer := limits{
		maxSend: req.PreferredSendSize, maxReceive: req.MaxReceiveSize,
		maxFragmented: req.MaxFragmentedSize, creditsRequested: req.CreditsRequested,
	}
	resp.CreditsGranted = p.receiveCreditTarget
	a, err := peer.acceptResponse(b[:resp.put(b)])
	if err != nil {
		t.Fatalf("%+v does not accept %+v: %v", peer, resp, err)
	}
	checkAgreed(t, a, p)
	if p.maxReceive > testLimits.maxReceive || p.maxSend > testLimits.maxSend ||
		p.receiveCreditTarget > testLimits.creditsGranted {
		t.Fatalf("beyond our limits: %+v", p)
	}
}

// fuzzResponse has the active side judge msg, and checks an agreement against
// what the message says and the limits allow.
func fuzzResponse(t *testing.T, msg []byte) {
	var resp negotiateResponse
	short := resp.parse(msg) != nil
	if short != (len(msg) < 32) {
		t.Fatalf("response of %d bytes: short = %v", len(msg), short)
	}
	a, err := testLimits.acceptResponse(msg)
	if err != nil {
		if a != (agreement{}) {
			t.Fatalf("acceptResponse = %+v, %v", a, err)
		}
		return
	}
	b := make([]byte, negotiateResponseLen)
	want := bytes.Clone(msg[:negotiateResponseLen])
	clear(want[6:8]) // Reserved
	if got := b[:resp.put(b)]; !bytes.Equal(got, want) {
		t.Fatalf("encoded again:\n% x, want\n% x", got, want)
	}
	legal := resp.Status == 0 && resp.NegotiatedVersion == 0x0100 && resp.MaxReceiveSize >= 128 &&
		resp.MaxFragmentedSize >= 131072 && resp.CreditsGranted > 0 && resp.CreditsRequested > 0 &&
		resp.PreferredSendSize <= testLimits.maxReceive
	if !legal {
		t.Fatalf("accepted %+v", resp)
	}
	if a.maxSend > min(testLimits.maxSend, resp.MaxReceiveSize) || a.maxSend < 128 ||
		a.maxReceive > testLimits.maxReceive || a.maxReceive < max(128, resp.PreferredSendSize) ||
		a.maxFragmentedSend > resp.MaxFragmentedSize || a.maxFragmentedReceive != testLimits.maxFragmented ||
		a.sendCredits != resp.CreditsGranted ||
		a.receiveCreditTarget == 0 || a.receiveCreditTarget > min(resp.CreditsRequested, testLimits.creditsGranted) ||
		a.maxReadWrite > min(resp.MaxReadWriteSize, testLimits.maxReadWrite) {
		t.Fatalf("%+v from %+v", a, resp)
	}
}
