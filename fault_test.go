package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// pattern returns n bytes that no shift of them matches.
func pattern(seed uint64, n int) []byte {
	b := make([]byte, n)
	var s [32]byte
	s[0], s[1] = byte(seed), byte(seed>>8)
	rand.NewChaCha8(s).Read(b)
	return b
}

// faulty is one run of a fixed scenario on a device that may fail: a listener,
// two connections at a time, on each of them bytes both ways, half-close, close.
type faulty struct {
	cfg  Config
	data [2][]byte // from the dialling side, from the listening side
	how  func(c *Conn, out, in []byte)
	on   func(p ibv.Provider) ibv.Provider // the device, made out of that which fails, if not nil

	mu   sync.Mutex
	errs []error // what went wrong
	bad  []error // what must never be
}

const faultyConns = 2

func (f *faulty) failed(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs = append(f.errs, err)
	var op *net.OpError
	if !errors.As(err, &op) && err != io.ErrUnexpectedEOF {
		f.bad = append(f.bad, fmt.Errorf("not an OpError: %w", err))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		f.bad = append(f.bad, fmt.Errorf("it hung: %w", err))
	}
}

// run goes through the scenario.
func (f *faulty) run() {
	lc := ListenConfig{Config: f.cfg}
	ln, err := lc.Listen(tctx, "rdma4", local4)
	if err != nil {
		f.failed(err)
		return
	}
	var clients, servers sync.WaitGroup
	servers.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					f.failed(err)
				}
				return
			}
			servers.Go(func() { f.how(c.(*Conn), f.data[1], f.data[0]) })
		}
	})
	for range faultyConns {
		clients.Go(func() {
			d := Dialer{Config: f.cfg, Timeout: patience}
			c, err := d.Dial("rdma4", ln.Addr().String())
			if err != nil {
				f.failed(err)
				return
			}
			f.how(c.(*Conn), f.data[0], f.data[1])
		})
	}
	clients.Wait()
	if err := ln.Close(); err != nil {
		f.failed(err)
	}
	servers.Wait()
}

// talk writes out, ends its stream, and expects in.
func (f *faulty) talk(c *Conn, out, in []byte) {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		f.failed(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if n, err := c.Write(out); err != nil {
			f.failed(err)
		} else if n != len(out) {
			f.mu.Lock()
			f.bad = append(f.bad, fmt.Errorf("wrote %d of %d bytes without an error", n, len(out)))
			f.mu.Unlock()
		}
		if err := c.CloseWrite(); err != nil {
			f.failed(err)
		}
	})
	got, err := io.ReadAll(c)
	if err != nil {
		f.failed(err)
		in = in[:min(len(got), len(in))] // An error explains that the rest is missing.
	}
	if wrong := defect.Differ(in, got); wrong != nil {
		f.mu.Lock()
		f.bad = append(f.bad, wrong)
		f.mu.Unlock()
	}
	wg.Wait()
	if err := c.Close(); err != nil {
		f.failed(err)
	}
}

// faultTest runs the scenario again and again, each time with one fault that
// set sets, the n-th of its kind, until there is no n-th. It returns in how
// many runs the fault was felt.
func faultTest(t *testing.T, set func(s *verbstest.Switch, n int) *verbstest.Fault) (felt int) {
	return newFaulty().runAll(t, set)
}

func newFaulty() *faulty {
	f := &faulty{data: [2][]byte{pattern(1, heavy(100<<10)), pattern(2, heavy(100<<10))}}
	f.how = f.talk
	return f
}

// withoutHolding is for faults that turn a receive into one that was flushed. A device that holds
// Sends tells the end of the peer's direction by an event, which may have come by then. It never
// flushes what the peer had sent before.
func withoutHolding(t testing.TB, p ibv.Provider) ibv.Provider {
	return newModestOn(p, math.MaxInt, math.MaxInt, false)
}

