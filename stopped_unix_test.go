//go:build unix

package rdmanet

import (
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// A process that is stopped for longer than keep-alive waits keeps its connections where the
// kernels answer each other, idle ones and those with a window that is full, as with TCP.
// Elsewhere its process has to answer if it can be asked.
func TestStoppedPeer(t *testing.T) {
	checkLeaks(t)
	const keepAlive = time.Second
	// Bytes that the peer has no room for wait in the socket, and TCP's window is closed then.
	ln, err := (&ListenConfig{Config: Config{KeepAlive: keepAlive, TransferSize: -1}}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	v := startVictim(t, "echoes "+ln.Addr().String())
	defer v.kill()
	var conns [victimConns]*Conn
	for i := range conns {
		c, err := ln.Accept()
		require.NoError(t, err)
		defer c.Close()
		conns[i] = c.(*Conn)
		pass1(t, conns[i], false)
		pass1(t, conns[i], true)
	}
	idle, full := conns[0], conns[1]

	require.NoError(t, v.cmd.Process.Signal(syscall.SIGSTOP))
	want := pattern(1, 16<<20)
	wrote := writing(full, want)
	read := reading(idle, make([]byte, 1))
	time.Sleep(5 * keepAlive)
	if onRDMA || runtime.GOOS != "linux" {
		require.ErrorIs(t, (<-read).err, syscall.ETIMEDOUT)
		return // The device may be asked in place of a process that has no room.
	}
	require.Empty(t, read)
	require.Empty(t, wrote)
	if full.Info().Link == "tcp" {
		require.Positive(t, full.lane.id.(ibv.Unsender).Unsent(), "the window is open")
	}

	require.NoError(t, v.cmd.Process.Signal(syscall.SIGCONT))
	require.NoError(t, defect.ReadFull(full, want))
	require.NoError(t, (<-wrote).err)
	_, err = idle.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, (<-read).err)
}
