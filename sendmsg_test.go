package rdmanet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// messageWays are the ways that messages go: cut into segments, or by transfers.
var messageWays = []struct {
	name string
	cfg  Config
}{
	{"segments", Config{TransferSize: -1, MaxSendSize: 1000, MaxReceiveSize: 1000}},
	{"large segments", Config{TransferSize: -1}},
	{"transfers", Config{TransferSize: minTransfer}},
	{"transfers by RDMA Write", Config{TransferSize: minTransfer, NoRDMARead: true}},
}

// eachWay runs f over each of them, with whatever else is set.
func eachWay(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, w := range messageWays {
		t.Run(w.name, func(t *testing.T) {
			checkLeaks(t)
			f(t, w.cfg)
		})
	}
}

// piece is what ReadPiece returned.
type piece struct {
	data  []byte
	flags MsgFlags
}

func recvPiece(t testing.TB, c *Conn, b []byte) piece {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(patience))
	n, flags, err := c.ReadPiece(b)
	require.NoError(t, err)
	if n == 0 {
		return piece{nil, flags}
	}
	return piece{bytes.Clone(b[:n]), flags}
}

// requirePiece receives a piece, which must be that.
func requirePiece(t testing.TB, want piece, c *Conn, b []byte) {
	t.Helper()
	got := recvPiece(t, c, b)
	require.Equal(t, want.flags, got.flags)
	defect.Bytes(t, want.data, got.data)
}

// messagePipe makes a connection that ends with the test at the latest. Unless its
// receives are limited there is room for some messages that nobody has read.
func messagePipe(t testing.TB, cfg Config) (client, server *Conn) {
	t.Helper()
	if cfg.MaxReceiveCredits == 0 {
		cfg.InitialReceiveCredits = 16
	}
	client, server = pipeOn(t, cfg)
	t.Cleanup(func() {
		client.Close()
		server.Close()
	})
	return client, server
}

