package verbstest

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var eventTests = []subtest{
	{"OncePerArm", testOncePerArm},
	{"NotForOldCompletions", testNotForOldCompletions},
	{"BeforeWait", testEventBeforeWait},
	{"SeveralBeforeWait", testEventsBeforeWait},
	{"Rearmed", testRearmed},
	{"SendCompletion", testSendCompletionEvent},
	{"Solicited", testSolicited},
	{"SolicitedByFailure", testSolicitedByFailure},
	{"Widening", testWidening},
	{"NoLostWakeup", testNoLostWakeup},
	{"NoLostWakeupShared", testNoLostWakeupShared},
}

// arrive sends from the active side, and returns when the receive has completed.
func arrive(t testing.TB, p *Pair, flags ibv.SendFlags) {
	t.Helper()
	p.Active.Send(t, ibv.SendWR{Op: ibv.OpSend, Flags: flags})
	p.Active.sync(t, p.Passive)
}

// eventPair returns a pair and the completion queue of its passive side. That side has n
// receives posted, with IDs from 0.
func eventPair(t testing.TB, env Env, n int) (*Pair, ibv.CQ) {
	t.Helper()
	p := NewPair(t, env, PairConfig{})
	for i := range n {
		p.Passive.Recv(t, ibv.RecvWR{ID: uint64(i)})
	}
	return p, p.Passive.RecvCQ
}

// testOncePerArm arms once for two completions. There is one event.
func testOncePerArm(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 3)
	must(t, "Arm", cq.Arm(false))
	arrive(t, p, 0)
	arrive(t, p, 0)
	raised(t, "event", cq)
	quiet(t, "after the one event", cq)
	succeeded(t, p.Passive, pollNext(t, cq), 0, ibv.WCRecv)
	succeeded(t, p.Passive, pollNext(t, cq), 1, ibv.WCRecv)
	arrive(t, p, 0)
	quiet(t, "not armed again", cq)
	succeeded(t, p.Passive, pollNext(t, cq), 2, ibv.WCRecv)
}

// testNotForOldCompletions arms while completions are waiting. They raise no event, which
// is why callers poll once more after Arm.
func testNotForOldCompletions(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 3)
	arrive(t, p, 0)
	arrive(t, p, 0)
	must(t, "Arm", cq.Arm(false))
	quiet(t, "old completions", cq)
	arrive(t, p, 0)
	raised(t, "a new completion behind old ones", cq)
	for i := range uint64(3) {
		succeeded(t, p.Passive, pollNext(t, cq), i, ibv.WCRecv)
	}
}

// testEventBeforeWait lets the event come, and polls its completion, before it waits. The
// event is kept.
func testEventBeforeWait(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 1)
	must(t, "Arm", cq.Arm(false))
	arrive(t, p, 0)
	succeeded(t, p.Passive, pollNext(t, cq), 0, ibv.WCRecv)
	raised(t, "event of a completion that is polled", cq)
	quiet(t, "after the one event", cq)
}

// testEventsBeforeWait does the same with several events. One Wait takes all of them.
func testEventsBeforeWait(t *testing.T, env Env) {
	const rounds = 3
	p, cq := eventPair(t, env, rounds+1)
	for i := range uint64(rounds) {
		must(t, "Arm", cq.Arm(false))
		arrive(t, p, 0)
		succeeded(t, p.Passive, pollNext(t, cq), i, ibv.WCRecv)
	}
	raised(t, "events of completions that are polled", cq)
	quiet(t, "after them", cq)
	must(t, "Arm", cq.Arm(false))
	arrive(t, p, 0)
	raised(t, "a new event", cq)
	quiet(t, "after the new event", cq)
}

// testRearmed arms twice before the event, and again before the first event is taken.
func testRearmed(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 2)
	must(t, "Arm", cq.Arm(false))
	must(t, "Arm", cq.Arm(false))
	arrive(t, p, 0)
	raised(t, "event", cq)
	quiet(t, "armed twice, one completion", cq)
	quiet(t, "still one completion", cq)
	must(t, "Arm", cq.Arm(false))
	quiet(t, "deadline on an armed queue", cq)
	arrive(t, p, 0)
	raised(t, "event after a Wait that timed out", cq)
}

