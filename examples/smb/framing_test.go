package main

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// message is one as SMB over TCP has it.
func message(n int, b byte) []byte {
	m := binary.BigEndian.AppendUint32(nil, uint32(n))
	return append(m, bytes.Repeat([]byte{b}, n)...)
}

// direct is a connection over the software device.
func direct(t *testing.T) (client, server *rdmanet.Conn) {
	t.Helper()
	ln, err := rdmanet.Listen("rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	c, err := rdmanet.Dial("rdma4", ln.Addr().String())
	require.NoError(t, err)
	s, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Close()
		s.Close()
	})
	return c.(*rdmanet.Conn), s.(*rdmanet.Conn)
}

// Whatever the sizes of the Writes, SMB Direct carries whole messages, and the reader gets
// the stream back.
func TestFraming(t *testing.T) {
	client, server := direct(t)
	stream := append(append(message(1, 'a'), message(100, 'b')...), message(70000, 'c')...)
	for _, piece := range []int{1, 3, 50, 4096, len(stream)} {
		w := frame(client)
		go func() {
			for b := stream; len(b) > 0; {
				k := min(piece, len(b))
				w.Write(b[:k])
				b = b[k:]
			}
		}()
		buf := make([]byte, 1<<20)
		for _, want := range []int{1, 100, 70000} {
			n, err := server.ReadMsg(buf)
			require.NoError(t, err)
			require.Equal(t, want, n)
			_, err = server.WriteMsg(buf[:n])
			require.NoError(t, err)
		}
		require.NoError(t, defect.ReadFull(w, stream))
	}
	_, err := frame(client).Write([]byte{1, 0, 0, 0})
	require.ErrorIs(t, err, errHeader)
}

// The relay passes on messages, and the end of either side.
func TestRelay(t *testing.T) {
	client, server := direct(t)
	near, far := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- relay(server, near) }()
	go io.Copy(far, far)
	for _, n := range []int{1, 5000} {
		_, err := client.WriteMsg(message(n, 'x')[headerLen:])
		require.NoError(t, err)
		buf := make([]byte, 1<<20)
		k, err := client.ReadMsg(buf)
		require.NoError(t, err)
		require.Equal(t, message(n, 'x')[headerLen:], buf[:k])
	}
	client.Close()
	require.NoError(t, <-done)
	_, err := far.Read(make([]byte, 1))
	require.Error(t, err)
}