// closeBoth ends a connection on both sides, in order.
func closeBoth(t testing.TB, a, b *Conn) {
	t.Helper()
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// Each flag, and each combination that there is, arrives with its message, of
// whatever length.
func TestMessageFlags(t *testing.T) {
	eachWay(t, func(t *testing.T, cfg Config) {
		client, server := messagePipe(t, cfg)
		require.True(t, client.Info().Extensions.MessageFlags)
		require.True(t, server.Info().Extensions.MessageFlags)
		full := segmentBytes(client)
		sizes := []int{0, 1, full, full + 1, 3 * full, minTransfer - 1, minTransfer, 100 << 10}
		flags := []MsgFlags{0, Expedited, NoResponse, Expedited | NoResponse}
		done := make(chan error, 1)
		go func() {
			for i, n := range sizes {
				for _, f := range flags {
					if k, err := client.WriteMsg(pattern(uint64(i), n), f); k != n || err != nil {
						done <- fmt.Errorf("%d of %d bytes: %w", k, n, err)
						return
					}
				}
			}
			done <- client.CloseWrite()
		}()
		b := make([]byte, 3*full+100<<10)
		for i, n := range sizes {
			for _, f := range flags {
				got := recvPiece(t, server, b)
				require.Equal(t, f&Expedited, got.flags)
				defect.Bytes(t, pattern(uint64(i), n), got.data)
			}
		}
		_, _, err := server.ReadPiece(b)
		require.True(t, err == io.EOF)
		require.NoError(t, <-done)
		require.EqualValues(t, len(sizes)*len(flags), client.Stats().MessagesSent)
		require.EqualValues(t, len(sizes)*len(flags), server.Stats().MessagesReceived)
		closeBoth(t, client, server)
	})
}

// A message in pieces: ReadPiece tells of each whether there are more, ReadMsg joins
// them, Read sees a stream.
func TestPartialMessages(t *testing.T) {
	eachWay(t, func(t *testing.T, cfg Config) {
		for _, kind := range []MsgFlags{0, Expedited} {
			client, server := messagePipe(t, cfg)
			full := segmentBytes(client)
			sizes := []int{3, full, 2*full + 5, minTransfer + 7, 1}
			for _, lastPiece := range []int{10, 2 * minTransfer, 0} {
				sizes := append(sizes, lastPiece)
				var whole []byte
				for i, n := range sizes {
					whole = append(whole, pattern(uint64(i), n)...)
				}
				send := func() error {
					for i, n := range sizes {
						f := kind | Partial
						if i == len(sizes)-1 {
							f = kind
						}
						if k, err := client.WriteMsg(pattern(uint64(i), n), f); k != n || err != nil {
							return fmt.Errorf("%d of %d bytes: %w", k, n, err)
						}
						if _, err := client.WriteMsg(nil, kind|Partial); err != nil && i < len(sizes)-1 {
							return err // an empty piece is nothing
						}
					}
					return writeMsg(client, []byte("next"))
				}
				done := make(chan error, 1)
				b := make([]byte, len(whole))

				go func() { done <- send() }()
				for i, n := range sizes {
					got := recvPiece(t, server, b)
					want := kind | Partial
					if i == len(sizes)-1 {
						want = kind
					}
					require.Equal(t, want, got.flags, "piece %d", i)
					defect.Bytes(t, pattern(uint64(i), n), got.data, "piece %d", i)
				}
				requirePiece(t, piece{[]byte("next"), 0}, server, b)
				require.NoError(t, <-done)

				go func() { done <- send() }()
				n, err := server.ReadMsg(b)
				require.NoError(t, err)
				defect.Bytes(t, whole, b[:n])
				requirePiece(t, piece{[]byte("next"), 0}, server, b)
				require.NoError(t, <-done)

				go func() { done <- send() }()
				require.NoError(t, defect.ReadFull(server, whole))
				require.NoError(t, defect.ReadFull(server, "next"))
				require.NoError(t, <-done)
			}
			closeBoth(t, client, server)
		}
	})
}

// Write ends a message that was begun with pieces; however much it is, it belongs
// to it.
func TestWriteEndsMessage(t *testing.T) {
	eachWay(t, func(t *testing.T, cfg Config) {
		client, server := messagePipe(t, cfg)
		for _, n := range []int{1, 1000, 600 << 10} {
			want := append([]byte("begun "), pattern(1, n)...)
			done := make(chan error, 1)
			go func() {
				_, err := client.WriteMsg(want[:6], Partial)
				_, err2 := client.Write(want[6:])
				done <- errors.Join(err, err2, writeMsg(client, []byte("next")))
			}()
			b := make([]byte, len(want)+1)
			k, err := server.ReadMsg(b)
			require.NoError(t, err)
			defect.Bytes(t, want, b[:k])
			requirePiece(t, piece{[]byte("next"), 0}, server, b)
			require.NoError(t, <-done)
		}
		closeBoth(t, client, server)
	})
}

// An expedited message does not get between the pieces of another, nor a normal
// one between those of an expedited one; both go when the message has ended.
func TestNothingInsideMessage(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{})
	b := make([]byte, 100)
	for _, kind := range []MsgFlags{0, Expedited} {
		other := kind ^ Expedited
		_, err := client.WriteMsg([]byte("one "), kind|Partial)
		require.NoError(t, err)
		queued := client.QueueMsg([]byte("other"), other)
		called := make(chan error, 1)
		parked(t, func() {
			_, err := client.WriteMsg([]byte("other"), other)
			called <- err
		})
		require.Empty(t, called)
		_, err = client.WriteMsg([]byte("no"), other|NonBlocking)
		require.ErrorIs(t, err, syscall.EAGAIN)
		_, err = client.WriteMsg([]byte("message"), kind)
		require.NoError(t, err)
		_, err = queued.Result()
		require.NoError(t, err)
		require.NoError(t, <-called)
		requirePiece(t, piece{[]byte("one "), kind | Partial}, server, b)
		requirePiece(t, piece{[]byte("message"), kind}, server, b)
		requirePiece(t, piece{[]byte("other"), other}, server, b)
		requirePiece(t, piece{[]byte("other"), other}, server, b)
	}
	closeBoth(t, client, server)
}

