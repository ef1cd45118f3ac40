//go:build linux && cgo

package rdmacore_test

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// fakeEnv names the devices of testdata/fake.c, and what is odd about them.
const fakeEnv = "FAKE_DEVICES"

// onFake runs the rest of the test in a process of its own, in which testdata/fake.c takes the place of the
// libraries. It is called first; where it returns true the test is over.
func onFake(t *testing.T, devices string) (done bool) {
	t.Helper()
	if os.Getenv(fakeEnv) != "" {
		return false
	}
	cc := strings.Fields(os.Getenv("CC"))
	if len(cc) == 0 {
		cc = []string{"cc"}
	}
	if _, err := exec.LookPath(cc[0]); err != nil {
		if os.Getenv("RDMANET_REQUIRE_HEADERS") != "" {
			t.Fatal(err)
		}
		t.Skip("no C compiler: ", err)
	}
	dir := t.TempDir()
	lib := filepath.Join(dir, "libibverbs.so.1")
	out, err := exec.Command(cc[0], append(cc[1:], "-shared", "-fPIC", "-o", lib, "testdata/fake.c")...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Symlink(lib, filepath.Join(dir, "librdmacm.so.1")))
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+strings.ReplaceAll(t.Name(), "/", "$/^")+"$", "-test.v")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, fakeEnv+"="+devices, addrEnv+"=", deviceEnv+"=")
	out, err = cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: "+t.Name())
	return true
}

// names lists the devices' names.
func names(devs []ibv.Device) (all []string) {
	for _, d := range devs {
		all = append(all, d.Name())
	}
	return all
}

// A device that cannot be queried does not hide those that can.
func TestSickDevice(t *testing.T) {
	if onFake(t, "sick0:query,well0,sick1:port,well1,later0:once") {
		return
	}
	p, err := rdmacore.New(rdmacore.Config{})
	require.NoError(t, err)
	devs, err := p.Devices()
	require.NoError(t, err)
	require.Equal(t, []string{"well0", "well1"}, names(devs))
	why := p.Unusable()
	require.ErrorIs(t, why, syscall.EIO)
	for _, name := range []string{"sick0", "sick1", "later0"} {
		require.ErrorContains(t, why, name+": query device: input/output error")
	}

	devs, err = p.Devices()
	require.NoError(t, err)
	require.Equal(t, []string{"well0", "well1", "later0"}, names(devs), "one that was sick is asked again")
	require.NotContains(t, p.Unusable().Error(), "later0")

	p, err = rdmacore.New(rdmacore.Config{Device: "sick1"})
	require.NoError(t, err)
	_, err = p.Devices()
	require.ErrorIs(t, err, syscall.EIO)
	require.ErrorContains(t, err, "sick1: query device: input/output error")
	require.NotContains(t, err.Error(), "sick0")
}

// Where no device can be queried the error says so of each.
func TestSickDevices(t *testing.T) {
	if onFake(t, "sick0:query,sick1:port") {
		return
	}
	p, err := rdmacore.New(rdmacore.Config{})
	require.NoError(t, err)
	_, err = p.Devices()
	require.ErrorIs(t, err, syscall.EIO)
	require.ErrorContains(t, err, "no RDMA device can be used")
	require.ErrorContains(t, err, "sick0: query device: input/output error")
	require.ErrorContains(t, err, "sick1: query device: input/output error")
}

// fakeQP is a queue pair that is connected, with nobody.
func fakeQP(t *testing.T) (ibv.QP, ibv.CQ, ibv.Device) {
	p, err := rdmacore.New(rdmacore.Config{})
	require.NoError(t, err)
	id, err := p.Resolve(t.Context(), netip.AddrPort{}, netip.MustParseAddrPort("192.0.2.1:1"))
	require.NoError(t, err)
	qp, cq := queuePair(t, id)
	require.NoError(t, id.Connect(t.Context(), ibv.ConnParam{InitiatorDepth: 1, ResponderResources: 1}))
	return qp, cq, id.Device()
}

// queuePair makes a queue pair of id, which is closed with it when the test ends.
func queuePair(t *testing.T, id ibv.ID) (ibv.QP, ibv.CQ) {
	pd, err := id.Device().AllocPD()
	require.NoError(t, err)
	cq, err := id.Device().CreateCQ(16)
	require.NoError(t, err)
	qp, err := id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq,
		Cap: ibv.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 2, MaxRecvSGE: 2}})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, qp.Close())
		require.NoError(t, cq.Close())
		require.NoError(t, pd.Close())
		require.NoError(t, id.Close())
	})
	return qp, cq
}

