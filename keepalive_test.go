package rdmanet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// quietFor makes the connection believe that it has heard nothing for d, and
// waited for as long if it has asked, and lets its timer look.
func (c *conn) quietFor(d time.Duration) {
	c.mu.Lock()
	c.live.lastReceived = time.Now().Add(-d)
	c.live.probedAt = c.live.probedAt.Add(-d)
	c.unlock()
	c.tick()
}

func (c *conn) isProbing() bool {
	c.mu.Lock()
	defer c.unlock()
	c.poll() // the device's answer wakes nobody
	return c.live.probing
}

// A peer that is there answers, although its program does nothing.
func TestKeepAliveAnswered(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			checkLeaks(t)
			client, server := pipe(t, lb.network, lb.address, new(ListenConfig), &Dialer{Config: Config{KeepAlive: time.Hour}})
			client.quietFor(time.Minute)
			require.False(t, client.isProbing())
			require.Zero(t, client.Stats().KeepAliveSent)
			for n := range 3 {
				client.quietFor(time.Hour)
				require.True(t, eventually(func() bool { return !client.isProbing() }), "no answer")
				require.EqualValues(t, n+1, client.Stats().KeepAliveSent)
			}
			require.Zero(t, server.Stats().KeepAliveSent, "the answer does not ask back")
			exchange(t, client, server, 10<<10)
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
		})
	}
}

// A peer that does not answer is given up, which everybody who waits learns.
func TestKeepAliveUnanswered(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{KeepAlive: time.Hour}})
	readErr, writeErr := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := client.Read(make([]byte, 1))
		readErr <- err
	}()
	server.mu.Lock() // whoever would answer waits
	client.quietFor(time.Hour)
	require.True(t, client.isProbing())
	go func() {
		_, err := client.Write(make([]byte, 64<<20))
		writeErr <- err
	}()
	client.quietFor(time.Hour)
	for op, ch := range map[string]chan error{"read": readErr, "write": writeErr} {
		var err error
		within(t, op, func() { err = <-ch })
		requireConnError(t, transports[0], err, op)
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		require.ErrorIs(t, err, errSilent)
	}
	server.mu.Unlock()
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// requireSilence waits until nothing is on the way any more, which is when
// keep-alive begins.
func requireSilence(t testing.TB, a, b *Conn) {
	t.Helper()
	heard := func() uint64 {
		x, y := a.Stats(), b.Stats()
		return x.received() + y.received()
	}
	require.True(t, eventually(func() bool {
		before := heard()
		time.Sleep(50 * time.Millisecond)
		return heard() == before
	}))
}

// Programs that do not read break no connection, however long they take, in
// one direction or both.
func TestKeepAliveStalled(t *testing.T) {
	for _, s := range []struct {
		name         string
		both, garble bool
	}{{"one writes", false, false}, {"both write", true, false}, {"garbled reads", true, true}} {
		t.Run(s.name, func(t *testing.T) {
			checkLeaks(t)
			m := newModest(t, 1<<20, 1<<14, false)
			m.garble = s.garble
			a, b := pipeOn(t, Config{KeepAlive: time.Hour, TransferSize: -1, Provider: m})
			exchange(t, a, b, 2<<20) // every slot of the send queues has been used
			want := pattern(1, 16<<20)
			ends := []*Conn{a, b}
			if !s.both {
				ends = ends[:1]
			}
			errs := make(chan error, 4)
			for _, c := range ends {
				go func() {
					_, err := c.Write(want)
					errs <- err
				}()
			}
			for _, c := range ends {
				require.True(t, eventually(func() bool { return c.Stats().CreditStalls > 0 }))
			}
			requireSilence(t, a, b)
			for range 10 {
				for _, c := range []*Conn{a, b} {
					c.quietFor(time.Hour)
					require.True(t, eventually(func() bool { return !c.isProbing() }), "no answer")
				}
			}
			if s.garble || testDevice(t).Attr().Quirks.EmptyReadsGarbled {
				require.Zero(t, m.empty.Load())
			}
			require.NotZero(t, m.reads.Load())
			for i := range ends {
				reader := []*Conn{b, a}[i]
				go func() {
					got := make([]byte, len(want))
					_, err := io.ReadFull(reader, got)
					if err == nil && !bytes.Equal(got, want) {
						err = errors.New("the bytes are not those that were sent")
					}
					errs <- err
				}()
			}
			within(t, "transfer", func() {
				for range 2 * len(ends) {
					require.NoError(t, <-errs)
				}
			})
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
		})
	}
}

