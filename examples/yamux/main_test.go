package main

import (
	"io"
	"net"
	"testing"

	"github.com/hashicorp/yamux"
	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/examples/internal/demo/demotest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { demotest.Main(m, main) }

func TestExchange(t *testing.T) {
	conn, err := rdmanet.Dial("rdma", demotest.Serve(t, serve))
	require.NoError(t, err)
	_, err = exchange(conn, 100, 10_000)
	demotest.NoError(t, err)
}

func TestExchangeDamaged(t *testing.T) {
	addr := demotest.Serve(t, func(ln net.Listener) error {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		session, err := yamux.Server(conn, config())
		if err != nil {
			return err
		}
		defer session.Close()
		stream, err := session.AcceptStream()
		if err != nil {
			return err
		}
		data, err := io.ReadAll(stream)
		if err != nil {
			return err
		}
		data[len(data)/2] ^= 1
		if _, err := stream.Write(data); err != nil {
			return err
		}
		stream.Close()
		<-session.CloseChan()
		return nil
	})
	conn, err := rdmanet.Dial("rdma", addr)
	require.NoError(t, err)
	_, err = exchange(conn, 1, 1000)
	assert.EqualError(t, err, "stream 0: what came is not what was sent")
}

func TestContentDiffers(t *testing.T) {
	assert.NotEqual(t, content(1, 100), content(2, 100))
	assert.Equal(t, content(300, 100), content(300, 100))
	assert.NotEqual(t, content(300, 100), content(300&0xff, 100))
}

func TestMainFails(t *testing.T) {
	for _, args := range [][]string{{"-size=-1"}, {"-streams=-1"}} {
		out, err := demotest.Run(t, args...)
		assert.Error(t, err)
		assert.Contains(t, out, "usage: ")
		assert.NotContains(t, out, "panic:")
	}
}

func TestTwoProcesses(t *testing.T) {
	for _, network := range []string{"rdma", "tcp"} {
		t.Run(network, func(t *testing.T) {
			out, err := demotest.Run(t, "-network", network, "-size=5000")
			require.NoError(t, err, out)
			assert.Contains(t, out, "ok: 100 streams on one connection, 488.3 KiB each way")
		})
	}
}
