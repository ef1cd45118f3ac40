package iwarp

import (
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// A connection whose socket takes nothing, with registered memory on its way out, holds up
// nobody who registers or closes a region of its domain, or posts there: the gate is held
// around calls only that do not wait.
func TestSlowSocketLeavesGateOpen(t *testing.T) {
	for _, portable := range []bool{false, true} {
		const size = 64 << 10
		x, y := newPair(t, Config{portable: portable}, 16, size)
		xq, yq := x.qp.(*qp), y.qp.(*qp)
		stuck := yq.stream.Load()
		yq.recvCQ.Interrupt()
		for !stuck.role.TryLock() { // nobody receives there: the sweeper may have sent somebody
			stuck.wanted.Store(true)
			stuck.link.interrupt()
			time.Sleep(time.Millisecond)
		}
		flushing := func() bool {
			xq.sq.mu.Lock()
			defer xq.sq.mu.Unlock()
			return xq.stream.Load().tx.flushing && xq.sq.reqs.Len() > 2
		}
		deadline := time.Now().Add(time.Minute)
		target, err := y.pd.RegMR(make([]byte, 64<<20), ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		source, err := x.pd.RegMR(make([]byte, 64<<20), 0)
		if err != nil {
			t.Fatal(err)
		}
		for range 4 {
			if _, err := x.qp.PostSend([]ibv.SendWR{{Op: ibv.OpWrite, RemoteAddr: target.Addr(), RKey: target.RKey(),
				SGL: []ibv.SGE{{Buf: source.(*mr).buf, LKey: source.LKey()}}}}); err != nil {
				t.Fatal(err)
			}
		}
		for !flushing() {
			if time.Now().After(deadline) {
				t.Fatal("the socket takes everything")
			}
			time.Sleep(time.Millisecond)
		}
		done := make(chan error, 1)
		go func() {
			for i := range 1000 {
				m, err := x.pd.RegMR(make([]byte, 100), ibv.AccessLocalWrite)
				if err == nil {
					_, err = x.qp.PostRecv([]ibv.RecvWR{{ID: uint64(100 + i), SGL: []ibv.SGE{{Buf: m.(*mr).buf, LKey: m.LKey()}}}})
				}
				if i >= 4 {
					err = nil // the queue is full
				}
				if err == nil {
					err = m.Close()
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Error("closing a region waits for a slow socket")
		}
		stuck.role.Unlock()
		x.qp.Close()
		y.qp.Close()
	}
}