// A message goes before the end of the stream, and so does a Write that ends a message. All
// calls of CloseWrite that wait for it find the stream ended.
func TestCloseWriteTwiceInLine(t *testing.T) {
	checkLeaks(t)
	data := pattern(3, 16<<20)
	for name, tt := range map[string]struct {
		cfg  Config
		send func(*Conn) (int, error)
	}{
		"a message by a transfer": {Config{}, func(c *Conn) (int, error) { return c.WriteMsg(data) }},
		"a Write by a transfer":   {Config{TransferSize: 1 << 20}, func(c *Conn) (int, error) { return c.Write(data) }},
		"a Write by segments":     {Config{TransferSize: -1}, func(c *Conn) (int, error) { return c.Write(data) }},
	} {
		client, server := messagePipe(t, tt.cfg)
		_, err := client.WriteMsg([]byte("one "), Partial)
		require.NoError(t, err)
		sent := make(chan error, 1)
		parked(t, func() {
			_, err := tt.send(client)
			sent <- err
		})
		ended := make(chan error, 2)
		for range 2 {
			parked(t, func() { ended <- client.CloseWrite() })
		}
		require.Empty(t, ended, name)
		got, err := io.ReadAll(server)
		require.NoError(t, err, name)
		defect.Bytes(t, "one "+string(data), got)
		require.NoError(t, <-sent, name)
		for range 2 {
			require.NoError(t, <-ended, name)
		}
		closeBoth(t, client, server)
	}
}

// CloseWrite is refused when a message has begun and nobody sends the rest of it.
func TestCloseWriteBehindPiece(t *testing.T) {
	checkLeaks(t)
	for _, kind := range []MsgFlags{0, Expedited} {
		client, server := messagePipe(t, withCredits(t, Config{TransferSize: -1, MaxReceiveCredits: 8}))
		sent := make(chan error, 1)
		parked(t, func() {
			var err error
			for n := 0; err == nil && n < 4; n++ { // There is no room even for the first one.
				_, err = client.WriteMsg(make([]byte, 1000<<10), kind|Partial)
			}
			sent <- err
		})
		require.True(t, eventually(func() bool { return client.Stats().CreditStalls > 0 }))
		ended := make(chan error, 1)
		parked(t, func() { ended <- client.CloseWrite() })
		require.Empty(t, ended)
		go io.Copy(io.Discard, server)
		within(t, "CloseWrite", func() { require.ErrorIs(t, <-ended, errMessageOpen) })
		within(t, "WriteMsg", func() { require.NoError(t, <-sent) })
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
	}
}

// While CloseWrite waits, only the rest of the message that it waits for is sent.
func TestNothingBeforeCloseWrite(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{TransferSize: -1})
	_, err := client.WriteMsg([]byte("one "), Partial)
	require.NoError(t, err)
	data := pattern(3, 16<<20)
	sent := make(chan error, 1)
	parked(t, func() {
		_, err := client.Write(data)
		sent <- err
	})
	ended := make(chan error, 1)
	parked(t, func() { ended <- client.CloseWrite() })
	for _, flags := range []MsgFlags{Expedited, Expedited | Partial, Expedited | NonBlocking} {
		_, err = client.WriteMsg([]byte("late"), flags)
		require.ErrorIs(t, err, syscall.EPIPE)
		if flags&NonBlocking == 0 {
			_, err = client.QueueMsg([]byte("late"), flags).Result()
			require.ErrorIs(t, err, syscall.EPIPE)
		}
	}
	got, err := io.ReadAll(server)
	require.NoError(t, err)
	defect.Bytes(t, "one "+string(data), got)
	require.NoError(t, <-sent)
	require.NoError(t, <-ended)
	closeBoth(t, client, server)
}

