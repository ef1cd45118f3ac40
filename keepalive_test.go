package rdmanet

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
	"github.com/rdmanet/rdmanet/internal/scripted"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// fabricModest returns the device in memory behind a modest one, for tests in virtual time.
func fabricModest(t testing.TB) *modest {
	t.Helper()
	leaktest.Check(t)
	return newModestOn(newMemoryFabric(), 1<<20, 1<<14, false)
}

// probe is a question of keep-alive that an end has posted.
type probe struct {
	how string // "message", "Read" or "Write"
	at  time.Time
}

// probeLog has the probes of an end.
type probeLog struct {
	mu     sync.Mutex
	probes []probe
	heard  time.Time // when the end has last polled a message of its peer
}

// watchProbes has an end's probes noted. The end moves no data by RDMA.
func watchProbes(e *scripted.Endpoint) *probeLog {
	l := &probeLog{heard: time.Now()}
	e.OnPostSend(func(wrs []ibv.SendWR) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		for i := range wrs {
			var message []byte
			for _, s := range wrs[i].SGL {
				message = append(message, s.Buf...)
			}
			switch wrs[i].Op {
			case ibv.OpRead:
				l.probes = append(l.probes, probe{"Read", time.Now()})
			case ibv.OpWrite:
				l.probes = append(l.probes, probe{"Write", time.Now()})
			default:
				h, _, err := smbdpeer.ParseDataTransfer(message)
				if err == nil && h.Flags&smbdpeer.FlagResponseRequested != 0 {
					l.probes = append(l.probes, probe{"message", time.Now()})
				}
			}
		}
		return nil
	})
	e.OnPolled(func(wcs []ibv.WC) {
		for i := range wcs {
			if !e.IsSend(&wcs[i]) {
				l.mu.Lock()
				l.heard = time.Now()
				l.mu.Unlock()
			}
		}
	})
	return l
}

// take returns the probes since the last call.
func (l *probeLog) take() []probe {
	l.mu.Lock()
	defer l.mu.Unlock()
	probes := l.probes
	l.probes = nil
	return probes
}

// lastHeard is when a message of the peer was polled last.
func (l *probeLog) lastHeard() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.heard
}

// sleepUntil waits for a time in a bubble, and until everything that is due then is done.
func sleepUntil(at time.Time) {
	time.Sleep(time.Until(at))
	synctest.Wait()
}

// freeze has an end neither learn of anything nor send anything until thaw is called.
func freeze(t testing.TB, e *scripted.Endpoint) (thaw func()) {
	e.HoldAll(true)
	open := e.Gate()
	thaw = func() {
		open()
		e.HoldAll(false)
	}
	t.Cleanup(thaw)
	return thaw
}

// absorb has a peer receive what has come, and take the credits in it.
func absorb(t testing.TB, p *smbdpeer.Raw) {
	t.Helper()
	for msgs := p.Poll(); len(msgs) > 0; msgs = p.Poll() {
		for _, b := range msgs {
			h, _, err := smbdpeer.ParseDataTransfer(b)
			require.NoError(t, err)
			p.Credits += int(h.CreditsGranted)
			p.Received++
		}
	}
}

// A peer that is there answers, although its program does nothing.
func TestKeepAliveAnswered(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			checkLeaks(t)
			inTime(t, 20*time.Millisecond, func(d time.Duration) bool {
				m := newModest(t, 1<<20, 1<<14, false) // which cannot ask the peer's host
				client, server := pipe(t, lb.network, lb.address, &ListenConfig{Config: Config{Provider: m}}, &Dialer{Config: Config{Provider: m, KeepAlive: d}})
				defer closeBoth(t, client, server)
				asked := eventually(func() bool { return client.Stats().KeepAliveSent > 2 })
				err := exchanged(t, client, server, 10<<10)
				if errors.Is(err, errSilent) {
					return false // the answer took longer than it may
				}
				require.NoError(t, err)
				require.True(t, asked)
				require.Zero(t, server.Stats().KeepAliveSent, "the answer does not ask back")
				return true
			})
		})
	}
	t.Run("when it is asked", func(t *testing.T) {
		inVirtualTime(t, func(t *testing.T) {
			m := fabricModest(t)
			client, server := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: m, KeepAlive: -1}},
				&Dialer{Config: Config{Provider: m, KeepAlive: time.Hour}})
			l := watchProbes(m.end(client))
			time.Sleep(time.Minute) // what an idle connection gives back, it has given back
			for range 3 {
				due := l.lastHeard().Add(time.Hour)
				sleepUntil(due.Add(-1))
				require.Empty(t, l.take())
				sleepUntil(due)
				require.Equal(t, []probe{{"message", due}}, l.take())
				require.Equal(t, due, l.lastHeard(), "no answer")
			}
			require.EqualValues(t, 3, client.Stats().KeepAliveSent)
			require.Zero(t, server.Stats().KeepAliveSent, "the answer does not ask back")
			exchange(t, client, server, 10<<10)
			closeBoth(t, client, server)
		})
	})
}

