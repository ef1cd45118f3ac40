package rdmanet

import (
	"context"
	"io"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// warnings collects what is logged at level Warn or above.
type warnings struct {
	slog.Handler
	mu   sync.Mutex
	text []string
}

func (w *warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

func (w *warnings) Handle(_ context.Context, r slog.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, r.Message)
	return nil
}

// about returns how many warnings speak of what.
func (w *warnings) about(what string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, text := range w.text {
		if strings.Contains(text, what+" dropped without Close") {
			n++
		}
	}
	return n
}

func logWarnings() (*slog.Logger, *warnings) {
	w := &warnings{Handler: slog.DiscardHandler}
	return slog.New(w), w
}

// collected runs the garbage collector until ok holds.
func collected(ok func() bool) bool {
	return eventually(func() bool {
		runtime.GC()
		return ok()
	})
}

// A connection that a program drops without Close is closed by the garbage collector, with
// a warning: nothing of it is left, and the peer reads what was written before.
func TestDropped(t *testing.T) {
	t.Run("connections", func(t *testing.T) {
		checkLeaks(t)
		log, warned := logWarnings()
		sw := newSwitch(t, nil)
		data := pattern(3, 100<<10)
		const n = 5
		func() {
			for range n {
				a, b := pipeOn(t, Config{Provider: sw, Logger: log})
				var got []byte
				var err error
				done := make(chan struct{})
				go func() {
					defer close(done)
					got, err = io.ReadAll(b)
				}()
				_, werr := a.Write(data)
				require.NoError(t, werr)
				a = nil // b goes on
				require.True(t, collected(func() bool {
					select {
					case <-done:
						return true
					default:
						return false
					}
				}), "the peer of a dropped connection hears nothing")
				require.NoError(t, err)
				defect.Bytes(t, data, got)
				require.NoError(t, b.Close())
			}
		}()
		require.Equal(t, n, warned.about("connection"))
	})
	t.Run("both ends", func(t *testing.T) {
		checkLeaks(t)
		log, warned := logWarnings()
		sw := newSwitch(t, nil)
		func() { exchange2(t, Config{Provider: sw, Logger: log}) }()
		require.True(t, collected(func() bool { return len(sw.Live()) == 0 && warned.about("connection") == 2 }))
	})
	t.Run("listener", func(t *testing.T) {
		checkLeaks(t)
		log, warned := logWarnings()
		sw := newSwitch(t, nil)
		cfg := Config{Provider: sw, Logger: log}
		func() {
			ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
			require.NoError(t, err)
			c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String()) // which nobody accepts
			require.NoError(t, err)
			require.NoError(t, c.Close())
		}()
		require.True(t, collected(func() bool { return len(sw.Live()) == 0 && warned.about("listener") == 1 }))
		require.Zero(t, warned.about("connection"))
	})
	t.Run("packet connection", func(t *testing.T) {
		checkLeaks(t)
		log, warned := logWarnings()
		func() {
			cfg := Config{Logger: log, Provider: iwarp.New(iwarp.Config{})} // siw has no datagrams
			p, err := (&ListenConfig{Config: cfg}).ListenPacket(tctx, "udp4", "127.0.0.1:0")
			require.NoError(t, err)
			p.SetReadDeadline(time.Now().Add(time.Hour))
		}()
		require.True(t, collected(func() bool { return warned.about("packet connection") == 1 }))
	})
}

// exchange2 makes a connection, uses it and forgets it.
func exchange2(t testing.TB, cfg Config) {
	a, b := pipeOn(t, cfg)
	exchange(t, a, b, 300<<10)
}

// A connection is not garbage while a call of it is in progress, or a message is queued.
func TestNotDropped(t *testing.T) {
	checkLeaks(t)
	log, warned := logWarnings()
	a, b := pipeOn(t, Config{Logger: log})
	got := make(chan error, 1)
	go func(c net.Conn) {
		_, err := c.Read(make([]byte, 1)) // the last use of this end
		got <- err
	}(b)
	b = nil
	var sends []*PendingMessage
	for range 3 {
		runtime.GC()
	}
	sends = append(sends, a.QueueMsg([]byte("x")))
	within(t, "Read", func() { require.NoError(t, <-got) })
	_, err := sends[0].Result()
	require.NoError(t, err)
	require.Zero(t, warned.about("connection"))
	require.NoError(t, a.Close())
	require.True(t, collected(func() bool { return warned.about("connection") == 1 }))
}
