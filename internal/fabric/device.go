package fabric

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// Limits of the device.
const (
	maxQPWR     = 512
	maxInline   = 64
	maxPrivate  = 136
	maxMemories = 1 << 20
	maxGroups   = 1 << 10
)

type device struct {
	f *Fabric
}

func (d *device) Name() string { return "fabric0" }

func (d *device) Attr() ibv.DeviceAttr {
	var cheap ibv.Caps
	if !d.f.pins {
		cheap = ibv.CapOnDemandPaging | ibv.CapWaitReceives
	}
	return ibv.DeviceAttr{Transport: ibv.TransportRoCE, Caps: ibv.CapUD | ibv.CapSendImm | ibv.CapMulticast | cheap, Ports: d.f.ports(),
		MaxQP: 1 << 16, MaxQPWR: maxQPWR, MaxSGE: 1, MaxCQ: 1 << 16, MaxCQE: 1 << 16, MaxMR: maxMemories, MaxPD: 1 << 16,
		MaxMRSize: 1 << 40, MaxMessageSize: 4096, MaxAH: 1 << 16, MaxInlineUD: maxInline, MaxPrivateDataUD: maxPrivate,
		MaxMcastGrp: maxGroups, MaxMcastQPAttach: maxGroups}
}

func (d *device) Port(n int) (ibv.PortAttr, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	attr := ibv.PortAttr{State: ibv.PortActive, ActiveMTU: d.f.mtu, NetDev: "fab0"}
	for _, a := range d.f.addrs {
		attr.GIDs = append(attr.GIDs, ibv.GIDFromAddr(a.WithZone("")))
	}
	return attr, nil
}

func (d *device) AllocPD() (ibv.PD, error) { return &pd{}, nil }

// pd counts what depends on it.
type pd struct{ users atomic.Int32 }

func (p *pd) RegMR(buf []byte, _ ibv.Access) (ibv.MR, error) {
	p.users.Add(1)
	return &mr{pd: p, n: len(buf)}, nil
}

func (p *pd) CreateAH(attr ibv.AHAttr) (ibv.AH, error) {
	p.users.Add(1)
	return &ah{pd: p, to: netip.AddrFrom16(attr.GID).Unmap()}, nil
}

func (p *pd) CreateAHFromWC(_ int, wc *ibv.WC, grh []byte) (ibv.AH, error) {
	src, _, ok := ibv.GRHAddrs(grh)
	if !ok {
		return nil, syscall.EINVAL
	}
	p.users.Add(1)
	return &ah{pd: p, to: src}, nil
}

func (p *pd) Close() error {
	if p.users.Load() > 0 {
		return ibv.ErrBusy
	}
	return nil
}

type mr struct {
	pd *pd
	n  int
}

func (m *mr) LKey() uint32 { return 7 }
func (m *mr) RKey() uint32 { return 0 }
func (m *mr) Addr() uint64 { return 0 }
func (m *mr) Len() int     { return m.n }
func (m *mr) Close() error { m.pd.users.Add(-1); return nil }

type ah struct {
	pd     *pd
	to     netip.Addr
	closed atomic.Bool
}

func (a *ah) Close() error {
	if a.closed.Swap(true) {
		return net.ErrClosed
	}
	a.pd.users.Add(-1)
	return nil
}

func (d *device) CreateCQ(depth int) (ibv.CQ, error) {
	return &cq{depth: depth, event: make(chan struct{}, 1), rouse: make(chan struct{}, 1), done: make(chan struct{})}, nil
}

type cq struct {
	depth int
	event chan struct{}
	rouse chan struct{}
	done  chan struct{}

	mu     sync.Mutex
	wcs    ring.Ring[ibv.WC]
	armed  bool
	over   bool
	closed bool
	users  int
}

func (c *cq) add(wc ibv.WC) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wcs.Len() >= c.depth {
		c.over = true
		return
	}
	c.wcs.Push(wc)
	if c.armed {
		c.armed = false
		select {
		case c.event <- struct{}{}:
		default:
		}
	}
}

