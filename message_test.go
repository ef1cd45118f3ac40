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

	"github.com/rdmanet/rdmanet/internal/defect"
)

// Messages keep their boundaries through any number of segments.
func TestMessageBoundaries(t *testing.T) {
	for _, lb := range loopbacks {
		for _, size := range []int{minSegment, 1000, 0} {
			t.Run(fmt.Sprintf("%s/MaxSendSize=%d", lb.network, size), func(t *testing.T) {
				checkLeaks(t)
				client, server := pipe(t, lb.network, lb.address, new(ListenConfig), &Dialer{Config: Config{MaxSendSize: size}})
				full := segmentBytes(client)
				sizes := []int{1, full - 1, full, full + 1, 3*full - 1, 3 * full, 1, 100 << 10}
				done := make(chan error, 1)
				go func() {
					var err error
					for i, n := range sizes {
						err = errors.Join(err, writeMsg(client, nil), writeMsg(client, pattern(uint64(i), n)))
					}
					done <- errors.Join(err, client.CloseWrite())
				}()
				b := make([]byte, 1<<20)
				for i, want := range sizes {
					n, err := server.ReadMsg(b)
					require.NoError(t, err)
					require.Zero(t, n)
					n, err = server.ReadMsg(b)
					require.NoError(t, err)
					defect.Bytes(t, pattern(uint64(i), want), b[:n])
				}
				_, err := server.ReadMsg(b)
				require.True(t, err == io.EOF)
				require.NoError(t, <-done)
				sent, got := client.Stats(), server.Stats()
				require.EqualValues(t, 2*len(sizes), sent.MessagesSent)
				require.EqualValues(t, 2*len(sizes), got.MessagesReceived)
				segments := 0
				for _, n := range sizes {
					segments += (n + full - 1) / full
				}
				require.EqualValues(t, segments, sent.SegmentsSent)
				require.EqualValues(t, segments, got.SegmentsReceived)
				require.NoError(t, client.Close())
				require.NoError(t, server.Close())
			})
		}
	}
}

// segmentBytes is how many bytes of payload a segment of c has at most.
func segmentBytes(c *Conn) int { return segmentData(1<<30, c.Info().MaxSendSize) }

func TestMessageLimit(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4,
		&ListenConfig{Config: Config{MaxFragmentedSize: 200000}}, &Dialer{Config: Config{TransferSize: -1}})
	limit := client.MaxMessageSize()
	require.Equal(t, 200000, limit)
	err := writeMsg(client, make([]byte, limit+1))
	requireConnError(t, transports[0], err, "write")
	require.ErrorIs(t, err, ErrMessageTooLong)
	require.ErrorIs(t, err, syscall.EMSGSIZE)
	require.Zero(t, client.Stats().BytesSent)

	want := pattern(9, limit)
	done := make(chan error, 1)
	go func() { done <- writeMsg(client, want) }()
	got := make([]byte, limit)
	n, err := server.ReadMsg(got)
	require.NoError(t, err)
	defect.Bytes(t, want, got[:n])
	require.NoError(t, <-done)
	exchange(t, client, server, 2*limit) // Write takes any amount
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// A buffer that is too short is told how long it must be, and loses nothing.
func TestShortBuffer(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{MaxSendSize: minSegment}})
	require.NoError(t, writeMsg(client, pattern(1, 600)))
	b := make([]byte, 600)
	for range 2 {
		n, err := server.ReadMsg(b[:599])
		require.Equal(t, 600, n)
		requireConnError(t, transports[0], err, "read")
		require.ErrorIs(t, err, io.ErrShortBuffer)
	}
	n, err := server.ReadMsg(b)
	require.NoError(t, err)
	defect.Bytes(t, pattern(1, 600), b[:n])
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// Read takes from messages as from a stream, and ReadMsg what it left of one.
func TestReadAmongMessages(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), new(Dialer))
	for _, m := range []string{"one message", "another", "last"} {
		require.NoError(t, writeMsg(client, []byte(m)))
	}
	b := make([]byte, 100)
	require.NoError(t, defect.ReadFull(server, "one "))
	n, err := server.ReadMsg(b)
	require.NoError(t, err)
	defect.Bytes(t, "message", b[:n])
	require.NoError(t, defect.ReadFull(server, "anotherla")) // over the boundary
	n, err = server.ReadMsg(b[:1])
	require.ErrorIs(t, err, io.ErrShortBuffer)
	defect.Bytes(t, "s", b[:n], "of a message that was begun the part that fits is read")
	n, err = server.ReadMsg(b)
	require.NoError(t, err)
	defect.Bytes(t, "t", b[:n])
	require.NoError(t, client.Close())
	_, err = server.ReadMsg(b)
	require.True(t, err == io.EOF)
	require.NoError(t, server.Close())
}

