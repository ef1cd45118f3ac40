package rdmanet

import (
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// tapReader yields what it is fed, as a socket does: all that is there and fits. It tells
// of each Read how much room it has.
type tapReader struct {
	mu   sync.Mutex
	some sync.Cond
	data []byte
	end  bool
	room int // of the Read that waits, 0 if none does
	most int // that a Read ever had
}

func newTapReader() *tapReader {
	r := new(tapReader)
	r.some.L = &r.mu
	return r
}

func (r *tapReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.most = max(r.most, len(p))
	for len(r.data) == 0 && !r.end {
		r.room = len(p)
		r.some.Wait()
	}
	r.room = 0
	if len(r.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.data)
	r.data = r.data[n:]
	return n, nil
}

func (r *tapReader) feed(data []byte, end bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.data, r.end = append(r.data, data...), end
	r.some.Signal()
}

// waiting is how much room the Read has that waits, 0 if none does.
func (r *tapReader) waiting() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.room
}

// ReadFrom holds little memory, and no chunk, while its reader has nothing, also after much
// has gone by; what comes is not kept back meanwhile, and much is read at a time when there
// is much.
func TestReadFromWaitsWithLittle(t *testing.T) {
	for _, cfg := range []Config{{}, {TransferSize: 128 << 10}, {TransferSize: minTransfer}, {TransferSize: -1}} {
		t.Run(fmt.Sprint(cfg.TransferSize), func(t *testing.T) {
			checkLeaks(t)
			setScratchIdle(t, 0)
			before := countScratch()
			a, b := pipeOn(t, cfg)
			r := newTapReader()
			done := make(chan error, 1)
			var copied int64
			go func() {
				var err error
				copied, err = a.ReadFrom(r)
				done <- err
			}()
			idle := func() {
				t.Helper()
				require.True(t, eventually(func() bool { return r.waiting() > 0 }))
				require.LessOrEqual(t, r.waiting(), littleBytes)
				require.True(t, eventually(func() bool { return countScratch() == before }), "chunks are held")
			}
			var sum int64
			for _, n := range []int{100, 4096, 5000, 8192, 32 << 10, 3 << 20, 1, 64 << 10} {
				data := pattern(uint64(n), n)
				idle()
				r.feed(data, false)
				require.NoError(t, defect.ReadFull(b, data)) // all of it: nothing waits for more
				sum += int64(n)
			}
			idle()
			require.Equal(t, copyBytes, r.most, "much at a time")
			r.feed(nil, true)
			require.NoError(t, <-done)
			require.Equal(t, sum, copied)
			closeBoth(t, a, b)
		})
	}
}

// Connections that nobody has accepted take half of the transfer memory at most, whatever their
// peers offer. When they are accepted what is offered is fetched ahead as ever.
func TestUnacceptedTakeHalf(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		setScratchIdle(t, 0)
		m := fabricModest(t)
		const size = regmem.ChunkSize
		cfg := Config{Provider: m, TransferSize: minTransfer, TransferMemory: maxBounceBuffers * regmem.ChunkSize}
		l, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
		require.NoError(t, err)
		defer l.Close()
		before := countScratch()
		c, err := (&Dialer{Config: cfg}).Dial("rdma4", l.Addr().String())
		require.NoError(t, err)
		client := c.(*Conn)
		var sends []*PendingMessage
		for range maxBounceBuffers {
			sends = append(sends, client.QueueMsg(pattern(1, size)))
		}
		time.Sleep(time.Second) // for longer than an accepted connection would wait
		require.Positive(t, m.reads.Load())
		require.Equal(t, before+maxBounceBuffers/2, countScratch())

		accepted, err := l.(*Listener).AcceptRDMA()
		require.NoError(t, err)
		for _, s := range sends { // nobody reads
			within(t, "the sends", func() {
				n, err := s.Result()
				require.NoError(t, err)
				require.Equal(t, size, n)
			})
		}
		require.EqualValues(t, maxBounceBuffers, accepted.Stats().TransfersReceived)
		closeBoth(t, client, accepted)
	})
}

// While nobody reads and no more memory can be registered, what is offered asks for some now and
// then, more and more seldom. It is fetched when there is some.
func TestPrefetchWithoutMemory(t *testing.T) {
	for name, free := range map[string]int{"none": 0, "some for the beginning": 1} {
		t.Run(name, func(t *testing.T) { testPrefetchWithoutMemory(t, free) })
	}
}

// testPrefetchWithoutMemory leaves so many buffers free.
func testPrefetchWithoutMemory(t *testing.T, free int) {
	inVirtualTime(t, func(t *testing.T) {
		m := fabricModest(t)
		sw := newSwitch(t, m)
		a, b := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: sw, TransferSize: minTransfer, KeepAlive: -1}}, &Dialer{Config: Config{Provider: m, TransferSize: minTransfer}})
		sw.LimitMemory(1)
		var taken []*regmem.Buffer
		for buf, err := b.pool.Get(); err == nil; buf, err = b.pool.Get() {
			taken = append(taken, buf)
		}
		for range free {
			taken[0].Release()
			taken = taken[1:]
		}
		asked := func(d time.Duration) int64 {
			before := sw.Calls(verbstest.RegMR)
			time.Sleep(d)
			return sw.Calls(verbstest.RegMR) - before
		}
		data := pattern(1, (4-free)*regmem.ChunkSize) // A buffer that was filled in part may not be filled further.
		sent := a.QueueMsg(data)
		require.Greater(t, asked(time.Second), int64(2))
		asked(time.Minute)
		seldom := asked(time.Minute)
		require.Positive(t, seldom)
		require.LessOrEqual(t, seldom, 3*int64(time.Minute/prefetchAgain))
		sw.LimitMemory(0)
		for _, buf := range taken {
			buf.Release()
		}
		within(t, "the send", func() {
			n, err := sent.Result()
			require.NoError(t, err)
			require.Equal(t, len(data), n)
		})
		require.NoError(t, defect.ReadFull(b, data))
		closeBoth(t, a, b)
	})
}