// A peer that does not answer is given up, which everybody who waits learns.
func TestKeepAliveUnanswered(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		m := fabricModest(t)
		client, server := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: m, KeepAlive: -1}},
			&Dialer{Config: Config{Provider: m, KeepAlive: time.Hour}})
		l := watchProbes(m.end(client))
		readErr, writeErr := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := client.Read(make([]byte, 1))
			readErr <- err
		}()
		synctest.Wait()
		thaw := freeze(t, m.end(server))
		due := l.lastHeard().Add(time.Hour)
		sleepUntil(due)
		require.Equal(t, []probe{{"message", due}}, l.take())
		go func() {
			_, err := client.Write(make([]byte, 64<<20))
			writeErr <- err
		}()
		sleepUntil(due.Add(20*time.Second - 1))
		require.Empty(t, readErr)
		require.Empty(t, writeErr)
		for op, ch := range map[string]chan error{"read": readErr, "write": writeErr} {
			var err error
			within(t, op, func() { err = <-ch })
			require.Equal(t, 20*time.Second, time.Since(due))
			requireConnError(t, transports[0], err, op)
			require.ErrorIs(t, err, syscall.ETIMEDOUT)
			require.ErrorIs(t, err, errSilent)
		}
		thaw()
		closeBoth(t, client, server)
	})
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
	for _, s := range []stall{{"one writes", false, false}, {"both write", true, false}, {"garbled reads", true, true}} {
		t.Run(s.name, func(t *testing.T) {
			checkLeaks(t)
			inTime(t, 20*time.Millisecond, func(d time.Duration) bool {
				m := newModest(t, 1<<20, 1<<14, false)
				err := s.run(t, m, d, func(failed func() bool) {
					require.True(t, eventually(func() bool { return failed() || m.reads.Load() >= 10 }))
				})
				if errors.Is(err, errSilent) {
					return false // an answer took longer than it may
				}
				require.NoError(t, err)
				require.True(t, !s.garble && !testDevice(t).Attr().Quirks.EmptyReadsGarbled || m.empty.Load() == 0)
				return true
			})
		})
		t.Run(s.name+" for hours", func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				m := fabricModest(t)
				require.NoError(t, s.run(t, m, time.Hour, func(func() bool) { time.Sleep(10*time.Hour + time.Minute) }))
				require.GreaterOrEqual(t, m.reads.Load(), int64(10))
				require.True(t, !s.garble || m.empty.Load() == 0)
			})
		})
	}
}

// stall is a connection on which programs write and do not read.
type stall struct {
	name         string
	both, garble bool
}

// run has a and b write more than goes without a reader, waits, and has them read. failed
// reports whether a write has returned. Keep-alive asks by RDMA Read.
func (s *stall) run(t *testing.T, m *modest, keepAlive time.Duration, wait func(failed func() bool)) error {
	t.Helper()
	m.garble = s.garble
	a, b := pipeOn(t, Config{KeepAlive: keepAlive, TransferSize: -1, Provider: m})
	defer closeBoth(t, a, b)
	if err := exchanged(t, a, b, 2<<20); err != nil { // every slot of the send queues has been used
		return err
	}
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
	failed := func() bool { return len(errs) > 0 }
	for _, c := range ends {
		require.True(t, eventually(func() bool { return c.Stats().CreditStalls > 0 || failed() }))
	}
	wait(failed)
	for i := range ends {
		reader := []*Conn{b, a}[i]
		go func() {
			errs <- defect.ReadFull(reader, want)
		}()
	}
	var err error
	within(t, "transfer", func() {
		for range 2 * len(ends) {
			err = errors.Join(err, <-errs)
		}
	})
	if err != nil {
		// An end whose calls are done may have given up the other, which then cannot say why.
		for _, c := range []*Conn{a, b} {
			c.mu.Lock()
			err = errors.Join(err, c.life.cause)
			c.mu.Unlock()
		}
	}
	return err
}

