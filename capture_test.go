package rdmanet

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/pcaptest"
)

// What Linux puts on the wire: cifs.ko as client and ksmbd as server, SMB
// Direct over siw. The counts were taken with tshark, the digests from the
// files that the guests exchanged.

// sends returns the private data of the MPA frame at the start of stream, and
// the messages that the RDMA Sends behind it carry.
func sends(t *testing.T, stream []byte, reply bool) (private []byte, messages [][]byte) {
	t.Helper()
	n, err := iwarpwire.ParseStartHeader(stream[:iwarpwire.StartLen], reply)
	if err != nil {
		t.Fatal(err)
	}
	n += iwarpwire.StartLen
	start, err := iwarpwire.ParseStart(stream[:n], reply)
	if err != nil {
		t.Fatal(err)
	}
	var message []byte
	for stream = stream[n:]; len(stream) > 0; {
		n := int(binary.BigEndian.Uint16(stream))
		ulpdu := stream[iwarpwire.LengthLen:][:n]
		stream = stream[iwarpwire.FPDULen(n):]
		var h iwarpwire.Header
		at, terr := h.Parse(ulpdu)
		if terr != nil {
			t.Fatal(terr)
		}
		if h.Tagged || h.QN != iwarpwire.QNSend {
			continue
		}
		if int(h.MO) != len(message) || int(h.MSN) != len(messages)+1 {
			t.Fatalf("%+v after %d messages and %d bytes", h, len(messages), len(message))
		}
		message = append(message, ulpdu[at:]...)
		if h.Last {
			messages = append(messages, message)
			message = nil
		}
	}
	if message != nil {
		t.Fatal("the stream ends inside a Send")
	}
	return start.Private, messages
}

// reencode fails unless message, a Data Transfer message that was parsed into
// h and payload, is what put makes of them.
func reencode(t *testing.T, message []byte, h segmentHeader, payload []byte) {
	t.Helper()
	b := make([]byte, len(message))
	n := h.put(b)
	if n += copy(b[n:], payload); n != len(message) || !bytes.Equal(b, message) {
		t.Errorf("%+v encoded again:\n% x, want\n% x", h, b[:min(n, 32)], message[:min(len(message), 32)])
	}
}

// smb2Files returns the data of the SMB2 READ responses and WRITE requests in
// message, as far as they carry it inline ([MS-SMB2] 2.2.20, 2.2.21).
func smb2Files(message []byte) (files [][]byte) {
	const headerLen, read, write = 64, 8, 9
	le := binary.LittleEndian
	for {
		var offset int
		response := message[16]&1 != 0
		switch command := le.Uint16(message[12:]); {
		case command == read && response:
			offset = int(message[headerLen+2])
		case command == write && !response:
			offset = int(le.Uint16(message[headerLen+2:]))
		}
		if offset > 0 {
			files = append(files, message[offset:][:le.Uint32(message[headerLen+4:])])
		}
		next := le.Uint32(message[20:])
		if next == 0 {
			return files
		}
		message = message[next:]
	}
}

