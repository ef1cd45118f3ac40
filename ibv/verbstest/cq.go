package verbstest

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

var cqTests = []subtest{
	{"WaitDeadline", testWaitDeadline},
	{"Interrupt", testInterrupt},
	{"InterruptKeepsEvent", testInterruptKeepsEvent},
	{"CloseEndsWait", testCloseEndsWait},
	{"WaitAfterClose", testWaitAfterClose},
	{"Overrun", testOverrun},
}

// emptyCQ returns a completion queue that nothing will ever complete on.
func emptyCQ(t testing.TB, env Env) ibv.CQ {
	t.Helper()
	return env.unconnected(t).SendCQ
}

// quiet fails the test if the queue raises an event within a moment.
func quiet(t testing.TB, what string, cq ibv.CQ) {
	t.Helper()
	if err := cq.Wait(time.Now().Add(shortly)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%s: Wait gave %v, want no event", what, err)
	}
}

// raised fails the test unless the queue raises its event.
func raised(t testing.TB, what string, cq ibv.CQ) {
	t.Helper()
	if err := cq.Wait(time.Now().Add(Patience)); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func testWaitDeadline(t *testing.T, env Env) {
	cq := emptyCQ(t, env)
	for _, armed := range []bool{false, true} {
		if armed {
			must(t, "Arm", cq.Arm(false))
		}
		for _, d := range []time.Duration{-time.Hour, 0, time.Millisecond, shortly} {
			deadline := time.Now().Add(d)
			mustBe(t, "Wait", cq.Wait(deadline), os.ErrDeadlineExceeded)
			if time.Now().Before(deadline) {
				t.Errorf("Wait with a deadline in %v returned too early", d)
			}
		}
	}
}

// testInterrupt interrupts a Wait, sometimes before it has begun: either way
// one Wait ends by it, and only one.
func testInterrupt(t *testing.T, env Env) {
	cq := emptyCQ(t, env)
	result := make(chan error)
	for i := range 200 {
		if i%2 == 0 {
			must(t, "Arm", cq.Arm(false))
		}
		go func() { result <- cq.Wait(time.Now().Add(Patience)) }()
		if i%3 == 0 {
			time.Sleep(time.Millisecond) // for the better chance to meet it asleep
		}
		cq.Interrupt()
		mustBe(t, "interrupted Wait", <-result, ibv.ErrInterrupted)
	}
	late := time.AfterFunc(Patience, cq.Interrupt)
	cq.Interrupt()
	mustBe(t, "Wait without a deadline after Interrupt", cq.Wait(time.Time{}), ibv.ErrInterrupted)
	if !late.Stop() {
		t.Error("the first Interrupt was lost")
	}
	quiet(t, "the Wait after an interrupted one", cq)
}

// testInterruptKeepsEvent interrupts a Wait on an armed queue, which stays armed.
func testInterruptKeepsEvent(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	cq := p.Passive.RecvCQ
	p.Passive.Recv(t, ibv.RecvWR{ID: 1})
	must(t, "Arm", cq.Arm(false))
	cq.Interrupt()
	mustBe(t, "interrupted Wait", cq.Wait(time.Now().Add(Patience)), ibv.ErrInterrupted)
	p.Active.Send(t, ibv.SendWR{Op: ibv.OpSend})
	raised(t, "the event after an Interrupt", cq)
	succeeded(t, p.Passive, pollNext(t, cq), 1, ibv.WCRecv)
}

func testCloseEndsWait(t *testing.T, env Env) {
	dev := env.device(t)
	for i := range 20 {
		cq, err := dev.CreateCQ(1)
		must(t, "CreateCQ", err)
		must(t, "Arm", cq.Arm(false))
		result := make(chan error)
		go func() { result <- cq.Wait(time.Now().Add(Patience)) }()
		if i%2 == 0 {
			time.Sleep(time.Millisecond) // for the better chance to meet it asleep
		}
		must(t, "CQ.Close", cq.Close())
		mustBe(t, "Wait during Close", <-result, net.ErrClosed)
	}
}

func testWaitAfterClose(t *testing.T, env Env) {
	cq, err := env.device(t).CreateCQ(1)
	must(t, "CreateCQ", err)
	must(t, "CQ.Close", cq.Close())
	mustBe(t, "Wait after Close", cq.Wait(time.Now().Add(Patience)), net.ErrClosed)
	cq.Interrupt() // nobody is there to hear it
}

// testOverrun lets more receives complete than the queue can hold. The first
// ones may be read, then the loss shows, and goes on showing.
func testOverrun(t *testing.T, env Env) {
	e := env.unconnected(t)
	probe, err := e.Dev.CreateCQ(4)
	must(t, "CreateCQ", err)
	over := probe.Depth() + 8
	must(t, "CQ.Close", probe.Close())
	if over > e.Dev.Attr().MaxQPWR {
		t.Logf("not tried: the smallest completion queue holds %d", probe.Depth())
		return
	}
	p := NewPair(t, env, PairConfig{SendWR: over, RecvWR: over, CQDepth: 4})
	healthy := NewPair(t, env, PairConfig{})
	for i := range over {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i)})
	}
	// One at a time: only the passive side loses completions. The connection may
	// break by it, and then the rest is flushed.
	for i := range uint64(over) {
		p.Active.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		if wc := pollNext(t, p.Active.SendCQ); wc.ID != i {
			t.Fatalf("completion %+v, want that of %d", wc, i)
		}
	}
	p.Active.trySync(t, p.Passive)
	got := uint64(0)
	var wcs [3]ibv.WC
	lost := eventually(func() bool {
		n, err := p.Passive.RecvCQ.Poll(wcs[:])
		for _, wc := range wcs[:n] {
			if wc.ID < got || wc.ID >= uint64(over) {
				t.Errorf("completion %d after %d", wc.ID, got)
			}
			got = wc.ID + 1
		}
		if err != nil {
			mustBe(t, "Poll", err, ibv.ErrCQOverrun)
		}
		return err != nil
	})
	if !lost {
		t.Fatalf("no error, although %d receives completed in a queue of %d", over, p.Passive.RecvCQ.Depth())
	}
	for range 3 {
		_, err := p.Passive.RecvCQ.Poll(wcs[:])
		mustBe(t, "Poll after an overrun", err, ibv.ErrCQOverrun)
	}
	healthy.Active.transfer(t, healthy.Passive, pattern(10, 1))
}
