package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
)

// upperKinds counts what is complete, by kind.
func upperKinds(tb testing.TB, res *result) map[UpperKind]int {
	tb.Helper()
	kinds := map[UpperKind]int{}
	for i := range res.uppers {
		u := &res.uppers[i]
		if !u.Complete {
			tb.Errorf("not complete: %+v", u)
		}
		if u.Got != u.Size || u.Data != nil && uint64(len(u.Data)) != u.Size {
			tb.Errorf("%v: %d bytes there, %d of data; want %d", u.Kind, u.Got, len(u.Data), u.Size)
		}
		kinds[u.Kind]++
	}
	return kinds
}

// The files that Linux's SMB client and server exchanged; the digests are those
// of the files.
func TestSMBDirect(t *testing.T) {
	for _, tt := range []struct {
		file                  string
		sends, open, messages int // Sends; those in front of others of their message; messages of SMB2
		digests               []string
	}{
		{
			file: "siw-smbdirect.pcap", sends: 76, open: 7, messages: 64,
			digests: []string{
				"d8fe9cc483cb1a3fab005f6c26718c2f07c07f7c74176ddc44fdcda11388c721", // read, 262144 bytes
				"b6dc9c1655a5cbe348859c0bbc710b2ad4f036be5a40a7b5b821745d4b74adae", // written, 262144 bytes
			},
		},
		{
			file: "siw-smbdirect-frag.pcap", sends: 95, open: 22, messages: 64,
			digests: []string{
				"165b3b78eb108f83e798e95808ec2d906d2a6c434acdd0b942c0f5241b4cf69e", // read, 4001 bytes
				"ac1816d06659e3427dbfb394bc0d6f125c0ea29f7e5e42d09df1362dccc90b8f", // written, 3900 bytes
			},
		},
	} {
		t.Run(tt.file, func(t *testing.T) {
			res := run(t, Config{Data: true}, frames(t, tt.file))
			kinds := upperKinds(t, res)
			sends, open := 0, 0
			for _, u := range res.uppers {
				if u.Protocol != SMBDirect {
					t.Errorf("protocol %v", u.Protocol)
				}
				sends += u.Sends
				if u.Sends > 0 {
					open += u.Sends - 1
				}
				if u.Kind == Payload && !bytes.HasPrefix(u.Data, []byte("\xfeSMB")) {
					t.Errorf("does not begin like SMB2: % x", u.Data[:4])
				}
			}
			if kinds[Negotiation] != 2 || kinds[Payload] != tt.messages || sends != tt.sends || open != tt.open {
				t.Errorf("%v, %d Sends, %d with more to come; want %d, %d, %d", kinds, sends, open, tt.messages, tt.sends, tt.open)
			}
			digests := smbDigests(res)
			for _, want := range tt.digests {
				if !slices.Contains(digests, want) {
					t.Errorf("no file with digest %s among %d", want, len(digests))
				}
			}
			// Without the bytes there are the same messages.
			bare := run(t, Config{}, frames(t, tt.file))
			if len(bare.uppers) != len(res.uppers) {
				t.Fatalf("%d messages without data, %d with", len(bare.uppers), len(res.uppers))
			}
			for i, u := range bare.uppers {
				if w := res.uppers[i]; u.Kind != w.Kind || u.Size != w.Size || u.Got != w.Got || u.Complete != w.Complete || u.Data != nil {
					t.Errorf("without data %+v, with %+v", u, w)
				}
			}
		})
	}
}

// smbDigests returns the digests of the files in SMB2 messages, inline or by
// RDMA, and of the data of each direction joined.
func smbDigests(res *result) (digests []string) {
	var moved [2][]byte
	for _, u := range res.uppers {
		if u.Kind == Transfer && u.Complete {
			moved[u.From] = append(moved[u.From], u.Data...)
		}
		if u.Kind == Payload && u.Complete {
			for _, file := range smb2Inline(u.Data) {
				digests = append(digests, digest(file))
			}
		}
	}
	return append(digests, digest(moved[0]), digest(moved[1]))
}

