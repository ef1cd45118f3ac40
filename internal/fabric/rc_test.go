package fabric

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

const allRights = ibv.AccessLocalWrite | ibv.AccessRemoteWrite | ibv.AccessRemoteRead

// newPair connects two queue pairs over a fabric of their own.
func newPair(t testing.TB, cfg verbstest.PairConfig) *verbstest.Pair {
	t.Helper()
	leaktest.Check(t)
	return verbstest.NewPair(t, verbstest.Env{Passive: New(1024, addr4), Addr: addr4}, cfg)
}

// completion takes a completion that must be there.
func completion(t testing.TB, cq ibv.CQ) ibv.WC {
	t.Helper()
	var wc [1]ibv.WC
	n, err := cq.Poll(wc[:])
	require.NoError(t, err)
	require.Equal(t, 1, n, "no completion")
	return wc[0]
}

func none(t testing.TB, cq ibv.CQ) {
	t.Helper()
	n, err := cq.Poll(make([]ibv.WC, 1))
	require.NoError(t, err)
	require.Zero(t, n, "a completion that must not be there")
}

// sleepFor returns the next completion, for which it sleeps if need be.
func sleepFor(cq ibv.CQ, wc []ibv.WC) error {
	for {
		if err := cq.Arm(false); err != nil {
			return err
		}
		if n, err := cq.Poll(wc[:1]); n > 0 || err != nil {
			return err
		}
		if err := cq.Wait(time.Now().Add(verbstest.Patience)); err != nil {
			return err
		}
	}
}

// A request is complete at both ends when its post returns.
func TestCompleteAtOnce(t *testing.T) {
	p := newPair(t, verbstest.PairConfig{})
	a, b := p.Active, p.Passive
	src, dst := a.Register(t, []byte("hello"), allRights), b.Register(t, make([]byte, 5), allRights)
	b.Recv(t, ibv.RecvWR{ID: 1, SGL: dst.SGL(0, 5, 1)})
	a.Send(t, ibv.SendWR{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: src.SGL(0, 5, 1)})
	require.Equal(t, uint64(1), completion(t, b.RecvCQ).ID)
	require.Equal(t, uint64(2), completion(t, a.SendCQ).ID)
	defect.Bytes(t, "hello", dst.Buf)
	copy(dst.Buf, "peers")
	a.Send(t, ibv.SendWR{ID: 3, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: src.SGL(0, 5, 1), RemoteAddr: dst.Addr(0), RKey: dst.MR.RKey()})
	require.Equal(t, uint64(3), completion(t, a.SendCQ).ID)
	defect.Bytes(t, "peers", src.Buf)
}

// A Send without a receive waits, and so do the requests behind it, as many as the send
// queue holds. The receives get the messages in order, and inline data as it was posted.
func TestReceiverNotReady(t *testing.T) {
	const n = 4
	p := newPair(t, verbstest.PairConfig{SendWR: n, Inline: 8})
	a, b := p.Active, p.Passive
	src, dst := a.Register(t, make([]byte, 8), 0), b.Register(t, make([]byte, 4*n), allRights)
	inline := make([]byte, 1)
	for round := range byte(3) {
		send := func(i byte) (int, error) {
			inline[0] = 10*round + i
			wr := ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendInline, SGL: []ibv.SGE{{Buf: inline}}}
			if i == 2 { // which waits too, although it needs no receive
				src.Buf[0] = 10*round + 7
				wr = ibv.SendWR{ID: 2, Op: ibv.OpWrite, Flags: ibv.SendSignaled, SGL: src.SGL(0, 1, 1), RemoteAddr: dst.Addr(8), RKey: dst.MR.RKey()}
			}
			return a.QP.PostSend([]ibv.SendWR{wr})
		}
		clear(dst.Buf)
		for i := range byte(n) {
			_, err := send(i)
			require.NoError(t, err)
		}
		_, err := send(n)
		require.ErrorIs(t, err, ibv.ErrQueueFull)
		inline[0] = 99
		none(t, a.SendCQ)
		require.Equal(t, make([]byte, 4*n), dst.Buf)
		for i, k := range []int{0, 1, 3} {
			b.Recv(t, ibv.RecvWR{ID: uint64(k), SGL: dst.SGL(i, 1, 1)})
			require.Equal(t, uint64(k), completion(t, b.RecvCQ).ID)
			require.Equal(t, uint64(k), completion(t, a.SendCQ).ID)
			require.Equal(t, 10*round+byte(k), dst.Buf[i])
			if k == 1 {
				require.Equal(t, uint64(2), completion(t, a.SendCQ).ID)
				require.Equal(t, 10*round+7, dst.Buf[8])
			}
		}
		none(t, a.SendCQ)
		none(t, b.RecvCQ)
	}
}