// outOfCredits has a write more than goes without a reader at b, until it can say nothing
// any more.
func outOfCredits(t *testing.T, a, b *Conn) (wrote chan error) {
	t.Helper()
	wrote = make(chan error, 1)
	go func() {
		_, err := a.Write(make([]byte, 64<<20))
		wrote <- err
	}()
	require.True(t, eventually(func() bool { return a.Stats().CreditStalls > 0 }))
	for _, c := range []*Conn{a, b} {
		c.mu.Lock()
		c.shrinkIdle() // or it does so when it likes, and is heard
		c.lane.flush()
		c.unlock()
	}
	requireSilence(t, a, b)
	require.True(t, eventually(func() bool {
		a.mu.Lock()
		defer a.unlock()
		if !a.credits.maySendControl() {
			return true
		}
		a.send.responseDue = true // b's last word has left something to grant
		a.lane.flush()
		return false
	}))
	requireSilence(t, a, b)
	require.False(t, a.locked(a.credits.maySendControl)())
	return wrote
}

// A side that is to ask while it posts something does so afterwards, when it
// knows whether it can.
func TestKeepAliveDuringPost(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, Config{KeepAlive: time.Hour, LingerTimeout: -1, TransferSize: -1})
	pass(t, a, b)
	pass(t, b, a)
	wrote := outOfCredits(t, a, b)
	a.mu.Lock()
	for a.lane.posting {
		a.writers.Wait()
	}
	a.lane.posting = true // as if somebody did
	a.unlock()
	asked := make(chan struct{})
	go func() {
		a.quietFor(time.Hour)
		close(asked)
	}()
	require.True(t, eventually(func() bool {
		a.mu.Lock()
		defer a.unlock()
		a.lane.posting = a.live.probedAt.Before(time.Now().Add(-time.Minute)) // until it has begun to ask
		a.writers.WakeAll()
		return !a.lane.posting
	}))
	within(t, "ask", func() { <-asked })
	require.True(t, eventually(func() bool { return !a.isProbing() }), "no answer")
	require.NoError(t, b.Close())
	require.Error(t, <-wrote)
	require.NoError(t, a.Close())
}

// Where the peer's device cannot be asked either, a device that does not get rid of
// what it is to send is taken for silence; one that does is not.
func TestKeepAliveTouch(t *testing.T) {
	for _, slow := range []bool{false, true} {
		t.Run(fmt.Sprintf("slow=%v", slow), func(t *testing.T) {
			checkLeaks(t)
			m := newModest(t, 1<<20, 1<<14, false)
			a, b := pipeOn(t, Config{KeepAlive: time.Hour, LingerTimeout: -1, TransferSize: -1, Provider: m})
			pass(t, a, b)
			wrote := outOfCredits(t, a, b)
			a.mu.Lock()
			a.live.answersReads = false
			a.unlock()
			m.setSlow(slow)
			if slow {
				a.quietFor(time.Hour)
				require.True(t, a.isProbing())
				a.quietFor(time.Hour)
				require.ErrorIs(t, <-wrote, errSilent)
				m.setSlow(false)
			} else {
				for range 3 {
					a.quietFor(time.Hour)
					require.True(t, eventually(func() bool { return !a.isProbing() }))
				}
				require.NoError(t, b.Close())
				require.Error(t, <-wrote)
			}
			require.NoError(t, a.Close())
			b.Close()
		})
	}
}

// wire carries TCP between two ends until it is cut, of which nobody is told.
type wire struct {
	ln  net.Listener
	cut chan struct{}
	wg  sync.WaitGroup
}

// newWire leads to address. What it carries ends with the test.
func newWire(t *testing.T, address string) *wire {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	w := &wire{ln: ln, cut: make(chan struct{})}
	over := make(chan struct{})
	t.Cleanup(func() {
		ln.Close()
		close(over)
		w.wg.Wait()
	})
	w.wg.Go(func() {
		for {
			a, err := ln.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp4", address)
			if err != nil {
				a.Close()
				continue
			}
			w.wg.Go(func() { w.carry(a, b) })
			w.wg.Go(func() { w.carry(b, a) })
			w.wg.Go(func() {
				<-over
				a.Close()
				b.Close()
			})
		}
	})
	return w
}

