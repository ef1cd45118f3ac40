package verbstest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// The types of objects that a Switch counts.
const (
	objListener = iota
	objID
	objQP
	objCQ
	objMR
	objAH
	objPD
	numObjects
)

var objectNames = [numObjects]string{"Listener", "ID", "QP", "CQ", "MR", "AH", "PD"}

// object counts one live object until the first Close that succeeds.
type object struct {
	s      *Switch
	what   int
	bytes  int64 // registered, of a region
	closed atomic.Bool
}

func (s *Switch) opened(what int) *object {
	s.live[what].Add(1)
	return &object{s: s, what: what}
}

func (o *object) close(k Kind, inner io.Closer) error {
	if f := o.s.enter(k); f != nil {
		return f.err
	}
	err := inner.Close()
	if err == nil && o.closed.CompareAndSwap(false, true) {
		o.s.live[o.what].Add(-1)
		o.s.registered.Add(-o.bytes)
	}
	return err
}

// The wrappers embed the inner interface: what they do not define goes straight
// through.

type switchDevice struct {
	ibv.Device
	s *Switch
}

func (d *switchDevice) Port(n int) (ibv.PortAttr, error) {
	if f := d.s.enter(QueryPort); f != nil {
		return ibv.PortAttr{}, f.err
	}
	return d.Device.Port(n)
}

func (d *switchDevice) AllocPD() (ibv.PD, error) {
	if f := d.s.enter(AllocPD); f != nil {
		return nil, f.err
	}
	pd, err := d.Device.AllocPD()
	if err != nil {
		return nil, err
	}
	return &switchPD{PD: pd, object: d.s.opened(objPD)}, nil
}

func (d *switchDevice) CreateCQ(depth int) (ibv.CQ, error) {
	if f := d.s.enter(CreateCQ); f != nil {
		return nil, f.err
	}
	cq, err := d.Device.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	return &switchCQ{CQ: cq, dev: d, object: d.s.opened(objCQ)}, nil
}

type switchPD struct {
	ibv.PD
	*object
}

func (p *switchPD) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	return p.s.register(p.PD.RegMR, buf, access)
}

// register is RegMR of a domain or of a queue pair.
func (s *Switch) register(inner func([]byte, ibv.Access) (ibv.MR, error), buf []byte, access ibv.Access) (ibv.MR, error) {
	if f := s.enter(RegMR); f != nil {
		return nil, f.err
	}
	n := int64(len(buf))
	now := s.registered.Add(n) // first, so that two at once do not both fit
	if limit := s.limit.Load(); limit > 0 && now > limit {
		s.registered.Add(-n)
		return nil, fmt.Errorf("register %d bytes beyond a limit of %d: %w", n, limit, errno.ENOMEM)
	}
	mr, err := inner(buf, access)
	if err != nil {
		s.registered.Add(-n)
		return nil, err
	}
	o := s.opened(objMR)
	o.bytes = n
	return &switchMR{MR: mr, object: o}, nil
}

func (p *switchPD) Close() error { return p.close(ClosePD, p.PD) }

type switchMR struct {
	ibv.MR
	*object
}

func (m *switchMR) Close() error { return m.close(CloseMR, m.MR) }

type switchCQ struct {
	ibv.CQ
	*object
	dev *switchDevice
}

func (c *switchCQ) Poll(wcs []ibv.WC) (int, error) {
	if f := c.s.enter(Poll); f != nil {
		return 0, f.err
	}
	n, err := c.CQ.Poll(wcs)
	c.s.moved[movedCompletions].Add(int64(n))
	if n > 0 && c.s.spoil.Load() {
		c.s.spoilCompletions(c.dev, wcs[:n])
	}
	return n, err
}

func (c *switchCQ) Arm(solicitedOnly bool) error {
	if f := c.s.enter(Arm); f != nil {
		return f.err
	}
	return c.CQ.Arm(solicitedOnly)
}

