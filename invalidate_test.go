package rdmanet

import (
	"bytes"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

// One segment of a message, and no other, takes the peer's key back.
func TestWriteMsgInvalidate(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			small := Config{MaxSendSize: 256}
			client, server := pipe(t, lb.network, lb.address, new(ListenConfig), &Dialer{Config: small})
			defer client.Close()
			defer server.Close()
			mr, err := server.dom.PD.RegMR(make([]byte, 64), ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
			if err != nil {
				t.Fatal(err)
			}
			defer mr.Close()
			want := bytes.Repeat([]byte("segments "), 100)
			sent := make(chan error, 1)
			go func() { sent <- client.WriteMsgInvalidate(want, mr.RKey()) }()
			got := make([]byte, 2000)
			n, err := server.ReadMsg(got)
			if err != nil || !bytes.Equal(got[:n], want) {
				t.Fatalf("read %d bytes, %v", n, err)
			}
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			keys := uint64(0) // where the device cannot do it, the token is dropped
			if testDevice(t).Attr().Caps.Has(ibv.CapSendInvalidate) {
				keys = 1
			}
			s := server.Stats()
			if s.SegmentsReceived < 2 || s.KeysInvalidated != keys {
				t.Errorf("%d segments took back %d keys, want several and %d", s.SegmentsReceived, s.KeysInvalidated, keys)
			}
			// A second time the key is gone: the device breaks the connection.
			if err := client.WriteMsgInvalidate([]byte("again"), mr.RKey()); err != nil {
				t.Fatal(err)
			}
			if n, err := server.ReadMsg(got); (err == nil) != (keys == 0) {
				t.Fatalf("a key is taken back twice: %d bytes, %v", n, err)
			}
		})
	}
}
