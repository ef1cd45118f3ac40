package verbstest

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

var flushTests = []subtest{
	{"Receives", testFlushReceives},
	{"Sends", testFlushSends},
	{"PostedAfterwards", testFlushPostedAfterwards},
	{"NeverConnected", testFlushNeverConnected},
	{"PeerDisconnected", testFlushPeerDisconnected},
	{"WhilePosting", testSetErrorWhilePosting},
}

// postReceives posts n receives with IDs from 0.
func postReceives(t testing.TB, e *End, n int) {
	t.Helper()
	for i := range uint64(n) {
		e.Recv(t, ibv.RecvWR{ID: i})
	}
}

// flushedInOrder expects n flushed requests with IDs from 0, and no more.
func flushedInOrder(t testing.TB, e *End, cq ibv.CQ, n int) {
	t.Helper()
	for i := range uint64(n) {
		ended(t, e, next(t, cq), i, ibv.WCFlushErr)
	}
	noCompletion(t, cq)
}

func testFlushReceives(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	postReceives(t, p.Passive, 20)
	must(t, "SetError", p.Passive.QP.SetError())
	if s := p.Passive.QP.State(); s != ibv.QPSError {
		t.Errorf("state after SetError is %v", s)
	}
	flushedInOrder(t, p.Passive, p.Passive.RecvCQ, 20)
	noCompletion(t, p.Passive.SendCQ)
}

// testFlushSends moves the queue pair to the error state under unsignaled
// Writes: those that were done stay silent, the others are all reported.
func testFlushSends(t *testing.T, env Env) {
	const n, size = 16, 1 << 18
	p := NewPair(t, env, PairConfig{})
	src := p.Active.Register(t, make([]byte, size), 0)
	dst := p.Passive.Register(t, make([]byte, size), allRights)
	for i := range uint64(n) {
		p.Active.Send(t, ibv.SendWR{ID: i, Op: ibv.OpWrite, SGL: src.SGL(0, size, 1), RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()})
	}
	must(t, "SetError", p.Active.QP.SetError())
	p.Active.Send(t, ibv.SendWR{ID: n, Op: ibv.OpSend})
	wc := next(t, p.Active.SendCQ)
	for id := wc.ID; ; id++ {
		ended(t, p.Active, wc, id, ibv.WCFlushErr)
		if id == n {
			break
		}
		wc = next(t, p.Active.SendCQ)
	}
	noCompletion(t, p.Active.SendCQ)
}

func testFlushPostedAfterwards(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	e := p.Active
	must(t, "SetError", e.QP.SetError())
	var sends []ibv.SendWR
	for i := range uint64(10) {
		wr := ibv.SendWR{ID: i, Op: ibv.OpSend}
		if i%3 == 0 {
			wr.Flags = ibv.SendSignaled
		}
		sends = append(sends, wr)
	}
	e.Send(t, sends...)
	flushedInOrder(t, e, e.SendCQ, 10)
	postReceives(t, e, 10)
	flushedInOrder(t, e, e.RecvCQ, 10)
}

// testFlushNeverConnected flushes the receives of a queue pair that was waiting
// for its connection, and the sends that are posted then.
func testFlushNeverConnected(t *testing.T, env Env) {
	e := env.unconnected(t)
	must(t, "CreateQP", e.createQP(PairConfig{}.filled()))
	postReceives(t, e, 10)
	must(t, "SetError", e.QP.SetError())
	flushedInOrder(t, e, e.RecvCQ, 10)
	for i := range uint64(10) {
		e.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend})
	}
	flushedInOrder(t, e, e.SendCQ, 10)
}

func testFlushPeerDisconnected(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	for _, e := range []*End{p.Active, p.Passive} {
		postReceives(t, e, 10)
	}
	must(t, "Disconnect", p.Passive.ID.Disconnect())
	for _, e := range []*End{p.Active, p.Passive} {
		e.events.wait(t, ibv.EventDisconnected)
		e.flushed(t)
		flushedInOrder(t, e, e.RecvCQ, 10)
		for i := range uint64(10) {
			e.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend})
		}
		flushedInOrder(t, e, e.SendCQ, 10)
	}
}

// testSetErrorWhilePosting has several goroutines post before, during and after
// the change to the error state: what was taken completes, once.
func testSetErrorWhilePosting(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{CQDepth: 256})
	e := p.Active
	room := make(chan struct{}, 200) // keeps the completion queue from overrunning
	done := make(chan struct{})
	var taken atomic.Int64
	post := func(stop <-chan struct{}) error {
		for {
			select {
			case room <- struct{}{}:
			case <-done:
				return nil
			case <-stop:
				return nil
			}
			for {
				// An empty Write needs neither memory nor a receive.
				n, err := e.QP.PostSend([]ibv.SendWR{{Op: ibv.OpWrite, Flags: ibv.SendSignaled}})
				taken.Add(int64(n))
				if err == nil {
					break
				}
				if !errors.Is(err, ibv.ErrQueueFull) {
					return err
				}
				select {
				case <-done: // nobody makes room any more
					return nil
				case <-stop:
					return nil
				case <-time.After(10 * time.Microsecond):
				}
			}
		}
	}
	collected := int64(0)
	collect := func() (ibv.WC, error) {
		wc, err := await(e.SendCQ)
		if err == nil {
			collected++
			<-room
		}
		return wc, err
	}
	together(t, post, post, post, func(<-chan struct{}) error {
		defer close(done)
		for range 300 {
			if wc, err := collect(); err != nil || wc.Status != ibv.WCSuccess {
				return fmt.Errorf("completion %+v: %w", wc, errors.Join(err, wc.Status))
			}
		}
		if err := e.QP.SetError(); err != nil {
			return err
		}
		flushed := false
		for range 1000 {
			wc, err := collect()
			if err != nil {
				return err
			}
			if flushed && wc.Status != ibv.WCFlushErr {
				return fmt.Errorf("%v after a flushed request", wc.Status)
			}
			flushed = wc.Status == ibv.WCFlushErr
		}
		return nil
	})
	for collected < taken.Load() {
		if _, err := collect(); err != nil {
			t.Fatalf("%d of %d requests completed: %v", collected, taken.Load(), err)
		}
	}
	noCompletion(t, e.SendCQ)
}