func testSendCompletionEvent(t *testing.T, env Env) {
	p, _ := eventPair(t, env, 2)
	cq := p.Active.SendCQ
	must(t, "Arm", cq.Arm(false))
	p.Active.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpSend, Flags: ibv.SendSignaled})
	raised(t, "event of a send", cq)
	succeeded(t, p.Active, pollNext(t, cq), 1, ibv.WCSend)
	must(t, "Arm", cq.Arm(false))
	p.Active.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSend})
	quiet(t, "an unsignaled send", cq)
}

// testSolicited arms for solicited completions only.
func testSolicited(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 3)
	must(t, "Arm", cq.Arm(true))
	arrive(t, p, 0)
	if p.Passive.Dev.Attr().Caps.Has(ibv.CapSolicited) {
		quiet(t, "a plain send", cq)
	} else {
		raised(t, "a plain send, as good as solicited", cq)
		must(t, "Arm", cq.Arm(true))
	}
	arrive(t, p, ibv.SendSolicited)
	raised(t, "a solicited send", cq)
	must(t, "Arm", cq.Arm(false))
	arrive(t, p, 0)
	raised(t, "a plain send on a queue armed for all", cq)
	for i := range uint64(3) {
		succeeded(t, p.Passive, pollNext(t, cq), i, ibv.WCRecv)
	}
}

// testSolicitedByFailure arms for solicited completions only, and gets an event for a
// flushed receive.
func testSolicitedByFailure(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 1)
	must(t, "Arm", cq.Arm(true))
	must(t, "SetError", p.Passive.QP.SetError())
	raised(t, "a failure", cq)
	ended(t, p.Passive, pollNext(t, cq), 0, ibv.WCFlushErr)
}

// testWidening arms for solicited completions and for all completions, in both orders. All
// completions raise the event then.
func testWidening(t *testing.T, env Env) {
	p, cq := eventPair(t, env, 2)
	for i, first := range []bool{true, false} {
		must(t, "Arm", cq.Arm(first))
		must(t, "Arm", cq.Arm(!first))
		arrive(t, p, 0)
		raised(t, fmt.Sprintf("armed with %v, then %v", first, !first), cq)
		succeeded(t, p.Passive, pollNext(t, cq), uint64(i), ibv.WCRecv)
	}
}

// testNoLostWakeup receives message by message, and sleeps whenever there is none. The peer
// sends as fast as receives are posted. With the order Arm, Poll, Wait no completion may be
// missed.
func testNoLostWakeup(t *testing.T, env Env) {
	wakeups(t, NewPair(t, env, PairConfig{}))
}

// testNoLostWakeupShared has sends and receives complete on one queue.
func testNoLostWakeupShared(t *testing.T, env Env) {
	wakeups(t, NewPair(t, env, PairConfig{SharedCQ: true}))
}

func wakeups(t *testing.T, p *Pair) {
	const rounds, ahead = 2000, 2
	credit := make(chan struct{}, ahead) // credit counts the posted receives.
	for i := range uint64(ahead) {
		p.Passive.Recv(t, ibv.RecvWR{ID: i})
		credit <- struct{}{}
	}
	together(t,
		func(stop <-chan struct{}) error {
			for i := range uint64(rounds) {
				select {
				case <-credit:
				case <-stop:
					return nil
				}
				if i%7 == 0 {
					runtime.Gosched()
				}
				if _, err := p.Active.QP.PostSend([]ibv.SendWR{{ID: i, Op: ibv.OpSend, Flags: ibv.SendSignaled}}); err != nil {
					return err
				}
				if _, err := expect(p.Active.SendCQ, i); err != nil {
					return err
				}
			}
			return nil
		},
		func(<-chan struct{}) error {
			for i := range uint64(rounds) {
				if _, err := expect(p.Passive.RecvCQ, i); err != nil {
					return err
				}
				if i+ahead < rounds {
					if _, err := p.Passive.QP.PostRecv([]ibv.RecvWR{{ID: i + ahead}}); err != nil {
						return err
					}
					credit <- struct{}{}
				}
			}
			return nil
		})
}