// An empty message is one for who reads messages, and nothing in a stream.
func TestEmptyMessages(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{})
	b := make([]byte, 10)
	require.NoError(t, writeMsg(client, nil))
	n, err := server.ReadMsg(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	_, err = client.WriteMsg([]byte{}, Expedited)
	require.NoError(t, err)
	requirePiece(t, piece{nil, Expedited}, server, b)

	_, err = client.WriteMsg(nil, Partial) // nothing: it begins no message either
	require.NoError(t, err)
	require.NoError(t, writeMsg(client, nil))
	_, err = client.Write([]byte("ab"))
	require.NoError(t, err)
	require.NoError(t, writeMsg(client, nil))
	_, err = client.Write([]byte("cd"))
	require.NoError(t, err)
	require.NoError(t, writeMsg(client, nil))
	for _, p := range []string{"ef", ""} {
		for {
			_, err := client.WriteMsg([]byte(p), NonBlocking)
			if !errors.Is(err, syscall.EAGAIN) {
				require.NoError(t, err)
				break
			}
			within(t, "Writable", func() { <-client.Writable() })
		}
	}
	require.NoError(t, client.CloseWrite())
	_, err = io.ReadFull(server, b[:2])
	require.NoError(t, err)
	var rest bytes.Buffer
	_, err = server.WriteTo(&rest)
	require.NoError(t, err)
	defect.Bytes(t, "abcdef", string(b[:2])+rest.String())
	closeBoth(t, client, server)
}

// Empty messages that nobody reads take no more than a bounded amount of memory, and
// none gets lost.
func TestEmptyMessageFlood(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{MaxReceiveCredits: 8, ReceiveMemory: minReceiveMemory})
	free := server.in.copies.free
	least, most := uint64(max(free, minReceiveMemory)/copyBreakCost), uint64(free+minReceiveMemory)/copyBreakCost
	wrote := make(chan result, 1)
	go func() {
		for sent := 0; ; sent++ {
			if err := writeMsg(client, nil); err != nil {
				wrote <- result{sent, err}
				return
			}
		}
	}()
	require.True(t, eventually(func() bool { return server.Stats().MessagesReceived >= least }), "the memory is not used")
	requireSilence(t, client, server)
	require.NoError(t, client.SetWriteDeadline(past))
	var r result
	within(t, "WriteMsg", func() { r = <-wrote })
	requireTimeout(t, r.err)
	sent := r.n
	require.LessOrEqual(t, server.Stats().MessagesReceived, most+2*8)
	require.NoError(t, client.SetWriteDeadline(time.Time{}))
	for range sent {
		requirePiece(t, piece{}, server, nil)
	}
	require.NoError(t, client.CloseWrite())
	_, _, err := server.ReadPiece(nil)
	require.True(t, err == io.EOF)
	closeBoth(t, client, server)
}

// Of a piece that does not fit nothing is lost, and what was read of one is said.
func TestPieceShortBuffer(t *testing.T) {
	eachWay(t, func(t *testing.T, cfg Config) {
		client, server := messagePipe(t, cfg)
		first, second := pattern(1, 6000), pattern(2, 5000)
		done := make(chan error, 1)
		send := func() {
			_, err := client.WriteMsg(first, Partial)
			_, err2 := client.WriteMsg(second)
			done <- errors.Join(err, err2)
		}
		b := make([]byte, 6000)

		go send()
		for range 2 { // the first piece stays
			n, flags, err := server.ReadPiece(b[:5999])
			require.ErrorIs(t, err, io.ErrShortBuffer)
			require.Equal(t, 6000, n)
			require.Equal(t, Partial, flags)
		}
		requirePiece(t, piece{first, Partial}, server, b)
		require.NoError(t, defect.ReadFull(server, second[:100])) // now a part of the second is gone
		n, flags, err := server.ReadPiece(b[:4000])
		require.ErrorIs(t, err, io.ErrShortBuffer)
		require.Equal(t, 4000, n)
		require.Equal(t, Partial, flags)
		defect.Bytes(t, second[100:4100], b[:n])
		requirePiece(t, piece{second[4100:], 0}, server, b)
		require.NoError(t, <-done)

		go send() // ReadMsg fills its buffer, and goes on
		n, err = server.ReadMsg(b[:6000])
		require.ErrorIs(t, err, io.ErrShortBuffer)
		require.Equal(t, 6000, n)
		defect.Bytes(t, first, b)
		n, err = server.ReadMsg(b)
		require.NoError(t, err)
		defect.Bytes(t, second, b[:n])
		require.NoError(t, <-done)
		closeBoth(t, client, server)
	})
}

