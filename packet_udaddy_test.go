package rdmanet

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// udaddy is rdma-core's own example for datagrams: its client sends ten of 100 bytes to
// port 7174, and the server answers with as many.
const (
	udaddyPort  = "7174"
	udaddyCount = 10
	udaddySize  = 100
)

// startUdaddy runs it and returns a function that waits for its end.
func startUdaddy(t *testing.T, arg ...string) (wait func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "udaddy", arg...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	return func() {
		t.Helper()
		require.NoError(t, cmd.Wait(), "%s", &out)
		require.Contains(t, out.String(), "data transfers complete")
	}
}

// udaddy as the client: it is received, and answered.
func TestPacketUdaddyClient(t *testing.T) {
	if !hasUD(t) {
		return
	}
	checkLeaks(t)
	p, err := ListenPacket("rdma4", net.JoinHostPort(host4, udaddyPort))
	require.NoError(t, err)
	defer p.Close()
	wait := startUdaddy(t, "-s", host4)
	var from netip.AddrPort
	for i := range udaddyCount {
		var got []byte
		got, from = readFrom(t, p.(*PacketConn))
		require.Len(t, got, udaddySize, "datagram %d", i)
	}
	for range udaddyCount {
		_, err := p.WriteTo(make([]byte, udaddySize), udpAddr(from))
		require.NoError(t, err)
	}
	wait()
}

// udaddy as the server: it is found, and its answers are its own.
func TestPacketUdaddyServer(t *testing.T) {
	if !hasUD(t) {
		return
	}
	checkLeaks(t)
	wait := startUdaddy(t, "-b", host4)
	var c net.Conn
	require.True(t, eventually(func() bool { // it listens by and by
		var err error
		c, err = Dial("udp4", net.JoinHostPort(host4, udaddyPort))
		return err == nil
	}))
	defer c.Close()
	for range udaddyCount {
		_, err := c.Write(make([]byte, udaddySize))
		require.NoError(t, err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	for range udaddyCount {
		n, err := c.Read(make([]byte, 200))
		require.NoError(t, err)
		require.Equal(t, udaddySize, n)
	}
	wait()
}
