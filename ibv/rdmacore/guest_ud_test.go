//go:build linux && cgo

package rdmacore_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// datagrams is a queue pair and where it sends to.
type datagrams struct {
	id ibv.ID
	pd ibv.PD
	cq ibv.CQ
	qp ibv.QP
	to ibv.UDParam
}

// newDatagrams creates the queue pair on an ID.
func newDatagrams(t *testing.T, id ibv.ID) *datagrams {
	d := &datagrams{id: id}
	var err error
	d.pd, err = id.Device().AllocPD()
	require.NoError(t, err)
	d.cq, err = id.Device().CreateCQ(256)
	require.NoError(t, err)
	d.qp, err = id.CreateQP(d.pd, ibv.QPInit{SendCQ: d.cq, RecvCQ: d.cq,
		Cap: ibv.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxInline: 16}})
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, c := range []interface{ Close() error }{d.qp, d.cq, d.pd, d.id} {
			assert.NoError(t, c.Close())
		}
	})
	return d
}

// next waits for the completion of a receive, or of a send; the others pass by.
func (d *datagrams) next(t *testing.T, op ibv.WCOpcode) ibv.WC {
	t.Helper()
	var wcs [1]ibv.WC
	for deadline := time.Now().Add(verbstest.Patience); ; {
		n, err := d.cq.Poll(wcs[:])
		require.NoError(t, err)
		switch {
		case n > 0:
			require.Equal(t, ibv.WCSuccess, wcs[0].Status)
			if wcs[0].Op == op {
				return wcs[0]
			}
		case time.Now().After(deadline):
			t.Fatalf("no completion of a %v", op)
		default:
			time.Sleep(100 * time.Microsecond)
		}
	}
}

// listenUD returns nil on devices without datagrams.
func listenUD(t *testing.T, p ibv.Provider, port uint16) ibv.Listener {
	l, err := p.ListenUD(t.Context(), netip.AddrPortFrom(addr(t), port), 0)
	if err != nil {
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, os.Getenv(deviceEnv))
		return nil
	}
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	return l
}

// toItself returns a queue pair that has asked for the way to itself, or nil.
func toItself(t *testing.T) *datagrams {
	addr(t)
	p := open(t, rdmacore.Config{})
	l := listenUD(t, p, 0)
	if l == nil {
		return nil
	}
	id, err := p.ResolveUD(t.Context(), netip.AddrPort{}, l.Addr())
	require.NoError(t, err)
	d := newDatagrams(t, id)
	result := make(chan error, 1)
	go func() { result <- id.Connect(t.Context(), ibv.ConnParam{}) }()
	request, err := l.Accept(t.Context())
	require.NoError(t, err)
	require.NoError(t, request.Accept(t.Context(), ibv.ConnParam{QPN: d.qp.QPN()}))
	require.NoError(t, <-result)
	d.to = id.UDParam()
	require.NoError(t, request.Close())
	return d
}

// TestDatagramsWithoutGarbage sends and receives without allocating.
func TestDatagramsWithoutGarbage(t *testing.T) {
	d := toItself(t)
	if d == nil {
		return
	}
	buf := make([]byte, ibv.GRHLen+16)
	mr, err := d.pd.RegMR(buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	ah, err := d.pd.CreateAH(d.to.AH)
	require.NoError(t, err)
	recv := []ibv.RecvWR{{SGL: []ibv.SGE{{Buf: buf, LKey: mr.LKey()}}}}
	send := []ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline | ibv.SendSignaled, SGL: []ibv.SGE{{Buf: make([]byte, 16)}},
		AH: ah, RemoteQPN: d.to.QPN, RemoteQKey: d.to.QKey}}
	var wcs [4]ibv.WC
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := d.qp.PostRecv(recv); err != nil {
			t.Error(err)
		}
		if _, err := d.qp.PostSend(send); err != nil {
			t.Error(err)
		}
		for deadline, n := time.Now().Add(verbstest.Patience), 0; n < 2; { // the send and the receive
			m, err := d.cq.Poll(wcs[:])
			if n += m; err != nil || time.Now().After(deadline) {
				t.Fatal(n, err)
			}
		}
	}))
	assert.NoError(t, ah.Close())
	assert.NoError(t, mr.Close())
}