// unable returns a connection over the device in memory that can say nothing to its raw
// peer, because the peer has taken what it has granted and grants no more. wrote is the Write
// that waits. The peer has this private data.
func unable(t *testing.T, active bool, private []byte) (s *scene, c *Conn, p *smbdpeer.Raw, l *probeLog, wrote chan result) {
	t.Helper()
	s = newFabricScene(t)
	c, p, l, wrote = s.unable(active, private)
	return s, c, p, l, wrote
}

// unable is the function of that name for a scene on the device in memory.
func (s *scene) unable(active bool, private []byte) (c *Conn, p *smbdpeer.Raw, l *probeLog, wrote chan result) {
	t := s.t
	t.Helper()
	s.cfg.KeepAlive, s.cfg.TransferSize, s.cfg.LingerTimeout = time.Hour, -1, 2*endless
	c, p = s.conns(active, private)
	c.SetDeadline(time.Time{})
	l = watchProbes(s.end(c))
	wrote = writing(c, make([]byte, 64<<10))
	synctest.Wait()
	require.NotZero(t, c.Stats().CreditStalls)
	p.RequestResponse(0)    // the answer takes the last credit, which goes with a grant alone
	time.Sleep(time.Minute) // what an idle connection gives back, it has given back
	require.Empty(t, l.take())
	return c, p, l, wrote
}

// readablePrivate is the private data of a peer whose device answers RDMA Reads of no bytes.
var readablePrivate = smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true, Features: smbdpeer.FeatureFIN, MaxReceiveSize: 8136}.Append(nil)

// unreadablePrivate is the private data of a peer whose device does not.
var unreadablePrivate = smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureNoEmptyRead,
	MaxReceiveSize: 8136}.Append(nil)

// A side that is to ask while it posts something asks afterwards, by what is possible then.
func TestKeepAliveDuringPost(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		m := fabricModest(t)
		cfg := Config{KeepAlive: time.Hour, LingerTimeout: -1, TransferSize: -1, Provider: m, MaxSendSize: 8 << 10}
		peer := cfg
		peer.KeepAlive, peer.MaxReceiveCredits = -1, 4
		a, b := pipe(t, "rdma4", local4, &ListenConfig{Config: peer}, &Dialer{Config: cfg})
		l := watchProbes(m.end(a))
		pass(t, a, b)
		pass(t, b, a)
		time.Sleep(time.Minute) // what an idle connection gives back, it has given back
		open := m.end(a).Gate()
		want := pattern(1, 8<<20)
		wrote := writing(a, want) // the first post takes all credits
		sleepUntil(l.lastHeard().Add(time.Hour))
		require.Equal(t, 1, m.end(a).Blocked())
		require.Empty(t, l.take())
		time.Sleep(10 * time.Second)
		open()
		synctest.Wait()
		require.Equal(t, []probe{{"Read", time.Now()}}, l.take())
		time.Sleep(time.Minute)
		require.Empty(t, wrote, "no answer")
		require.NoError(t, defect.ReadFull(b, want))
		require.NoError(t, (<-wrote).err)
		closeBoth(t, a, b)
	})
}

// Where the peer's device cannot be asked either, a device that does not get rid of
// what it is to send is taken for silence; one that does is not.
func TestKeepAliveTouch(t *testing.T) {
	for _, side := range sides {
		for _, slow := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/slow=%v", side.name, slow), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					s, c, _, l, wrote := unable(t, side.active, unreadablePrivate)
					s.script.HoldSends(slow)
					due := l.lastHeard().Add(time.Hour)
					sleepUntil(due)
					require.Equal(t, []probe{{"Write", due}}, l.take())
					if slow {
						sleepUntil(due.Add(20*time.Second - 1))
						require.Empty(t, wrote)
						r := <-wrote
						require.Equal(t, 20*time.Second, time.Since(due))
						require.ErrorIs(t, r.err, errSilent)
						s.script.HoldSends(false)
						return
					}
					time.Sleep(3 * time.Hour)
					require.Greater(t, len(l.take()), 3)
					require.Empty(t, wrote)
					require.NoError(t, c.Close())
					require.Error(t, (<-wrote).err)
				})
			})
		}
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
	for _, s := range []cutWire{{name: "idle"}, {"client writes", true, false, false}, {"server writes", false, true, false}, {"both write", true, true, false},
		{"garbled reads", true, true, true}} {
		t.Run(s.name, func(t *testing.T) {
			checkLeaks(t)
			inTime(t, 100*time.Millisecond, func(d time.Duration) bool { return s.run(t, d) })
		})
	}
}

