package rdmanet

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// One segment of a message, and no other, takes the peer's key back, however the message is
// sent and although it is as long as a large transfer.
func TestInvalidate(t *testing.T) {
	for _, lb := range loopbacks {
		for name, send := range map[string]func(c *Conn, p []byte, key uint32) (int, error){
			"WriteMsg":  func(c *Conn, p []byte, key uint32) (int, error) { return c.WriteMsg(p, Invalidate(key)) },
			"expedited": func(c *Conn, p []byte, key uint32) (int, error) { return c.WriteMsg(p, Expedited, Invalidate(key)) },
			"QueueMsg":  func(c *Conn, p []byte, key uint32) (int, error) { return c.QueueMsg(p, Invalidate(key)).Result() },
			"pieces": func(c *Conn, p []byte, key uint32) (int, error) {
				n, err := c.WriteMsg(p[:5000], Invalidate(key), Partial)
				if err != nil {
					return n, err
				}
				k, err := c.WriteMsg(p[5000:])
				return n + k, err
			},
			"without blocking": func(c *Conn, p []byte, key uint32) (int, error) {
				n, err := c.WriteMsg(p, NonBlocking, Invalidate(key))
				if n == 0 || err != nil {
					return n, err
				}
				k, err := c.WriteMsg(p[n:]) // without the option
				return n + k, err
			},
		} {
			t.Run(lb.network+"/"+name, func(t *testing.T) {
				small := Config{MaxSendSize: 256, TransferSize: minTransfer}
				client, server := pipe(t, lb.network, lb.address, new(ListenConfig), &Dialer{Config: small})
				defer client.Close()
				defer server.Close()
				mr, err := server.dom.PD.RegMR(make([]byte, 64), ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
				require.NoError(t, err)
				defer mr.Close()
				want := bytes.Repeat([]byte("segments "), 1000)
				sent := make(chan error, 1)
				go func() {
					n, err := send(client, want, mr.RKey())
					if err == nil && n != len(want) {
						t.Errorf("%d bytes were taken", n)
					}
					sent <- err
				}()
				got := make([]byte, 2*len(want))
				n, err := server.ReadMsg(got)
				require.NoError(t, err)
				defect.Bytes(t, want, got[:n])
				require.NoError(t, <-sent)
				keys := uint64(0) // where the device cannot do it, the token is dropped
				if testDevice(t).Attr().Caps.Has(ibv.CapSendInvalidate) {
					keys = 1
				}
				s := server.Stats()
				// What is left behind the piece that took the key may go by a large transfer.
				require.Greater(t, s.SegmentsReceived+s.TransfersReceived, uint64(2))
				require.Equal(t, keys, s.KeysInvalidated)
				// A second time the key is gone: the device breaks the connection.
				require.NoError(t, writeMsg(client, []byte("again"), Invalidate(mr.RKey())))
				if n, err := server.ReadMsg(got); (err == nil) != (keys == 0) {
					t.Fatalf("a key is taken back twice: %d bytes, %v", n, err)
				}
			})
		}
	}
}
