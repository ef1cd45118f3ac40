package rdmanet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// begun is how many messages of size bytes, which are all that there are, have had
// something sent.
func begun(c *Conn, size int) int { return (int(c.Stats().BytesSent) + size - 1) / size }

// stalled waits until a connection has sent all that it may.
func stalled(t testing.TB, c, peer *Conn) {
	t.Helper()
	require.True(t, eventually(func() bool {
		s := c.Stats()
		return s.CreditStalls > 0 || s.TransfersSent > 0
	}), "nothing waits")
	requireSilence(t, c, peer)
}

// numbered is a message of n bytes that begins with a number.
func numbered(number, n int) []byte {
	p := make([]byte, n)
	binary.BigEndian.PutUint64(p, uint64(number))
	return p
}

// With 16 MiB of normal messages queued an expedited one overtakes all of which
// nothing has been sent, the one that waits for credits too; several keep their
// order, and nothing is lost.
func TestExpeditedOvertakes(t *testing.T) {
	for _, w := range messageWays {
		t.Run(w.name, func(t *testing.T) {
			checkLeaks(t)
			w.cfg.MaxReceiveCredits = 8
			client, server := messagePipe(t, withCredits(t, w.cfg))
			const size, expeditedSends = 128 << 10, 3
			const count = 16 << 20 / size // more than twice what is received without a reader
			var queued []*PendingMessage
			for i := range count {
				queued = append(queued, client.QueueMsg(numbered(i, size)))
			}
			stalled(t, client, server)
			sent := client.Stats().MessagesSent // as a whole
			var urgent []*PendingMessage
			for i := range expeditedSends {
				urgent = append(urgent, client.QueueMsg(numbered(i, 100), Expedited))
			}
			first := begun(client, size) // those are ahead, at most
			require.Less(t, first, count/2)
			b := make([]byte, size)
			normals, expediteds := 0, 0
			for normals+expediteds < count+expeditedSends {
				got := recvPiece(t, server, b)
				number := int(binary.BigEndian.Uint64(got.data))
				if got.flags == Expedited {
					require.Len(t, got.data, 100)
					require.Equal(t, expediteds, number)
					require.LessOrEqual(t, normals, first)
					require.GreaterOrEqual(t, normals, int(sent))
					expediteds++
					continue
				}
				require.Len(t, got.data, size)
				require.Equal(t, normals, number)
				normals++
			}
			for _, s := range append(queued, urgent...) {
				_, err := s.Result()
				require.NoError(t, err)
			}
			closeBoth(t, client, server)
		})
	}
}

// An expedited message does not wait for the end of a long Write either, of which
// everything arrives in order.
func TestExpeditedOvertakesWrite(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, withCredits(t, Config{TransferSize: -1, MaxReceiveCredits: 8}))
	want := pattern(3, 16<<20) // more than twice what is received without a reader
	wrote := make(chan error, 1)
	go func() {
		_, err := client.Write(want)
		wrote <- err
	}()
	stalled(t, client, server)
	before := client.Stats().BytesSent
	require.Less(t, before, uint64(len(want)))
	called := make(chan error, 1)
	parked(t, func() {
		_, err := client.WriteMsg([]byte("urgent"), Expedited)
		called <- err
	})
	b := make([]byte, len(want))
	var got []byte
	for len(got) < len(want) {
		p := recvPiece(t, server, b)
		if p.flags == Expedited {
			require.Equal(t, "urgent", string(p.data))
			require.GreaterOrEqual(t, len(got), int(before))
			require.Less(t, len(got), len(want)/2)
			continue
		}
		got = append(got, p.data...)
	}
	defect.Bytes(t, want, got)
	require.NoError(t, <-wrote)
	require.NoError(t, <-called)
	closeBoth(t, client, server)
}

