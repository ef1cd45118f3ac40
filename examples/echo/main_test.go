package main

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/examples/internal/demo/demotest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { demotest.Main(m, main) }

func TestEcho(t *testing.T) {
	conn, err := rdmanet.Dial("rdma", demotest.Serve(t, serve))
	require.NoError(t, err)
	defer conn.Close()

	question := strings.Repeat("0123456789", 10_000) // some segments, but less than what fits on the way
	_, err = ask(conn, question)
	demotest.NoError(t, err)
}

func TestWrongAnswer(t *testing.T) {
	addr := demotest.Serve(t, func(ln net.Listener) error {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := io.ReadAll(conn); err != nil {
			return err
		}
		_, err = io.WriteString(conn, "what?")
		return err
	})
	conn, err := rdmanet.Dial("rdma", addr)
	require.NoError(t, err)
	defer conn.Close()

	_, err = ask(conn, "hello")
	assert.EqualError(t, err, `what came is not what was sent: said "hello", heard "what?"`)
}

func TestTwoProcesses(t *testing.T) {
	for _, network := range []string{"rdma", "rdma4", "rdma6", "tcp", "tcp4", "tcp6"} {
		t.Run(network, func(t *testing.T) {
			out, err := demotest.Run(t, "-network", network)
			require.NoError(t, err, out)
			assert.Contains(t, out, "ok: \"hello over a queue pair\" came back\n")
		})
	}
}

func TestMainFails(t *testing.T) {
	for name, args := range map[string][]string{
		"unknown network":  {"-network", "carrier-pigeon"},
		"nobody listens":   {"-dial", "127.0.0.1:1"},
		"address in doubt": {"-serve", "nonsense"},
		"both at once":     {"-serve", "127.0.0.1:0", "-dial", "127.0.0.1:1"},
		"datagrams":        {"-dial", "127.0.0.1:1", "-network", "udp"},
		"both families":    {"-network", "rdma46"},
		"no flag":          {"127.0.0.1:1"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := demotest.Run(t, args...)
			assert.Error(t, err)
			assert.NotContains(t, out, "ok:")
			assert.NotContains(t, out, "panic:")
		})
	}
}
