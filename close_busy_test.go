package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// Close while the peer writes by large transfers, which nobody here takes any more: what
// was written to the peer before arrives all the same.

// closings are the two ways to close.
var closings = []struct {
	name string
	end  func(*Conn) error
}{
	{"Close", func(c *Conn) error { return c.Close() }},
	{"CloseContext", func(c *Conn) error { return c.CloseContext(tctx) }},
}

// readings are the ways in which large transfers come in: into scratch, ahead of a reader
// that is not there or takes little at a time, or straight into the reader's memory.
var readings = []struct {
	name string
	room int // of a Read, 0 for none
}{{"nobody reads", 0}, {"in progress, of little", 64 << 10}, {"in progress, of much", 4 << 20}}

// The peer's device is at work on memory that it was granted when we close, so its RDMA
// Writes go on while what we wrote is on its way. Were the keys closed by then, or the
// memory, the next one would break the connection, and the peer would lose the rest.
func TestCloseUnderRDMAWrites(t *testing.T) {
	data := patternOf(200_000)
	for _, how := range closings {
		for _, reading := range readings {
			t.Run(how.name+", "+reading.name, func(t *testing.T) {
				checkLeaks(t)
				rounds := heavy(24)
				for i := range rounds {
					a, b := pipeOn(t, Config{NoRDMARead: true, TransferSize: 256 << 10})
					var busy sync.WaitGroup
					busy.Go(func() {
						for p, err := make([]byte, 4<<20), error(nil); err == nil; {
							_, err = b.Write(p)
						}
					})
					if reading.room > 0 {
						busy.Go(func() {
							for p, err := make([]byte, reading.room), error(nil); err == nil; {
								_, err = a.Read(p)
							}
						})
					}
					got := make(chan error, 1)
					go func() { got <- readsAll(b, data) }()
					// Every round closes a little later in the transfer. What comes in for
					// nobody ends with the scratch memory of a connection.
					under := uint64(i * (640 << 10) / rounds)
					require.True(t, eventually(func() bool { return a.Stats().TransferBytesReceived >= under }))
					_, err := a.Write(data)
					require.NoError(t, err)
					within(t, how.name, func() { err = how.end(a) })
					require.NoError(t, err, "closed after %d bytes", under)
					within(t, "the peer", func() { err = <-got; busy.Wait() })
					require.NoError(t, err, "closed after %d bytes", under)
					require.NoError(t, b.Close())
				}
			})
		}
	}
}

// readsAll reads until the stream ends, and checks that it has had all of want by then. The
// end may be an error: a peer that writes finds one where it has not read the end yet.
func readsAll(c net.Conn, want []byte) error {
	got, err := io.ReadAll(c)
	if err == nil || len(got) >= len(want) {
		return defect.Differ(want, got)
	}
	return errors.Join(defect.Differ(want[:len(got)], got), fmt.Errorf("%d of %d bytes, then %w", len(got), len(want), err))
}

// A peer that writes before it reads would not come to it if what it writes were left
// unread here: a Read in progress must not keep it.
func TestCloseContextUnderWrites(t *testing.T) {
	const written = 256 << 20
	var segments Config
	if !onRDMA {
		segments.TransferSize = inlineTransfer // for the message, and not for what the peer writes
	}
	for _, peer := range []struct {
		name string
		cfg  Config
	}{
		{"segments", segments}, // but on RDMA devices
		{"RDMA Reads", Config{TransferSize: 512 << 10}},
		{"RDMA Writes", Config{TransferSize: 512 << 10, NoRDMARead: true}},
	} {
		for _, reading := range readings {
			t.Run(peer.name+", "+reading.name, func(t *testing.T) {
				checkLeaks(t)
				a, b := pipeOn(t, peer.cfg)
				buf := alloc(t, heavy(8<<20))
				data := pattern(9, len(buf.Bytes()))
				copy(buf.Bytes(), data)
				s := a.QueueMsg(buf.Bytes())
				// Close drops what the peer has not been told of.
				require.True(t, eventually(func() bool { return a.Stats().TransfersSent == 1 }))
				var busy sync.WaitGroup
				if reading.room > 0 {
					busy.Go(func() {
						for p, err := make([]byte, reading.room), error(nil); err == nil; {
							_, err = a.Read(p)
						}
					})
				}
				got := make(chan error, 1)
				go func() {
					p, n := make([]byte, 1<<20), heavy(written)
					for err := error(nil); n > 0 && err == nil; n -= len(p) {
						_, err = b.Write(p)
					}
					got <- readsAll(b, data)
				}()
				require.True(t, eventually(func() bool { return a.Stats().BytesReceived > 0 }))
				var err error
				within(t, "CloseContext", func() { err = a.CloseContext(tctx) })
				require.NoError(t, err)
				within(t, "the peer", func() { err = <-got; busy.Wait() })
				require.NoError(t, err)
				n, err := s.Result()
				require.NoError(t, err)
				require.Equal(t, len(data), n)
				require.NoError(t, b.Close())
			})
		}
	}
}