// Many goroutines send in all ways: the order of each, and of the queue as a whole,
// is kept within each kind.
func TestSendOrder(t *testing.T) {
	const goroutines = 16
	for _, cfg := range []Config{{}, {TransferSize: minTransfer, MaxReceiveCredits: 8}} {
		t.Run(fmt.Sprintf("TransferSize=%d", cfg.TransferSize), func(t *testing.T) {
			checkLeaks(t)
			client, server := messagePipe(t, cfg)
			total := heavy(heavy(100_000))
			if cfg.TransferSize > 0 {
				total /= 10 // those are slower
			}
			each := total / goroutines

			// A message is sender, number, place in the queue, or 0 for those that are
			// not in the common order. All are of the kind.
			var order struct {
				sync.Mutex
				next [2]uint64
			}
			send := func(g int) error {
				r := rand.New(rand.NewPCG(uint64(g), uint64(total)))
				var number [2]uint64
				var queued []*PendingMessage
				for range each {
					var flags MsgFlags
					if r.IntN(4) == 0 {
						flags = Expedited
					}
					kind := flags.kind()
					n := 24 + r.IntN(100)
					if r.IntN(64) == 0 {
						n += r.IntN(20 << 10)
					}
					p := make([]byte, n)
					number[kind]++
					binary.BigEndian.PutUint64(p, uint64(g))
					binary.BigEndian.PutUint64(p[8:], number[kind])
					var err error
					switch r.IntN(4) {
					case 0:
						order.Lock()
						order.next[kind]++
						binary.BigEndian.PutUint64(p[16:], order.next[kind])
						queued = append(queued, client.QueueMsg(p, flags))
						order.Unlock()
					case 1:
						queued = append(queued, client.QueueMsg(p, flags|NoResponse))
					case 2:
						if flags == 0 {
							err = writeMsg(client, p)
							break
						}
						fallthrough
					default:
						_, err = client.WriteMsg(p, flags)
					}
					if len(queued) == 32 {
						_, e := queued[0].Result()
						err = errors.Join(err, e)
						queued = queued[1:]
					}
					if err != nil {
						return err
					}
				}
				for _, s := range queued {
					if n, err := s.Result(); err != nil {
						return fmt.Errorf("%d bytes: %w", n, err)
					}
				}
				return nil
			}
			errs := make(chan error, 1)
			go func() {
				var all sync.WaitGroup
				results := make([]error, goroutines)
				for g := range goroutines {
					all.Go(func() { results[g] = send(g) })
				}
				all.Wait()
				errs <- errors.Join(append(results, client.CloseWrite())...)
			}()

			var last [goroutines][2]uint64
			var common [2]uint64
			b := make([]byte, 40<<10)
			got := 0
			for ; ; got++ {
				server.SetReadDeadline(time.Now().Add(patience))
				n, flags, err := server.ReadPiece(b)
				if err == io.EOF {
					break
				}
				require.NoError(t, err)
				require.GreaterOrEqual(t, n, 24)
				kind := flags.kind()
				g, number, place := binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])
				if number != last[g][kind]+1 {
					t.Fatalf("goroutine %d, kind %d: %d after %d", g, kind, number, last[g][kind])
				}
				last[g][kind] = number
				if place != 0 {
					if place != common[kind]+1 {
						t.Fatalf("kind %d: place %d after %d", kind, place, common[kind])
					}
					common[kind] = place
				}
			}
			require.NoError(t, <-errs)
			require.Equal(t, each*goroutines, got)
			closeBoth(t, client, server)
		})
	}
}

// A queued send that is cancelled has never been, and the others do not notice. When
// it is being sent, or has been, it is too late.
func TestCancel(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, withCredits(t, Config{TransferSize: -1, MaxReceiveCredits: 4}))
	const count, size = 40, 100 << 10
	var queued []*PendingMessage
	for i := range count {
		flags := MsgFlags(0)
		if i%8 == 0 {
			flags = NoResponse
		}
		queued = append(queued, client.QueueMsg(numbered(i, size), flags))
	}
	stalled(t, client, server)
	first := begun(client, size)
	require.False(t, queued[0].Cancel())
	var left []int
	for i, s := range queued {
		if i >= first && (i%3 == 0 || i == count-1) {
			require.True(t, s.Cancel(), "%d", i)
			require.False(t, s.Cancel(), "twice")
			<-s.Done()
			n, err := s.Result()
			require.Zero(t, n)
			requireConnError(t, transports[0], err, "write")
			require.ErrorIs(t, err, context.Canceled)
		} else {
			left = append(left, i)
		}
	}
	b := make([]byte, size)
	for _, i := range left {
		got := recvPiece(t, server, b)
		require.EqualValues(t, i, binary.BigEndian.Uint64(got.data))
		n, err := queued[i].Result()
		require.NoError(t, err)
		require.Equal(t, size, n)
		require.False(t, queued[i].Cancel())
	}
	closeBoth(t, client, server)
}