// cutWire is a connection whose wire is cut.
type cutWire struct {
	name                  string
	clientFull, otherFull bool // has written as much as goes without a reader
	garble                bool
}

// run reports whether the connection lived until the wire was cut.
func (s *cutWire) run(t *testing.T, keepAlive time.Duration) bool {
	t.Helper()
	m := newModestOn(overTCP(), 1<<20, 1<<14, false)
	m.garble = s.garble
	cfg := Config{KeepAlive: keepAlive, LingerTimeout: -1, Provider: m}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	w := newWire(t, ln.Addr().String())
	c, err := (&Dialer{Config: cfg}).Dial("rdma4", w.ln.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	a, err := ln.Accept()
	require.NoError(t, err)
	defer a.Close()
	ends := []*Conn{c.(*Conn), a.(*Conn)}
	if err := exchanged(t, c, a, 10); err != nil {
		require.ErrorIs(t, err, errSilent)
		return false
	}
	wrote := []chan error{make(chan error, 1), make(chan error, 1)}
	broken := func() bool { return len(wrote[0]) > 0 || len(wrote[1]) > 0 }
	for i, full := range []bool{s.clientFull, s.otherFull} {
		if !full {
			continue
		}
		go func() {
			_, err := ends[i].Write(make([]byte, 64<<20))
			wrote[i] <- err
		}()
		require.True(t, eventually(func() bool { return ends[i].Stats().CreditStalls > 0 || broken() }))
	}
	alive := !broken()
	if !s.clientFull && !s.otherFull {
		_, err := c.Write([]byte("x"))
		_, err2 := a.Write([]byte("x"))
		alive = err == nil && err2 == nil
	}
	if !alive {
		return false
	}
	close(w.cut)
	for i, full := range []bool{s.clientFull, s.otherFull} {
		for op, f := range map[string]func() error{
			"read": func() error { return drain(ends[i]) },
			"write": func() error {
				if full {
					return <-wrote[i]
				}
				var err error
				for err == nil {
					_, err = ends[i].Write([]byte("x"))
				}
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
	}
	return true
}

// Whenever the timer looks, the peer is asked and given up at the times that
// Config.KeepAlive says, counted from its last word.
func TestKeepAliveBound(t *testing.T) {
	for _, k := range []struct{ keepAlive, answer time.Duration }{
		{time.Hour, 20 * time.Second},
		{2 * time.Minute, 20 * time.Second},
		{8 * time.Second, 8 * time.Second},
	} {
		for _, warm := range []bool{false, true} {
			for _, side := range sides {
				t.Run(fmt.Sprintf("%v/warm=%v/%s", k.keepAlive, warm, side.name), func(t *testing.T) {
					inVirtualTime(t, func(t *testing.T) {
						s := newFabricScene(t)
						s.cfg.KeepAlive = k.keepAlive
						c, p := s.conns(side.active, rdmanetPrivate)
						c.SetDeadline(time.Time{})
						read := reading(c, make([]byte, 1))
						l := watchProbes(s.end(c))
						if warm {
							p.Grant(2000) // more than an idle connection keeps
						}
						until := func(at time.Time) {
							for warm && time.Now().Before(at) { // so warm it stays
								_, err := c.Write([]byte("x"))
								require.NoError(t, err)
								absorb(t, p)
								time.Sleep(min(4*time.Second, time.Until(at)))
							}
							sleepUntil(at)
						}
						until(time.Now().Add(k.keepAlive / 3))
						p.Grant(1) // a word between two looks
						synctest.Wait()
						start := time.Now()
						require.Equal(t, start, l.lastHeard())
						until(start.Add(k.keepAlive - 1))
						require.Empty(t, l.take())
						until(start.Add(k.keepAlive))
						require.Equal(t, []probe{{"message", start.Add(k.keepAlive)}}, l.take())
						until(start.Add(k.keepAlive + k.answer - 1))
						require.Empty(t, read)
						require.ErrorIs(t, (<-read).err, errSilent)
						require.Equal(t, k.keepAlive+k.answer, time.Since(start))
						require.NoError(t, c.Close())
					})
				})
			}
		}
	}
}

// The device's answer says that the peer was there when it was asked, however long it
// lies in the completion queue; and is none to a question that was asked later.
func TestKeepAliveLateAnswer(t *testing.T) {
	for _, side := range sides {
		for _, word := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/word=%v", side.name, word), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					s, c, p, l, wrote := unable(t, side.active, readablePrivate)
					const late = 15 * time.Second
					s.end(c).Hold(func(wc *ibv.WC) bool { return wc.Op == ibv.WCRead }) // nobody looks at the answer
					asked := l.lastHeard().Add(time.Hour)
					sleepUntil(asked)
					require.Equal(t, []probe{{"Read", asked}}, l.take())
					sleepUntil(asked.Add(late))
					if !word {
						s.end(c).Hold(nil)
						due := asked.Add(time.Hour) // it counts from when it was asked
						sleepUntil(due.Add(-1))
						require.Empty(t, l.take())
						sleepUntil(due)
						require.Equal(t, []probe{{"Read", due}}, l.take())
					} else {
						p.Grant(0)
						synctest.Wait()
						require.Equal(t, asked.Add(late), l.lastHeard())
						due := l.lastHeard().Add(time.Hour)
						sleepUntil(due.Add(-1))
						require.Empty(t, l.take())
						s.end(c).Hold(nil)
						sleepUntil(due)
						require.Equal(t, []probe{{"Read", due}}, l.take(), "the old answer is taken for one to the new question")
					}
					time.Sleep(time.Minute)
					require.Empty(t, wrote)
					require.NoError(t, c.Close())
					require.Error(t, (<-wrote).err)
				})
			})
		}
	}
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

