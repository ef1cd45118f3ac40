package smbdpeer

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// vector returns a block of hexadecimal bytes of docs/protocol.md by its name.
func vector(t *testing.T, name string) []byte {
	t.Helper()
	doc, err := os.ReadFile("../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, found := strings.Cut(string(doc), "```hex "+name+"\n")
	if !found {
		t.Fatalf("the document has no vector %s", name)
	}
	block, _, _ = strings.Cut(block, "```")
	var digits strings.Builder
	for line := range strings.Lines(block) {
		text, _, _ := strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(text), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The encoders write what docs/protocol.md shows, and the decoders read it.
func TestProtocolDocVectors(t *testing.T) {
	request := NegotiateRequest{MinVersion: Version, MaxVersion: Version, CreditsRequested: 255,
		PreferredSendSize: 1364, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20}
	response := NegotiateResponse{MinVersion: Version, MaxVersion: Version, NegotiatedVersion: Version,
		CreditsRequested: 255, CreditsGranted: 32, MaxReadWriteSize: 8 << 20,
		PreferredSendSize: 1364, MaxReceiveSize: 1364, MaxFragmentedSize: 1 << 20}
	private := PrivateData{IRD: 16, ORD: 8, Rdmanet: true, Features: FeatureFIN, MaxReceiveSize: 8192}
	early, probed := private, private
	early.Features |= FeatureEarly
	probed.Features |= FeatureNoEmptyRead | FeatureProbeTarget
	target := ProbeTarget{Addr: 0x7fc13c5e1000, Key: 0x2ba401}
	for name, encoded := range map[string][]byte{
		"private-rdmanet":       private.Append(nil),
		"private-plain":         PrivateData{IRD: 32, ORD: 1}.Append(nil),
		"private-early-request": append(request.Append(early.Append(nil)), 4, 0),
		"private-probe-target":  target.Append(probed.Append(nil)),
		"negotiate-request":     request.Append(nil),
		"negotiate-response":    response.Append(nil),
		"negotiate-refusal":     Refusal(StatusNotSupported).Append(nil),
		"segment-single": append(DataTransfer{CreditsRequested: 255, CreditsGranted: 4, DataOffset: PayloadOffset,
			DataLength: 11}.Append(nil), "hello, rdma"...),
		"segment-first":   DataTransfer{CreditsRequested: 255, RemainingDataLength: 2660, DataOffset: PayloadOffset, DataLength: 1340}.Append(nil),
		"large-grant":     DataTransfer{CreditsRequested: 255, CreditsGranted: 4, Flags: FlagLarge}.Append(nil),
		"empty-grant":     DataTransfer{CreditsRequested: 255, CreditsGranted: 16}.Append(nil),
		"keepalive-probe": DataTransfer{CreditsRequested: 255, Flags: FlagResponseRequested}.Append(nil),
		"fin":             DataTransfer{CreditsRequested: 255, Flags: FlagFIN}.Append(nil),
		"message-empty":   DataTransfer{CreditsRequested: 255, Flags: FlagEmptyMessage}.Append(nil),
		"message-piece": append(DataTransfer{CreditsRequested: 255, Flags: FlagExpedited | FlagPartial, DataOffset: PayloadOffset,
			DataLength: 3}.Append(nil), "urg"...),
	} {
		if want := vector(t, name); !bytes.Equal(encoded, want) {
			t.Errorf("%s in the document:\n% x, encoded:\n% x", name, want, encoded)
		}
	}
	if m, err := ParseNegotiateRequest(vector(t, "negotiate-request")); m != request || err != nil {
		t.Errorf("request: %+v, %v", m, err)
	}
	if m, err := ParseNegotiateResponse(vector(t, "negotiate-response")); m != response || err != nil {
		t.Errorf("response: %+v, %v", m, err)
	}
	if p := ParsePrivateData(vector(t, "private-rdmanet")); p != private {
		t.Errorf("private data: %+v", p)
	}
	if m, granted, ok := EarlyRequest(vector(t, "private-early-request")); m != request || granted != 4 || !ok {
		t.Errorf("early request: %+v, %d, %v", m, granted, ok)
	}
	if p, ok := ParseProbeTarget(vector(t, "private-probe-target"), EarlyRequestLen); p != target || !ok {
		t.Errorf("probe target: %+v, %v", p, ok)
	}
	if h, payload, err := ParseDataTransfer(vector(t, "segment-single")); h.CreditsGranted != 4 || string(payload) != "hello, rdma" || err != nil {
		t.Errorf("segment: %+v, %q, %v", h, payload, err)
	}
}

// So do those of transfer headers.
func TestProtocolDocTransfers(t *testing.T) {
	for name, h := range map[string]Transfer{
		"transfer-offer":    {Kind: Offer, ID: 7, Addr: 0x7fc13c5e1000, Key: 0x2ba401, Length: 100000},
		"transfer-done":     {Kind: Done, ID: 7, Length: 100000},
		"transfer-request":  {Kind: Request, ID: 7, Length: 100000},
		"transfer-grant":    {Kind: Grant, ID: 7, Addr: 0x7f5518200000, Key: 0x11c302, Length: 65536},
		"transfer-written":  {Kind: Written, ID: 7, Length: 65536},
		"transfer-withdraw": {Kind: Withdraw, Flags: TransferCut, ID: 7},
		"transfer-end":      {Kind: Written, Flags: TransferEnd, ID: 7},
	} {
		var payload []byte
		if h.Kind == Offer {
			payload = make([]byte, 1308) // which the document leaves out
		}
		encoded := h.MessageIn(DataTransfer{CreditsRequested: 255, CreditsGranted: 1}, payload)
		if want := vector(t, name); !bytes.Equal(encoded[:TransferPayloadOffset], want) {
			t.Errorf("%s in the document:\n% x, encoded:\n% x", name, want, encoded[:TransferPayloadOffset])
		}
		if got, err := ParseTransfer(encoded); got != h || err != nil {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// A message can be of any size, whatever its header says.
func TestMessageOfAnySize(t *testing.T) {
	h := DataTransfer{CreditsRequested: 1, CreditsGranted: 2, Flags: 3, RemainingDataLength: 4, DataOffset: 25, DataLength: 1 << 31}
	for _, size := range []int{0, 19, 20, 100} {
		b := h.Message(size)
		if len(b) != size {
			t.Fatalf("%d bytes for %d", len(b), size)
		}
		want := []byte{1, 0, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 25, 0, 0, 0, 0, 0, 0, 0x80}
		for i := 20; i < size; i++ {
			want = append(want, byte(i))
		}
		if !bytes.Equal(b, want[:size]) {
			t.Errorf("% x", b)
		}
	}
}
