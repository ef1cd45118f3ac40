package scripted_test

import (
	"errors"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/scripted"
)

// The wrappers keep the rules of package ibv where nothing is scripted.
func TestTransparent(t *testing.T) {
	verbstest.TestProvider(t, func(*testing.T) verbstest.Env {
		return verbstest.Env{Passive: scripted.New(iwarp.New(iwarp.Config{})), Addr: netip.MustParseAddr("127.0.0.1")}
	})
}

// pair is a connection whose ends are scripted.
func pair(t *testing.T) (*verbstest.Pair, *scripted.Endpoint) {
	p := scripted.New(iwarp.New(iwarp.Config{}))
	pair := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: netip.MustParseAddr("127.0.0.1")}, verbstest.PairConfig{SendWR: 8})
	return pair, p.Endpoint(pair.Active.QP.QPN())
}

func poll(t *testing.T, cq ibv.CQ) []ibv.WC {
	t.Helper()
	var wcs [16]ibv.WC
	n, err := cq.Poll(wcs[:])
	require.NoError(t, err)
	return wcs[:n]
}

func every(*ibv.WC) bool { return true }

// soon tries until ok holds.
func soon(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not come to pass")
		}
	}
}

// A completion that is held is neither polled nor known, and comes when it is let go.
func TestHold(t *testing.T) {
	p, e := pair(t)
	send := func(id uint64) ibv.SendWR {
		return ibv.SendWR{ID: id, Op: ibv.OpWrite, Flags: ibv.SendSignaled}
	}
	e.Hold(func(wc *ibv.WC) bool { return e.IsSend(wc) })
	before := e.Posted()
	p.Active.Send(t, send(1), send(2))
	soon(t, func() bool { return len(poll(t, p.Active.SendCQ)) == 0 && e.Held(every) == 2 })
	require.Equal(t, 2, e.Outstanding())
	require.Equal(t, before+2, e.Posted())
	e.Hold(func(wc *ibv.WC) bool { return wc.ID == 2 })
	wcs := poll(t, p.Active.SendCQ)
	require.Len(t, wcs, 1)
	require.EqualValues(t, 1, wcs[0].ID)
	require.Equal(t, 1, e.Outstanding())
	e.Hold(nil)
	wcs = poll(t, p.Active.SendCQ)
	require.Len(t, wcs, 1)
	require.EqualValues(t, 2, wcs[0].ID)
	require.Zero(t, e.Outstanding())
}

// Whoever sleeps is seen, and wakes when something is let go that the queue is armed for.
func TestSleeper(t *testing.T) {
	p, e := pair(t)
	e.HoldAll(true)
	p.Active.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpWrite, Flags: ibv.SendSignaled})
	soon(t, func() bool { return len(poll(t, p.Active.SendCQ)) == 0 && e.Held(every) == 1 })
	require.False(t, e.Asleep())
	wait := func(solicited bool) chan error {
		require.NoError(t, p.Active.SendCQ.Arm(solicited))
		require.Equal(t, !solicited, e.ArmedForAll())
		woken := make(chan error, 1)
		go func() { woken <- p.Active.SendCQ.Wait(time.Now().Add(time.Minute)) }()
		soon(t, e.Asleep)
		return woken
	}
	woken := wait(true)
	require.Equal(t, 1, e.MostWaiting())
	e.HoldAll(false) // a send, for which nobody waits
	e.HoldAll(true)
	require.True(t, e.Asleep())
	e.Interrupt()
	require.ErrorIs(t, <-woken, ibv.ErrInterrupted)
	woken = wait(false)
	e.HoldAll(false)
	err := <-woken
	require.True(t, errors.Is(err, ibv.ErrInterrupted), "%v", err)
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded))
	require.Len(t, poll(t, p.Active.SendCQ), 1)
	require.Equal(t, scripted.Goroutine(), e.Poller())
}