// Cancelling races with sending: what is not cancelled arrives, what is does not.
func TestCancelRace(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{})
	count := heavy(4000)
	sent := make(chan int, count)
	go func() {
		defer close(sent)
		for i := range count {
			s := client.QueueMsg(numbered(i, 64), MsgFlags(i%2)*Expedited)
			client.QueueMsg(numbered(-1, 64))
			cancelled := s.Cancel()
			_, err := s.Result()
			switch {
			case cancelled != errors.Is(err, context.Canceled):
				t.Errorf("message %d, cancelled %v: %v", i, cancelled, err)
			case !cancelled:
				sent <- i
			}
		}
		client.CloseWrite()
	}()
	b := make([]byte, 64)
	got := make(map[int]bool)
	for {
		n, err := server.ReadMsg(b)
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		require.Equal(t, 64, n)
		got[int(int64(binary.BigEndian.Uint64(b)))] = true
	}
	n := 0
	for i := range sent {
		require.True(t, got[i], "message %d was sent and has not come", i)
		n++
	}
	delete(got, -1)
	require.Len(t, got, n)
	closeBoth(t, client, server)
}

// The memory of a queued send is the caller's when it is done, not before.
func TestQueuedBuffers(t *testing.T) {
	eachWay(t, func(t *testing.T, cfg Config) {
		client, server := messagePipe(t, cfg)
		const size = 50 << 10
		count := heavy(100)
		go func() {
			p := [2][]byte{make([]byte, size), make([]byte, size)}
			var sends [2]*PendingMessage
			for i := range count {
				k := i % 2
				if sends[k] != nil {
					<-sends[k].Done()
				}
				copy(p[k], pattern(uint64(i), size))
				sends[k] = client.QueueMsg(p[k])
			}
			for k := range sends {
				<-sends[k].Done()
				clear(p[k])
			}
			client.CloseWrite()
		}()
		b := make([]byte, size)
		for i := range count {
			require.Equal(t, string(pattern(uint64(i), size)), string(recvPiece(t, server, b).data), "message %d", i)
		}
		closeBoth(t, client, server)
	})
}

// What is queued fails with the deadline, with the connection, and at Close; after a
// deadline that is taken back everything goes on.
func TestQueueFails(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(client, server *Conn)
		want error
	}{
		{"deadline", func(client, _ *Conn) { client.SetWriteDeadline(time.Now().Add(10 * time.Millisecond)) }, nil},
		{"Close", func(client, _ *Conn) { client.Close() }, net.ErrClosed},
		{"peer goes", func(_, server *Conn) { server.Close() }, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			checkLeaks(t)
			client, server := messagePipe(t, Config{TransferSize: -1, MaxReceiveCredits: 4, LingerTimeout: 100 * time.Millisecond})
			_, err := client.WriteMsg(make([]byte, 100), Expedited|Partial)
			require.NoError(t, err)
			var queued []*PendingMessage
			for i := range 20 {
				queued = append(queued, client.QueueMsg(numbered(i, 100<<10)))
			}
			called := make(chan error, 1)
			parked(t, func() {
				_, err := client.Write(make([]byte, 100))
				called <- err
			})
			require.Empty(t, called, "nothing waits")
			tt.do(client, server)
			check := func(err error) {
				t.Helper()
				requireConnError(t, transports[0], err, "write")
				switch {
				case tt.want != nil:
					require.ErrorIs(t, err, tt.want)
				case tt.name == "deadline":
					requireTimeout(t, err)
				}
			}
			within(t, "Result", func() {
				for _, s := range queued {
					n, err := s.Result()
					require.Zero(t, n)
					check(err)
				}
				check(<-called)
			})
			if tt.name == "deadline" {
				require.NoError(t, client.SetWriteDeadline(time.Time{}))
				go func() {
					_, err := client.WriteMsg([]byte("end"), Expedited)
					called <- err
				}()
				n, err := server.ReadMsg(make([]byte, 103))
				require.NoError(t, err)
				require.Equal(t, 103, n)
				require.NoError(t, <-called)
				pass(t, client, server)
			}
		})
	}
}

