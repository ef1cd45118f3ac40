package rdmanet

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

// The worked examples of [MS-SMBD] section 4, encoded and decoded field for
// field. The bytes are laid out here by hand from the values printed there.

// unhex reads hexadecimal bytes, spaces where they please.
func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// [MS-SMBD] 4.1, Establishing a Connection: ten credits each way, Sends of
// 1 KiB, messages of 128 KiB.
var (
	exampleRequest = negotiateRequest{
		MinVersion:        0x0100,
		MaxVersion:        0x0100,
		CreditsRequested:  0x000A,
		PreferredSendSize: 0x00000400,
		MaxReceiveSize:    0x00000400,
		MaxFragmentedSize: 0x00020000,
	}
	exampleResponse = negotiateResponse{
		MinVersion:        0x0100,
		MaxVersion:        0x0100,
		NegotiatedVersion: 0x0100,
		CreditsRequested:  0x000A,
		CreditsGranted:    0x000A,
		Status:            0x00000000,
		MaxReadWriteSize:  0x00100000,
		PreferredSendSize: 0x00000400,
		MaxReceiveSize:    0x00000400,
		MaxFragmentedSize: 0x00020000,
	}
	// exampleLimits is an end that has the values of the example. Its
	// messages are as long as the specification demands and no longer, which
	// we do not offer ourselves (see limits.bounded).
	exampleLimits = limits{
		maxSend:          1024,
		maxReceive:       1024,
		maxFragmented:    131072,
		creditsRequested: 10,
		creditsGranted:   10,
		maxReadWrite:     1 << 20,
	}
)

func TestExample41Request(t *testing.T) {
	wire := unhex(t, "0001 0001 0000 0a00 00040000 00040000 00000200")
	b := make([]byte, negotiateRequestLen)
	if got := b[:exampleRequest.put(b)]; !bytes.Equal(got, wire) {
		t.Errorf("encoded as\n% x, want\n% x", got, wire)
	}
	var got negotiateRequest
	if err := got.parse(wire); err != nil || got != exampleRequest {
		t.Errorf("decoded as %+v, %v", got, err)
	}

	offer := exampleLimits.request()
	if offer.MaxFragmentedSize <= exampleRequest.MaxFragmentedSize {
		t.Errorf("we offer the bare minimum: %+v", offer)
	}
	offer.MaxFragmentedSize = exampleRequest.MaxFragmentedSize
	if offer != exampleRequest {
		t.Errorf("request() = %+v, want %+v", offer, exampleRequest)
	}
}

func TestExample41Response(t *testing.T) {
	wire := unhex(t, "0001 0001 0001 0000 0a00 0a00 00000000 00001000 00040000 00040000 00000200")
	b := make([]byte, negotiateResponseLen)
	if got := b[:exampleResponse.put(b)]; !bytes.Equal(got, wire) {
		t.Errorf("encoded as\n% x, want\n% x", got, wire)
	}
	var got negotiateResponse
	if err := got.parse(wire); err != nil || got != exampleResponse {
		t.Errorf("decoded as %+v, %v", got, err)
	}

	resp := answer(t, exampleLimits, exampleRequest, 10)
	if resp.MaxFragmentedSize <= exampleResponse.MaxFragmentedSize {
		t.Errorf("we offer the bare minimum: %+v", resp)
	}
	resp.MaxFragmentedSize = exampleResponse.MaxFragmentedSize
	if resp != exampleResponse {
		t.Errorf("acceptRequest answers %+v, want %+v", resp, exampleResponse)
	}

	a, err := exampleLimits.acceptResponse(wire)
	if err != nil {
		t.Fatal(err)
	}
	want := agreement{
		maxSend: 1024, maxReceive: 1024, maxFragmentedSend: 131072,
		maxFragmentedReceive: exampleLimits.request().MaxFragmentedSize,
		sendCredits:          10, receiveCreditTarget: 10, maxReadWrite: 1 << 20,
	}
	if a != want {
		t.Errorf("agreement %+v, want %+v", a, want)
	}
}

// checkExampleSegment encodes h with a payload of its length and compares with
// header, then decodes what header says.
func checkExampleSegment(t *testing.T, h segmentHeader, header string) {
	t.Helper()
	wire := append(unhex(t, header), bytes.Repeat([]byte{0x5a}, int(h.DataLength))...)
	b := make([]byte, len(wire))
	n := h.put(b)
	copy(b[n:], wire[n:])
	if n+int(h.DataLength) != len(wire) || !bytes.Equal(b, wire) {
		t.Errorf("encoded as\n% x, want\n% x", b[:n], wire[:n])
	}
	var got segmentHeader
	payload, err := got.parse(wire)
	if err != nil || got != h || len(payload) != int(h.DataLength) {
		t.Errorf("decoded as %+v with %d bytes, %v", got, len(payload), err)
	}
}

