package verbstest

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// The fake devices do nothing: every call succeeds, and what was posted
// completes at the next Poll of the queue.

type fakeProvider struct{ dev fakeDevice }

func (p *fakeProvider) Name() string                   { return "fake" }
func (p *fakeProvider) Attr() ibv.ProviderAttr         { return ibv.ProviderAttr{} }
func (p *fakeProvider) Devices() ([]ibv.Device, error) { return []ibv.Device{&p.dev}, nil }
func (p *fakeProvider) Resolve(context.Context, netip.AddrPort, netip.AddrPort) (ibv.ID, error) {
	return &fakeID{dev: &p.dev}, nil
}
func (p *fakeProvider) Listen(context.Context, netip.AddrPort, int) (ibv.Listener, error) {
	return &fakeListener{dev: &p.dev}, nil
}

func (p *fakeProvider) BindUD(context.Context, netip.AddrPort) (ibv.ID, error) {
	return &fakeID{dev: &p.dev}, nil
}
func (p *fakeProvider) ResolveUD(context.Context, netip.AddrPort, netip.AddrPort) (ibv.ID, error) {
	return &fakeID{dev: &p.dev}, nil
}
func (p *fakeProvider) ListenUD(context.Context, netip.AddrPort, int) (ibv.Listener, error) {
	return &fakeListener{dev: &p.dev}, nil
}

type fakeDevice struct {
	mu  sync.Mutex
	qpn uint32
}

func (d *fakeDevice) Name() string                       { return "fake0" }
func (d *fakeDevice) Attr() ibv.DeviceAttr               { return ibv.DeviceAttr{Ports: 1} }
func (d *fakeDevice) Port(int) (ibv.PortAttr, error)     { return ibv.PortAttr{State: ibv.PortActive}, nil }
func (d *fakeDevice) AllocPD() (ibv.PD, error)           { return &fakePD{}, nil }
func (d *fakeDevice) CreateCQ(depth int) (ibv.CQ, error) { return &fakeCQ{depth: depth}, nil }

type fakePD struct{ closeErr error }

func (p *fakePD) RegMR(buf []byte, _ ibv.Access) (ibv.MR, error) { return &fakeMR{buf}, nil }
func (p *fakePD) CreateAH(ibv.AHAttr) (ibv.AH, error)            { return &fakeAH{}, nil }
func (p *fakePD) CreateAHFromWC(int, *ibv.WC, []byte) (ibv.AH, error) {
	return &fakeAH{}, nil
}
func (p *fakePD) Close() error { return p.closeErr }

type fakeAH struct{}

func (a *fakeAH) Close() error { return nil }

type fakeMR struct{ buf []byte }

func (m *fakeMR) LKey() uint32 { return 1 }
func (m *fakeMR) RKey() uint32 { return 2 }
func (m *fakeMR) Addr() uint64 { return 0 }
func (m *fakeMR) Len() int     { return len(m.buf) }
func (m *fakeMR) Close() error { return nil }

type fakeCQ struct {
	depth int
	mu    sync.Mutex
	wcs   []ibv.WC
}

func (c *fakeCQ) add(wc ibv.WC) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wcs = append(c.wcs, wc)
}
func (c *fakeCQ) Poll(wcs []ibv.WC) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(wcs, c.wcs)
	c.wcs = c.wcs[n:]
	return n, nil
}
func (c *fakeCQ) Depth() int           { return c.depth }
func (c *fakeCQ) Arm(bool) error       { return nil }
func (c *fakeCQ) Wait(time.Time) error { return nil }
func (c *fakeCQ) Interrupt()           {}
func (c *fakeCQ) Close() error         { return nil }

type fakeListener struct{ dev *fakeDevice }

func (l *fakeListener) Addr() netip.AddrPort                   { return netip.AddrPort{} }
func (l *fakeListener) Accept(context.Context) (ibv.ID, error) { return &fakeID{dev: l.dev}, nil }
func (l *fakeListener) Close() error                           { return nil }

type fakeID struct{ dev *fakeDevice }

func (i *fakeID) Device() ibv.Device         { return i.dev }
func (i *fakeID) Port() int                  { return 1 }
func (i *fakeID) LocalAddr() netip.AddrPort  { return netip.AddrPort{} }
func (i *fakeID) RemoteAddr() netip.AddrPort { return netip.AddrPort{} }
func (i *fakeID) CreateQP(pd ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	// Like every device the fake takes its own objects only.
	_ = pd.(*fakePD)
	i.dev.mu.Lock()
	defer i.dev.mu.Unlock()
	i.dev.qpn++
	return &fakeQP{qpn: i.dev.qpn, send: init.SendCQ.(*fakeCQ), recv: init.RecvCQ.(*fakeCQ)}, nil
}
func (i *fakeID) Connect(context.Context, ibv.ConnParam) error { return nil }
func (i *fakeID) Accept(context.Context, ibv.ConnParam) error  { return nil }
func (i *fakeID) Reject([]byte) error                          { return nil }
func (i *fakeID) PrivateData() []byte                          { return nil }
func (i *fakeID) MaySendFirst() bool                           { return true }
func (i *fakeID) Param() ibv.ConnParam                         { return ibv.ConnParam{} }
func (i *fakeID) UDParam() ibv.UDParam                         { return ibv.UDParam{} }
func (i *fakeID) JoinMulticast(context.Context, netip.Addr, ibv.JoinFlags) (ibv.UDParam, error) {
	return ibv.UDParam{}, nil
}
func (i *fakeID) LeaveMulticast(netip.Addr) error { return nil }
func (i *fakeID) PathMTU() int                    { return 0 }
func (i *fakeID) Notify(func(ibv.Event))          {}
func (i *fakeID) Disconnect() error               { return nil }
func (i *fakeID) Close() error                    { return nil }

type fakeQP struct {
	qpn        uint32
	send, recv *fakeCQ

	mu    sync.Mutex
	state ibv.QPState
}

func (q *fakeQP) QPN() uint32    { return q.qpn }
func (q *fakeQP) Cap() ibv.QPCap { return ibv.QPCap{} }
func (q *fakeQP) State() ibv.QPState {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state
}
func (q *fakeQP) PostSend(wrs []ibv.SendWR) (int, error) {
	for _, wr := range wrs {
		if wr.AH != nil {
			_ = wr.AH.(*fakeAH) // its own, too
		}
		q.send.add(ibv.WC{ID: wr.ID, QPN: q.qpn, Op: ibv.WCSend})
	}
	return len(wrs), nil
}
func (q *fakeQP) PostRecv(wrs []ibv.RecvWR) (int, error) {
	for _, wr := range wrs {
		q.recv.add(ibv.WC{ID: wr.ID, QPN: q.qpn, Op: ibv.WCRecv, ByteLen: 5})
	}
	return len(wrs), nil
}
func (q *fakeQP) RegMR(buf []byte, _ ibv.Access) (ibv.MR, error) { return &fakeMR{buf}, nil }
func (q *fakeQP) SetError() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.state = ibv.QPSError
	return nil
}
func (q *fakeQP) AttachMcast(ibv.GID, uint16) error { return nil }
func (q *fakeQP) DetachMcast(ibv.GID, uint16) error { return nil }
func (q *fakeQP) Close() error                      { return nil }
