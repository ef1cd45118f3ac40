package rdmanet

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

var past = time.Unix(1, 0)

// A deadline that has passed moves no byte, and is gone when it is taken back.
func TestPastDeadline(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		_, err := server.Write([]byte("here"))
		require.NoError(t, err)
		require.NoError(t, client.SetDeadline(past))
		for range 2 {
			n, err := client.Read(make([]byte, 4))
			require.Zero(t, n)
			requireConnError(t, tr, err, "read")
			requireTimeout(t, err)
			n, err = client.Write([]byte("none"))
			require.Zero(t, n)
			requireConnError(t, tr, err, "write")
			requireTimeout(t, err)
		}
		require.NoError(t, client.SetDeadline(time.Time{}))
		require.NoError(t, defect.ReadFull(client, "here"))
		exchange(t, client, server, 10<<10)
	})
}

// A deadline that is set, or moved, while a call waits ends the call.
func TestDeadlineUnblocks(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		for _, at := range []func() time.Time{
			func() time.Time { return past },
			func() time.Time { return time.Now().Add(time.Millisecond) },
		} {
			require.NoError(t, client.SetDeadline(time.Now().Add(time.Hour)))
			errs := make(chan error, 2)
			go func() {
				_, err := client.Read(make([]byte, 1))
				errs <- err
			}()
			go func() {
				_, err := client.Write(make([]byte, 64<<20))
				errs <- err
			}()
			_, err := io.ReadFull(server, make([]byte, 1)) // the Write is under way
			require.NoError(t, err)
			require.NoError(t, client.SetDeadline(at()))
			within(t, "read or write past its deadline", func() {
				err = errors.Join(<-errs, <-errs)
			})
			requireTimeout(t, err)
			require.NoError(t, client.SetDeadline(time.Time{}))
		}
	})
}

// A Write that times out has sent what it says, and the stream goes on there.
func TestStreamAfterTimeout(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		data := pattern(8, 24<<20)
		require.NoError(t, client.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
		sent, err := client.Write(data) // nobody reads: too much for any buffer
		requireTimeout(t, err)
		require.Less(t, sent, len(data))

		done := make(chan error, 1)
		go func() {
			got, err := io.ReadAll(server)
			if err == nil {
				err = defect.Differ(data, got)
			}
			done <- err
		}()
		timeouts := 0
		for sent < len(data) {
			if timeouts < 20 {
				require.NoError(t, client.SetWriteDeadline(time.Now().Add(100*time.Microsecond)))
			} else {
				require.NoError(t, client.SetWriteDeadline(time.Time{}))
			}
			n, err := client.Write(data[sent:])
			sent += n
			if err != nil {
				requireTimeout(t, err)
				timeouts++
			}
		}
		require.NoError(t, client.SetWriteDeadline(time.Time{}))
		require.NoError(t, client.CloseWrite())
		within(t, "read", func() { err = <-done })
		require.NoError(t, err)
	})
}

// Everything at once, from many goroutines, and Close in the middle of it.
func TestConcurrentUse(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			checkLeaks(t)
			for range heavy(5) {
				client, server := pipe(t, lb.network, lb.address, new(ListenConfig), new(Dialer))
				var wg sync.WaitGroup
				errs := make(chan error, 100)
				use := func(c *Conn, f func() error) {
					wg.Go(func() {
						for {
							err := f()
							switch {
							case err == nil, errors.Is(err, os.ErrDeadlineExceeded):
								continue
							case err == io.EOF, errors.Is(err, net.ErrClosed),
								errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNRESET):
							default:
								errs <- err
							}
							return
						}
					})
				}
				for _, c := range []*Conn{client, server} {
					for range 2 {
						in, out := make([]byte, 1000), make([]byte, 10000)
						use(c, func() error { _, err := c.Read(in); return err })
						use(c, func() error { _, err := c.Write(out); return err })
					}
					use(c, func() error { return c.SetDeadline(time.Now().Add(time.Millisecond)) })
					use(c, func() error { return c.SetReadDeadline(time.Time{}) })
					use(c, func() error { return c.SetWriteDeadline(time.Time{}) })
					use(c, func() error { c.Stats(); c.Info(); return c.SetDeadline(past) })
				}
				require.True(t, eventually(func() bool { return server.Stats().BytesReceived > 20000 && client.Stats().BytesReceived > 20000 }))
				within(t, "close in the middle", func() {
					wg.Go(func() { client.Close() })
					wg.Go(func() { client.Close() })
					wg.Go(func() { server.Close() })
					wg.Wait()
				})
				close(errs)
				for err := range errs {
					t.Errorf("not an error to expect: %v", err)
				}
			}
		})
	}
}
