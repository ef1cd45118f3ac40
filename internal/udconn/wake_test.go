package udconn

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/fabric"
)

// sleeps reports whether the leader of the first queue pair sleeps, and whether it is the
// goroutine in the background. The caller holds receiver.mu.
func (c *Conn) sleeps() (sleeping, background bool) {
	if c.recv.first == nil {
		return false, false
	}
	w := c.recv.first.waiter()
	return w.Sleeping(), w.InBackground()
}

// One reader receives from every port of a device, whichever it is that it waits for.
func TestReaderHearsEveryPort(t *testing.T) {
	fab := fabric.New(1024, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), netip.IPv6Loopback())
	fab.Split()
	n := newTestNet(t, fab, "0.0.0.0")
	server := n.listen(t)
	var clients []*Conn
	for _, host := range []string{"127.0.0.1", "127.0.0.2"} {
		client := n.dial(t, netip.AddrPortFrom(netip.MustParseAddr(host), at(server).Port()))
		clients = append(clients, client)
		require.NoError(t, client.WritePeer([]byte(host)))
		got, _ := read(t, server)
		defect.Bytes(t, host, got)
	}
	require.Len(t, server.Info(), 2)
	require.NoError(t, server.SetReadDeadline(time.Now().Add(patience)))
	for i := range 20 {
		got := make(chan string)
		go func() {
			var b [10]byte
			n, _, err := server.Read(b[:])
			got <- fmt.Sprint(string(b[:n]), err)
		}()
		require.True(t, eventually(func() bool {
			server.recv.mu.Lock()
			defer server.recv.mu.Unlock()
			sleeping, background := server.sleeps()
			return sleeping && !background || server.recv.readers.Waiting() > 0 // A reader waits for a leader in the background.
		}))
		require.NoError(t, clients[i%2^1].WritePeer([]byte("x")))
		require.Equal(t, "x<nil>", <-got, "round %d", i)
	}
}

// Two datagrams that arrive at once wake the reader that waits for others, and the one that
// leads.
func TestWakesAllReaders(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *testNet) {
		server := n.listen(t)
		require.NoError(t, server.SetReadDeadline(time.Now().Add(patience)))
		for range 20 {
			done := make(chan error, 2)
			for range 2 {
				go func() {
					var b [10]byte
					_, _, err := server.Read(b[:])
					done <- err
				}()
			}
			require.True(t, eventually(func() bool {
				server.recv.mu.Lock()
				defer server.recv.mu.Unlock()
				sleeping, background := server.sleeps()
				waiting := server.recv.readers.Waiting()
				if !sleeping || background && waiting != 2 || !background && waiting != 1 {
					return false
				}
				for range 2 { // No reader comes between the two, as a device could not make sure.
					server.recv.deliver(at(server), false, []byte("x"))
					server.recv.wakeReaders()
				}
				return true
			}))
			require.NoError(t, <-done)
			require.NoError(t, <-done)
		}
	})
}

func polls() bool {
	polls, _ := cqwait.Polling()
	return polls
}

func served() int {
	_, n := cqwait.Polling()
	return n
}

// A read that waits for the answer to a datagram polls for it, and no other does.
func TestPollsForAnswer(t *testing.T) {
	// With fewer processors no wait polls while both ends count as being served.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(8))
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			t.Cleanup(cqwait.SetWindow(time.Hour)) // before the first wait
			fab := fabric.New(1024, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback())
			fab.PinMemory()
			n := newTestNet(t, fab, host)
			client, server := n.pair(t)
			begin := func() chan error {
				done := make(chan error, 1)
				go func() {
					_, _, err := client.Read(make([]byte, 10))
					done <- err
				}()
				return done
			}
			answer := func() { require.NoError(t, server.Write([]byte("y"), at(client))) }
			done := begin()
			require.True(t, eventually(func() bool {
				client.recv.mu.Lock()
				defer client.recv.mu.Unlock()
				sleeping, background := client.sleeps()
				return sleeping && (client.recv.readers.Waiting() > 0 || !background)
			}), "nothing was asked")
			require.False(t, polls())
			answer()
			require.NoError(t, <-done)

			for _, end := range []func(){answer, func() { client.SetReadDeadline(time.Unix(1, 0)) }} {
				require.NoError(t, client.WritePeer([]byte("x")))
				done := begin()
				require.True(t, eventually(polls))
				end()
				<-done
				require.False(t, polls())
			}
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
			require.Zero(t, served())
		})
	}
}
