package rdmanet

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/scripted"
)

// Nothing is posted on a connection whose disconnect is under way, while its peer writes as
// fast as it can, by segments and by large transfers.
func TestNothingAfterDisconnect(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  Config
	}{
		{"segments", Config{TransferSize: -1}},
		{"RDMA Reads", Config{TransferSize: minTransfer}},
		{"RDMA Writes", Config{TransferSize: minTransfer, NoRDMARead: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			checkLeaks(t)
			for i := range heavy(40) {
				dev := scripted.New(newProvider(t))
				sw := newSwitch(t, dev)
				cfg := tt.cfg
				cfg.Provider, cfg.MaxSendSize, cfg.MaxReceiveSize = sw, 4<<10, 4<<10
				a, b := pipeOn(t, cfg)
				post := watchDisconnect(dev.Endpoint(a.Info().QPN))
				go func() {
					for p := make([]byte, 8<<10); ; {
						if _, err := b.Write(p); err != nil {
							return
						}
					}
				}()
				data := pattern(uint64(i), 60<<10)
				go func() {
					a.Write(data)
					a.Close()
				}()
				var got []byte
				var err error
				within(t, "the reader", func() { got, err = io.ReadAll(b) })
				require.NoError(t, err)
				defect.Bytes(t, data, got)
				require.NoError(t, b.Close())
				require.True(t, requireReleased(t, sw))
				require.Zero(t, post.late(), "posts after the disconnect")
			}
		})
	}
}

// Nothing that comes due after the disconnect is posted: no keep-alive probe, no answer to
// the peer, no receive. The device learns of the disconnect only when all of that has come
// due, so it would take every post. Each case also runs on an open connection, where it
// must lead to a post.
func TestNothingDueAfterDisconnect(t *testing.T) {
	for _, tt := range []struct {
		name    string
		noRead  bool                                         // large transfers go by RDMA Write
		asks    bool                                         // the peer asks for signs of life, and not the connection
		receive bool                                         // a receive comes due, else a send
		ready   func(t *testing.T, s *heldPair) (due func()) // ready runs before Close, due after the disconnect
	}{
		{name: "a keep-alive probe", ready: func(t *testing.T, s *heldPair) func() {
			s.idles()
			return s.probes
		}},
		{name: "an idle connection uses up its credits", ready: func(t *testing.T, s *heldPair) func() {
			require.True(t, eventually(func() bool { return s.a.Stats().SendCredits > s.a.Stats().ReceiveWindow }))
			return s.idles
		}},
		{name: "the peer sends a keep-alive probe", asks: true, ready: func(t *testing.T, s *heldPair) func() {
			s.idles()
			return func() {
				s.arrives(t, func() { s.probes() })
				require.NotZero(t, s.b.Stats().KeepAliveSent)
			}
		}},
		{name: "the peer offers a transfer", ready: offersTransfer},
		{name: "the peer requests a transfer", noRead: true, ready: offersTransfer},
		{name: "RDMA Reads complete", ready: func(t *testing.T, s *heldPair) func() {
			// By the ID, as Close may wait for an RDMA Read of its own, which is not held.
			s.m.script.Hold(func(_ *scripted.Endpoint, wc *ibv.WC) bool { return wc.ID == fetchID })
			s.peerWrites(t)
			require.True(t, eventually(func() bool { return s.end.Reading() > 0 }))
			return func() {
				s.m.script.Hold(nil)
				require.True(t, eventually(func() bool { return s.end.Reading() == 0 }))
			}
		}},
		{name: "the peer has written", noRead: true, ready: func(t *testing.T, s *heldPair) func() {
			peer := s.m.end(s.b)
			peer.HoldAll(true) // the peer does not answer the grant
			s.peerWrites(t)
			require.True(t, eventually(func() bool { return s.post.transfers.Load() == 1 }), "no grant")
			require.NoError(t, s.a.CloseRead()) // b waits to hear that a wants no more of it
			return func() { s.arrives(t, func() { peer.HoldAll(false) }) }
		}},
		{name: "a receive comes back", receive: true, ready: func(t *testing.T, s *heldPair) func() {
			w := &heldWriter{come: make(chan struct{}), leave: make(chan struct{})}
			wrote := make(chan struct{})
			s.busy.Go(func() {
				defer close(wrote)
				s.a.WriteTo(w)
			})
			_, err := s.b.Write(make([]byte, 1000))
			require.NoError(t, err)
			within(t, "WriteTo", func() { <-w.come })
			return func() {
				close(w.leave)
				if s.closed {
					within(t, "WriteTo", func() { <-wrote })
				}
			}
		}},
		// Every message and every other work request is posted by one of these two functions.
		// They are called directly, as nothing leads to them after Close: that is what the other
		// cases are about.
		{name: "a message", ready: func(t *testing.T, s *heldPair) func() {
			return s.withLock(func() { s.a.queueEmpty(1) })
		}},
		{name: "a request", ready: func(t *testing.T, s *heldPair) func() {
			return s.withLock(func() { s.a.queueEmptyWrite() })
		}},
	} {
		for _, closed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/closed=%v", tt.name, closed), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					m := fabricModest(t)
					s := newHeldPair(t, m, tt.noRead, tt.asks)
					s.closed = closed
					due := tt.ready(t, s)
					synctest.Wait()
					if !closed {
						posts := &s.post.sends
						if tt.receive {
							posts = &s.post.recvs
						}
						s.post.over.Store(true)
						due()
						require.True(t, eventually(func() bool { return posts.Load() > 0 }), "nothing comes due")
						s.post.held.Store(false)
						require.NoError(t, s.a.Close())
					} else {
						require.NoError(t, s.a.Close())
						require.True(t, eventually(s.post.over.Load), "no disconnect")
						due()
						synctest.Wait()
					}
					within(t, "the peer", func() {
						require.NoError(t, s.b.Close())
						s.busy.Wait()
					})
					if closed {
						require.Zero(t, s.post.late(), "posts after the disconnect")
						// The error is no concern of the test: the connection may be gone since its
						// peer closed, and the look for leaks waits for its end.
						s.end.Disconnect()
					}
				})
			})
		}
	}
}