func (c *switchCQ) Wait(deadline time.Time) error {
	if f := c.s.enter(Wait); f != nil {
		return f.err
	}
	return c.CQ.Wait(deadline)
}

func (c *switchCQ) Close() error { return c.close(CloseCQ, c.CQ) }

type switchListener struct {
	ibv.Listener
	*object
}

func (l *switchListener) Accept(ctx context.Context) (ibv.ID, error) {
	if f := l.s.enter(ListenerAccept); f != nil {
		return nil, f.err
	}
	id, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return l.s.id(id), nil
}

func (l *switchListener) Close() error { return l.close(CloseListener, l.Listener) }

type switchID struct {
	ibv.ID
	*object
	dev *switchDevice
}

func (s *Switch) id(id ibv.ID) *switchID {
	return &switchID{ID: id, object: s.opened(objID), dev: s.device(id.Device())}
}

func (i *switchID) Device() ibv.Device { return i.dev }

// Unsent implements ibv.Unsender where the device does.
func (i *switchID) Unsent() int {
	if f, ok := i.ID.(ibv.Unsender); ok {
		return f.Unsent()
	}
	return 0
}

// Acknowledged implements ibv.Acknowledger where the device does.
func (i *switchID) Acknowledged() ibv.Ack {
	if a, ok := i.ID.(ibv.Acknowledger); ok {
		return a.Acknowledged()
	}
	return ibv.AckUnknown
}

// Ending implements ibv.Ender where the device does.
func (i *switchID) Ending() {
	if e, ok := i.ID.(ibv.Ender); ok {
		e.Ending()
	}
}

// ProbeHost implements ibv.HostProber where the device does.
func (i *switchID) ProbeHost(idle, patience time.Duration) bool {
	p, ok := i.ID.(ibv.HostProber)
	return ok && p.ProbeHost(idle, patience)
}

// HostHeard implements ibv.HostProber where the device does.
func (i *switchID) HostHeard() (ago time.Duration, owes bool) {
	if p, ok := i.ID.(ibv.HostProber); ok {
		return p.HostHeard()
	}
	return 0, false
}

func (i *switchID) CreateQP(pd ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	if f := i.s.enter(CreateQP); f != nil {
		return nil, f.err
	}
	// The inner device knows only its own objects.
	if p, ok := pd.(*switchPD); ok {
		pd = p.PD
	}
	if c, ok := init.SendCQ.(*switchCQ); ok {
		init.SendCQ = c.CQ
	}
	if c, ok := init.RecvCQ.(*switchCQ); ok {
		init.RecvCQ = c.CQ
	}
	inner, err := i.ID.CreateQP(pd, init)
	if err != nil {
		return nil, err
	}
	qp := &switchQP{QP: inner, object: i.s.opened(objQP), key: qpKey{i.dev, inner.QPN()}}
	i.s.mu.Lock()
	i.s.qps[qp.key] = qp
	i.s.mu.Unlock()
	return qp, nil
}

func (i *switchID) Connect(ctx context.Context, param ibv.ConnParam) error {
	if f := i.s.enter(Connect); f != nil {
		return f.err
	}
	return i.ID.Connect(ctx, param)
}

func (i *switchID) Accept(ctx context.Context, param ibv.ConnParam) error {
	if f := i.s.enter(Accept); f != nil {
		return f.err
	}
	return i.ID.Accept(ctx, param)
}

func (i *switchID) Reject(private []byte) error {
	if f := i.s.enter(Reject); f != nil {
		return f.err
	}
	return i.ID.Reject(private)
}

func (i *switchID) Disconnect() error {
	if f := i.s.enter(Disconnect); f != nil {
		return f.err
	}
	return i.ID.Disconnect()
}

func (i *switchID) Close() error { return i.close(CloseID, i.ID) }

type switchQP struct {
	ibv.QP
	*object
	key     qpKey
	spoilt  [2]bool    // send and receive queue; under s.mu
	closing sync.Mutex // keeps breakDown and Close apart
}

