package rdmanet

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"
	"testing"

	"github.com/rdmanet/rdmanet/internal/udconn"
)

// docVectors returns the blocks of docs/protocol.md that are marked as vectors,
// by name, without their comments.
func docVectors(t *testing.T) map[string][]byte {
	t.Helper()
	doc, err := os.ReadFile("docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	vectors := make(map[string][]byte)
	var name string
	var hexBytes strings.Builder
	for line := range strings.Lines(string(doc)) {
		line = strings.TrimRight(line, "\n")
		fence, inside := strings.CutPrefix(line, "```")
		switch {
		case inside && name == "":
			marked, ok := strings.CutPrefix(fence, "hex ")
			if !ok {
				t.Fatalf("a fenced block that is no vector: %q", line)
			}
			name = marked
			hexBytes.Reset()
		case inside:
			if vectors[name] != nil {
				t.Fatalf("two vectors named %s", name)
			}
			vectors[name] = unhex(t, hexBytes.String())
			name = ""
		case name != "":
			text, _, _ := strings.Cut(line, "#")
			hexBytes.WriteString(text)
		}
	}
	if name != "" {
		t.Fatalf("vector %s has no end", name)
	}
	return vectors
}

// docLimits are those of both ends in section 2 of the document.
var docLimits = limits{
	maxSend: 1364, maxReceive: 8192, maxFragmented: 1 << 20,
	creditsRequested: 255, creditsGranted: 255, maxReadWrite: 8 << 20,
}

func TestProtocolDocVectors(t *testing.T) {
	segment := func(h segmentHeader, payload string) []byte {
		b := make([]byte, dataOffset)
		return append(b[:h.put(b)], payload...)
	}
	request, response, refused := make([]byte, negotiateRequestLen), make([]byte, negotiateResponseLen), make([]byte, negotiateResponseLen)
	req := docLimits.request()
	req.put(request)
	resp := answer(t, docLimits, req, 32)
	resp.put(response)
	newer := req
	newer.MinVersion, newer.MaxVersion = 0x0200, 0x0200
	b := make([]byte, negotiateRequestLen)
	_, no, _, _ := docLimits.acceptRequest(b[:newer.put(b)])
	no.put(refused)

	transfer := func(h transferHeader, payload int) []byte {
		b := make([]byte, transferOffset)
		(&segmentHeader{CreditsRequested: 255, CreditsGranted: 1, DataLength: uint32(payload)}).putWith(&h, b)
		return b
	}

	want := map[string][]byte{
		"private-rdmanet": privateData{ird: 16, ord: 8, rdmanet: true, features: featureFIN, maxReceive: 8192}.append(nil),
		"private-early-request": append(append(privateData{ird: 16, ord: 8, rdmanet: true, features: featureFIN | featureEarly, maxReceive: 8192}.append(nil),
			request...), wireGrant(4)...),
		"private-probe-target": probeTarget{addr: 0x7fc13c5e1000, key: 0x2ba401}.append(privateData{ird: 16, ord: 8, rdmanet: true,
			features: featureFIN | featureNoEmptyRead | featureProbeTarget, maxReceive: 8192}.append(nil)),
		"private-plain":      privateData{ird: 32, ord: 1}.append(nil),
		"negotiate-request":  request,
		"negotiate-response": response,
		"negotiate-refusal":  refused,
		"segment-single":     segment(segmentHeader{CreditsRequested: 255, CreditsGranted: 4, DataOffset: dataOffset, DataLength: 11}, "hello, rdma"),
		"segment-first": segment(segmentHeader{
			CreditsRequested: 255, Remaining: 4000 - uint32(segmentData(4000, 1364)),
			DataOffset: dataOffset, DataLength: uint32(segmentData(4000, 1364)),
		}, ""),
		"large-grant":     segment(segmentHeader{CreditsRequested: 255, CreditsGranted: 4, Flags: flagLarge}, ""),
		"empty-grant":     segment(segmentHeader{CreditsRequested: 255, CreditsGranted: 16}, ""),
		"keepalive-probe": segment(segmentHeader{CreditsRequested: 255, Flags: flagResponseRequested}, ""),
		"transfer-offer": transfer(transferHeader{Kind: transferOffer, ID: 7, Addr: 0x7fc13c5e1000, Key: 0x2ba401, Length: 100000},
			segmentData(4000, 1364-transferHeaderLen)),
		"transfer-done":      transfer(transferHeader{Kind: transferDone, ID: 7, Length: 100000}, 0),
		"transfer-request":   transfer(transferHeader{Kind: transferRequest, ID: 7, Length: 100000}, 0),
		"transfer-grant":     transfer(transferHeader{Kind: transferGrant, ID: 7, Addr: 0x7f5518200000, Key: 0x11c302, Length: 65536}, 0),
		"transfer-written":   transfer(transferHeader{Kind: transferWritten, ID: 7, Length: 65536}, 0),
		"transfer-withdraw":  transfer(transferHeader{Kind: transferWithdraw, Flags: transferCut, ID: 7}, 0),
		"transfer-end":       transfer(transferHeader{Kind: transferWritten, Flags: transferEnd, ID: 7}, 0),
		"message-piece":      segment(segmentHeader{CreditsRequested: 255, Flags: flagExpedited | flagPartial, DataOffset: dataOffset, DataLength: 3}, "urg"),
		"message-empty":      segment(segmentHeader{CreditsRequested: 255, Flags: flagEmpty}, ""),
		"fin":                segment(segmentHeader{CreditsRequested: 255, Flags: flagFIN}, ""),
		"datagram-private":   udconn.PrivateData{Port: 9053, QPN: 18}.Append(nil),
		"datagram-immediate": binary.BigEndian.AppendUint32(nil, udconn.Immediate(9053)),
		"group-immediate":    binary.BigEndian.AppendUint32(nil, udconn.GroupImmediate(9053, 7777)),
	}
	got := docVectors(t)
	for name, bytesWanted := range want {
		if !bytes.Equal(got[name], bytesWanted) {
			t.Errorf("%s in the document:\n% x, encoded:\n% x", name, got[name], bytesWanted)
		}
	}
	for name := range got {
		if want[name] == nil {
			t.Errorf("nothing encodes %s", name)
		}
	}
}

// The vectors mean to a receiver what the document says of them.
func TestProtocolDocVectorsDecode(t *testing.T) {
	v := docVectors(t)
	if p := parsePrivate(v["private-rdmanet"]); !p.rdmanet || p.features&featureFIN == 0 || p.maxReceive != 8192 {
		t.Errorf("private-rdmanet: %+v", p)
	}
	if p := parseProbeTarget(v["private-probe-target"], earlyRequestLen); p == nil || *p != (probeTarget{addr: 0x7fc13c5e1000, key: 0x2ba401}) {
		t.Errorf("private-probe-target: %+v", p)
	}
	if p := parsePrivate(v["private-plain"]); p != (privateData{ird: 32, ord: 1}) {
		t.Errorf("private-plain: %+v", p)
	}
	a, err := docLimits.acceptResponse(v["negotiate-response"])
	want := agreement{
		maxSend: 1364, maxReceive: 1364, maxFragmentedSend: 1 << 20, maxFragmentedReceive: 1 << 20,
		sendCredits: 32, receiveCreditTarget: 255, maxReadWrite: 8 << 20,
	}
	if err != nil || a != want {
		t.Errorf("negotiate-response: %+v, %v; want %+v", a, err, want)
	}
	if _, err := docLimits.acceptResponse(v["negotiate-refusal"]); err != statusError(statusNotSupported) {
		t.Errorf("negotiate-refusal: %v", err)
	}
	r := reassembler{max: 1 << 20, fin: true, messages: true}
	if _, last, err := r.accept(&segmentHeader{Flags: flagEmpty}); !last || err != nil {
		t.Errorf("an empty message: last %v, %v", last, err)
	}
	pieces := r
	for _, name := range []string{"message-piece", "message-empty"} {
		var h segmentHeader
		_, err := h.parse(v[name])
		if err == nil {
			h.Flags |= flagExpedited // an empty one that ends the piece's message is
			_, _, err = pieces.accept(&h)
		}
		if open := name == "message-piece"; err != nil || pieces.open() != open {
			t.Errorf("%s: open %v, want %v; %v", name, pieces.open(), open, err)
		}
	}
	for _, name := range []string{"segment-single", "empty-grant", "keepalive-probe", "fin"} {
		var h segmentHeader
		payload, err := h.parse(v[name])
		if err == nil {
			_, _, err = r.accept(&h)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if name == "segment-single" && string(payload) != "hello, rdma" {
			t.Errorf("%s: payload %q", name, payload)
		}
	}
	if !r.ended {
		t.Error("fin did not end the stream")
	}
	for name, b := range v {
		kind, ok := strings.CutPrefix(name, "transfer-")
		if !ok {
			continue
		}
		if kind == "offer" {
			b = append(b, make([]byte, 1308)...)
		}
		var h segmentHeader
		var th transferHeader
		if _, err := h.parse(b); err != nil || h.Flags != flagTransfer {
			t.Errorf("%s: %+v, %v", name, h, err)
		}
		if err := th.parse(&h, b); err != nil || th.ID != 7 {
			t.Errorf("%s: %+v, %v", name, th, err)
		}
	}
	if g, ok := udconn.ParsePrivateData(v["datagram-private"]); !ok || g != (udconn.PrivateData{Port: 9053, QPN: 18}) {
		t.Errorf("datagram-private: %+v", g)
	}
	if port, ok := udconn.PortOf(binary.BigEndian.Uint32(v["datagram-immediate"])); !ok || port != 9053 {
		t.Errorf("datagram-immediate: %d", port)
	}
	if from, to, ok := udconn.GroupPorts(binary.BigEndian.Uint32(v["group-immediate"])); !ok || from != 9053 || to != 7777 {
		t.Errorf("group-immediate: %d, %d", from, to)
	}
}
