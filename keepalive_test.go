package rdmanet

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// quietFor makes the connection believe that it has heard nothing for d, and
// lets its timer look.
func (c *Conn) quietFor(d time.Duration) {
	c.mu.Lock()
	c.heard = false
	c.lastHeard = time.Now().Add(-d)
	c.mu.Unlock()
	c.tick()
}

func (c *Conn) isProbing() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.probing
}

// A peer that is there answers, although its program does nothing.
func TestKeepAliveAnswered(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			checkLeaks(t)
			client, server := pipe(t, lb.network, lb.address, new(ListenConfig), &Dialer{Config: Config{KeepAlive: time.Hour}})
			client.quietFor(time.Minute)
			require.False(t, client.isProbing())
			require.Zero(t, client.Stats().KeepAliveSent)
			for n := range 3 {
				client.quietFor(time.Hour)
				require.True(t, eventually(func() bool { return !client.isProbing() }), "no answer")
				require.EqualValues(t, n+1, client.Stats().KeepAliveSent)
			}
			require.Zero(t, server.Stats().KeepAliveSent, "the answer does not ask back")
			exchange(t, client, server, 10<<10)
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
		})
	}
}

// A peer that does not answer is given up, which everybody who waits learns.
func TestKeepAliveUnanswered(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", "127.0.0.1:0", new(ListenConfig), &Dialer{Config: Config{KeepAlive: time.Hour}})
	readErr, writeErr := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := client.Read(make([]byte, 1))
		readErr <- err
	}()
	server.mu.Lock() // whoever would answer waits
	go func() {
		_, err := client.Write(make([]byte, 64<<20))
		writeErr <- err
	}()
	client.quietFor(time.Hour)
	require.True(t, client.isProbing())
	client.quietFor(time.Hour)
	for op, ch := range map[string]chan error{"read": readErr, "write": writeErr} {
		var err error
		within(t, op, func() { err = <-ch })
		requireConnError(t, transports[0], err, op)
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		require.ErrorIs(t, err, errSilent)
	}
	server.mu.Unlock()
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// A negative KeepAlive never asks.
func TestKeepAliveOff(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", "127.0.0.1:0", new(ListenConfig), &Dialer{Config: Config{KeepAlive: -1}})
	client.quietFor(1000 * time.Hour)
	client.quietFor(1000 * time.Hour)
	require.False(t, client.isProbing())
	exchange(t, client, server, 10<<10)
	require.Zero(t, client.Stats().KeepAliveSent)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}