// Messages that wait at both ends at once do not wait for each other.
func TestReceiversNotReady(t *testing.T) {
	p := newPair(t, verbstest.PairConfig{})
	ends := []*verbstest.End{p.Active, p.Passive}
	for _, e := range ends {
		for i := range uint64(20) {
			e.Send(t, ibv.SendWR{ID: i, Op: ibv.OpSend, Flags: ibv.SendSignaled})
		}
	}
	var wg sync.WaitGroup
	errs := make([]error, 2)
	for i, e := range ends {
		wg.Go(func() {
			for id := range uint64(20) {
				if _, err := e.QP.PostRecv([]ibv.RecvWR{{ID: id}}); err != nil {
					errs[i] = err
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for _, e := range ends {
		for i := range uint64(20) {
			require.Equal(t, i, completion(t, e.SendCQ).ID)
			require.Equal(t, i, completion(t, e.RecvCQ).ID)
		}
	}
}

// A queue pair that is in the error state or closed answers nothing. Requests that wait for
// it fail after a while, whether they were posted before or after.
func TestUnanswered(t *testing.T) {
	var senders []*verbstest.End
	for _, leave := range []func(e *verbstest.End){
		func(e *verbstest.End) { e.CloseQP(t) },
		func(e *verbstest.End) { require.NoError(t, e.QP.SetError()) },
		func(e *verbstest.End) { // by a request of its own that fails
			e.Send(t, ibv.SendWR{Op: ibv.OpSend, SGL: []ibv.SGE{{Buf: make([]byte, 1)}}})
			require.Equal(t, ibv.WCLocProtErr, completion(t, e.SendCQ).Status)
		},
	} {
		for _, before := range []bool{false, true} {
			p := newPair(t, verbstest.PairConfig{})
			post := func() { p.Active.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpSend}, ibv.SendWR{ID: 2, Op: ibv.OpWrite}) }
			if before {
				post()
			}
			leave(p.Passive)
			if !before {
				post()
			}
			none(t, p.Active.SendCQ)
			require.Equal(t, ibv.QPSRTS, p.Active.QP.State())
			senders = append(senders, p.Active)
		}
	}
	for _, e := range senders {
		for i, status := range []ibv.WCStatus{ibv.WCRetryExcErr, ibv.WCFlushErr} {
			wc := make([]ibv.WC, 1)
			require.NoError(t, sleepFor(e.SendCQ, wc))
			require.Equal(t, status, wc[0].Status)
			require.Equal(t, uint64(1+i), wc[0].ID)
		}
		require.Equal(t, ibv.QPSError, e.QP.State())
	}
}

// The end of the connection flushes the requests that wait at both ends, before the event.
func TestDisconnectFlushesWaiting(t *testing.T) {
	p := newPair(t, verbstest.PairConfig{})
	ends := []*verbstest.End{p.Active, p.Passive}
	told := make(chan ibv.Event, 2)
	for _, e := range ends {
		e.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpSend})
		e.ID.Notify(func(ev ibv.Event) { told <- ev })
	}
	require.NoError(t, p.Active.ID.Disconnect())
	require.NoError(t, p.Passive.ID.Disconnect(), "the second one is fine")
	for _, e := range ends {
		require.Equal(t, ibv.Event{Kind: ibv.EventDisconnected}, <-told)
		require.Equal(t, ibv.WCFlushErr, completion(t, e.SendCQ).Status)
	}
	require.Empty(t, told)
}

// The queue pair that refuses a request fails as well, and the event has the reason.
func TestRefusedRequestIsFatal(t *testing.T) {
	p := newPair(t, verbstest.PairConfig{})
	told := make(chan ibv.Event, 1)
	p.Passive.ID.Notify(func(ev ibv.Event) { told <- ev })
	p.Passive.Recv(t, ibv.RecvWR{ID: 5})
	src := p.Active.Register(t, make([]byte, 1), 0)
	p.Active.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpWrite, SGL: src.SGL(0, 1, 1), RemoteAddr: 4096, RKey: 12345})
	require.Equal(t, ibv.WCRemAccessErr, completion(t, p.Active.SendCQ).Status)
	require.Equal(t, ibv.WCFlushErr, completion(t, p.Passive.RecvCQ).Status)
	require.Equal(t, ibv.QPSError, p.Passive.QP.State())
	ev := <-told
	require.Equal(t, ibv.EventQPFatal, ev.Kind)
	require.ErrorIs(t, ev.Err, ibv.WCRemAccessErr)
}

