//go:build linux && cgo

package rdmacore_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// deviceEnv names the device that addrEnv belongs to, rxe0 or siw0: the kind and
// a number. vm/run sets it.
const deviceEnv = "RDMANET_VM_DEVICE"

// TestMain fails when the tests leave resources of the device behind.
func TestMain(m *testing.M) {
	dev := os.Getenv(deviceEnv)
	if os.Getenv(childEnv) != "" {
		dev = ""
	}
	os.Exit(leaktest.Main(m, dev, os.Getenv(addrEnv), func() (ibv.Provider, error) { return rdmacore.New(rdmacore.Config{}) }))
}

func TestIPv6(t *testing.T) {
	addr(t)
	a := netip.MustParseAddr(os.Getenv("RDMANET_VM_ADDR6"))
	p := open(t, rdmacore.Config{})
	verbstest.TestAddress(t, func(*testing.T) verbstest.Env { return verbstest.Env{Passive: p, Addr: a} })
}

// TestConfig connects with everything set that operators may set.
func TestConfig(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{
		Device:        os.Getenv(deviceEnv),
		TypeOfService: 104,
		AckTimeout:    500 * time.Millisecond,
		Retries:       3,
		RNRRetries:    5,
		RNRTimer:      10 * time.Millisecond,
		PathMTU:       512,
	})
	devs, err := p.Devices()
	require.NoError(t, err)
	require.Len(t, devs, 1)
	pair := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: a}, verbstest.PairConfig{})
	assert.Equal(t, os.Getenv(deviceEnv), pair.Active.Dev.Name())
	if l := listenUD(t, p, 0); l != nil { // for which some of it means nothing
		id, err := p.ResolveUD(t.Context(), netip.AddrPort{}, l.Addr())
		require.NoError(t, err)
		assert.NoError(t, id.Close())
	}
}

func TestConfigRefused(t *testing.T) {
	for _, cfg := range []rdmacore.Config{
		{Retries: -1}, {Retries: 8}, {RNRRetries: -1}, {RNRRetries: 8}, {AckTimeout: -1}, {RNRTimer: -1},
		{PathMTU: -1}, {PathMTU: 1500},
	} {
		_, err := rdmacore.New(cfg)
		assert.ErrorIs(t, err, syscall.EINVAL, "%+v", cfg)
	}
}

func TestUnknownDevice(t *testing.T) {
	a := addr(t)
	open(t, rdmacore.Config{})
	p, err := rdmacore.New(rdmacore.Config{Device: "no_such_0"})
	require.NoError(t, err)
	_, err = p.Devices()
	assert.ErrorIs(t, err, syscall.ENODEV)
	assert.ErrorContains(t, err, "no_such_0")
	_, err = p.Resolve(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(a, 1))
	assert.ErrorIs(t, err, syscall.ENODEV)
	assert.ErrorContains(t, err, os.Getenv(deviceEnv), "which device it is instead")
}

// TestNoDeviceThere goes where no RDMA device leads.
func TestNoDeviceThere(t *testing.T) {
	addr(t)
	p := open(t, rdmacore.Config{})
	for _, to := range []string{"127.0.0.1:1", "192.0.2.1:1", "[::1]:1", "[2001:db8::1]:1"} {
		_, err := p.Resolve(t.Context(), netip.AddrPort{}, netip.MustParseAddrPort(to))
		require.Error(t, err, to)
		assert.NotErrorIs(t, err, context.DeadlineExceeded, to)
		if netip.MustParseAddrPort(to).Addr().IsLoopback() {
			assert.ErrorContains(t, err, "no RDMA device on the interface", to)
		}
	}
	for _, at := range []string{"192.0.2.1:0", "[2001:db8::1]:0"} {
		_, err := p.Listen(t.Context(), netip.MustParseAddrPort(at), 0)
		assert.ErrorContains(t, err, "no RDMA device has this address", at)
	}
}

// childEnv is set in the processes that tests start of themselves.
const childEnv = "RDMANET_TEST_CHILD"

// inChild runs the test in another process, started by the command if there is
// one, and reports whether this is it.
func inChild(t *testing.T, command ...string) bool {
	t.Helper()
	if os.Getenv(childEnv) != "" {
		return true
	}
	command = append(command, os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: "+t.Name())
	return false
}

// TestNoLockedMemory registers more than may be locked. The limit does not bind
// a process with CAP_IPC_LOCK.
func TestNoLockedMemory(t *testing.T) {
	a := addr(t)
	if !inChild(t, "setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "--",
		"prlimit", "--memlock=1048576:1048576") {
		return
	}
	p := open(t, rdmacore.Config{})
	pair := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: a}, verbstest.PairConfig{})
	_, err := pair.Active.PD.RegMR(make([]byte, 4<<20), 0)
	assert.ErrorIs(t, err, syscall.ENOMEM)
	assert.ErrorContains(t, err, "the limit of locked memory is 1024 KiB")
}