// Posts wait at the gate, and fail when the test says so.
func TestPosts(t *testing.T) {
	p, e := pair(t)
	before := e.Posted()
	open := e.Gate()
	posted := make(chan error, 1)
	go func() {
		_, err := p.Active.QP.PostSend([]ibv.SendWR{{ID: 1, Op: ibv.OpWrite, Flags: ibv.SendSignaled}})
		posted <- err
	}()
	soon(t, func() bool { return e.Blocked() == 1 })
	require.Equal(t, before, e.Posted())
	open()
	open()
	require.NoError(t, <-posted)
	require.Zero(t, e.Blocked())
	require.Equal(t, before+1, e.Posted())
	e.OnPostSend(func([]ibv.SendWR) error { return verbstest.ErrInjected })
	_, err := p.Active.QP.PostSend([]ibv.SendWR{{ID: 2, Op: ibv.OpWrite}})
	require.ErrorIs(t, err, verbstest.ErrInjected)
	require.Equal(t, before+1, e.Posted())
}

// The oldest completions that are held can be let go, by their number.
func TestPass(t *testing.T) {
	p, e := pair(t)
	e.Hold(func(wc *ibv.WC) bool { return e.IsSend(wc) })
	post := func(id uint64) ibv.SendWR {
		return ibv.SendWR{ID: id, Op: ibv.OpWrite, Flags: ibv.SendSignaled}
	}
	p.Active.Send(t, post(1), post(2), post(3))
	soon(t, func() bool { return len(poll(t, p.Active.SendCQ)) == 0 && e.Held(every) == 3 })
	require.NoError(t, p.Active.SendCQ.Arm(false))
	woken := make(chan error, 1)
	go func() { woken <- p.Active.SendCQ.Wait(time.Now().Add(time.Minute)) }()
	soon(t, e.Asleep)
	e.Pass(2)
	require.ErrorIs(t, <-woken, ibv.ErrInterrupted)
	wcs := poll(t, p.Active.SendCQ)
	require.Len(t, wcs, 2)
	require.EqualValues(t, 1, wcs[0].ID)
	require.EqualValues(t, 2, wcs[1].ID)
	require.Empty(t, poll(t, p.Active.SendCQ))
	e.Pass(1)
	require.Len(t, poll(t, p.Active.SendCQ), 1)
}

// A completion queue is not armed if the test says so.
func TestOnArm(t *testing.T) {
	p, e := pair(t)
	var solicited []bool
	e.OnArm(func(solicitedOnly bool) error {
		solicited = append(solicited, solicitedOnly)
		if solicitedOnly {
			return nil
		}
		return verbstest.ErrInjected
	})
	require.ErrorIs(t, p.Active.SendCQ.Arm(false), verbstest.ErrInjected)
	require.False(t, e.ArmedForAll())
	require.NoError(t, p.Active.SendCQ.Arm(true))
	require.Equal(t, []bool{false, true}, solicited)
}

// Whoever sleeps is woken for a completion that was let go while Poll asked whether it is held.
func TestLetGoDuringPoll(t *testing.T) {
	p, e := pair(t)
	asked, answer := make(chan bool), make(chan bool)
	var answered atomic.Bool
	e.Hold(func(*ibv.WC) bool {
		if !answered.Load() {
			asked <- true
			<-answer
			answered.Store(true)
		}
		return true
	})
	p.Active.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpWrite, Flags: ibv.SendSignaled})
	require.NoError(t, p.Active.SendCQ.Arm(false))
	polled := make(chan int)
	go func() {
		var wcs [4]ibv.WC
		n := 0
		for !answered.Load() {
			n, _ = p.Active.SendCQ.Poll(wcs[:])
		}
		polled <- n
	}()
	<-asked
	e.Hold(nil)
	close(answer)
	require.Zero(t, <-polled)
	require.ErrorIs(t, p.Active.SendCQ.Wait(time.Now().Add(time.Minute)), ibv.ErrInterrupted)
	require.Len(t, poll(t, p.Active.SendCQ), 1)
}