func (w *wire) carry(to, from net.Conn) {
	for p := make([]byte, 32<<10); ; {
		n, err := from.Read(p)
		select {
		case <-w.cut:
			return
		default:
		}
		if err != nil {
			to.Close()
			return
		}
		to.Write(p[:n])
	}
}

// When the way to the peer is cut, of which TCP learns a quarter of an hour later,
// keep-alive ends what waits, also where neither program could say anything
// because the other does not read.
func TestKeepAliveCut(t *testing.T) {
	for _, s := range []struct {
		name                  string
		clientFull, otherFull bool // has written as much as goes without a reader
		garble                bool
	}{{name: "idle"}, {"client writes", true, false, false}, {"server writes", false, true, false}, {"both write", true, true, false},
		{"garbled reads", true, true, true}} {
		t.Run(s.name, func(t *testing.T) {
			checkLeaks(t)
			m := newModest(t, 1<<20, 1<<14, false)
			m.Provider, m.garble = iwarp.New(iwarp.Config{}), s.garble
			cfg := Config{KeepAlive: time.Hour, LingerTimeout: -1, Provider: m}
			ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", "127.0.0.1:0")
			require.NoError(t, err)
			defer ln.Close()
			w := newWire(t, ln.Addr().String())
			c, err := (&Dialer{Config: cfg}).Dial("rdma4", w.ln.Addr().String())
			require.NoError(t, err)
			a, err := ln.Accept()
			require.NoError(t, err)
			ends := []*Conn{c.(*Conn), a.(*Conn)}
			require.True(t, ends[0].live.answersReads && ends[1].live.answersReads)
			pass(t, c, a)
			pass(t, a, c)
			wrote := []chan error{make(chan error, 1), make(chan error, 1)}
			for i, full := range []bool{s.clientFull, s.otherFull} {
				if !full {
					wrote[i] = nil
					continue
				}
				go func() {
					_, err := ends[i].Write(make([]byte, 64<<20))
					wrote[i] <- err
				}()
				require.True(t, eventually(func() bool { return ends[i].Stats().CreditStalls > 0 }))
			}
			close(w.cut)
			for i, c := range ends {
				require.True(t, eventually(func() bool {
					c.quietFor(time.Hour)
					c.mu.Lock()
					defer c.unlock()
					return c.life.over()
				}), "end %d goes on", i)
				for op, f := range map[string]func() error{
					"read": func() error { return drain(c) },
					"write": func() error {
						if wrote[i] != nil {
							return <-wrote[i]
						}
						_, err := c.Write([]byte("x"))
						return err
					},
				} {
					var err error
					within(t, op, func() { err = f() })
					requireConnError(t, transports[0], err, op)
					require.ErrorIs(t, err, syscall.ETIMEDOUT)
					require.ErrorIs(t, err, errSilent)
					var timeout net.Error
					require.ErrorAs(t, err, &timeout)
					require.True(t, timeout.Timeout())
				}
				require.NoError(t, c.Close())
			}
		})
	}
}

// Whenever the timer looks, the peer is asked and given up at the times that
// Config.KeepAlive says, counted from its last word.
func TestKeepAliveBound(t *testing.T) {
	for _, s := range []struct{ keepAlive, answer time.Duration }{
		{time.Hour, 20 * time.Second},
		{2 * time.Minute, 20 * time.Second},
		{8 * time.Second, 8 * time.Second},
	} {
		for _, warm := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/warm=%v", s.keepAlive, warm), func(t *testing.T) {
				client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{KeepAlive: s.keepAlive}})
				pass(t, server, client)
				server.mu.Lock() // whoever would answer waits
				client.mu.Lock()
				client.live.timer.Stop()
				client.idle.trimmable = warm
				client.stats.BytesSent++
				client.runTimer(client.live.lastReceived)
				start := client.live.lastReceived.Add(s.keepAlive / 3) // a word between two looks
				client.live.lastReceived = start
				now := start
				asked := time.Duration(-1)
				for wait := 2 * s.keepAlive / 3; !client.life.over(); wait = client.runTimer(now) {
					require.Positive(t, wait)
					now = now.Add(wait)
					client.stats.BytesSent++ // so warm it stays
					if asked < 0 && client.live.probing {
						asked = client.live.probedAt.Sub(start)
					}
				}
				gone := now.Sub(start)
				client.mu.Unlock()
				server.mu.Unlock()
				require.Equal(t, s.keepAlive, asked)
				require.Equal(t, s.keepAlive+s.answer, gone)
				require.NoError(t, client.Close())
				require.NoError(t, server.Close())
			})
		}
	}
}

