package capture

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// segmentOf returns a Data Transfer message.
func segmentOf(payload []byte, remaining int) []byte {
	b := make([]byte, 24)
	le := binary.LittleEndian
	le.PutUint16(b, 255)
	le.PutUint16(b[2:], 1)
	le.PutUint32(b[8:], uint32(remaining))
	le.PutUint32(b[12:], 24)
	le.PutUint32(b[16:], uint32(len(payload)))
	return append(b, payload...)
}

// smbStream sends messages of three segments each, with a Write between them.
func smbStream(messages int) *roceBuilder {
	x := newRoCEBuilder()
	psn := uint32(1)
	for i := range messages {
		data := pattern(900, i)
		psn = x.send(near, psn, segmentOf(data[:300], 600), mtu)
		psn = x.write(near, psn, 0, 1, pattern(3*mtu, i), mtu)
		psn = x.send(near, psn, segmentOf(data[300:600], 300), mtu)
		psn = x.send(near, psn, segmentOf(data[600:], 0), mtu)
	}
	return x
}

// What is missing is of SMB Direct only if it may have been a Send. After that
// a message is whole again only behind the end of the one before.
func TestSegmentsMissing(t *testing.T) {
	const perMessage = 6 // packets
	for _, tt := range []struct {
		name     string
		lose     int
		complete []int // messages
	}{
		{"the first packet of all", 0, []int{1, 2, 3}},
		{"a first segment", perMessage, []int{2, 3}}, // what follows it may be the end of another
		{"the middle of a Write", perMessage + 2, []int{1, 2, 3}},
		{"a second segment", perMessage + 4, []int{2, 3}},
		{"a last segment", perMessage + 5, []int{3}}, // the beginning of the next cannot be told from its end
	} {
		ps := smbStream(4).packets
		ps = append(ps[:tt.lose:tt.lose], ps[tt.lose+1:]...)
		res := run(t, Config{Data: true, Protocol: SMBDirect}, ps)
		var got []int
		for _, u := range res.uppers {
			if !u.Complete {
				continue
			}
			found := -1
			for i := range 4 {
				if bytes.Equal(u.Data, pattern(900, i)) {
					found = i
				}
			}
			got = append(got, found)
		}
		// The first message is only whole where nothing came before it, which
		// without the set-up nobody knows.
		want := tt.complete
		if len(got) != len(want) {
			t.Errorf("%s: complete are %v, want %v", tt.name, got, want)
			continue
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("%s: complete are %v, want %v", tt.name, got, want)
			}
		}
	}
}