// A deadline between two pieces leaves both sides as they were.
func TestPieceDeadlines(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{})
	_, err := client.WriteMsg([]byte("one "), Partial)
	require.NoError(t, err)
	require.NoError(t, client.SetWriteDeadline(past))
	_, err = client.WriteMsg([]byte("never"))
	requireTimeout(t, err)
	require.NoError(t, client.SetWriteDeadline(time.Time{}))

	b := make([]byte, 100)
	read := make(chan result, 1)
	call := start(func() {
		n, err := server.ReadMsg(b)
		read <- result{n, err}
	})
	require.True(t, eventually(func() bool { return server.Stats().BytesReceived == 4 }))
	require.True(t, eventually(call.waits), "it has the first piece, and waits for the next")
	require.NoError(t, server.SetReadDeadline(past))
	var r result
	within(t, "ReadMsg", func() { r = <-read })
	requireTimeout(t, r.err)
	defect.Bytes(t, "one ", b[:r.n])
	_, flags, err := server.ReadPiece(b)
	requireTimeout(t, err)
	require.Zero(t, flags)
	_, err = client.WriteMsg([]byte("message"))
	require.NoError(t, err)
	requirePiece(t, piece{[]byte("message"), 0}, server, b)
	closeBoth(t, client, server)
}

// A message whose last piece is not sent has no end: CloseWrite does not pretend
// so, and after Close the peer reads an error.
func TestUnfinishedMessage(t *testing.T) {
	checkLeaks(t)
	for _, kind := range []MsgFlags{0, Expedited} {
		client, server := messagePipe(t, Config{})
		_, err := client.WriteMsg([]byte("begun"), kind|Partial)
		require.NoError(t, err)
		require.ErrorIs(t, client.CloseWrite(), errMessageOpen)
		_, err = client.WriteMsg([]byte(", not ended"), kind|Partial)
		require.NoError(t, err)
		require.NoError(t, client.Close())
		b := make([]byte, 100)
		n, err := server.ReadMsg(b)
		require.ErrorIs(t, err, syscall.ECONNRESET)
		require.ErrorIs(t, err, errTruncated)
		defect.Bytes(t, "begun, not ended", b[:n])
		require.NoError(t, server.Close())
	}
}

// A deadline in the middle of a piece: nothing more can be sent.
func TestPieceCut(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, withCredits(t, Config{MaxSendSize: minSegment, TransferSize: -1}))
	_, err := client.WriteMsg([]byte("one "), Partial)
	require.NoError(t, err)
	waiting := client.QueueMsg([]byte("never"), Expedited)
	sent := make(chan result, 1)
	go func() {
		n, err := client.WriteMsg(make([]byte, 1<<20), Partial)
		sent <- result{n, err}
	}()
	require.True(t, eventually(func() bool { return client.Stats().CreditStalls > 0 }), "it fits")
	require.NoError(t, client.SetWriteDeadline(past))
	var r result
	within(t, "WriteMsg", func() { r = <-sent })
	requireTimeout(t, r.err)
	require.NotZero(t, r.n)
	require.Less(t, r.n, 1<<20)
	_, err = waiting.Result()
	requireTimeout(t, err)
	require.NoError(t, client.SetWriteDeadline(time.Time{}))
	_, err = client.WriteMsg([]byte("more"))
	require.ErrorIs(t, err, errMessageCut)
	_, err = client.QueueMsg([]byte("more"), Expedited).Result()
	require.ErrorIs(t, err, errMessageCut)
	pass(t, server, client)
	require.NoError(t, client.Close())
	_, err = server.ReadMsg(make([]byte, 1<<21))
	require.ErrorIs(t, err, errTruncated)
	require.NoError(t, server.Close())
}