// smb2Inline returns the data of READ responses and WRITE requests that is in
// the messages themselves ([MS-SMB2] 2.2.20, 2.2.21).
func smb2Inline(b []byte) (files [][]byte) {
	le := binary.LittleEndian
	for len(b) >= smb2Header {
		offset := 0
		switch response := b[16]&1 != 0; {
		case le.Uint16(b[12:]) == smb2Read && response:
			offset = int(b[smb2Header+2])
		case le.Uint16(b[12:]) == smb2Write && !response:
			offset = int(le.Uint16(b[smb2Header+2:]))
		}
		if offset > 0 {
			if n := int(le.Uint32(b[smb2Header+4:])); offset+n <= len(b) && n > 0 {
				files = append(files, b[offset:offset+n])
			}
		}
		next := int(le.Uint32(b[20:]))
		if next == 0 {
			break
		}
		b = b[next:]
	}
	return files
}

// What two rdmanet ends said to each other, over RDMA Read and over RDMA Write;
// some transfers were withdrawn.
func TestTransfers(t *testing.T) {
	up, down := stream(60<<10+17, 'u'), stream(30<<10+5, 'd')
	for _, tt := range []struct {
		file      string
		transfers [2]int // by Read, by Write
	}{{"rxe-transfers.pcap", [2]int{11, 11}}, {"siw-transfers.pcap", [2]int{10, 11}}} {
		t.Run(tt.file, func(t *testing.T) {
			res := run(t, Config{Data: true}, frames(t, tt.file))
			upperKinds(t, res)
			var streams [2][2][]byte // by connection and side
			var transfers [2]int
			withdrawn := 0
			for i := range res.uppers {
				u := &res.uppers[i]
				if u.Kind == Transfer {
					if want := []TransferOp{Offer, Request}[u.Conn.ID-1]; u.Op != want {
						t.Errorf("%v, want %v", u.Op, want)
					}
					transfers[u.Conn.ID-1]++
					if u.Withdrawn {
						withdrawn++
					}
				}
				if u.Kind == Transfer || u.Kind == Payload {
					s := &streams[u.Conn.ID-1][u.From]
					*s = append(*s, u.Data...)
				}
			}
			for i, s := range streams {
				if !bytes.Equal(s[0], up) || !bytes.Equal(s[1], down) {
					t.Errorf("connection %d: other bytes than were sent", i+1)
				}
			}
			if transfers != tt.transfers || withdrawn != 4 {
				t.Errorf("%v transfers, %d withdrawn; want %v, 4", transfers, withdrawn, tt.transfers)
			}
			bare := run(t, Config{}, frames(t, tt.file))
			if len(bare.uppers) != len(res.uppers) {
				t.Fatalf("%d messages without data, %d with", len(bare.uppers), len(res.uppers))
			}
			for i, u := range bare.uppers {
				if w := res.uppers[i]; u.Kind != w.Kind || u.Size != w.Size || u.Got != w.Got || u.Complete != w.Complete || u.Rest != w.Rest || u.Data != nil {
					t.Errorf("without data %+v, with %+v", u, w)
				}
			}
		})
	}
}

// nfsFiles are the files in rxe-nfs.pcap: their digests and how they travel.
var nfsFiles = []struct{ name, digest string }{
	{"readme.bin, read, write chunks", "949acfaff4842a26314fe12b76c52cf97428a9300f0e050878a2870d9aa6a5e6"},
	{"small.bin, read, a write chunk", "1a958b5e5ade9ff1a61839ef682ff91a596d62f8c8a4a1ace329a3f9c3d8c1bb"},
	{"written.bin, written, a read chunk", "0d2b6a00f1fc386783511774dbd211e66946557e44067e61ed585059387477af"},
	{"tiny.bin, written inline", "ced4d2cf6e941d8d482f46d5beb5a9dc9251834d45405c81e7453ee3ba0178f0"},
}