func TestCaptureSMBDirect(t *testing.T) {
	for _, tt := range []struct {
		file      string
		frames    int // SMB Direct messages, negotiation included
		fragments int // of them, with RemainingDataLength > 0
		complete  int // of them, ending an SMB2 message
		digests   []string
	}{
		{
			file:   "siw-smbdirect-frag.pcap",
			frames: 95, fragments: 22, complete: 64,
			digests: []string{
				"165b3b78eb108f83e798e95808ec2d906d2a6c434acdd0b942c0f5241b4cf69e", // read, 4001 bytes
				"ac1816d06659e3427dbfb394bc0d6f125c0ea29f7e5e42d09df1362dccc90b8f", // written, 3900 bytes
			},
		},
		{
			file:   "siw-smbdirect.pcap", // its files travel by RDMA
			frames: 76, fragments: 7, complete: 64,
		},
	} {
		t.Run(tt.file, func(t *testing.T) {
			conns := pcaptest.Load(t, filepath.Join("testdata", "captures", tt.file), 5445)
			if len(conns) != 1 {
				t.Fatalf("%d connections", len(conns))
			}
			private, client := sends(t, conns[0].FromClient, false)
			if got, want := parsePrivate(private), (privateData{ird: 32, ord: 1}); got != want {
				t.Errorf("client's private data % x: %+v, want %+v", private, got, want)
			}
			private, server := sends(t, conns[0].FromServer, true)
			if got, want := parsePrivate(private), (privateData{ird: 1, ord: 8}); got != want {
				t.Errorf("server's private data % x: %+v, want %+v", private, got, want)
			}

			maxFragmented := checkLinuxNegotiation(t, client[0], server[0])
			if n := len(client) + len(server); n != tt.frames {
				t.Errorf("%d messages, want %d", n, tt.frames)
			}

			var opening segmentHeader
			if payload, err := opening.parse(client[1]); err != nil || len(payload) != 0 || opening.CreditsGranted != 255 {
				t.Errorf("the client opens with %+v, %v; want an empty message that grants 255", opening, err)
			}

			fragments, complete := 0, 0
			var digests []string
			for _, messages := range [][][]byte{client[1:], server[1:]} {
				r := reassembler{max: maxFragmented}
				var buffer []byte
				for _, message := range messages {
					var h segmentHeader
					payload, err := h.parse(message)
					if err != nil {
						t.Fatalf("% x: %v", message[:min(len(message), 24)], err)
					}
					reencode(t, message, h, payload)
					first, last, err := r.accept(&h)
					if err != nil {
						t.Fatalf("%+v: %v", h, err)
					}
					if h.Remaining > 0 {
						fragments++
					}
					if first {
						buffer = buffer[:0]
					}
					buffer = append(buffer, payload...)
					if !last {
						continue
					}
					complete++
					if !bytes.HasPrefix(buffer, []byte("\xfeSMB")) {
						t.Errorf("message %d does not begin like SMB2: % x", complete, buffer[:4])
					}
					for _, file := range smb2Files(buffer) {
						sum := sha256.Sum256(file)
						digests = append(digests, hex.EncodeToString(sum[:]))
					}
				}
				if r.remaining != 0 {
					t.Errorf("%d bytes are missing at the end", r.remaining)
				}
			}
			if fragments != tt.fragments || complete != tt.complete {
				t.Errorf("%d fragments, %d messages; want %d, %d", fragments, complete, tt.fragments, tt.complete)
			}
			for _, want := range tt.digests {
				if !slices.Contains(digests, want) {
					t.Errorf("no file with digest %s among %v", want, digests)
				}
			}
		})
	}
}

// checkLinuxNegotiation decodes both messages of the negotiation, encodes them
// again, and has our own ends in the place of either side come to the same
// terms. It returns the MaxFragmentedSize of both.
func checkLinuxNegotiation(t *testing.T, request, response []byte) uint32 {
	t.Helper()
	var req negotiateRequest
	if err := req.parse(request); err != nil {
		t.Fatal(err)
	}
	wantReq := negotiateRequest{
		MinVersion: 0x0100, MaxVersion: 0x0100, CreditsRequested: 255,
		PreferredSendSize: 1364, MaxReceiveSize: 1364, MaxFragmentedSize: 173910,
	}
	if req != wantReq {
		t.Errorf("request %+v, want %+v", req, wantReq)
	}
	var resp negotiateResponse
	if err := resp.parse(response); err != nil {
		t.Fatal(err)
	}
	wantResp := negotiateResponse{
		MinVersion: 0x0100, MaxVersion: 0x0100, NegotiatedVersion: 0x0100,
		CreditsRequested: 255, CreditsGranted: 254, MaxReadWriteSize: 8388608,
		PreferredSendSize: 1364, MaxReceiveSize: 1364, MaxFragmentedSize: 173910,
	}
	if resp != wantResp {
		t.Errorf("response %+v, want %+v", resp, wantResp)
	}
	b := make([]byte, negotiateResponseLen)
	if got := b[:req.put(b)]; !bytes.Equal(got, request) {
		t.Errorf("request encoded again: % x, want % x", got, request)
	}
	if got := b[:resp.put(b)]; !bytes.Equal(got, response) {
		t.Errorf("response encoded again: % x, want % x", got, response)
	}

	linux := limits{
		maxSend: 1364, maxReceive: 1364, maxFragmented: 173910,
		creditsRequested: 255, creditsGranted: 255, maxReadWrite: 8388608,
	}
	if got := linux.request(); got != req {
		t.Errorf("we would ask %+v, cifs.ko asks %+v", got, req)
	}
	if got := answer(t, linux, req, 254); got != resp {
		t.Errorf("we would answer %+v, ksmbd answers %+v", got, resp)
	}
	a, err := linux.acceptResponse(response)
	want := agreement{
		maxSend: 1364, maxReceive: 1364, maxFragmentedSend: 173910, maxFragmentedReceive: 173910,
		sendCredits: 254, receiveCreditTarget: 255, maxReadWrite: 8388608,
	}
	if err != nil || a != want {
		t.Errorf("agreement %+v, %v; want %+v", a, err, want)
	}
	return req.MaxFragmentedSize
}