// CloseWrite takes its turn behind what is queued.
func TestCloseWriteBehindQueue(t *testing.T) {
	checkLeaks(t)
	client, server := messagePipe(t, Config{MaxReceiveCredits: 4})
	const count = 50
	for i := range count {
		client.QueueMsg(numbered(i, 10<<10))
	}
	closed := make(chan error, 1)
	go func() { closed <- client.CloseWrite() }()
	b := make([]byte, 10<<10)
	for i := range count {
		require.EqualValues(t, i, binary.BigEndian.Uint64(recvPiece(t, server, b).data))
	}
	_, err := server.ReadMsg(b)
	require.True(t, err == io.EOF)
	require.NoError(t, <-closed)
	closeBoth(t, client, server)
}

// talkInMessages is talk with messages of all kinds: what is expedited is the
// second half of the bytes.
func (f *faulty) talkInMessages(c *Conn, out, in []byte) {
	wrong := func(format string, args ...any) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.bad = append(f.bad, fmt.Errorf(format, args...))
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		f.failed(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		var sends []*PendingMessage
		var sizes []int
		halves := [2][]byte{out[:len(out)/2], out[len(out)/2:]}
		for n := 500; len(halves[0])+len(halves[1]) > 0; n += 500 {
			for kind, flags := range []MsgFlags{Partial, Expedited} {
				k := min(n, len(halves[kind]))
				if k == len(halves[kind]) || n%1000 == 0 {
					flags &^= Partial
				}
				sends, sizes = append(sends, c.QueueMsg(halves[kind][:k], flags)), append(sizes, k)
				halves[kind] = halves[kind][k:]
			}
		}
		for i, s := range sends {
			n, err := s.Result()
			if err != nil {
				f.failed(err)
			} else if n != sizes[i] {
				wrong("%d bytes taken without an error", n)
			}
		}
		if err := c.CloseWrite(); err != nil {
			f.failed(err)
		}
	})
	var got [2][]byte
	b := make([]byte, len(in))
	var err error
	for err == nil {
		var n int
		var flags MsgFlags
		n, flags, err = c.ReadPiece(b)
		got[flags.kind()] = append(got[flags.kind()], b[:n]...)
	}
	if err != io.EOF {
		f.failed(err)
	}
	for kind, want := range [][]byte{in[:len(in)/2], in[len(in)/2:]} {
		if err != io.EOF { // An error explains that the rest is missing.
			want = want[:min(len(got[kind]), len(want))]
		}
		if differ := defect.Differ(want, got[kind]); differ != nil {
			wrong("kind %d: %w", kind, differ)
		}
	}
	wg.Wait()
	if err := c.Close(); err != nil {
		f.failed(err)
	}
}

// Posts and completions fail one by one under messages of all kinds: errors there
// are, but nothing hangs, leaks, or arrives wrong.
func TestFaultsUnderMessages(t *testing.T) {
	checkLeaks(t)
	for name, set := range map[string]func(s *verbstest.Switch, n int) *verbstest.Fault{
		"post":       func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailNth(n, nil, verbstest.PostSend) },
		"chain":      func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailPost(n, verbstest.PostSend, 1, nil) },
		"completion": func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailCompletion(n, ibv.WCGeneralErr) },
		"flush":      func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailCompletion(n, ibv.WCFlushErr) },
	} {
		t.Run(name, func(t *testing.T) {
			f := faulty{data: [2][]byte{pattern(1, heavy(60<<10)), pattern(2, heavy(60<<10))}}
			f.how = f.talkInMessages
			if name == "flush" {
				f.on = func(p ibv.Provider) ibv.Provider { return withoutHolding(t, p) }
			}
			require.NotZero(t, f.runAll(t, set))
		})
	}
}