// A request allocates nothing once the queues have their size, however many elements it has
// and whether it waits for a receive or not.
func TestWithoutGarbage(t *testing.T) {
	const size = 3000
	for name, wr := range map[string]ibv.SendWR{
		"Send":          {Op: ibv.OpSend, Flags: ibv.SendSignaled},
		"inline Send":   {Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendInline | ibv.SendSolicited},
		"RDMA Write":    {Op: ibv.OpWrite, Flags: ibv.SendSignaled},
		"RDMA Read":     {Op: ibv.OpRead, Flags: ibv.SendSignaled},
		"fenced Send":   {Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendFence},
		"Send with Imm": {Op: ibv.OpSendImm, Flags: ibv.SendSignaled, Imm: 7},
	} {
		for _, elements := range []int{1, 3, maxSGE} {
			for _, waits := range []bool{false, true} {
				p := newPair(t, verbstest.PairConfig{SGE: maxSGE, Inline: 100})
				a, b := p.Active, p.Passive
				src, dst := a.Register(t, make([]byte, size), allRights), b.Register(t, make([]byte, size), allRights)
				n := size
				if wr.Flags&ibv.SendInline != 0 {
					n = 100
				}
				wr.SGL, wr.RemoteAddr, wr.RKey = src.SGL(0, n, elements), dst.Addr(0), dst.MR.RKey()
				sends, recvs, wcs := []ibv.SendWR{wr}, []ibv.RecvWR{{SGL: dst.SGL(0, size, elements)}}, make([]ibv.WC, 2)
				sided := wr.Op != ibv.OpWrite && wr.Op != ibv.OpRead
				post := func(err error) {
					if err != nil {
						t.Fatal(err)
					}
				}
				turn := func() {
					post(b.RecvCQ.Arm(false))
					if waits {
						_, err := a.QP.PostSend(sends)
						post(err)
					}
					if sided {
						_, err := b.QP.PostRecv(recvs)
						post(err)
					}
					if !waits {
						_, err := a.QP.PostSend(sends)
						post(err)
					}
					if n, err := a.SendCQ.Poll(wcs); n != 1 || err != nil || wcs[0].Status != ibv.WCSuccess {
						t.Fatal(name, n, err, wcs[0])
					}
					if !sided {
						return
					}
					post(b.RecvCQ.Wait(time.Time{}))
					if n, err := b.RecvCQ.Poll(wcs); n != 1 || err != nil || wcs[0].Status != ibv.WCSuccess {
						t.Fatal(name, n, err, wcs[0])
					}
				}
				for range 100 {
					turn()
				}
				require.Zero(t, testing.AllocsPerRun(500, turn), "%s of %d elements, waits %v", name, elements, waits)
			}
		}
	}
}