func (q *switchQP) PostSend(wrs []ibv.SendWR) (int, error) {
	f := q.s.enter(PostSend)
	n, err := cutShort(f, innerAHs(wrs), q.QP.PostSend)
	q.s.moved[movedSends].Add(int64(n))
	return n, err
}

func (q *switchQP) PostRecv(wrs []ibv.RecvWR) (int, error) {
	n, err := cutShort(q.s.enter(PostRecv), wrs, q.QP.PostRecv)
	q.s.moved[movedRecvs].Add(int64(n))
	return n, err
}

// PostInPlace implements ibv.InPlaceQP. Without that of the device it is PostSend.
func (q *switchQP) PostInPlace(wrs []ibv.SendWR) (n int, lent bool, err error) {
	p, ok := q.QP.(ibv.InPlaceQP)
	if !ok {
		n, err = q.PostSend(wrs)
		return n, false, err
	}
	n, err = cutShort(q.s.enter(PostSend), innerAHs(wrs), func(wrs []ibv.SendWR) (int, error) {
		n, h, err := p.PostInPlace(wrs)
		lent = lent || h
		return n, err
	})
	q.s.moved[movedSends].Add(int64(n))
	return n, lent, err
}

// StopHolding implements ibv.HoldingQP where the device does.
func (q *switchQP) StopHolding() {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		h.StopHolding()
	}
}

// SendsHaveRoom implements ibv.HoldingQP where the device does.
func (q *switchQP) SendsHaveRoom() bool {
	h, ok := q.QP.(ibv.HoldingQP)
	return !ok || h.SendsHaveRoom()
}

// CloseSends implements ibv.HoldingQP where the device does.
func (q *switchQP) CloseSends() error {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		return h.CloseSends()
	}
	return errors.ErrUnsupported
}

// PeerCloses implements ibv.HoldingQP where the device does.
func (q *switchQP) PeerCloses() {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		h.PeerCloses()
	}
}

// PeerHolds implements ibv.HoldingQP where the device does.
func (q *switchQP) PeerHolds() {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		h.PeerHolds()
	}
}

func (q *switchQP) Flush() (left int, err error) { return q.QP.(ibv.InPlaceQP).Flush() }
func (q *switchQP) FlushInterrupt()              { q.QP.(ibv.InPlaceQP).FlushInterrupt() }
func (q *switchQP) Keep() (left int, err error)  { return q.QP.(ibv.InPlaceQP).Keep() }

// Idle passes the call on to a queue pair that has it.
func (q *switchQP) Idle(unused func(buf []byte)) {
	if idle, ok := q.QP.(ibv.IdleQP); ok {
		idle.Idle(unused)
	}
}

// cutShort posts what the fault lets through and fails the next one. Without a fault it
// posts all.
func cutShort[WR any](f *Fault, wrs []WR, post func([]WR) (int, error)) (int, error) {
	if f == nil {
		return post(wrs)
	}
	taken := min(f.taken, len(wrs)-1)
	if taken <= 0 {
		return 0, f.err
	}
	if n, err := post(wrs[:taken]); err != nil {
		return n, err
	}
	return taken, f.err
}

func (q *switchQP) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	return q.s.register(q.QP.RegMR, buf, access)
}

func (q *switchQP) SetError() error {
	if f := q.s.enter(SetError); f != nil {
		return f.err
	}
	return q.QP.SetError()
}

// breakDown moves the queue pair to the error state unless it is closed.
func (q *switchQP) breakDown() {
	q.closing.Lock()
	defer q.closing.Unlock()
	if !q.closed.Load() {
		_ = q.QP.SetError() // it may be in the error state already
	}
}

func (q *switchQP) Close() error {
	q.closing.Lock()
	defer q.closing.Unlock()
	err := q.close(CloseQP, q.QP)
	if err != nil {
		return err
	}
	q.s.mu.Lock()
	defer q.s.mu.Unlock()
	if q.s.qps[q.key] == q { // the device may have given the number away again
		delete(q.s.qps, q.key)
	}
	return nil
}
