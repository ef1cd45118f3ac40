package rdmanet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
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
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{KeepAlive: time.Hour}})
	readErr, writeErr := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := client.Read(make([]byte, 1))
		readErr <- err
	}()
	server.mu.Lock() // whoever would answer waits
	client.quietFor(time.Hour)
	require.True(t, client.isProbing())
	go func() {
		_, err := client.Write(make([]byte, 64<<20))
		writeErr <- err
	}()
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

// Programs that do not read break no connection, however long they take, in
// one direction or both.
func TestKeepAliveStalled(t *testing.T) {
	for _, both := range []bool{false, true} {
		t.Run(fmt.Sprint("both ", both), func(t *testing.T) {
			checkLeaks(t)
			a, b := pipeOn(t, Config{KeepAlive: time.Hour})
			want := pattern(1, 16<<20)
			ends := []*Conn{a, b}
			if !both {
				ends = ends[:1]
			}
			errs := make(chan error, 4)
			for _, c := range ends {
				go func() {
					_, err := c.Write(want)
					errs <- err
				}()
			}
			for _, c := range ends {
				require.True(t, eventually(func() bool { return c.Stats().CreditStalls > 0 }))
			}
			for range 10 {
				for _, c := range []*Conn{a, b} {
					c.quietFor(time.Hour)
					require.True(t, eventually(func() bool { return !c.isProbing() }), "no answer")
				}
			}
			for i := range ends {
				reader := []*Conn{b, a}[i]
				go func() {
					got := make([]byte, len(want))
					_, err := io.ReadFull(reader, got)
					if err == nil && !bytes.Equal(got, want) {
						err = errors.New("the bytes are not those that were sent")
					}
					errs <- err
				}()
			}
			within(t, "transfer", func() {
				for range 2 * len(ends) {
					require.NoError(t, <-errs)
				}
			})
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
		})
	}
}

// A negative KeepAlive never asks.
func TestKeepAliveOff(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{KeepAlive: -1}})
	client.quietFor(1000 * time.Hour)
	client.quietFor(1000 * time.Hour)
	require.False(t, client.isProbing())
	exchange(t, client, server, 10<<10)
	require.Zero(t, client.Stats().KeepAliveSent)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}