// TestHandleClosedInUse closes address handles while others post with them: a
// post is refused or goes well.
func TestHandleClosedInUse(t *testing.T) {
	d := toItself(t)
	if d == nil {
		return
	}
	for range 50 {
		ah, err := d.pd.CreateAH(d.to.AH)
		require.NoError(t, err)
		var posted atomic.Int32
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				var wcs [8]ibv.WC
				for {
					_, err := d.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendSignaled, AH: ah,
						RemoteQPN: d.to.QPN, RemoteQKey: d.to.QKey}})
					if err != nil && !errors.Is(err, ibv.ErrQueueFull) {
						assert.ErrorIs(t, err, net.ErrClosed)
						return
					}
					posted.Add(1)
					d.cq.Poll(wcs[:])
				}
			})
		}
		wg.Go(func() {
			for posted.Load() < 10 {
				runtime.Gosched()
			}
			assert.NoError(t, ah.Close())
			assert.ErrorIs(t, ah.Close(), net.ErrClosed)
		})
		wg.Wait()
	}
}

// udaddy is rdma-core's example for datagrams: the client sends ten of 100 bytes
// to port 7174, each with its queue pair's number beside it, and the server
// answers with as many.
const (
	udaddyPort  = 7174
	udaddyCount = 10
	udaddySize  = 100
)

// udaddy runs it and returns a function that waits for its end.
func udaddy(t *testing.T, arg ...string) (wait func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), verbstest.Patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "udaddy", arg...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	return func() {
		t.Helper()
		assert.NoError(t, cmd.Wait(), "%s", out.String())
		assert.Contains(t, out.String(), "data transfers complete")
	}
}

// udaddyEnd has room for what udaddy sends.
type udaddyEnd struct {
	*datagrams
	buf []byte
	mr  ibv.MR
}

func newUdaddyEnd(t *testing.T, id ibv.ID) *udaddyEnd {
	e := &udaddyEnd{datagrams: newDatagrams(t, id), buf: make([]byte, udaddyCount*(ibv.GRHLen+udaddySize))}
	var err error
	e.mr, err = e.pd.RegMR(e.buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.mr.Close()) })
	for i := range udaddyCount {
		_, err := e.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: e.slot(i), LKey: e.mr.LKey()}}}})
		require.NoError(t, err)
	}
	return e
}

func (e *udaddyEnd) slot(i int) []byte {
	const size = ibv.GRHLen + udaddySize
	return e.buf[i*size:][:size]
}

// receive takes all that udaddy sends and returns the last completion.
func (e *udaddyEnd) receive(t *testing.T) (wc ibv.WC) {
	t.Helper()
	for range udaddyCount {
		wc = e.next(t, ibv.WCRecv)
		require.EqualValues(t, ibv.GRHLen+udaddySize, wc.ByteLen)
		require.Equal(t, ibv.WCWithImm|ibv.WCGRH, wc.Flags)
		require.Equal(t, wc.SrcQP, wc.Imm)
		src, dst, ok := ibv.GRHAddrs(e.slot(int(wc.ID)))
		require.True(t, ok)
		require.Equal(t, addr(t), src)
		require.Equal(t, addr(t), dst)
	}
	return wc
}

func (e *udaddyEnd) send(t *testing.T, ah ibv.AH, qpn uint32) {
	t.Helper()
	for i := range udaddyCount {
		_, err := e.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSendImm, Imm: e.qp.QPN(), Flags: ibv.SendSignaled,
			SGL: []ibv.SGE{{Buf: e.slot(i)[ibv.GRHLen:], LKey: e.mr.LKey()}}, AH: ah, RemoteQPN: qpn, RemoteQKey: ibv.QKeyUDP}})
		require.NoError(t, err)
	}
}

func TestUdaddyServer(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	if l := listenUD(t, p, 0); l == nil {
		return
	}
	wait := udaddy(t, "-b", a.String())
	var id ibv.ID
	require.Eventually(t, func() bool { // it listens by and by
		var err error
		id, err = p.ResolveUD(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(a, udaddyPort))
		require.NoError(t, err)
		if err = id.Connect(t.Context(), ibv.ConnParam{}); err != nil {
			assert.ErrorIs(t, err, syscall.ECONNREFUSED)
			assert.NoError(t, id.Close())
		}
		return err == nil
	}, verbstest.Patience, 10*time.Millisecond)
	e := newUdaddyEnd(t, id)
	to := id.UDParam()
	ah, err := e.pd.CreateAH(to.AH)
	require.NoError(t, err)
	e.send(t, ah, to.QPN)
	assert.Equal(t, to.QPN, e.receive(t).SrcQP)
	assert.NoError(t, ah.Close())
	wait()
}