// A connection that can say nothing to its peer asks the peer's device, and not after the
// disconnect.
func TestNoProbeAfterDisconnect(t *testing.T) {
	for _, side := range sides {
		for how, private := range map[string][]byte{"RDMA Read": readablePrivate, "RDMA Write": unreadablePrivate} {
			for _, closed := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/closed=%v", side.name, how, closed), func(t *testing.T) {
					inVirtualTime(t, func(t *testing.T) {
						s, c, _, l, wrote := unable(t, side.active, private)
						due := l.lastHeard().Add(time.Hour)
						post := watchDisconnect(s.end(c))
						post.held.Store(true)
						if !closed {
							post.over.Store(true)
							sleepUntil(due)
							require.EqualValues(t, 1, post.late())
							require.Equal(t, how == "RDMA Write", post.writes.Load() == 1)
							post.held.Store(false)
							require.NoError(t, c.Close())
							require.Error(t, (<-wrote).err)
							return
						}
						require.NoError(t, c.Close())
						require.Error(t, (<-wrote).err)
						require.True(t, eventually(post.over.Load), "no disconnect")
						require.True(t, time.Now().Before(due))
						sleepUntil(due.Add(time.Minute))
						require.Zero(t, post.late(), "posts after the disconnect")
						require.NoError(t, s.end(c).Disconnect())
					})
				})
			}
		}
	}
}

// heldPair is a connection from a to b. The device does not learn of a's disconnect until
// the test ends, so that something can come due in between.
type heldPair struct {
	a, b   *Conn
	m      *modest
	end    *scripted.Endpoint // a's
	post   *postAfter
	closed bool // a is closed before something comes due
	busy   sync.WaitGroup
}

// heldKeepAlive is Config.KeepAlive of the end that asks for signs of life.
const heldKeepAlive = 20 * time.Minute

