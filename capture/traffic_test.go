package capture_test

import (
	"bytes"
	"crypto/sha256"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/capture"
	"github.com/rdmanet/rdmanet/internal/pcaptest"
	"github.com/rdmanet/rdmanet/internal/tsharktest"
)

// What two rdmanet ends say to each other over the software device comes out of
// a capture byte for byte.
func TestOwnTraffic(t *testing.T) {
	tsharktest.NeedCapture(t)
	const size = 3<<20 + 17
	up, down := make([]byte, size), make([]byte, size/2)
	for i := range up {
		up[i] = byte(i * 31 >> 3)
	}
	for i := range down {
		down[i] = byte(i * 17 >> 2)
	}
	var server netip.AddrPort
	path := tsharktest.Capture(t, netip.MustParseAddr("127.0.0.1"), func() {
		config := rdmanet.Config{Device: "iwarp"}
		ln, err := (&rdmanet.ListenConfig{Config: config}).Listen(t.Context(), "rdma4", "127.0.0.1:0")
		require.NoError(t, err)
		defer ln.Close()
		server = ln.Addr().(*net.TCPAddr).AddrPort()
		done := make(chan error, 1)
		go func() {
			done <- func() error {
				c, err := ln.Accept()
				if err != nil {
					return err
				}
				defer c.Close()
				if _, err := io.Copy(io.Discard, io.LimitReader(c, size)); err != nil {
					return err
				}
				_, err = c.Write(down)
				return err
			}()
		}()
		c, err := (&rdmanet.Dialer{Config: config}).DialContext(t.Context(), "rdma4", server.String())
		require.NoError(t, err)
		defer c.Close()
		for rest := up; len(rest) > 0; { // pieces of all lengths
			n := min(len(rest), 1+len(rest)/3)
			_, err := c.Write(rest[:n])
			require.NoError(t, err)
			rest = rest[n:]
		}
		got, err := io.ReadAll(c)
		require.NoError(t, err)
		require.True(t, bytes.Equal(got, down))
		require.NoError(t, <-done)
	})

	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	frames, err := pcaptest.Read(file)
	require.NoError(t, err)
	sums := [2]interface {
		io.Writer
		Sum([]byte) []byte
	}{sha256.New(), sha256.New()}
	var bytes [2]int
	incomplete := 0
	r := capture.NewReassembler(capture.Config{
		Data: true,
		Upper: func(u *capture.UpperMessage) {
			if u.Conn.Ends[1].Addr != server || u.Kind != capture.Payload {
				return
			}
			if !u.Complete {
				incomplete++
			}
			sums[u.From].Write(u.Data)
			bytes[u.From] += len(u.Data)
		},
		Loss: func(l capture.Loss) { t.Errorf("%v: %v", l.Conn, l) },
	})
	for _, f := range frames {
		r.Add(&capture.Packet{Time: f.Time, Link: capture.LinkEthernet, Data: f.Data})
	}
	r.Flush()
	require.Zero(t, incomplete)
	require.Equal(t, [2]int{len(up), len(down)}, bytes)
	wantUp, wantDown := sha256.Sum256(up), sha256.Sum256(down)
	require.Equal(t, wantUp[:], sums[0].Sum(nil))
	require.Equal(t, wantDown[:], sums[1].Sum(nil))
}