// runAll is faultTest for a scenario of choice.
func (f *faulty) runAll(t *testing.T, set func(s *verbstest.Switch, n int) *verbstest.Fault) (felt int) {
	setDomainIdle(t, 0)
	for n := 1; ; n += faultStep(n) {
		s := verbstest.NewSwitch(newProvider(t))
		// A linger time that runs out would pass for a hang.
		f.cfg = Config{Provider: s, MaxReceiveSize: 16 << 10, InitialReceiveCredits: minCredits, LingerTimeout: 2 * patience}
		if f.on != nil {
			f.cfg.Provider = f.on(s)
		}
		f.errs, f.bad = nil, nil
		fault := set(s, n)
		within(t, fmt.Sprintf("fault %d", n), f.run)
		require.Empty(t, f.bad, "fault %d", n)
		if !requireReleased(t, s) {
			t.FailNow()
		}
		if len(f.errs) > 0 {
			felt++
		}
		if !fault.Fired() {
			require.Empty(t, f.errs, "without a fault")
			return felt
		}
		require.Less(t, n, 10000, "there is no end of calls")
	}
}

// faultStep is how far it is from the n-th call or completion to fail to the next. With
// -short, and over RDMA devices, which are emulated, only the first are taken one by one.
func faultStep(n int) int {
	switch {
	case onRDMA:
		return 1 + n/2
	case testing.Short():
		return 1 + n/8
	}
	return 1
}

// Every call of every kind fails once. What a call's failure does to a
// connection is an error there; nothing hangs, leaks, or gets its data wrong.
func TestFaultsOfCalls(t *testing.T) {
	checkLeaks(t)
	kinds := []verbstest.Kind{verbstest.Resolve, verbstest.Listen, verbstest.ListenerAccept,
		verbstest.AllocPD, verbstest.CreateCQ, verbstest.RegMR, verbstest.CreateQP, verbstest.Connect, verbstest.Accept,
		verbstest.Disconnect, verbstest.PostSend, verbstest.PostRecv, verbstest.Poll, verbstest.Arm, verbstest.Wait}
	harmless := map[verbstest.Kind]bool{
		verbstest.ListenerAccept: true, // is tried again
		verbstest.Disconnect:     true, // the end comes with the queue pair's
		verbstest.RegMR:          true, // set-up makes a second attempt
	}
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			felt := faultTest(t, func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailNth(n, nil, k) })
			if !harmless[k] {
				require.NotZero(t, felt, "no fault was felt")
			}
		})
	}
}

// The same with a probe target, over a device that keeps what it registers to one connection
// and over one that does not.
func TestFaultsWithProbeTarget(t *testing.T) {
	checkLeaks(t)
	for _, apart := range []bool{false, true} {
		for _, k := range []verbstest.Kind{verbstest.AllocPD, verbstest.CreateCQ, verbstest.RegMR, verbstest.CreateQP,
			verbstest.Connect, verbstest.Accept, verbstest.PostSend, verbstest.PostRecv} {
			t.Run(fmt.Sprintf("%v/apart=%v", k, apart), func(t *testing.T) {
				f := faulty{data: [2][]byte{pattern(1, 100), pattern(2, 100)}}
				f.how = f.talk
				f.on = func(p ibv.Provider) ibv.Provider {
					m := newModest(t, 1<<20, 1<<14, false)
					m.Provider, m.garble, m.apart, m.buffer = p, true, apart, true
					return m
				}
				require.NotZero(t, f.runAll(t, func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailNth(n, nil, k) }))
			})
		}
	}
}

// A chain of sends of which the device takes only the first.
func TestFaultsInChains(t *testing.T) {
	checkLeaks(t)
	felt := faultTest(t, func(s *verbstest.Switch, n int) *verbstest.Fault {
		return s.FailPost(n, verbstest.PostSend, 1, nil)
	})
	require.NotZero(t, felt)
}

// Every completion fails once, with every status there is; over RDMA devices with
// a few of them, the flush among them, which is taken apart from the others.
func TestFaultsOfCompletions(t *testing.T) {
	checkLeaks(t)
	for status := ibv.WCSuccess + 1; status <= ibv.WCGeneralErr; status++ {
		if onRDMA && status%ibv.WCFlushErr != 0 {
			continue
		}
		t.Run(status.String(), func(t *testing.T) {
			f := newFaulty()
			if status == ibv.WCFlushErr {
				f.on = func(p ibv.Provider) ibv.Provider { return withoutHolding(t, p) }
			}
			require.NotZero(t, f.runAll(t, func(s *verbstest.Switch, n int) *verbstest.Fault { return s.FailCompletion(n, status) }))
		})
	}
}