// A Wait that sleeps allocates nothing, with a deadline or without one.
func TestSleepWithoutGarbage(t *testing.T) {
	for _, timeout := range []time.Duration{0, time.Hour} {
		p := newPair(t, verbstest.PairConfig{})
		echo := make(chan error, 1)
		go func() {
			wc := make([]ibv.WC, 1)
			recvs, sends := []ibv.RecvWR{{}}, []ibv.SendWR{{Op: ibv.OpSend}}
			for {
				if err := sleepFor(p.Passive.RecvCQ, wc); err != nil || wc[0].Status != ibv.WCSuccess {
					echo <- err
					return
				}
				p.Passive.QP.PostRecv(recvs)
				p.Passive.QP.PostSend(sends)
			}
		}()
		wc := make([]ibv.WC, 1)
		recvs, sends := []ibv.RecvWR{{}}, []ibv.SendWR{{Op: ibv.OpSend}}
		p.Passive.Recv(t, recvs...)
		turn := func() {
			if _, err := p.Active.QP.PostRecv(recvs); err != nil {
				t.Fatal(err)
			}
			if err := p.Active.RecvCQ.Arm(false); err != nil {
				t.Fatal(err)
			}
			if _, err := p.Active.QP.PostSend(sends); err != nil {
				t.Fatal(err)
			}
			var deadline time.Time
			if timeout > 0 {
				deadline = time.Now().Add(timeout)
			}
			if err := p.Active.RecvCQ.Wait(deadline); err != nil {
				t.Fatal(err)
			}
			if n, err := p.Active.RecvCQ.Poll(wc); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		}
		for range 100 {
			turn()
		}
		require.Zero(t, testing.AllocsPerRun(500, turn), "timeout %v", timeout)
		require.NoError(t, p.Passive.QP.SetError())
		require.NoError(t, <-echo)
	}
}

// A region is found by its key, and by no key of a region that had its place before.
func TestKeys(t *testing.T) {
	f := New(1024, addr4)
	domain, err := f.dev.AllocPD()
	require.NoError(t, err)
	seen := make(map[uint32]bool)
	buf := make([]byte, 1)
	for range 200 {
		m, err := domain.RegMR(buf, 0)
		require.NoError(t, err)
		require.NotZero(t, m.RKey())
		require.False(t, seen[m.RKey()], "key %#x again", m.RKey())
		for key := range seen {
			require.Nil(t, f.regions.find(key))
		}
		seen[m.RKey()] = true
		require.Equal(t, m, f.regions.find(m.RKey()))
		require.ErrorIs(t, domain.Close(), ibv.ErrBusy)
		require.NoError(t, m.Close())
		require.Error(t, m.Close())
	}
	require.Len(t, f.regions.slots, 2, "the place is used again")
	require.NoError(t, domain.Close())
	_, err = domain.RegMR(buf, 0)
	require.Error(t, err)
}

// A queue pair takes no objects of another device.
func TestForeignObjects(t *testing.T) {
	mine, other := newPair(t, verbstest.PairConfig{}).Active, newPair(t, verbstest.PairConfig{}).Active
	i, err := mine.Dev.(*device).f.BindUD(t.Context(), netip.AddrPortFrom(addr4, 0))
	require.NoError(t, err)
	defer func() { require.NoError(t, i.Close()) }()
	for _, bad := range []struct {
		pd         ibv.PD
		send, recv ibv.CQ
	}{
		{other.PD, mine.SendCQ, mine.RecvCQ},
		{mine.PD, other.SendCQ, mine.RecvCQ},
		{mine.PD, mine.SendCQ, other.RecvCQ},
	} {
		_, err = i.CreateQP(bad.pd, ibv.QPInit{SendCQ: bad.send, RecvCQ: bad.recv})
		require.Error(t, err)
	}
	q, err := i.CreateQP(mine.PD, ibv.QPInit{SendCQ: mine.SendCQ, RecvCQ: mine.RecvCQ})
	require.NoError(t, err)
	require.NoError(t, q.Close())
}