// Some devices read the first element of a request that has none. They find an empty one: not NULL, and not
// an element of another request.
func TestFirstElement(t *testing.T) {
	if onFake(t, "irdma0:first") {
		return
	}
	qp, cq, _ := fakeQP(t)
	mem := []ibv.SGE{{Buf: make([]byte, 8192), LKey: 0x1234}}
	sends := []ibv.SendWR{
		{Op: ibv.OpRead, Flags: ibv.SendSignaled},
		{Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: mem},
		{Op: ibv.OpWrite, Flags: ibv.SendSignaled},
		{Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{LKey: 0x1234}}},
		{Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendInline},
		{Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: mem},
	}
	recvs := []ibv.RecvWR{{}, {SGL: mem}, {}, {SGL: mem}}
	expect := func(n int) {
		wcs := make([]ibv.WC, 16)
		got, err := cq.Poll(wcs)
		require.NoError(t, err)
		require.Equal(t, n, got)
		for i, wc := range wcs[:n] {
			require.Equal(t, ibv.WCSuccess, wc.Status, "request %d", i)
		}
	}
	for range 2 { // the second time round there are elements of before
		n, err := qp.PostSend(sends)
		require.NoError(t, err)
		expect(n)
		n, err = qp.PostRecv(recvs)
		require.NoError(t, err)
		expect(n)
	}
}

// A device that knows no solicited events is armed for all, and is not asked for solicited ones again.
func TestArmSolicitedRefused(t *testing.T) {
	if onFake(t, "mana0:unsolicited") {
		return
	}
	qp, cq, dev := fakeQP(t)
	require.True(t, dev.Attr().Caps.Has(ibv.CapSolicited), "nothing tells before")
	for range 3 {
		require.NoError(t, cq.Arm(true))
		_, err := qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendSignaled}})
		require.NoError(t, err)
		require.NoError(t, cq.Wait(time.Now().Add(verbstest.Patience)), "an event for any completion")
		n, err := cq.Poll(make([]ibv.WC, 4))
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.False(t, dev.Attr().Caps.Has(ibv.CapSolicited))
	}
	other, err := dev.CreateCQ(1)
	require.NoError(t, err)
	require.NoError(t, other.Arm(true))
	require.NoError(t, other.Close())
}

// fakePeer is a request to connect.
func fakePeer(t *testing.T) ibv.ID {
	p, err := rdmacore.New(rdmacore.Config{})
	require.NoError(t, err)
	ln, err := p.Listen(t.Context(), netip.MustParseAddrPort("192.0.2.1:1"), 1)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ln.Close()) })
	id, err := ln.Accept(t.Context())
	require.NoError(t, err)
	return id
}

// A peer that has sent and disconnected before this side knows of the connection has been connected: what it
// has sent is received, and then the queue pair ends.
func TestAcceptOvertaken(t *testing.T) {
	if onFake(t, "hasty0:hasty") {
		return
	}
	id := fakePeer(t)
	qp, cq := queuePair(t, id)
	_, err := qp.PostRecv([]ibv.RecvWR{{ID: 7}, {ID: 8}})
	require.NoError(t, err)
	require.NoError(t, id.Accept(t.Context(), ibv.ConnParam{}))
	heard := make(chan ibv.Event, 1)
	id.Notify(func(e ibv.Event) { heard <- e })
	require.Equal(t, ibv.EventDisconnected, (<-heard).Kind)
	wcs := make([]ibv.WC, 3)
	n, err := cq.Poll(wcs)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, []any{uint64(7), ibv.WCSuccess}, []any{wcs[0].ID, wcs[0].Status})
	require.Equal(t, []any{uint64(8), ibv.WCFlushErr}, []any{wcs[1].ID, wcs[1].Status})
}

// A disconnect in place of an answer is no connection, for either side.
func TestDisconnectedBefore(t *testing.T) {
	t.Run("active", func(t *testing.T) {
		if onFake(t, "hasty0:hasty") {
			return
		}
		p, err := rdmacore.New(rdmacore.Config{})
		require.NoError(t, err)
		id, err := p.Resolve(t.Context(), netip.AddrPort{}, netip.MustParseAddrPort("192.0.2.1:1"))
		require.NoError(t, err)
		queuePair(t, id)
		require.ErrorIs(t, id.Connect(t.Context(), ibv.ConnParam{}), syscall.ECONNRESET)
	})
	t.Run("passive", func(t *testing.T) {
		if onFake(t, "gone0:gone") {
			return
		}
		id := fakePeer(t)
		heard := make(chan ibv.Event, 1)
		id.Notify(func(e ibv.Event) { heard <- e })
		require.Equal(t, ibv.EventDisconnected, (<-heard).Kind)
		queuePair(t, id)
		require.ErrorIs(t, id.Accept(t.Context(), ibv.ConnParam{}), syscall.ECONNRESET)
	})
}