// extra makes a device of the same kind on an interface of its own and returns
// its name, that of the interface and the address.
func extra(t *testing.T) (dev, netdev string, a netip.Addr) {
	addr(t)
	kind := os.Getenv(deviceEnv)
	kind = kind[:len(kind)-1]
	dev, netdev, a = kind+"9", "dum9", netip.MustParseAddr("10.79.0.1")
	run(t, "ip", "link", "add", netdev, "type", "dummy")
	run(t, "ip", "addr", "add", a.String()+"/24", "dev", netdev)
	run(t, "ip", "link", "set", netdev, "up")
	run(t, "rdma", "link", "add", dev, "type", kind, "netdev", netdev)
	return dev, netdev, a
}

func run(t *testing.T, name string, arg ...string) {
	t.Helper()
	out, err := exec.Command(name, arg...).CombinedOutput()
	require.NoError(t, err, "%s %v: %s", name, arg, out)
}

// reachable waits until the device can be listened on and reached.
func reachable(t *testing.T, p ibv.Provider, a netip.Addr) {
	t.Helper()
	require.Eventually(t, func() bool {
		l, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
		if err != nil {
			return false
		}
		defer l.Close()
		id, err := p.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
		if err != nil {
			return false
		}
		return id.Close() == nil
	}, verbstest.Patience, 20*time.Millisecond)
}

// heard collects the kinds of events.
type heard struct {
	mu   sync.Mutex
	seen map[ibv.EventKind]int
}

func listenTo(id ibv.ID) *heard {
	h := &heard{seen: make(map[ibv.EventKind]int)}
	id.Notify(func(e ibv.Event) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.seen[e.Kind]++
	})
	return h
}

func (h *heard) count(k ibv.EventKind) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seen[k]
}

func (h *heard) wait(t *testing.T, k ibv.EventKind) {
	t.Helper()
	require.Eventually(t, func() bool { return h.count(k) > 0 }, verbstest.Patience, time.Millisecond, "no event %q", k)
	assert.Equal(t, 1, h.count(k))
}

// TestLinkDownAndRemoval takes the interface down and then the device away under
// a connection: both ends hear of it, all can be closed, and connections of
// another device go on. It does so in another process: Linux keeps a device that
// is in use until its last user is gone, and rdma-core may fail to list devices
// meanwhile.
func TestLinkDownAndRemoval(t *testing.T) {
	addr(t)
	if !inChild(t) {
		require.Eventually(t, func() bool { // which the child began
			return exec.Command("ip", "link", "del", "dum9").Run() == nil
		}, verbstest.Patience, 20*time.Millisecond)
		return
	}
	dev, netdev, a := extra(t)
	p := open(t, rdmacore.Config{})
	reachable(t, p, a)
	other := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: addr(t)}, verbstest.PairConfig{})
	pair := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: a}, verbstest.PairConfig{})
	require.Equal(t, dev, pair.Active.Dev.Name())
	port, err := pair.Active.Dev.Port(1)
	require.NoError(t, err)
	assert.Equal(t, ibv.PortActive, port.State)
	ln, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
	require.NoError(t, err)
	var ends []*heard
	for _, e := range []*verbstest.End{pair.Active, pair.Passive} {
		ends = append(ends, listenTo(e.ID))
		e.Recv(t, ibv.RecvWR{ID: 1})
	}
	run(t, "ip", "link", "set", netdev, "down")
	for _, h := range ends {
		h.wait(t, ibv.EventPortError)
	}
	require.NoError(t, exec.Command("rdma", "link", "delete", dev).Start())
	for _, h := range ends {
		h.wait(t, ibv.EventDeviceRemoval)
	}
	ctx, cancel := context.WithTimeout(t.Context(), verbstest.Patience)
	defer cancel()
	_, err = ln.Accept(ctx)
	assert.ErrorIs(t, err, syscall.ENODEV)
	assert.NoError(t, ln.Close())
	// What uses it gets errors, or its work flushed, and does not hang.
	for _, e := range []*verbstest.End{pair.Active, pair.Passive} {
		e.QP.PostSend([]ibv.SendWR{{ID: 2, Op: ibv.OpSend, Flags: ibv.SendSignaled}})
		e.ID.Disconnect()
		e.QP.SetError()
		assert.Equal(t, ibv.QPSError, e.QP.State())
	}
	other.Passive.Recv(t, ibv.RecvWR{ID: 3})
	other.Active.Send(t, ibv.SendWR{Op: ibv.OpSend})
	var wcs [1]ibv.WC
	require.Eventually(t, func() bool {
		n, err := other.Passive.RecvCQ.Poll(wcs[:])
		return err != nil || n > 0
	}, verbstest.Patience, time.Millisecond)
	assert.Equal(t, uint64(3), wcs[0].ID)
	assert.Equal(t, ibv.WCSuccess, wcs[0].Status)
}