// The device's answer says that the peer was there when it was asked, however long it
// lies in the completion queue; and is none to a question that was asked later.
func TestKeepAliveLateAnswer(t *testing.T) {
	checkLeaks(t)
	m := newModest(t, 1<<20, 1<<14, false)
	a, b := pipeOn(t, Config{KeepAlive: time.Hour, LingerTimeout: -1, TransferSize: -1, Provider: m})
	pass(t, a, b)
	wrote := outOfCredits(t, a, b)
	answered := func() {
		t.Helper()
		m.setSlow(true) // nobody looks at the answer
		require.True(t, eventually(func() bool {
			if !a.isProbing() {
				a.quietFor(time.Hour)
			}
			return a.isProbing() && m.end(a).Held(func(wc *ibv.WC) bool { return wc.Op == ibv.WCRead }) > 0
		}))
	}
	// undisturbed has f try again if something was heard of b meanwhile.
	undisturbed := func(what string, f func() bool) {
		t.Helper()
		require.True(t, eventually(func() bool {
			stats := a.Stats()
			before := stats.received()
			ok := f()
			stats = a.Stats()
			require.True(t, ok || stats.received() != before, what)
			return ok
		}))
	}
	const late = 15 * time.Second
	undisturbed("counts from when it was asked", func() bool {
		answered()
		a.mu.Lock()
		a.live.probedAt = a.live.probedAt.Add(-late)
		a.unlock()
		m.setSlow(false)
		a.mu.Lock()
		defer a.unlock()
		a.runTimer(time.Now())
		return !a.live.probing && a.live.probedAt.Equal(a.live.lastReceived)
	})
	undisturbed("is no answer to another question", func() bool {
		answered()
		a.mu.Lock()
		a.live.probing = false // as if the peer had said something before
		a.unlock()
		m.setSlow(false)
		reads := m.reads.Load()
		a.quietFor(time.Hour)
		return m.reads.Load() == reads+1
	})
	require.NoError(t, b.Close())
	require.Error(t, <-wrote)
	require.NoError(t, a.Close())
}

// Where no keep-alive would find it, a send that fails must wake who sleeps, also on
// devices that do not take it for solicited.
func TestKeepAliveOffHearsSends(t *testing.T) {
	for _, keepAlive := range []time.Duration{-1, time.Hour} {
		checkLeaks(t)
		m := newModest(t, 1<<20, 1<<14, false)
		a, b := pipeOn(t, Config{KeepAlive: keepAlive, LingerTimeout: -1, Provider: m})
		pass(t, a, b)
		pass(t, b, a)
		for _, c := range []*Conn{a, b} {
			e := m.end(c)
			requireSleeper(t, e, func() bool { return e.ArmedForAll() == (keepAlive < 0) })
		}
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
	}
}

// emptyCQ is a completion queue in which nothing ever is.
type emptyCQ struct{ ibv.CQ }

func (emptyCQ) Poll([]ibv.WC) (int, error) { return 0, nil }

// A connection that has grown beyond its initial size asks no later because of that.
func TestKeepAliveWarmUp(t *testing.T) {
	for _, keepAlive := range []time.Duration{time.Second, 7 * time.Second, 2 * time.Minute} {
		for _, word := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/word=%v", keepAlive, word), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c := &conn{set: (&Config{KeepAlive: keepAlive}).settings(testDevice(t), false), lane: lane{cq: emptyCQ{}}}
					c.startWaiting(new(ibv.DeviceAttr))
					c.send.midMessage = true // to a plain peer: it can say nothing
					c.credits.window = c.set.initial + 1
					c.startTimer()
					time.Sleep(keepAlive - time.Millisecond)
					c.mu.Lock()
					if word {
						c.live.lastReceived = time.Now()
					}
					due := c.live.lastReceived.Add(keepAlive)
					c.scheduleTrim()
					c.unlock()
					time.Sleep(time.Until(due))
					synctest.Wait()
					require.Equal(t, due, c.live.probedAt)
					c.live.timer.Stop()
				})
			})
		}
	}
}