// A connection that has more than an idle one needs asks no later because of that.
func TestKeepAliveWarmUp(t *testing.T) {
	for _, keepAlive := range []time.Duration{time.Second, 7 * time.Second, 2 * time.Minute} {
		for _, word := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/word=%v", keepAlive, word), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					s := newFabricScene(t)
					s.cfg.KeepAlive = keepAlive
					ln := listenRawOn(t, s.peers)
					result := s.dial(ln)
					p := acceptRaw(t, ln)
					require.NoError(t, p.ID.Accept(tctx, rawParam(p.ID, rdmanetPrivate)))
					response := goodResponse
					if !word {
						response.CreditsGranted = 10 // more than an idle connection keeps
					}
					p.Respond(response)
					r := <-result
					require.NoError(t, r.err)
					c := s.owned(r.c)
					l := watchProbes(s.end(c))
					start := time.Now()
					if word {
						p.WaitCredit()
						sleepUntil(start.Add(keepAlive - time.Millisecond))
						p.Grant(10)
						synctest.Wait()
						require.Equal(t, start.Add(keepAlive-time.Millisecond), l.lastHeard())
						start = l.lastHeard()
					}
					sleepUntil(start.Add(keepAlive - 1))
					require.Empty(t, l.take())
					sleepUntil(start.Add(keepAlive))
					require.Equal(t, []probe{{"message", start.Add(keepAlive)}}, l.take())
					require.NoError(t, c.Close())
				})
			})
		}
	}
}

// What keep-alive says, of either side, makes no connection busy: one without payload
// is brought back to its initial size, and no sooner than it should.
func TestKeepAliveCoolDown(t *testing.T) {
	for _, keepAlive := range []time.Duration{-1, time.Second, 7 * time.Second, 2 * time.Minute} {
		for _, side := range sides {
			t.Run(fmt.Sprintf("%v/%s", keepAlive, side.name), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					s := newFabricScene(t)
					s.cfg.KeepAlive, s.cfg.MaxReceiveCredits = keepAlive, 64
					initial := s.cfg.InitialReceiveCredits
					c, p := s.conns(side.active, rdmanetPrivate)
					c.SetDeadline(time.Time{})
					words := func(d time.Duration) {
						for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
							absorb(t, p)
							p.Grant(1)
						}
						synctest.Wait()
					}
					words(time.Second)
					for range 3 {
						for range 3 * initial {
							read := readingParked(t, c, make([]byte, 10))
							p.SendData(smbdpeer.Segment(10, 0))
							require.NoError(t, (<-read).err)
						}
						synctest.Wait()
						require.Greater(t, c.Stats().ReceiveWindow, initial)
						words(idleAfter - time.Second)
						require.Greater(t, c.Stats().ReceiveWindow, initial)
					}
					words(4 * idleAfter) // a Read has waited, for which the window may grow once more
					require.Equal(t, initial, c.Stats().ReceiveWindow)
					require.NoError(t, c.Close())
				})
			})
		}
	}
}

