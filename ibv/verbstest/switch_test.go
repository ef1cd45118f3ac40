package verbstest

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// rig is one connection's worth of objects behind a switch.
type rig struct {
	s   *Switch
	pd  ibv.PD
	mr  ibv.MR
	ah  ibv.AH
	cq  ibv.CQ
	id  ibv.ID
	qp  ibv.QP
	lis ibv.Listener
}

func newRig(t *testing.T) *rig {
	r := &rig{s: NewSwitch(&fakeProvider{})}
	devs, err := r.s.Devices()
	require.NoError(t, err)
	require.Len(t, devs, 1)
	r.lis, err = r.s.Listen(t.Context(), netip.AddrPort{}, 0)
	require.NoError(t, err)
	r.id, err = r.s.Resolve(t.Context(), netip.AddrPort{}, netip.AddrPort{})
	require.NoError(t, err)
	require.Same(t, devs[0], r.id.Device(), "one wrapper for one device")
	r.pd, err = r.id.Device().AllocPD()
	require.NoError(t, err)
	r.mr, err = r.pd.RegMR(make([]byte, 100), 0)
	require.NoError(t, err)
	r.ah, err = r.pd.CreateAHFromWC(1, &ibv.WC{}, nil)
	require.NoError(t, err)
	r.cq, err = r.id.Device().CreateCQ(8)
	require.NoError(t, err)
	r.qp, err = r.id.CreateQP(r.pd, ibv.QPInit{SendCQ: r.cq, RecvCQ: r.cq})
	require.NoError(t, err)
	return r
}

func (r *rig) poll(t *testing.T) []ibv.WC {
	wcs := make([]ibv.WC, 16)
	n, err := r.cq.Poll(wcs)
	require.NoError(t, err)
	return wcs[:n]
}

func sends(n int) []ibv.SendWR {
	wrs := make([]ibv.SendWR, n)
	for i := range wrs {
		wrs[i].ID = uint64(i)
	}
	return wrs
}

func TestSwitchCountsObjects(t *testing.T) {
	r := newRig(t)
	id, err := r.lis.Accept(t.Context())
	require.NoError(t, err)
	require.Same(t, r.id.Device(), id.Device())
	require.Equal(t, map[string]int{"Listener": 1, "ID": 2, "QP": 1, "CQ": 1, "MR": 1, "AH": 1, "PD": 1}, r.s.Live())
	require.EqualValues(t, 100, r.s.RegisteredBytes())

	inner := r.pd.(*switchPD).PD.(*fakePD)
	inner.closeErr = ibv.ErrBusy
	require.ErrorIs(t, r.pd.Close(), ibv.ErrBusy)
	require.Equal(t, 1, r.s.Live()["PD"], "a Close that failed releases nothing")
	inner.closeErr = nil

	for _, c := range []interface{ Close() error }{r.qp, r.mr, r.ah, r.cq, r.pd, r.id, id, r.lis} {
		require.NoError(t, c.Close())
		require.NoError(t, c.Close(), "the second one is the device's affair")
	}
	require.Empty(t, r.s.Live())
	require.Zero(t, r.s.RegisteredBytes())
	require.EqualValues(t, 3, r.s.Calls(ClosePD))
}

// TestSwitchCountsRegionsOfQPs: they are regions like those of a domain.
func TestSwitchCountsRegionsOfQPs(t *testing.T) {
	r := newRig(t)
	f := r.s.FailNth(2, nil, RegMR)
	mr, err := r.qp.RegMR(make([]byte, 50), 0)
	require.NoError(t, err)
	require.Equal(t, 2, r.s.Live()["MR"])
	require.EqualValues(t, 150, r.s.RegisteredBytes())
	_, err = r.qp.RegMR(make([]byte, 50), 0)
	require.ErrorIs(t, err, ErrInjected)
	require.True(t, f.Fired())
	require.NoError(t, mr.Close())
	require.Equal(t, 1, r.s.Live()["MR"])
	require.EqualValues(t, 100, r.s.RegisteredBytes())
}