// nfsDigests returns the digests of what may be a file: every write chunk, each
// run of them joined, and every opaque item of a call.
func nfsDigests(res *result) map[string]bool {
	digests := map[string]bool{}
	var run []byte
	for i := range res.uppers {
		u := &res.uppers[i]
		if !u.Complete {
			continue
		}
		for _, k := range u.Writes {
			if u.Kind != Reply {
				continue
			}
			digests[digest(k.Data)] = true
			run = append(run, k.Data...)
			digests[digest(run)] = true
			if k.Size%4096 != 0 {
				run = nil
			}
		}
		if u.Kind == Call {
			for at := 0; at+4 <= len(u.Data); at += 4 {
				if n := int(binary.BigEndian.Uint32(u.Data[at:])); n >= 300 && n <= len(u.Data)-at-4 {
					digests[digest(u.Data[at+4:at+4+n])] = true
				}
			}
		}
	}
	return digests
}

func TestNFS(t *testing.T) {
	res := run(t, Config{Data: true}, frames(t, "rxe-nfs.pcap"))
	kinds := upperKinds(t, res)
	if kinds[Call] != 40 || kinds[Reply] != 40 || len(res.uppers) != 80 {
		t.Errorf("%v, want 40 calls and 40 replies", kinds)
	}
	reads, writes, replies, whole := 0, 0, 0, 0
	for i := range res.uppers {
		u := &res.uppers[i]
		if len(u.ReadChunks) > 0 {
			reads++
		}
		if len(u.Writes) > 0 {
			writes++
		}
		if u.ReplyChunk != nil {
			replies++
			if u.Kind == Reply {
				whole++
				if !bytes.Equal(u.Data, u.ReplyChunk.Data) {
					t.Error("a reply is not its reply chunk")
				}
			}
		}
		if got := binary.BigEndian.Uint32(u.Data); got != u.XID {
			t.Errorf("message %d begins with %08x, its XID is %08x", i, got, u.XID)
		}
	}
	// The write lists and reply chunks of calls and of replies: as tshark has it.
	if reads != 1 || writes != 6 || replies != 16 || whole != 8 {
		t.Errorf("read lists %d, write lists %d, reply chunks %d, of replies %d; want 1, 6, 16, 8", reads, writes, replies, whole)
	}
	digests := nfsDigests(res)
	for _, f := range nfsFiles {
		if !digests[f.digest] {
			t.Errorf("%s: not found", f.name)
		}
	}
	names, link := 0, false
	for _, u := range res.uppers {
		if u.ReplyChunk != nil && u.Kind == Reply {
			for i := 1; i <= 40; i++ {
				if bytes.Contains(u.Data, fmt.Appendf(nil, "entry-shared-%d", i)) {
					names++
				}
			}
		}
		link = link || bytes.Contains(u.Data, []byte("some/target/path"))
	}
	if names < 40 || !link {
		t.Errorf("%d names of directory entries, symbolic link %v", names, link)
	}
}

// What rping reads it writes back.
func TestReadEqualsWrite(t *testing.T) {
	for _, tt := range []struct {
		file        string
		rounds, len int
	}{{"siw-rping.pcap", 4, 100}, {"siw-crc-p2p-rping.pcap", 3, 1601}, {"rxe-rping.pcap", 4, 100}} {
		var reads, writes [][]byte
		for _, m := range run(t, Config{Data: true}, frames(t, tt.file)).messages {
			switch {
			case m.Kind == Read:
				reads = append(reads, m.Data)
			case m.Kind == Write && m.Size > 0:
				writes = append(writes, m.Data)
			}
		}
		if len(reads) != tt.rounds || len(reads[0]) != tt.len || !slices.EqualFunc(reads, writes, bytes.Equal) {
			t.Errorf("%s: %d reads, %d writes, or they differ", tt.file, len(reads), len(writes))
		}
		if !bytes.HasPrefix(reads[0], []byte("rdma-ping-0: ")) {
			t.Errorf("%s: %q", tt.file, reads[0][:20])
		}
	}
}