func newHeldPair(t *testing.T, m *modest, noRead, peerAsks bool) *heldPair {
	t.Helper()
	s := &heldPair{m: m}
	cfg := Config{Provider: newSwitch(t, s.m), KeepAlive: heldKeepAlive, LingerTimeout: endless, TransferSize: minTransfer, NoRDMARead: noRead}
	peer := cfg
	peer.KeepAlive = -1
	if peerAsks {
		cfg.KeepAlive, peer.KeepAlive = -1, heldKeepAlive
	}
	peer.InitialReceiveCredits = 32 // a has more credits than it keeps when it is idle
	s.a, s.b = pipe(t, "rdma4", local4, &ListenConfig{Config: peer}, &Dialer{Config: cfg})
	pass(t, s.a, s.b) // both have credits
	pass(t, s.b, s.a)
	s.end = s.m.end(s.a)
	s.post = watchDisconnect(s.end)
	s.post.held.Store(true)
	return s
}

// idles waits until the connection has given back what an idle one does not need.
func (s *heldPair) idles() { time.Sleep(4 * idleAfter) }

// probes waits until an end is to ask its peer for a sign of life, and a bit longer.
func (s *heldPair) probes() { time.Sleep(heldKeepAlive + time.Minute) }

// withLock returns a function that runs f with a's lock held.
func (s *heldPair) withLock(f func()) func() {
	return func() { s.a.locked(func() bool { f(); return true })() }
}

// arrives runs f, which makes b send a message, and waits until a has handled the message.
func (s *heldPair) arrives(t *testing.T, f func()) {
	t.Helper()
	before := s.post.heard.Load()
	f()
	require.True(t, eventually(func() bool { return s.post.heard.Load() > before }))
	synctest.Wait() // the completion is handled
}

// peerWrites makes b write one large transfer, which is moved in one piece.
func (s *heldPair) peerWrites(t *testing.T) {
	t.Helper()
	p := alloc(t, minTransfer).Bytes()
	s.busy.Go(func() { s.b.Write(p) }) // an error is no concern of the test: a may close first
}

func offersTransfer(t *testing.T, s *heldPair) func() {
	return func() {
		s.arrives(t, func() { s.peerWrites(t) })
		time.Sleep(2 * prefetchAfter) // nobody reads
	}
}

// heldWriter is a writer whose calls wait until leave is closed. come is closed by the first.
type heldWriter struct {
	once        sync.Once
	come, leave chan struct{}
}

func (w *heldWriter) Write(p []byte) (int, error) {
	w.once.Do(func() { close(w.come) })
	<-w.leave
	return len(p), nil
}

// watchDisconnect counts what an end posts after its disconnect.
func watchDisconnect(e *scripted.Endpoint) *postAfter {
	p := &postAfter{}
	count := func(n *atomic.Int32) {
		if p.over.Load() {
			n.Add(1)
		}
	}
	e.OnPostSend(func(wrs []ibv.SendWR) error {
		count(&p.sends)
		for i := range wrs {
			if wrs[i].Op == ibv.OpSend && wrs[i].SGL[0].Buf[5]&byte(flagTransfer>>8) != 0 {
				p.transfers.Add(1)
			}
			if wrs[i].Op == ibv.OpWrite {
				p.writes.Add(1)
			}
		}
		return nil
	})
	e.OnPostRecv(func([]ibv.RecvWR) error { count(&p.recvs); return nil })
	e.OnPolled(func(wcs []ibv.WC) {
		for i := range wcs {
			if !e.IsSend(&wcs[i]) {
				p.heard.Add(1)
			}
		}
	})
	e.OnDisconnect(func() bool {
		p.over.Store(true)
		return !p.held.Load()
	})
	return p
}

// postAfter counts what is posted after the disconnect.
type postAfter struct {
	over         atomic.Bool
	held         atomic.Bool  // the device does not learn of the disconnect
	sends, recvs atomic.Int32 // posts after it
	heard        atomic.Int32 // messages that were polled, at any time
	transfers    atomic.Int32 // posts of messages with a transfer header, at any time
	writes       atomic.Int32 // RDMA Writes, at any time
}

func (p *postAfter) late() int32 { return p.sends.Load() + p.recvs.Load() }