// TestSendRefused checks what WriteMsg and QueueMsg refuse.
func TestSendRefused(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{TransferSize: -1})
	_, err := client.WriteMsg([]byte("x"), MsgFlags(0x80))
	requireConnError(t, transports[0], err, "write")
	require.ErrorIs(t, err, syscall.EINVAL)
	_, err = client.QueueMsg([]byte("x"), MsgFlags(0x80)).Result()
	requireConnError(t, transports[0], err, "write")
	require.ErrorIs(t, err, syscall.EINVAL)
	for _, opts := range [][]MsgOption{
		{nil}, {Expedited, MsgFlags(0x40)}, {struct{ MsgOption }{}},
		{Invalidate(1), Invalidate(2)}, {Invalidate(1), NoResponse, Invalidate(1)},
	} {
		_, err = client.WriteMsg([]byte("x"), opts...)
		require.ErrorIs(t, err, syscall.EINVAL, "%v", opts)
		_, err = client.QueueMsg([]byte("x"), opts...).Result()
		require.ErrorIs(t, err, syscall.EINVAL, "%v", opts)
	}
	_, err = client.WriteMsg(nil, Partial, Invalidate(1))
	require.ErrorIs(t, err, syscall.EINVAL, "it would not be sent")
	_, err = client.QueueMsg([]byte("x"), NonBlocking).Result()
	require.ErrorIs(t, err, syscall.EINVAL)
	for _, flags := range []MsgFlags{0, Expedited, Partial} {
		n, err := client.WriteMsg(make([]byte, client.MaxMessageSize()+1), flags)
		require.Zero(t, n)
		require.ErrorIs(t, err, ErrMessageTooLong)
		_, err = client.QueueMsg(make([]byte, client.MaxMessageSize()+1), flags).Result()
		require.ErrorIs(t, err, ErrMessageTooLong)
	}
	require.Zero(t, client.Stats().BytesSent)
	pass(t, client, server)
	require.NoError(t, client.CloseWrite())
	_, err = client.WriteMsg(nil, Expedited)
	require.ErrorIs(t, err, syscall.EPIPE)
	require.NoError(t, client.Close())
	_, err = client.WriteMsg([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = client.QueueMsg([]byte("x")).Result()
	require.ErrorIs(t, err, net.ErrClosed)
	_, _, err = client.ReadPiece(nil)
	require.ErrorIs(t, err, net.ErrClosed)
	require.NoError(t, server.Close())
}

// fillUp sends without blocking, n bytes at a time, until there is no room. Each
// message begins with its number.
func fillUp(t testing.TB, c *Conn, n, number int, flags MsgFlags) (sent int) {
	t.Helper()
	for {
		p := binary.BigEndian.AppendUint64(nil, uint64(number+sent))
		k, err := c.WriteMsg(append(p, make([]byte, n-8)...), flags|NonBlocking)
		if errors.Is(err, syscall.EAGAIN) {
			require.Zero(t, k)
			requireConnError(t, transports[0], err, "write")
			return sent
		}
		require.NoError(t, err)
		require.Equal(t, n, k)
		sent++
	}
}

// Without blocking: what is taken arrives, what gets EAGAIN does not, and the
// channel tells when there is room again.
func TestNonBlocking(t *testing.T) {
	checkLeaks(t)
	for _, flags := range []MsgFlags{0, Expedited, NoResponse} {
		client, server := messagePipe(t, Config{MaxReceiveCredits: 8})
		total, rounds := 0, heavy(50)
		counted := make(chan int, 1)
		first := fillUp(t, client, 100, 0, flags)
		require.NotZero(t, first)
		require.Equal(t, first, int(client.Stats().MessagesSent))
		total = first
		go func() {
			b := make([]byte, 100)
			n := 0
			defer func() { counted <- n }()
			for ; ; n++ {
				_, f, err := server.ReadPiece(b)
				if err != nil || f != flags&Expedited || binary.BigEndian.Uint64(b) != uint64(n) {
					return
				}
			}
		}()
		for range rounds {
			select {
			case <-client.Writable():
			case <-time.After(patience):
				t.Fatalf("nobody says that there is room after %d messages\n\n%s", total, stacks())
			}
			total += fillUp(t, client, 100, total, flags)
		}
		require.NoError(t, client.CloseWrite())
		require.Equal(t, total, <-counted)
		closeBoth(t, client, server)
	}
}

// A message for which there is not enough room goes in parts, of which each call
// says how long it was.
func TestNonBlockingParts(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, withCredits(t, Config{}))
	want := pattern(7, heavy(8<<20))
	read := make(chan error, 1)
	go func() {
		b := make([]byte, len(want)+1)
		n, err := server.ReadMsg(b)
		if err == nil {
			err = defect.Differ(want, b[:n])
		}
		read <- err
	}()
	parts := 0
	for rest := want; len(rest) > 0; {
		n, err := client.WriteMsg(rest, NonBlocking)
		if err != nil {
			require.ErrorIs(t, err, syscall.EAGAIN)
			require.Zero(t, n)
		} else {
			require.NotZero(t, n)
			parts++
		}
		if rest = rest[n:]; len(rest) > 0 {
			within(t, "Writable", func() { <-client.Writable() })
		}
	}
	require.Greater(t, parts, 1)
	require.NoError(t, <-read)
	require.NoError(t, writeMsg(client, []byte("next")))
	requirePiece(t, piece{[]byte("next"), 0}, server, make([]byte, 10))
	closeBoth(t, client, server)
}