// TestConnectIntoTheVoid connects to an address where there is nobody. The
// context ends that, and other connections can be made meanwhile.
func TestConnectIntoTheVoid(t *testing.T) {
	const retries = "/proc/sys/net/ipv4/tcp_syn_retries"
	a := addr(t)
	was, err := os.ReadFile(retries)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(retries, []byte("1"), 0)) // siw's TCP gives up after 3 s
	defer os.WriteFile(retries, was, 0)

	p := open(t, rdmacore.Config{})
	host := a.As4()
	host[3] += 77
	id, err := p.Resolve(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(netip.AddrFrom4(host), 4791))
	if err != nil {
		return // the interface asks who has the address
	}
	pd, err := id.Device().AllocPD()
	require.NoError(t, err)
	cq, err := id.Device().CreateCQ(4)
	require.NoError(t, err)
	qp, err := id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq, Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- id.Connect(ctx, ibv.ConnParam{}) }()
	t.Run("Others", func(t *testing.T) {
		verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: a}, verbstest.PairConfig{})
	})
	cancel()
	assert.ErrorIs(t, <-result, context.Canceled)
	assert.NoError(t, qp.Close())
	assert.NoError(t, cq.Close())
	assert.NoError(t, pd.Close())
	assert.NoError(t, id.Close())
}

// TestConcurrentUse posts, polls, waits, interrupts and disconnects while the
// queue pair is closed: every call returns, and none afterwards succeeds.
func TestConcurrentUse(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	env := verbstest.Env{Passive: p, Addr: a}
	for range 10 {
		t.Run("", func(t *testing.T) {
			pair := verbstest.NewPair(t, env, verbstest.PairConfig{SharedCQ: true, CQDepth: 1024})
			stop := make(chan struct{})
			var wg sync.WaitGroup
			forever := func(f func()) {
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
							f()
						}
					}
				})
			}
			var wcs [16]ibv.WC
			for _, e := range []*verbstest.End{pair.Active, pair.Passive} {
				forever(func() { e.QP.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendSignaled}}) })
				forever(func() { e.QP.PostRecv([]ibv.RecvWR{{}}) })
				forever(func() { e.SendCQ.Arm(false); e.SendCQ.Wait(time.Now().Add(time.Millisecond)) })
				forever(func() { e.QP.State(); e.SendCQ.Interrupt(); e.ID.LocalAddr(); e.ID.Param() })
			}
			forever(func() { pair.Active.SendCQ.Poll(wcs[:8]) })
			forever(func() { pair.Active.SendCQ.Poll(make([]ibv.WC, 4)) })
			forever(func() { pair.Passive.SendCQ.Poll(wcs[8:]) })
			time.Sleep(5 * time.Millisecond)
			wg.Go(func() { pair.Active.ID.Disconnect() })
			wg.Go(func() { pair.Passive.QP.SetError() })
			pair.Active.CloseQP(t)
			pair.Passive.CloseQP(t)
			_, err := pair.Active.QP.PostSend([]ibv.SendWR{{Op: ibv.OpSend}})
			assert.ErrorIs(t, err, net.ErrClosed)
			close(stop)
			wg.Wait()
		})
	}
}

// TestCloseDuringConnect closes the queue pair while the peer's answer comes,
// at which librdmacm changes the queue pair's state. It does so in a process that
// overwrites what it frees.
func TestCloseDuringConnect(t *testing.T) {
	a := addr(t)
	if !inChild(t, "env", "MALLOC_PERTURB_=165") {
		return
	}
	p := open(t, rdmacore.Config{})
	l, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
	require.NoError(t, err)
	defer l.Close()
	for i := range 50 {
		id, err := p.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
		require.NoError(t, err)
		qp, release := newQP(t, id)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { id.Connect(ctx, ibv.ConnParam{}) })
		peer, err := l.Accept(t.Context())
		require.NoError(t, err)
		_, releasePeer := newQP(t, peer)
		wg.Go(func() { peer.Accept(ctx, ibv.ConnParam{}) })
		time.Sleep(time.Duration(i) * 50 * time.Microsecond) // a little later each time
		assert.NoError(t, qp.Close())
		cancel()
		wg.Wait()
		release()
		releasePeer()
	}
}