// [MS-SMBD] 4.1, last step: the initiator's first message grants ten credits
// and asks for ten. The length of the upper layer's request is left open
// there; 102 bytes stand for it.
func TestExample41FirstTransfer(t *testing.T) {
	h := segmentHeader{CreditsRequested: 10, CreditsGranted: 10, DataOffset: 24, DataLength: 102}
	checkExampleSegment(t, h, "0a00 0a00 0000 0000 00000000 18000000 66000000 00000000")
}

// [MS-SMBD] 4.2, a peer transmits 500 bytes in one message, and grants the
// credit that it used up before.
func TestExample42(t *testing.T) {
	h := segmentHeader{CreditsRequested: 0x000A, CreditsGranted: 0x0001, DataOffset: 0x18, DataLength: 0x1F4}
	checkExampleSegment(t, h, "0a00 0100 0000 0000 00000000 18000000 f4010000 00000000")
	if n := segmentData(500, 1024); n != 500 {
		t.Errorf("segmentData(500, 1024) = %d", n)
	}
	r := reassembler{max: 131072}
	if first, last, err := r.accept(&h); !first || !last || err != nil {
		t.Errorf("accept = %v, %v, %v", first, last, err)
	}
}

// [MS-SMBD] 4.3, a peer transmits 64 KiB in fragments of 1024 - 24 bytes. The
// text says 1000 bytes and "MaxReceiveSize - 24" but prints DataLength as
// 0x3F8, 1016, and counts 65 fragments; 1024 - 24 is 0x3E8, and makes 66. We
// take the rule for it: DataOffset and DataLength together within MaxSendSize,
// 3.1.5.4.
func TestExample43(t *testing.T) {
	const length, maxSend = 64 << 10, 1024
	checkExampleSegment(t,
		segmentHeader{CreditsRequested: 10, CreditsGranted: 1, Remaining: length - 1000, DataOffset: 24, DataLength: 1000},
		"0a00 0100 0000 0000 18fc0000 18000000 e8030000 00000000")
	checkExampleSegment(t,
		segmentHeader{CreditsRequested: 10, CreditsGranted: 1, Remaining: length - 2000, DataOffset: 24, DataLength: 1000},
		"0a00 0100 0000 0000 30f80000 18000000 e8030000 00000000")
	checkExampleSegment(t,
		segmentHeader{CreditsRequested: 10, CreditsGranted: 1, DataOffset: 24, DataLength: 536},
		"0a00 0100 0000 0000 00000000 18000000 18020000 00000000")

	r := reassembler{max: 131072}
	sent, segments := 0, 0
	fragment(make([]byte, length), maxSend, func(segment []byte) {
		var h segmentHeader
		if _, err := h.parse(segment); err != nil {
			t.Fatal(err)
		}
		segments++
		sent += int(h.DataLength)
		if len(segment) > maxSend || int(h.Remaining) != length-sent {
			t.Errorf("segment %d: %d bytes, %+v", segments, len(segment), h)
		}
		first, last, err := r.accept(&h)
		if err != nil || first != (segments == 1) || last != (sent == length) {
			t.Errorf("segment %d: accept = %v, %v, %v", segments, first, last, err)
		}
	})
	if segments != 66 || sent != length {
		t.Errorf("%d bytes in %d segments, want %d in 66", sent, segments, length)
	}
}

// [MS-SMBD] 4.4, a peer transmits 1 MiB by RDMA: on our level a message of 500
// bytes with a Buffer Descriptor V1 inside, which we carry unread.
func TestExample44(t *testing.T) {
	descriptor := unhex(t, "12e0bcab00000000 56bc001a 00001000")
	message := make([]byte, 500)
	copy(message[112:], descriptor)
	var got []byte
	fragment(message, 1024, func(segment []byte) {
		var h segmentHeader
		payload, err := h.parse(segment)
		want := segmentHeader{CreditsRequested: 255, DataOffset: 24, DataLength: 500}
		if err != nil || h != want {
			t.Errorf("%+v, %v; want %+v", h, err, want)
		}
		got = append(got, payload...)
	})
	if !bytes.Equal(got, message) {
		t.Error("the message changed")
	}
}