// To a peer that knows no pieces a message goes as a whole or not at all.
func TestNonBlockingPlainPeer(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.conns(side.active, nil)
			full := segmentBytes(c)
			n, err := c.WriteMsg(make([]byte, batchSegments*full+1), NonBlocking)
			require.Zero(t, n)
			require.ErrorIs(t, err, syscall.EMSGSIZE)
			hear := func(n int) {
				t.Helper()
				for n > 0 {
					h, payload, ok := p.ReceiveData()
					require.True(t, ok)
					require.Zero(t, h.Flags)
					n -= len(payload)
					if len(payload) > 0 {
						require.EqualValues(t, n, h.RemainingDataLength)
					}
				}
				require.Zero(t, n)
			}

			_, err = c.WriteMsg([]byte("first"), Expedited|NonBlocking)
			for errors.Is(err, syscall.EAGAIN) { // the grant may be on its way
				<-c.Writable()
				_, err = c.WriteMsg([]byte("first"), Expedited|NonBlocking)
			}
			require.NoError(t, err)
			hear(len("first"))
			room := c.Stats().SendCredits - 1 // the last one is for a grant
			size := (room + 1) * full         // one segment too many
			n, err = c.WriteMsg(make([]byte, size), NonBlocking)
			require.Zero(t, n)
			require.ErrorIs(t, err, syscall.EAGAIN)
			p.WaitCredit()
			p.Grant(1)
			within(t, "Writable", func() { <-c.Writable() })
			n, err = c.WriteMsg(make([]byte, size), NonBlocking)
			require.NoError(t, err)
			require.Equal(t, size, n)
			hear(size)
		})
	}
}