func TestSwitchCountsWork(t *testing.T) {
	r := newRig(t)
	before := r.s.Counts()
	r.s.FailPost(2, PostSend, 2, nil)
	for _, n := range []int{4, 3} { // Of the second post two are taken.
		r.qp.PostSend(sends(n))
	}
	r.qp.PostRecv(make([]ibv.RecvWR, 2))
	require.NoError(t, r.cq.Arm(true))
	require.NoError(t, r.cq.Wait(time.Time{}))
	require.Len(t, r.poll(t), 8)
	require.Empty(t, r.poll(t))
	want := Counts{SendWRs: 6, RecvWRs: 2, SendPosts: 2, RecvPosts: 1, Completions: 8, Arms: 1, Waits: 1, Polls: 2}
	require.Equal(t, want, r.s.Counts().Sub(before))
	require.Zero(t, r.s.Counts().Sub(r.s.Counts()))
}

func TestSwitchLimitsMemory(t *testing.T) {
	r := newRig(t) // with 100 bytes
	r.s.LimitMemory(150)
	regs := []func([]byte, ibv.Access) (ibv.MR, error){r.pd.RegMR, r.qp.RegMR}
	for _, reg := range regs {
		_, err := reg(make([]byte, 51), 0)
		require.ErrorIs(t, err, syscall.ENOMEM)
		require.EqualValues(t, 100, r.s.RegisteredBytes())
		mr, err := reg(make([]byte, 50), 0)
		require.NoError(t, err)
		_, err = reg(make([]byte, 1), 0)
		require.ErrorIs(t, err, syscall.ENOMEM)
		require.NoError(t, mr.Close())
	}
	r.s.LimitMemory(0)
	_, err := r.pd.RegMR(make([]byte, 1000), 0)
	require.NoError(t, err)

	r.s.LimitMemory(1200)
	var wg sync.WaitGroup
	var fit atomic.Int32
	for range 20 {
		wg.Go(func() {
			if _, err := r.pd.RegMR(make([]byte, 50), 0); err == nil {
				fit.Add(1)
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, fit.Load(), int32(2))
	require.LessOrEqual(t, r.s.RegisteredBytes(), int64(1200))
}

// TestSwitchFailsEveryKind walks all calls: each is counted, and fails without
// reaching the device when it is told to.
func TestSwitchFailsEveryKind(t *testing.T) {
	r := newRig(t)
	ctx := context.Background()
	calls := map[Kind]func() error{
		Devices:        func() error { _, err := r.s.Devices(); return err },
		Resolve:        func() error { _, err := r.s.Resolve(ctx, netip.AddrPort{}, netip.AddrPort{}); return err },
		Listen:         func() error { _, err := r.s.Listen(ctx, netip.AddrPort{}, 0); return err },
		BindUD:         func() error { _, err := r.s.BindUD(ctx, netip.AddrPort{}); return err },
		ResolveUD:      func() error { _, err := r.s.ResolveUD(ctx, netip.AddrPort{}, netip.AddrPort{}); return err },
		ListenUD:       func() error { _, err := r.s.ListenUD(ctx, netip.AddrPort{}, 0); return err },
		ListenerAccept: func() error { _, err := r.lis.Accept(ctx); return err },
		QueryPort:      func() error { _, err := r.id.Device().Port(1); return err },
		AllocPD:        func() error { _, err := r.id.Device().AllocPD(); return err },
		CreateCQ:       func() error { _, err := r.id.Device().CreateCQ(1); return err },
		RegMR:          func() error { _, err := r.pd.RegMR(make([]byte, 1), 0); return err },
		CreateAH:       func() error { _, err := r.pd.CreateAH(ibv.AHAttr{}); return err },
		CreateQP: func() error {
			_, err := r.id.CreateQP(r.pd, ibv.QPInit{SendCQ: r.cq, RecvCQ: r.cq})
			return err
		},
		Connect:        func() error { return r.id.Connect(ctx, ibv.ConnParam{}) },
		Accept:         func() error { return r.id.Accept(ctx, ibv.ConnParam{}) },
		Reject:         func() error { return r.id.Reject(nil) },
		Disconnect:     func() error { return r.id.Disconnect() },
		JoinMulticast:  func() error { _, err := r.id.JoinMulticast(ctx, netip.Addr{}, 0); return err },
		LeaveMulticast: func() error { return r.id.LeaveMulticast(netip.Addr{}) },
		PostSend:       func() error { _, err := r.qp.PostSend(sends(1)); return err },
		PostRecv:       func() error { _, err := r.qp.PostRecv(make([]ibv.RecvWR, 1)); return err },
		SetError:       func() error { return r.qp.SetError() },
		Poll:           func() error { _, err := r.cq.Poll(nil); return err },
		Arm:            func() error { return r.cq.Arm(false) },
		Wait:           func() error { return r.cq.Wait(time.Time{}) },
		CloseListener:  func() error { return r.lis.Close() },
		CloseID:        func() error { return r.id.Close() },
		CloseQP:        func() error { return r.qp.Close() },
		CloseCQ:        func() error { return r.cq.Close() },
		CloseMR:        func() error { return r.mr.Close() },
		CloseAH:        func() error { return r.ah.Close() },
		ClosePD:        func() error { return r.pd.Close() },
	}
	require.Len(t, calls, int(numKinds))
	for k := range numKinds {
		t.Run(k.String(), func(t *testing.T) {
			before, live := r.s.Calls(k), r.s.Live()
			f := r.s.FailNth(1, nil, k)
			require.ErrorIs(t, calls[k](), ErrInjected)
			require.True(t, f.Fired())
			require.Equal(t, live, r.s.Live())
			require.EqualValues(t, before+1, r.s.Calls(k))
			require.NoError(t, calls[k](), "a fault strikes once")
		})
	}
}

// TestSwitchUnwrapsHandles posts datagrams, whose handles must be the device's
// own behind the switch and remain the caller's before it.
func TestSwitchUnwrapsHandles(t *testing.T) {
	r := newRig(t)
	wrs := sends(3)
	wrs[1].AH = r.ah
	n, err := r.qp.PostSend(wrs) // the fake panics at what it does not know
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Same(t, r.ah, wrs[1].AH)
	r.s.FailPost(1, PostSend, 2, nil)
	n, err = r.qp.PostSend(wrs)
	require.ErrorIs(t, err, ErrInjected)
	require.Equal(t, 2, n)
	require.Zero(t, testing.AllocsPerRun(10, func() { innerAHs(wrs[:1]) }), "without handles nothing is copied")
}

func TestSwitchFailNthCounts(t *testing.T) {
	r := newRig(t)
	want := errors.New("own error")

	f := r.s.FailNth(3, want, PostSend, PostRecv)
	_, err := r.qp.PostSend(sends(1))
	require.NoError(t, err)
	require.NoError(t, r.cq.Arm(false), "another kind does not count")
	_, err = r.qp.PostRecv(make([]ibv.RecvWR, 1))
	require.NoError(t, err)
	require.False(t, f.Fired())
	n, err := r.qp.PostSend(sends(1))
	require.Zero(t, n)
	require.ErrorIs(t, err, want)
	require.Len(t, r.poll(t), 2, "the failed post had no effect")

	f = r.s.FailNth(2, nil)
	require.NoError(t, r.mr.Close(), "closings count only by name")
	require.NoError(t, r.cq.Arm(false))
	require.ErrorIs(t, r.cq.Arm(false), ErrInjected)
	require.True(t, f.Fired())

	f = r.s.FailNth(1, nil, Arm)
	f.Cancel()
	require.NoError(t, r.cq.Arm(false))
	require.False(t, f.Fired())
}

func TestSwitchFailAll(t *testing.T) {
	r := newRig(t)
	f := r.s.FailAll(nil, Arm)
	require.False(t, f.Fired())
	for range 3 {
		require.ErrorIs(t, r.cq.Arm(false), ErrInjected)
	}
	require.True(t, f.Fired())
	_, err := r.qp.PostSend(sends(1))
	require.NoError(t, err, "another kind does not fail")
	f.Cancel()
	require.NoError(t, r.cq.Arm(false))
}

func TestSwitchFailPost(t *testing.T) {
	r := newRig(t)
	r.s.FailPost(2, PostSend, 3, ibv.ErrQueueFull)
	n, err := r.qp.PostSend(sends(2))
	require.NoError(t, err)
	require.Equal(t, 2, n)
	n, err = r.qp.PostSend(sends(5))
	require.ErrorIs(t, err, ibv.ErrQueueFull)
	require.Equal(t, 3, n)
	require.Len(t, r.poll(t), 5)

	r.s.FailPost(1, PostRecv, 3, nil)
	n, err = r.qp.PostRecv(make([]ibv.RecvWR, 2))
	require.ErrorIs(t, err, ErrInjected)
	require.Equal(t, 1, n, "of a shorter chain the last one fails")
}

func TestSwitchFailCompletion(t *testing.T) {
	r := newRig(t)
	_, err := r.qp.PostSend(sends(4))
	require.NoError(t, err)
	_, err = r.qp.PostRecv([]ibv.RecvWR{{ID: 10}})
	require.NoError(t, err)

	f := r.s.FailCompletion(2, ibv.WCRemAccessErr)
	qpn := r.qp.QPN()
	require.Equal(t, []ibv.WC{
		{ID: 0, QPN: qpn, Op: ibv.WCSend},
		{ID: 1, QPN: qpn, Status: ibv.WCRemAccessErr},
		{ID: 2, QPN: qpn, Status: ibv.WCFlushErr},
		{ID: 3, QPN: qpn, Status: ibv.WCFlushErr},
		{ID: 10, QPN: qpn, Op: ibv.WCRecv, ByteLen: 5},
	}, r.poll(t))
	require.True(t, f.Fired())
	require.Equal(t, ibv.QPSError, r.qp.State())

	// A new queue pair starts clean, and a fault may wait for one operation.
	id, err := r.lis.Accept(t.Context())
	require.NoError(t, err)
	qp, err := id.CreateQP(r.pd, ibv.QPInit{SendCQ: r.cq, RecvCQ: r.cq})
	require.NoError(t, err)
	r.s.FailCompletion(1, ibv.WCLocLenErr, ibv.WCRecv)
	_, err = qp.PostSend(sends(1))
	require.NoError(t, err)
	_, err = qp.PostRecv([]ibv.RecvWR{{ID: 10}})
	require.NoError(t, err)
	require.Equal(t, []ibv.WC{
		{ID: 0, QPN: qp.QPN(), Op: ibv.WCSend},
		{ID: 10, QPN: qp.QPN(), Status: ibv.WCLocLenErr},
	}, r.poll(t))
	require.Equal(t, ibv.QPSError, qp.State())

	// A completion may outlive its queue pair.
	_, err = r.qp.PostSend(sends(1))
	require.NoError(t, err)
	require.NoError(t, r.qp.Close())
	r.s.FailCompletion(1, ibv.WCFatalErr)
	require.Equal(t, []ibv.WC{{ID: 0, QPN: qpn, Status: ibv.WCFatalErr}}, r.poll(t))
}

func TestSwitchConcurrent(t *testing.T) {
	r := newRig(t)
	const workers, rounds = 4, 500
	faults := make([]*Fault, 100)
	for i := range faults {
		faults[i] = r.s.FailNth(10*(i+1), nil, PostSend)
	}
	r.s.FailCompletion(100, ibv.WCFatalErr)
	var wg sync.WaitGroup
	failed := make([]int, workers)
	for w := range workers {
		wg.Go(func() {
			wcs := make([]ibv.WC, 4)
			for range rounds {
				if _, err := r.qp.PostSend(sends(1)); err != nil {
					failed[w]++
				}
				_, _ = r.cq.Poll(wcs)
				_ = r.s.Live()
				if pd, err := r.id.Device().AllocPD(); err == nil {
					_ = pd.Close()
				}
			}
		})
	}
	wg.Wait()
	sum := 0
	for _, n := range failed {
		sum += n
	}
	require.Equal(t, len(faults), sum)
	require.EqualValues(t, workers*rounds, r.s.Calls(PostSend))
	require.Equal(t, 1, r.s.Live()["PD"])
	require.Equal(t, ibv.QPSError, r.qp.State())
}

func TestSwitchRefusesNonsense(t *testing.T) {
	s := NewSwitch(&fakeProvider{})
	require.Equal(t, "fake", s.Name())
	require.Panics(t, func() { s.FailNth(0, nil) })
	require.Panics(t, func() { s.FailPost(1, Poll, 0, nil) })
	require.Panics(t, func() { s.FailCompletion(1, ibv.WCSuccess) })
	require.Equal(t, "unknown", numKinds.String())
}