// TestPostDuringError posts receives while the queue pair is moved to the error
// state: all that were taken are flushed. There is one processor, so that posts
// come between the device's change of state and this package's notice of it.
func TestPostDuringError(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	env := verbstest.Env{Passive: p, Addr: a}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for range 30 {
		t.Run("", func(t *testing.T) {
			const room = 2048
			e := verbstest.NewPair(t, env, verbstest.PairConfig{RecvWR: room}).Active
			begun, total := make(chan struct{}), make(chan int)
			go func() {
				posted := 0
				for posted < room {
					n, err := e.QP.PostRecv([]ibv.RecvWR{{}})
					if posted += n; err != nil {
						break
					}
					if posted == 1 {
						close(begun)
						runtime.Gosched()
					}
				}
				total <- posted
			}()
			<-begun
			require.NoError(t, e.QP.SetError())
			posted := <-total
			flushed := 0
			var wcs [64]ibv.WC
			for end := time.Now().Add(verbstest.Patience); flushed < posted && time.Now().Before(end); {
				n, err := e.RecvCQ.Poll(wcs[:])
				require.NoError(t, err)
				flushed += n
			}
			assert.Equal(t, posted, flushed)
		})
	}
}

// newQP makes the smallest queue pair, and a function that closes all there is.
func newQP(t *testing.T, id ibv.ID) (qp ibv.QP, release func()) {
	t.Helper()
	pd, err := id.Device().AllocPD()
	require.NoError(t, err)
	cq, err := id.Device().CreateCQ(4)
	require.NoError(t, err)
	qp, err = id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq, Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
	require.NoError(t, err)
	return qp, func() {
		qp.Close()
		assert.NoError(t, cq.Close())
		assert.NoError(t, pd.Close())
		assert.NoError(t, id.Close())
	}
}

// TestCloseHoldsUpNobody closes a queue pair that Soft-iWARP keeps for 10 s, as
// the peer, a TCP server, does not answer.
func TestCloseHoldsUpNobody(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	silent, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
	require.NoError(t, err)
	defer silent.Close()
	id, err := p.Resolve(t.Context(), netip.AddrPort{}, silent.Addr().(*net.TCPAddr).AddrPort())
	require.NoError(t, err)
	qp, release := newQP(t, id)
	pd, err := id.Device().AllocPD()
	require.NoError(t, err)
	mr, err := pd.RegMR(make([]byte, 1), 0)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.Error(t, id.Connect(ctx, ibv.ConnParam{}))
	released := make(chan struct{})
	go func() {
		defer close(released)
		release()
	}()
	for err := error(nil); !errors.Is(err, net.ErrClosed); { // until it closes
		_, err = qp.PostRecv([]ibv.RecvWR{{}})
	}
	assert.Equal(t, a, id.LocalAddr().Addr())
	assert.NoError(t, mr.Close())
	assert.NoError(t, pd.Close())
	if id.Device().Attr().Transport == ibv.TransportIWARP {
		select {
		case <-released:
			t.Error("the others had to wait")
		default:
		}
	}
	<-released
}

// TestConnectInErrorState has librdmacm fail when the peer's answer comes, which
// it tells by a status that is no error number.
func TestConnectInErrorState(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	l, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
	require.NoError(t, err)
	defer l.Close()
	id, err := p.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
	require.NoError(t, err)
	if id.Device().Attr().Transport == ibv.TransportIWARP { // where the kernel does it all
		require.NoError(t, id.Close())
		return
	}
	qp, release := newQP(t, id)
	defer release()
	require.NoError(t, qp.SetError())
	ctx, cancel := context.WithTimeout(t.Context(), verbstest.Patience)
	defer cancel()
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		peer, err := l.Accept(ctx)
		if !assert.NoError(t, err) {
			return
		}
		_, releasePeer := newQP(t, peer)
		defer releasePeer()
		peer.Accept(ctx, ibv.ConnParam{})
	}()
	defer func() { <-accepted }()
	defer cancel()
	assert.ErrorIs(t, id.Connect(ctx, ibv.ConnParam{}), syscall.EINVAL)
}