// EAGAIN while others have the turn; the channel also tells that sending has become
// impossible.
func TestNonBlockingInVain(t *testing.T) {
	checkLeaks(t)
	for _, end := range []struct {
		name  string
		do    func(client, server *Conn)
		local bool
	}{
		{"Close", func(client, _ *Conn) { client.Close() }, true},
		{"peer closes", func(_, server *Conn) { server.Close() }, false},
	} {
		t.Run(end.name, func(t *testing.T) {
			client, server := messagePipe(t, Config{MaxReceiveCredits: 8, LingerTimeout: -1, TransferSize: -1})
			wrote := make(chan error, 1)
			go func() {
				_, err := client.Write(make([]byte, 64<<20))
				wrote <- err
			}()
			require.True(t, eventually(func() bool { return client.Stats().BytesSent > 0 }))
			n, err := client.WriteMsg([]byte("x"), NonBlocking)
			require.ErrorIs(t, err, syscall.EAGAIN)
			require.Zero(t, n)
			end.do(client, server)
			within(t, "Writable", func() { <-client.Writable() })
			_, err = client.WriteMsg([]byte("x"), NonBlocking)
			for _, err := range []error{err, <-wrote} {
				require.Error(t, err)
				require.NotErrorIs(t, err, syscall.EAGAIN)
				require.False(t, end.local && !errors.Is(err, net.ErrClosed), "%v", err)
			}
			client.Close()
			server.Close()
		})
	}
}

// The hint that no answer is expected saves grants that have nobody to wait for
// them, and holds nobody up.
func TestNoResponse(t *testing.T) {
	checkLeaks(t)
	alone := func(flags MsgFlags) (grants uint64) {
		client, server := messagePipe(t, withCredits(t, Config{InitialReceiveCredits: 32, MaxReceiveCredits: 32}))
		b := make([]byte, 100)
		n := heavy(2000)
		for range n {
			_, err := client.WriteMsg(b, flags)
			require.NoError(t, err)
			recvPiece(t, server, b)
		}
		grants = server.Stats().EmptySent
		closeBoth(t, client, server)
		return grants
	}
	hurried, patient := alone(0), alone(NoResponse)
	require.NotZero(t, patient)
	require.Less(t, patient, hurried)
}

// Receiving allocates nothing, nor does sending, with whatever flags, whether it goes
// inline or by way of registered buffers.
func TestMessagesWithoutGarbage(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{})
	p, b := pattern(1, 3000), make([]byte, 3000)
	exchange := func(want MsgFlags, send func() (int, error)) {
		n, err := send()
		for errors.Is(err, syscall.EAGAIN) {
			<-client.Writable()
			n, err = send()
		}
		if n != len(p) || err != nil {
			t.Fatal(n, err)
		}
		n, got, err := server.ReadPiece(b)
		if n != len(p) || err != nil || got != want {
			t.Fatal(n, got, err)
		}
	}
	withoutGarbage := func(name string, turn func()) {
		for range 50 {
			turn()
		}
		require.Zero(t, testing.AllocsPerRun(500, turn), name)
	}
	for _, flags := range []MsgFlags{0, Expedited, NoResponse, NonBlocking, Partial} {
		withoutGarbage(fmt.Sprintf("flags %b", flags), func() {
			for _, f := range []MsgFlags{flags, flags &^ Partial} {
				exchange(f&(Expedited|Partial), func() (int, error) { return client.WriteMsg(p, f) })
			}
		})
	}
	withoutGarbage("no options", func() { exchange(0, func() (int, error) { return client.WriteMsg(p) }) })
	withoutGarbage("flags one by one", func() {
		exchange(Expedited, func() (int, error) { return client.WriteMsg(p, Expedited, NoResponse, NonBlocking, Invalidate(0)) })
	})
	key := uint32(1 << 20) // Go has values below 256 at hand
	withoutGarbage("a key", func() {
		if m, err := client.messageOptions(p, []MsgOption{Expedited, Invalidate(key)}); m.token != key || m.flags != Expedited || err != nil {
			t.Fatal(m, err)
		}
	})
	closeBoth(t, client, server)
}