func (c *cq) Depth() int { return c.depth }

func (c *cq) Poll(wcs []ibv.WC) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return 0, net.ErrClosed
	case c.over:
		return 0, ibv.ErrCQOverrun
	}
	for n < len(wcs) && c.wcs.Len() > 0 {
		wcs[n] = c.wcs.Pop()
		n++
	}
	return n, nil
}

func (c *cq) Arm(bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.armed = true
	return nil
}

func (c *cq) Wait(deadline time.Time) error {
	var timeout <-chan time.Time
	if !deadline.IsZero() {
		t := time.NewTimer(time.Until(deadline))
		defer t.Stop()
		timeout = t.C
	}
	select {
	case <-c.event:
		return nil
	case <-c.rouse:
		return ibv.ErrInterrupted
	case <-c.done:
		return net.ErrClosed
	case <-timeout:
		return os.ErrDeadlineExceeded
	}
}

func (c *cq) Interrupt() {
	select {
	case c.rouse <- struct{}{}:
	default:
	}
}

func (c *cq) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return net.ErrClosed
	case c.users > 0:
		return ibv.ErrBusy
	}
	c.closed = true
	close(c.done)
	return nil
}

func (c *cq) use(n int) {
	c.mu.Lock()
	c.users += n
	c.mu.Unlock()
}

// qp is a queue pair, under the fabric's mu.
type qp struct {
	f          *Fabric
	id         *id
	pd         *pd
	num        uint32
	cap        ibv.QPCap
	send, recv *cq
	state      ibv.QPState
	closed     bool
	attached   map[ibv.GID]bool

	recvs ring.Ring[posted]
	sends ring.Ring[parcel] // not yet sent
	out   Packet
}

type posted struct {
	id  uint64
	buf []byte
}

// parcel is a send; its payload is a copy only while it has to wait.
type parcel struct {
	id uint64
	Packet
}

func (q *qp) QPN() uint32    { return q.num }
func (q *qp) Cap() ibv.QPCap { return q.cap }

func (q *qp) State() ibv.QPState {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.state
}

func (q *qp) PostRecv(wrs []ibv.RecvWR) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	for i := range wrs {
		switch {
		case q.closed:
			return i, net.ErrClosed
		case q.recvs.Len() >= q.cap.MaxRecvWR:
			return i, ibv.ErrQueueFull
		case q.state == ibv.QPSError:
			q.recv.add(ibv.WC{ID: wrs[i].ID, Status: ibv.WCFlushErr, QPN: q.num})
			continue
		}
		q.recvs.Push(posted{wrs[i].ID, wrs[i].SGL[0].Buf})
	}
	return len(wrs), nil
}