// TestForgottenRegion lets go of a region that is not closed: the device may
// write to its memory still, which must not become another's.
func TestForgottenRegion(t *testing.T) {
	addr(t)
	if !inChild(t) { // as it is lost for good
		return
	}
	devs, err := open(t, rdmacore.Config{}).Devices()
	require.NoError(t, err)
	pd, err := devs[0].AllocPD()
	require.NoError(t, err)
	buf := make([]byte, 1<<16)
	_, err = pd.RegMR(buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	kept := weak.Make(&buf[0])
	runtime.GC()
	runtime.GC()
	assert.NotNil(t, kept.Value())
}

// TestModuleComesLate has no connection manager at first.
func TestModuleComesLate(t *testing.T) {
	addr(t)
	if !inChild(t) {
		return
	}
	const file = "/dev/infiniband/rdma_cm"
	require.NoError(t, os.Rename(file, file+".away"))
	defer os.Rename(file+".away", file)
	_, err := rdmacore.New(rdmacore.Config{})
	require.ErrorContains(t, err, "no connection manager")
	require.NoError(t, os.Rename(file+".away", file))
	open(t, rdmacore.Config{})
}

// TestPathMTU connects with a smaller packet than the route allows, which both
// ends then keep to, and with a larger one, which changes nothing.
func TestPathMTU(t *testing.T) {
	for _, a := range []netip.Addr{addr(t), netip.MustParseAddr(os.Getenv("RDMANET_VM_ADDR6"))} {
		route := verbstest.NewPair(t, verbstest.Env{Passive: open(t, rdmacore.Config{}), Addr: a}, verbstest.PairConfig{}).Active.ID.PathMTU()
		for _, want := range []int{256, 512, 4096} {
			p := open(t, rdmacore.Config{PathMTU: want, TypeOfService: 104})
			if !testing.Short() || want == 512 {
				verbstest.TestAddress(t, func(*testing.T) verbstest.Env { return verbstest.Env{Passive: p, Addr: a} })
			}
			pair := verbstest.NewPair(t, verbstest.Env{Passive: p, Addr: a}, verbstest.PairConfig{})
			for _, e := range []*verbstest.End{pair.Active, pair.Passive} {
				assert.Equal(t, min(want, route), e.ID.PathMTU())
			}
		}
	}
}

// TestPathMTUPinned asks for a local port as well, which the ID has all along.
func TestPathMTUPinned(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{PathMTU: 256})
	l, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
	require.NoError(t, err)
	defer l.Close()
	local := netip.AddrPortFrom(a, 20049)
	id, err := p.Resolve(t.Context(), local, l.Addr())
	require.NoError(t, err)
	assert.Equal(t, local, id.LocalAddr())
	assert.NoError(t, id.Close())
}

// roce returns a pair whose ends have configurations of their own, or nil on iWARP,
// which has nothing of what they say.
func roce(t *testing.T, active, passive rdmacore.Config) *verbstest.Pair {
	a := addr(t)
	env := verbstest.Env{Active: open(t, active), Passive: open(t, passive), Addr: a}
	pair := verbstest.NewPair(t, env, verbstest.PairConfig{})
	if pair.Active.Dev.Attr().Transport == ibv.TransportIWARP {
		return nil
	}
	return pair
}

// failure sends a message and returns how it ends.
func failure(t *testing.T, e *verbstest.End) ibv.WCStatus {
	t.Helper()
	e.Send(t, ibv.SendWR{Op: ibv.OpSend})
	var wcs [1]ibv.WC
	require.Eventually(t, func() bool {
		n, err := e.SendCQ.Poll(wcs[:])
		return assert.NoError(t, err) && n == 1
	}, verbstest.Patience, time.Millisecond)
	return wcs[0].Status
}

// TestAckTimeoutAccepted has the side that accepts miss its peer, whose timeout is much
// longer than the test.
func TestAckTimeoutAccepted(t *testing.T) {
	pair := roce(t, rdmacore.Config{AckTimeout: 2 * verbstest.Patience}, rdmacore.Config{AckTimeout: 10 * time.Millisecond})
	if pair == nil {
		return
	}
	pair.Active.CloseQP(t)
	assert.Equal(t, ibv.WCRetryExcErr, failure(t, pair.Passive))
}