// A message that a deadline cuts short cannot be ended: nothing else may ever be
// sent, and the reader must not take what came for all.
func TestMessageCut(t *testing.T) {
	for name, cfg := range map[string]Config{
		"segments":                {MaxSendSize: minSegment, TransferSize: -1, MaxFragmentedSize: heldBulk},
		"transfers":               {},
		"transfers by RDMA Write": {NoRDMARead: true},
	} {
		t.Run(name, func(t *testing.T) {
			checkLeaks(t)
			size := heldBulk
			client, server := pipeOn(t, cfg)
			require.NoError(t, writeMsg(client, []byte("whole")))
			cut := make(chan error, 1)
			go func() { cut <- writeMsg(client, make([]byte, size)) }() // more than the peer keeps for its reader
			require.True(t, eventually(func() bool { return client.Stats().BytesSent > 1000 }))
			require.NoError(t, client.SetWriteDeadline(past))
			requireTimeout(t, <-cut)
			_, err := client.Write([]byte("more"))
			requireTimeout(t, err)
			require.NoError(t, client.SetWriteDeadline(time.Time{}))
			for range 2 {
				_, err = client.Write([]byte("more"))
				require.ErrorIs(t, err, errMessageCut)
			}
			require.ErrorIs(t, client.CloseWrite(), errMessageCut)
			_, err = server.Write([]byte("the other direction"))
			require.NoError(t, err)
			b := make([]byte, size)
			n, err := client.Read(b)
			require.NoError(t, err)
			defect.Bytes(t, "the other direction", b[:n])
			require.NoError(t, client.Close())
			n, err = server.ReadMsg(b)
			require.NoError(t, err)
			defect.Bytes(t, "whole", b[:n])
			n, err = server.ReadMsg(b)
			require.ErrorIs(t, err, syscall.ECONNRESET)
			require.ErrorIs(t, err, errTruncated)
			require.Less(t, n, size)
			require.NoError(t, server.Close())
		})
	}
}

// A deadline in the middle of ReadMsg gives what has come, and the rest later.
func TestReadMsgDeadline(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{MaxSendSize: minSegment}})
	want := pattern(2, 100<<10)
	done := make(chan error, 1)
	go func() { done <- writeMsg(client, want) }()
	got := make([]byte, len(want))
	n := 0
	for timeouts := 0; n < len(want); {
		at := time.Time{}
		if timeouts < 50 {
			at = time.Now().Add(100 * time.Microsecond)
		}
		require.NoError(t, server.SetReadDeadline(at))
		k, err := server.ReadMsg(got[n:])
		n += k
		if err != nil {
			requireTimeout(t, err)
			timeouts++
		}
	}
	defect.Bytes(t, want, got)
	require.NoError(t, <-done)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// io.Copy in both directions, from and to readers and writers of other kinds.
func TestCopy(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		want := pattern(10, 3<<20+17)
		echoed := make(chan error, 1)
		go func() { // from a connection to itself
			n, err := io.Copy(server, server)
			if err == nil && n != int64(len(want)) {
				err = fmt.Errorf("%d bytes echoed", n)
			}
			echoed <- errors.Join(err, server.CloseWrite())
		}()
		sent := make(chan error, 1)
		go func() {
			n, err := client.ReadFrom(bytes.NewReader(want))
			if err == nil && n != int64(len(want)) {
				err = fmt.Errorf("%d bytes sent", n)
			}
			sent <- errors.Join(err, client.CloseWrite())
		}()
		var got bytes.Buffer
		n, err := client.WriteTo(&got)
		require.NoError(t, err)
		defect.Bytes(t, want, got.Bytes())
		require.EqualValues(t, len(want), n)
		require.NoError(t, <-sent)
		require.NoError(t, <-echoed)
	})
}

// Errors of the other side of a copy come through as they are.
func TestCopyErrors(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		client, server := tr.pair(t)
		broken := errors.New("broken")
		n, err := client.ReadFrom(io.MultiReader(bytes.NewReader([]byte("some")), errReader{broken}))
		require.EqualValues(t, 4, n)
		require.ErrorIs(t, err, broken)
		w := &limitedWriter{n: 2, err: broken}
		n, err = server.WriteTo(w)
		require.EqualValues(t, 2, n)
		require.ErrorIs(t, err, broken)
		require.NoError(t, server.SetReadDeadline(past))
		_, err = server.WriteTo(io.Discard)
		requireTimeout(t, err)
	})
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// limitedWriter takes n bytes.
type limitedWriter struct {
	n   int
	err error
}

func (w *limitedWriter) Write(p []byte) (int, error) {
	n := min(w.n, len(p))
	w.n -= n
	if n < len(p) {
		return n, w.err
	}
	return n, nil
}

// writeMsg is WriteMsg for tests that know how many bytes are taken.
func writeMsg(c *Conn, p []byte, opts ...MsgOption) error {
	_, err := c.WriteMsg(p, opts...)
	return err
}