func (q *qp) PostSend(wrs []ibv.SendWR) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	for i := range wrs {
		if err := q.post(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *qp) post(wr *ibv.SendWR) error {
	a, ok := wr.AH.(*ah)
	var payload []byte
	if len(wr.SGL) > 0 {
		payload = wr.SGL[0].Buf
	}
	switch {
	case q.closed:
		return net.ErrClosed
	case q.sends.Len() >= q.cap.MaxSendWR:
		return ibv.ErrQueueFull
	case !ok || a.pd != q.pd || a.closed.Load():
		return fmt.Errorf("address handle: %w", syscall.EINVAL)
	case len(payload) > q.f.mtu, wr.Flags&ibv.SendInline != 0 && len(payload) > q.cap.MaxInline:
		return ibv.ErrLimit
	case wr.Flags&ibv.SendInline == 0 && len(payload) > 0 && wr.SGL[0].LKey != 7:
		return fmt.Errorf("key of no memory: %w", syscall.EINVAL)
	case q.state == ibv.QPSError:
		q.send.add(ibv.WC{ID: wr.ID, Status: ibv.WCFlushErr, QPN: q.num})
		return nil
	}
	p := parcel{wr.ID, Packet{From: q.id.local.Addr().WithZone(""), To: a.to, SrcQPN: q.num, DstQPN: wr.RemoteQPN,
		QKey: wr.RemoteQKey, Imm: wr.Imm, HasImm: wr.Op == ibv.OpSendImm, Payload: payload}}
	if q.f.stalled {
		p.Payload = append([]byte(nil), payload...)
		q.sends.Push(p)
		return nil
	}
	q.transmit(&p)
	return nil
}

// run sends what had to wait.
func (q *qp) run() {
	for !q.f.stalled && q.sends.Len() > 0 {
		p := q.sends.Pop()
		q.transmit(&p)
	}
}

func (q *qp) transmit(p *parcel) {
	q.out = p.Packet
	q.f.deliver(&q.out)
	q.out = Packet{}
	q.send.add(ibv.WC{ID: p.id, Op: ibv.WCSend, QPN: q.num})
}

func (q *qp) receive(p *Packet) {
	r := q.recvs.Pop()
	if ibv.GRHLen+len(p.Payload) > len(r.buf) {
		q.recv.add(ibv.WC{ID: r.id, Status: ibv.WCLocLenErr, QPN: q.num})
		q.fail()
		return
	}
	wc := ibv.WC{ID: r.id, Op: ibv.WCRecv, QPN: q.num, SrcQP: p.SrcQPN, ByteLen: uint32(ibv.GRHLen + len(p.Payload))}
	if p.HasImm {
		wc.Flags |= ibv.WCWithImm
		wc.Imm = p.Imm
	}
	if !p.NoGRH {
		wc.Flags |= ibv.WCGRH
		putGRH(r.buf, p.From, p.To)
	}
	copy(r.buf[ibv.GRHLen:], p.Payload)
	q.recv.add(wc)
}

// putGRH writes the header as RoCE does: that of IPv6, or of IPv4 at the end.
func putGRH(b []byte, from, to netip.Addr) {
	clear(b[:ibv.GRHLen])
	if from.Is4() {
		h := b[ibv.GRHLen-20 : ibv.GRHLen]
		h[0] = 0x45
		src, dst := from.As4(), [4]byte{}
		if to.Is4() {
			dst = to.As4()
		}
		copy(h[12:], src[:])
		copy(h[16:], dst[:])
		var sum uint32
		for i := 0; i < len(h); i += 2 {
			sum += uint32(h[i])<<8 | uint32(h[i+1])
		}
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		h[10], h[11] = byte(^sum>>8), byte(^sum)
		return
	}
	b[0] = 0x60
	src, dst := from.As16(), to.As16()
	copy(b[8:], src[:])
	copy(b[24:], dst[:])
}

// fail moves the queue pair to the error state.
func (q *qp) fail() {
	q.state = ibv.QPSError
	for q.recvs.Len() > 0 {
		q.recv.add(ibv.WC{ID: q.recvs.Pop().id, Status: ibv.WCFlushErr, QPN: q.num})
	}
	for q.sends.Len() > 0 {
		q.send.add(ibv.WC{ID: q.sends.Pop().id, Status: ibv.WCFlushErr, QPN: q.num})
	}
}

func (q *qp) SetError() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.fail()
	return nil
}

// RegMR returns an error that matches errors.ErrUnsupported.
func (q *qp) RegMR([]byte, ibv.Access) (ibv.MR, error) {
	return nil, ibv.Unsupported("fabric0", "regions of one queue pair")
}

func (q *qp) Close() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	switch {
	case q.closed:
		return net.ErrClosed
	case len(q.attached) > 0 || q.id.member():
		return ibv.ErrBusy
	}
	q.closed = true
	delete(q.f.qps, q.num)
	q.send.use(-1)
	q.recv.use(-1)
	q.pd.users.Add(-1)
	q.id.qp = nil
	return nil
}