// IDs on a device that is removed get the event, and no new ones can be had.
func TestRemove(t *testing.T) {
	leaktest.Check(t)
	f := New(1024, addr4)
	p := verbstest.NewPair(t, verbstest.Env{Passive: f, Addr: addr4}, verbstest.PairConfig{})
	told := make(chan ibv.Event, 2)
	for _, e := range []*verbstest.End{p.Active, p.Passive} {
		e.ID.Notify(func(ev ibv.Event) { told <- ev })
	}
	f.Remove()
	for range 2 {
		require.Equal(t, ibv.EventDeviceRemoval, (<-told).Kind)
	}
	_, err := f.Resolve(t.Context(), p.Active.ID.RemoteAddr(), p.Active.ID.RemoteAddr())
	require.Error(t, err)
}

// Every request that was taken completes once, however the connection ends while both sides
// post, and none succeeds behind one that failed.
func TestEndUnderLoad(t *testing.T) {
	for round := range 30 {
		p := newPair(t, verbstest.PairConfig{SendWR: 8, RecvWR: 8, CQDepth: 1 << 12, Inline: 16})
		ends := []*verbstest.End{p.Active, p.Passive}
		mems := []*verbstest.Mem{ends[0].Register(t, make([]byte, 64), allRights), ends[1].Register(t, make([]byte, 64), allRights)}
		var taken [2]struct{ sends, recvs int }
		var wg sync.WaitGroup
		stop := make(chan struct{})
		post := func(count *int, post func() (int, error)) {
			wg.Go(func() {
				for *count < 1<<11 {
					select {
					case <-stop:
						return
					default:
					}
					n, err := post()
					*count += n
					switch {
					case errors.Is(err, ibv.ErrQueueFull):
						runtime.Gosched()
					case err != nil:
						t.Error(err)
						return
					}
				}
			})
		}
		for i, e := range ends {
			own, far := mems[i], mems[1-i]
			rnd := rand.New(rand.NewPCG(uint64(round), uint64(i)))
			post(&taken[i].sends, func() (int, error) {
				wr := ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: own.SGL(0, 16, 2)[:1],
					RemoteAddr: far.Addr(32), RKey: far.MR.RKey()}
				switch rnd.IntN(4) {
				case 0:
					wr.Flags |= ibv.SendInline
				case 1:
					wr.Op, wr.SGL = ibv.OpRead, own.SGL(48, 8, 1)
				}
				return e.QP.PostSend([]ibv.SendWR{wr})
			})
			post(&taken[i].recvs, func() (int, error) {
				return e.QP.PostRecv([]ibv.RecvWR{{SGL: own.SGL(16, 16, 1)}})
			})
		}
		time.Sleep(time.Duration(round%6) * 100 * time.Microsecond)
		end := ends[round%2]
		switch round % 3 {
		case 0:
			require.NoError(t, end.ID.Disconnect())
		case 1:
			require.NoError(t, end.QP.SetError())
		case 2:
			refused := []ibv.SendWR{{Op: ibv.OpWrite, SGL: mems[round%2].SGL(0, 8, 1), RKey: 1}}
			for _, err := end.QP.PostSend(refused); err != nil; _, err = end.QP.PostSend(refused) {
				require.ErrorIs(t, err, ibv.ErrQueueFull)
				runtime.Gosched()
			}
		}
		close(stop)
		wg.Wait()
		if round%3 == 2 {
			taken[round%2].sends++ // the Write has failed, so it completes
		}
		for i, e := range ends {
			require.NoError(t, e.QP.SetError())
			for cq, want := range map[ibv.CQ]int{e.SendCQ: taken[i].sends, e.RecvCQ: taken[i].recvs} {
				wcs := make([]ibv.WC, 1<<12)
				n, err := cq.Poll(wcs)
				require.NoError(t, err)
				require.Equal(t, want, n, "round %d, end %d", round, i)
				failed := false
				for _, wc := range wcs[:n] {
					require.False(t, failed && wc.Status == ibv.WCSuccess, "a success behind a failure")
					failed = failed || wc.Status != ibv.WCSuccess
				}
			}
		}
	}
}