// TestRNRRetries sends to a side that has no receive posted, and has said how often the
// peer shall try.
func TestRNRRetries(t *testing.T) {
	for _, passive := range []bool{false, true} {
		var cfg [2]rdmacore.Config
		to := 0
		if passive {
			to = 1
		}
		cfg[to].RNRRetries = 1
		pair := roce(t, cfg[0], cfg[1])
		if pair == nil {
			return
		}
		from := [2]*verbstest.End{pair.Active, pair.Passive}[1-to]
		assert.Equal(t, ibv.WCRNRRetryExcErr, failure(t, from))
	}
}

// TestDepthAsked connects with fewer RDMA Reads at a time than the side that accepts
// could serve: the peer's device need not be able to do more.
func TestDepthAsked(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	l, err := p.Listen(t.Context(), netip.AddrPortFrom(a, 0), 0)
	require.NoError(t, err)
	defer l.Close()
	id, err := p.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
	require.NoError(t, err)
	_, release := newQP(t, id)
	defer release()
	result := make(chan error, 1)
	go func() { result <- id.Connect(t.Context(), ibv.ConnParam{InitiatorDepth: 2}) }()
	peer, err := l.Accept(t.Context())
	require.NoError(t, err)
	_, releasePeer := newQP(t, peer)
	defer releasePeer()
	require.NoError(t, peer.Accept(t.Context(), ibv.ConnParam{ResponderResources: 16}))
	require.NoError(t, <-result)
	assert.Equal(t, 2, peer.Param().ResponderResources)
	assert.Equal(t, 2, id.Param().InitiatorDepth)
}

// TestNoDriver has a device in the kernel and none in user space.
func TestNoDriver(t *testing.T) {
	addr(t)
	if !inChild(t, "unshare", "--mount", "sh", "-c", `mount -t tmpfs none /etc/libibverbs.d && exec "$0" "$@"`) {
		return
	}
	_, err := rdmacore.New(rdmacore.Config{})
	assert.ErrorIs(t, err, syscall.ENODEV)
	assert.ErrorContains(t, err, "the kernel has "+os.Getenv(deviceEnv))
	assert.ErrorContains(t, err, "ibverbs-providers")
}

// TestCloseOther closes a queue pair while the failure of another is in the completion
// queue that they share. What is posted to that one afterwards is flushed all the same.
func TestCloseOther(t *testing.T) {
	a := addr(t)
	env := verbstest.Env{Passive: open(t, rdmacore.Config{}), Addr: a}
	pair := verbstest.NewPair(t, env, verbstest.PairConfig{})
	e := verbstest.NewPair(t, env, verbstest.PairConfig{Share: pair}).Active
	require.NoError(t, e.SendCQ.Arm(false))
	e.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpSend, SGL: []ibv.SGE{{Buf: make([]byte, 8), LKey: 0xbad00}}})
	require.NoError(t, e.SendCQ.Wait(time.Now().Add(verbstest.Patience)))
	pair.Active.CloseQP(t)
	var wcs [4]ibv.WC
	n, err := e.SendCQ.Poll(wcs[:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	assert.Equal(t, uint64(1), wcs[0].ID)
	assert.NotEqual(t, ibv.WCSuccess, wcs[0].Status)
	e.Recv(t, ibv.RecvWR{ID: 2})
	require.Eventually(t, func() bool {
		n, err := e.RecvCQ.Poll(wcs[:])
		return assert.NoError(t, err) && n == 1
	}, verbstest.Patience, time.Millisecond)
	assert.Equal(t, uint64(2), wcs[0].ID)
	assert.Equal(t, ibv.WCFlushErr, wcs[0].Status)
}

// TestListenAnyPort has TCP hold one of the two ports that there are to choose from,
// which siw, whose connections are TCP's, cannot have as well.
func TestListenAnyPort(t *testing.T) {
	a := addr(t)
	p := open(t, rdmacore.Config{})
	tcp, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
	require.NoError(t, err)
	defer tcp.Close()
	taken := tcp.Addr().(*net.TCPAddr).Port
	const ports = "/proc/sys/net/ipv4/ip_local_port_range"
	before, err := os.ReadFile(ports)
	require.NoError(t, err)
	defer func() { require.NoError(t, os.WriteFile(ports, before, 0)) }()
	require.NoError(t, os.WriteFile(ports, fmt.Appendf(nil, "%d %d", taken&^1, taken|1), 0))
	for _, at := range []netip.Addr{a, {}} {
		for range 20 {
			l, err := p.Listen(t.Context(), netip.AddrPortFrom(at, 0), 1)
			require.NoError(t, err)
			require.NoError(t, l.Close())
		}
	}
}