func TestUdaddyClient(t *testing.T) {
	a := addr(t)
	l := listenUD(t, open(t, rdmacore.Config{}), udaddyPort)
	if l == nil {
		return
	}
	wait := udaddy(t, "-s", a.String())
	id, err := l.Accept(t.Context())
	require.NoError(t, err)
	e := newUdaddyEnd(t, id)
	require.NoError(t, id.Accept(t.Context(), ibv.ConnParam{}))
	wc := e.receive(t)
	ah, err := e.pd.CreateAHFromWC(id.Port(), &wc, e.slot(int(wc.ID)))
	require.NoError(t, err)
	e.send(t, ah, wc.SrcQP)
	wait()
	assert.NoError(t, ah.Close())
}

// TestGroupFull attaches more queue pairs to a group than the device allows.
func TestGroupFull(t *testing.T) {
	addr(t)
	p := open(t, rdmacore.Config{})
	if l := listenUD(t, p, 0); l == nil {
		return
	}
	group := netip.MustParseAddr("239.82.68.3")
	for n := 0; ; n++ {
		id, err := p.BindUD(t.Context(), netip.AddrPortFrom(addr(t), 0))
		require.NoError(t, err)
		d := newDatagrams(t, id)
		_, err = id.JoinMulticast(t.Context(), group, ibv.JoinFullMember)
		if limit := id.Device().Attr().MaxMcastQPAttach; n < limit {
			require.NoError(t, err, "%d of %d", n, limit)
			t.Cleanup(func() { assert.NoError(t, id.LeaveMulticast(group)) })
			continue
		}
		assert.ErrorIs(t, err, ibv.ErrLimit)
		assert.ErrorIs(t, d.qp.AttachMcast(ibv.GIDFromAddr(group), 0), ibv.ErrLimit)
		return
	}
}

// TestLeaveDuringJoin leaves a group while another goroutine joins it: that hears of
// it, or was done before.
func TestLeaveDuringJoin(t *testing.T) {
	addr(t)
	p := open(t, rdmacore.Config{})
	if l := listenUD(t, p, 0); l == nil {
		return
	}
	group := netip.MustParseAddr("239.82.68.4")
	id, err := p.BindUD(t.Context(), netip.AddrPortFrom(addr(t), 0))
	require.NoError(t, err)
	defer id.Close()
	ctx, cancel := context.WithTimeout(t.Context(), verbstest.Patience)
	defer cancel()
	for range 100 {
		joined := make(chan error)
		go func() {
			_, err := id.JoinMulticast(ctx, group, ibv.JoinSendOnly)
			joined <- err
		}()
		for err = syscall.EADDRNOTAVAIL; errors.Is(err, syscall.EADDRNOTAVAIL); {
			err = id.LeaveMulticast(group)
		}
		require.NoError(t, err)
		if err := <-joined; err != nil {
			require.ErrorIs(t, err, net.ErrClosed)
		}
	}
}

// TestClosedUnpolled polls a datagram whose queue pair is closed, from a completion queue
// that connections use as well.
func TestClosedUnpolled(t *testing.T) {
	d := toItself(t)
	if d == nil {
		return
	}
	p := open(t, rdmacore.Config{})
	id, err := p.BindUD(t.Context(), netip.AddrPortFrom(addr(t), 0))
	require.NoError(t, err)
	cq, err := id.Device().CreateCQ(4)
	require.NoError(t, err)
	init := ibv.QPInit{SendCQ: cq, RecvCQ: cq, Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxRecvSGE: 1}}
	qp, err := id.CreateQP(d.pd, init)
	require.NoError(t, err)
	other, err := p.Resolve(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(addr(t), 1))
	require.NoError(t, err)
	connection, err := other.CreateQP(d.pd, init)
	require.NoError(t, err)
	buf := make([]byte, ibv.GRHLen+16)
	mr, err := d.pd.RegMR(buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	ah, err := d.pd.CreateAH(d.to.AH)
	require.NoError(t, err)
	_, err = qp.PostRecv([]ibv.RecvWR{{ID: 1, SGL: []ibv.SGE{{Buf: buf, LKey: mr.LKey()}}}})
	require.NoError(t, err)
	require.NoError(t, cq.Arm(false))
	_, err = d.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendSignaled, AH: ah, RemoteQPN: qp.QPN(), RemoteQKey: d.to.QKey}})
	require.NoError(t, err)
	d.next(t, ibv.WCSend)
	require.NoError(t, cq.Wait(time.Now().Add(verbstest.Patience)))
	require.NoError(t, qp.Close())
	var wcs [4]ibv.WC
	n, err := cq.Poll(wcs[:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	assert.Equal(t, d.qp.QPN(), wcs[0].SrcQP)
	assert.Equal(t, ibv.WCGRH, wcs[0].Flags)
	for _, c := range []interface{ Close() error }{connection, other, id, cq, ah, mr} {
		assert.NoError(t, c.Close())
	}
}
