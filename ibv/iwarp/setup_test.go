package iwarp

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// watched is a context that counts the functions which wait for its end.
type watched struct {
	context.Context
	waiting atomic.Int32
}

func (w *watched) Value(any) any { return nil } // which hides what package context knows the inner one by

func (w *watched) AfterFunc(f func()) (stop func() bool) {
	w.waiting.Add(1)
	return func() bool {
		w.waiting.Add(-1)
		return true
	}
}

// A Connect that is over keeps nothing in its context, which may live long.
func TestConnectLeavesContext(t *testing.T) {
	for _, accept := range []bool{true, false} {
		leaktest.Check(t)
		ln := rawListener(t)
		p := newOverTCP(Config{})
		id, err := p.Resolve(t.Context(), loopback, unmapped(ln.Addr()))
		require.NoError(t, err)
		v := newVictim(t, id, newMemory(t, p), 0)
		parent, cancel := context.WithCancel(context.Background())
		ctx := &watched{Context: parent}
		result := make(chan error, 1)
		go func() { result <- id.Connect(ctx, depths) }()
		conn, err := ln.Accept()
		require.NoError(t, err)
		peer := newRawPeer(t, conn)
		peer.start(false)
		if accept {
			peer.send(reply(2, 2))
			require.NoError(t, <-result)
		} else {
			peer.send(header(replyKey, 0x20, 1, 0))
			require.Error(t, <-result)
		}
		require.Zero(t, ctx.waiting.Load())
		cancel()
		v.close()
		v.mem.close()
		peer.drain()
	}
}