// What keep-alive says, of either side, makes no connection busy: one without payload
// is brought back to its initial size, and no sooner than it should.
func TestKeepAliveCoolDown(t *testing.T) {
	for _, keepAlive := range []time.Duration{-1, time.Second, 7 * time.Second, 2 * time.Minute} {
		t.Run(fmt.Sprint(keepAlive), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &conn{set: (&Config{KeepAlive: keepAlive}).settings(testDevice(t), false), lane: lane{cq: emptyCQ{}}}
				c.startWaiting(new(ibv.DeviceAttr))
				c.startTimer()
				words := func(d time.Duration) {
					for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
						c.mu.Lock()
						c.live.lastReceived = time.Now()
						c.unlock()
					}
					synctest.Wait()
				}
				words(time.Second)
				for range 3 {
					c.mu.Lock()
					c.stats.BytesReceived++
					c.credits.window = c.set.initial + 1
					c.scheduleTrim()
					c.unlock()
					words(idleAfter - time.Second)
					require.Greater(t, c.credits.window, c.set.initial)
				}
				words(2 * idleAfter)
				require.Equal(t, c.set.initial, c.credits.window)
				c.live.timer.Stop()
			})
		})
	}
}

// gatedQP is a queue pair whose posts wait.
type gatedQP struct {
	ibv.QP
	come, leave chan struct{}
	once        sync.Once
}

func (q *gatedQP) PostSend(wrs []ibv.SendWR) (int, error) {
	q.once.Do(func() { close(q.come) })
	<-q.leave
	return q.QP.PostSend(wrs)
}

// When a connection is closed while keep-alive sends something for it, its timer is not
// set again.
func TestKeepAliveDuringClose(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, Config{KeepAlive: time.Hour, LingerTimeout: -1})
	exchange(t, a, b, 2<<20)
	requireSilence(t, a, b)
	q := &gatedQP{QP: a.lane.qp, come: make(chan struct{}), leave: make(chan struct{})}
	a.mu.Lock()
	a.lane.qp, a.send.probeDue = q, true // there is something to send
	a.idle.moved, a.idle.trimmable = a.stats.moved(), true
	a.idle.checkedAt, a.idle.movedAt = time.Time{}, time.Time{}
	a.mu.Unlock() // without what unlock posts
	ticked := make(chan struct{})
	go func() {
		a.tick()
		close(ticked)
	}()
	within(t, "post", func() { <-q.come })
	require.NoError(t, a.Close())
	close(q.leave)
	<-ticked
	require.NoError(t, b.Close())
	require.True(t, eventually(func() bool { return Lingering().Now == 0 }))
	require.False(t, a.live.timer.Stop(), "the timer is set")
}

// A negative KeepAlive never asks.
func TestKeepAliveOff(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "rdma4", local4, new(ListenConfig), &Dialer{Config: Config{KeepAlive: -1}})
	client.quietFor(1000 * time.Hour)
	client.quietFor(1000 * time.Hour)
	require.False(t, client.isProbing())
	exchange(t, client, server, 10<<10)
	require.Zero(t, client.Stats().KeepAliveSent)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// An end to which data comes, and which sends nothing, says something every now and then,
// but not to a peer that sends little, nor to one that is not rdmanet.
func TestKeepAliveConfirms(t *testing.T) {
	start := time.Now()
	for _, tt := range []struct {
		name    string
		plain   bool
		bytes   uint64
		d       time.Duration
		posted  bool // something was sent in between
		confirm bool
	}{
		{name: "much", bytes: confirmFrom, d: confirmEvery, confirm: true},
		{name: "little", bytes: confirmFrom - 1, d: time.Hour},
		{name: "just now", bytes: 1 << 30, d: confirmEvery - 1},
		{name: "both ways", bytes: 1 << 30, d: time.Hour, posted: true},
		{name: "not rdmanet", plain: true, bytes: 1 << 30, d: time.Hour},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &conn{peer: privateData{rdmanet: !tt.plain}}
			c.stats.Posts = 7
			c.confirmReceipt(start)
			c.stats.BytesReceived += tt.bytes
			if tt.posted {
				c.stats.Posts++
			}
			c.confirmReceipt(start.Add(tt.d))
			require.Equal(t, tt.confirm, c.send.responseDue)
		})
	}
}
