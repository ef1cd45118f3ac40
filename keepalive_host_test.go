package rdmanet

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// askedHost is the host of a peer, as a device sees it that can ask for answers.
type askedHost struct {
	mu    sync.Mutex
	asked []time.Duration // the arguments of all calls of probe
	last  time.Time       // when it answered last, zero for all the time
	owes  bool
}

func (h *askedHost) probe(idle, patience time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked = append(h.asked, idle, patience)
	return true
}

func (h *askedHost) heard() (ago time.Duration, owes bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last.IsZero() {
		return 0, h.owes
	}
	return time.Since(h.last), h.owes
}

// answer has the host have answered for the last time now, and owe another answer or none.
func (h *askedHost) answer(owes bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last, h.owes = time.Now(), owes
}

// owe has it owe an answer, or no more, and say nothing.
func (h *askedHost) owe(owes bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.owes = owes
}

// Where the device can ask the peer's host, a peer whose host answers is there, although the
// peer itself never does. A host that does not is given up: not before it has been silent for
// KeepAlive and its patience, and has owed an answer for that patience.
func TestKeepAliveAsksHost(t *testing.T) {
	const keepAlive, patience = 2 * time.Minute, 20 * time.Second
	for _, tt := range []struct {
		name string
		host func(h *askedHost) // what the host does, from the beginning on

		// The connection ends from least to most after host has returned. Both are zero if it
		// does not end.
		least, most time.Duration
	}{
		{"answers", func(h *askedHost) {
			for range 50 {
				h.answer(false)
				time.Sleep(keepAlive)
			}
		}, 0, 0},
		{"always owes another answer", func(h *askedHost) {
			for range 100 {
				h.answer(true)
				time.Sleep(keepAlive/2 - time.Second)
			}
			h.answer(false)
		}, 0, 0},
		{"answers within its patience after a long silence", func(h *askedHost) {
			for range 10 {
				time.Sleep(time.Hour)
				h.owe(true)
				time.Sleep(patience - 1)
				h.answer(false)
			}
		}, 0, 0},
		{"is not asked", func(h *askedHost) {
			h.answer(false)
			time.Sleep(10 * time.Hour)
		}, 0, 0},
		{"falls silent while it owes an answer", func(h *askedHost) {
			time.Sleep(time.Hour)
			h.answer(true)
		}, keepAlive + patience, keepAlive + patience},
		{"falls silent and is asked at once", func(h *askedHost) {
			time.Sleep(time.Hour)
			h.answer(false)
			time.Sleep(time.Millisecond)
			h.owe(true)
		}, keepAlive + patience - time.Millisecond, keepAlive + patience},
		{"falls silent and is asked late", func(h *askedHost) {
			h.answer(false)
			time.Sleep(2 * time.Hour)
			h.owe(true)
		}, patience, patience * 5 / 4},
		{"falls silent and is asked soon after a look", func(h *askedHost) {
			h.answer(false)
			time.Sleep(keepAlive + patience/4 + time.Millisecond)
			h.owe(true)
		}, patience - time.Millisecond, patience*5/4 + time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				m := fabricModest(t)
				m.host = new(askedHost)
				client, server := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: m, KeepAlive: -1}},
					&Dialer{Config: Config{Provider: m, KeepAlive: keepAlive}})
				require.Equal(t, []time.Duration{keepAlive, patience}, m.host.asked)
				read := reading(client, make([]byte, 1))
				thaw := freeze(t, m.end(server)) // the peer itself says nothing
				tt.host(m.host)
				if tt.least == 0 {
					synctest.Wait()
					require.Empty(t, read)
					require.Zero(t, client.Stats().KeepAliveSent)
					thaw()
					_, err := server.Write([]byte("x"))
					require.NoError(t, err)
					require.NoError(t, (<-read).err)
				} else {
					start := time.Now()
					require.ErrorIs(t, (<-read).err, errSilent)
					require.GreaterOrEqual(t, time.Since(start), tt.least)
					require.LessOrEqual(t, time.Since(start), tt.most)
					require.Zero(t, client.Stats().KeepAliveSent)
					thaw()
				}
				closeBoth(t, client, server)
			})
		})
	}
}

// A kernel counts in seconds, and a host has time for more than one answer, of which some may
// be lost.
func TestKeepAliveAsksHostInSeconds(t *testing.T) {
	for _, tt := range []struct{ keepAlive, idle, patience time.Duration }{
		{time.Millisecond, time.Second, 3 * time.Second},
		{time.Second, time.Second, 3 * time.Second},
		{2 * time.Second, 2 * time.Second, 3 * time.Second},
		{7 * time.Second, 7 * time.Second, 7 * time.Second},
		{time.Hour, time.Hour, 20 * time.Second},
		{0, 2 * time.Minute, 20 * time.Second},
	} {
		t.Run(tt.keepAlive.String(), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				m := fabricModest(t)
				m.host = new(askedHost)
				client, server := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: m, KeepAlive: -1}},
					&Dialer{Config: Config{Provider: m, KeepAlive: tt.keepAlive}})
				require.Equal(t, []time.Duration{tt.idle, tt.patience}, m.host.asked)
				m.host.answer(true)
				start := time.Now()
				_, err := client.Read(make([]byte, 1))
				require.ErrorIs(t, err, errSilent)
				require.Equal(t, tt.idle+tt.patience, time.Since(start))
				closeBoth(t, client, server)
			})
		})
	}
}