// A queue pair that has failed, of which the device does not say why, ends its connection
// by itself, with and without keep-alive: nothing is posted to it any more, so nobody
// learns anything by asking the peer.
func TestUntoldFailure(t *testing.T) {
	for _, keepAlive := range []time.Duration{-1, time.Hour} {
		t.Run(fmt.Sprintf("KeepAlive %v", keepAlive), func(t *testing.T) {
			checkLeaks(t)
			old := reasonWithin
			reasonWithin = 50 * time.Millisecond
			t.Cleanup(func() { reasonWithin = old })
			m := newModest(t, 1<<20, 1<<14, false)
			m.mute = true
			a, b := pipeOn(t, Config{Provider: m, KeepAlive: keepAlive, LingerTimeout: 50 * time.Millisecond})
			exchange(t, a, b, 100)
			errs := make(chan error, 2)
			read := start(func() { errs <- drain(a) })
			write := start(func() { errs <- flood(a) })
			require.True(t, eventually(func() bool { return a.Stats().CreditStalls > 0 }))
			require.True(t, eventually(func() bool { return read.waits() && write.waits() && m.end(a).Asleep() }), "both wait")
			require.NoError(t, m.end(a).Break())
			within(t, "Read and Write", func() {
				require.ErrorIs(t, <-errs, syscall.ECONNRESET)
				require.ErrorIs(t, <-errs, syscall.ECONNRESET)
			})
			within(t, "Close", func() {
				a.Close()
				b.Close()
			})
		})
	}
}

// A queue pair that has failed and does not say so leaves nothing undone: deadlines
// pass, Close ends.
func TestSilentFailure(t *testing.T) {
	checkLeaks(t)
	m := newModest(t, 1<<20, 1<<14, false)
	m.mute = true
	sw := newSwitch(t, m)
	a, b := pipeOn(t, Config{Provider: sw, LingerTimeout: 50 * time.Millisecond})
	exchange(t, a, b, 100)
	read := make(chan error, 1)
	go func() {
		_, err := a.Read(make([]byte, 1))
		read <- err
	}()
	var flushed atomic.Bool
	m.end(a).OnPolled(func(wcs []ibv.WC) { flushed.Store(flushed.Load() || wcs[0].Status == ibv.WCFlushErr) })
	require.NoError(t, m.end(a).Break())
	require.True(t, eventually(flushed.Load))
	posts := sw.Calls(verbstest.PostRecv)
	within(t, "Read", func() {
		a.SetReadDeadline(time.Now())
		requireTimeout(t, <-read)
	})
	within(t, "Close", func() {
		a.Close()
		b.Close()
	})
	require.LessOrEqual(t, sw.Calls(verbstest.PostRecv), posts+8, "receives were posted to be flushed")
}

// Who cannot be accepted for lack of memory hears that this is why, and the
// listener serves others when there is some again.
func TestRefusedForMemory(t *testing.T) {
	checkLeaks(t)
	for name, lack := range map[string]func(*verbstest.Switch){
		"memory":           func(s *verbstest.Switch) { s.LimitMemory(1) },
		"completion queue": func(s *verbstest.Switch) { s.FailNth(1, syscall.ENOMEM, verbstest.CreateCQ) },
		"queue pair":       func(s *verbstest.Switch) { s.FailNth(1, syscall.ENOMEM, verbstest.CreateQP) },
	} {
		t.Run(name, func(t *testing.T) {
			sw := newSwitch(t, nil)
			ln, err := (&ListenConfig{Config: Config{Provider: sw}}).Listen(tctx, "rdma4", local4)
			require.NoError(t, err)
			lack(sw)
			_, err = (&Dialer{Config: Config{Provider: newProvider(t)}}).Dial("rdma4", ln.Addr().String())
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
			require.ErrorContains(t, err, "STATUS_INSUFFICIENT_RESOURCES")
			require.ErrorContains(t, err, "locked memory")
			sw.LimitMemory(0)
			client, err := (&Dialer{Config: Config{Provider: newProvider(t)}}).Dial("rdma4", ln.Addr().String())
			require.NoError(t, err)
			server, err := ln.Accept()
			require.NoError(t, err)
			exchange(t, client, server, 10<<10)
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
			require.NoError(t, ln.Close())
			requireReleased(t, sw)
		})
	}
}