// When a connection is closed while keep-alive sends something for it, its timer is not
// set again.
func TestKeepAliveDuringClose(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				s := newFabricScene(t)
				s.cfg.KeepAlive, s.cfg.LingerTimeout = time.Hour, -1
				c, _ := s.conns(side.active, rdmanetPrivate)
				e := s.end(c)
				open := e.Gate()
				time.Sleep(time.Hour)
				require.Equal(t, 1, e.Blocked())
				require.EqualValues(t, 1, c.Stats().KeepAliveSent)
				require.NoError(t, c.Close())
				open()
				require.True(t, eventually(func() bool { return Lingering().Now == 0 }))
				// A timer that fires after Close does nothing, so only the timer itself shows that it
				// was set.
				require.False(t, c.live.timer.Stop(), "the timer is set")
			})
		})
	}
}

// A negative KeepAlive never asks.
func TestKeepAliveOff(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		m := fabricModest(t)
		client, server := pipeOn(t, Config{KeepAlive: -1, Provider: m})
		l := watchProbes(m.end(client))
		time.Sleep(2000 * time.Hour)
		require.Empty(t, l.take())
		exchange(t, client, server, 10<<10)
		require.Zero(t, client.Stats().KeepAliveSent)
		closeBoth(t, client, server)
	})
}

// An end to which data comes, and which sends nothing, says something every now and then,
// but not to a peer that sends little, nor to one that is not rdmanet.
func TestKeepAliveConfirms(t *testing.T) {
	const segment = 8000
	for _, tt := range []struct {
		name    string
		plain   bool
		bytes   int
		d       time.Duration
		posted  bool // something was sent in between
		confirm bool
	}{
		{name: "much", bytes: confirmFrom, d: confirmEvery, confirm: true},
		{name: "little", bytes: confirmFrom - 1, d: time.Hour},
		{name: "just now", bytes: 10 * confirmFrom, d: confirmEvery - 1},
		{name: "both ways", bytes: 10 * confirmFrom, d: time.Hour, posted: true},
		{name: "not rdmanet", plain: true, bytes: 10 * confirmFrom, d: time.Hour},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				s := newFabricScene(t)
				s.cfg.KeepAlive, s.cfg.InitialReceiveCredits, s.cfg.MaxReceiveCredits = -1, 255, 255
				ln := s.listen()
				private := rdmanetPrivate
				if tt.plain {
					private = nil
				}
				p := dialRawOn(t, s.peers, ln.Addr(), func(*smbdpeer.Raw) []byte { return private })
				request := goodRequest
				request.PreferredSendSize, request.CreditsRequested = 8192, 255
				p.Negotiate(request)
				nc, err := ln.Accept()
				require.NoError(t, err)
				c := s.owned(nc)
				c.SetDeadline(time.Time{})
				sent := func() uint64 {
					synctest.Wait()
					st := c.Stats()
					return st.EmptySent
				}
				waitCredits(t, p, 2+tt.bytes/segment+1)
				p.Grant(8)
				time.Sleep(time.Second) // a leader in the background sees at once what comes
				_, err = c.Write([]byte("x"))
				require.NoError(t, err)
				p.Payload(1) // the first since c has sent something
				before := sent()
				for left := tt.bytes - segment; left > 0; left -= segment {
					p.Payload(min(left, segment))
				}
				if tt.posted {
					_, err := c.Write([]byte("x"))
					require.NoError(t, err)
				}
				require.Equal(t, before, sent())
				time.Sleep(tt.d)
				p.Payload(segment)
				require.Equal(t, tt.confirm, sent() > before)
				require.NoError(t, c.Close())
			})
		})
	}
}
