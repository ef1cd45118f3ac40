package udconn

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// queuePair is the UD queue pair by which a Conn sends and receives on one port of an RDMA
// device. Its halves have a completion queue each, so that writers and readers do not wait
// for one lock.
type queuePair struct {
	*shared
	owner owner
	id    ibv.ID
	dom   *regmem.Domain
	qp    ibv.QP

	recv   recvQueue
	send   sendQueue
	groups groupSet
}

// owner is what a queue pair belongs to.
type owner interface {
	// tick and sender are those of senders, for a datagram that a queue pair has received.
	tick()
	sender(q *queuePair, host, to netip.Addr, wc *ibv.WC) (from netip.AddrPort, own, ok bool)

	// failed is called when a queue pair is of no use any more, with receiver.mu or sender.mu
	// held. It drops the queue pair in a goroutine of its own.
	failed(q *queuePair, err error)

	// forget drops the paths by a queue pair, with receiver.mu and sender.mu held.
	forget(q *queuePair)
}

// newQueuePair makes the queue pair on an ID, which it takes over.
func newQueuePair(s *shared, o owner, to *receiver, by *sender, id ibv.ID) (*queuePair, error) {
	q := &queuePair{shared: s, owner: o, id: id}
	device := id.Device().Name()
	fail := func(err error) { o.failed(q, err) }
	q.recv.to, q.recv.senders, q.recv.failed, q.recv.device = to, q, fail, device
	q.send.shared, q.send.by, q.send.failedWith, q.send.device, q.send.sent = s, by, fail, device, &q.recv.sent
	q.groups.id, q.groups.recv, q.groups.event = id, &q.recv, q.event
	if err := q.acquire(); err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

func (q *queuePair) acquire() (err error) {
	dev := q.id.Device()
	if q.dom, err = regmem.Acquire(dev, q.Lasting, q.Advice); err != nil {
		return err
	}
	attr := dev.Attr()
	recvs, sends := min(ReceiveSlots, attr.MaxQPWR, attr.MaxCQE), min(SendSlots, attr.MaxQPWR, attr.MaxCQE)
	var mem *regmem.Buffer
	for {
		mem, err = q.dom.Pool(recvs * SlotSize).Get()
		if err == nil || recvs/2 < minReceiveSlots || !errors.Is(err, errno.ENOBUFS) {
			break
		}
		recvs /= 2 // Little memory may be registered.
	}
	if err != nil {
		return err
	}
	sends = min(sends, recvs)
	q.send.room = uint64(sends)
	if err = q.recv.acquire(dev, mem, recvs); err != nil {
		return err
	}
	if q.send.cq, err = dev.CreateCQ(sends); err != nil {
		return err
	}
	q.send.inline, q.send.pd = attr.MaxInlineUD, q.dom.PD
	if q.qp, err = q.id.CreateQP(q.dom.PD, ibv.QPInit{SendCQ: q.send.cq, RecvCQ: q.recv.cq,
		Cap: ibv.QPCap{MaxSendWR: sends, MaxRecvWR: recvs, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInline: attr.MaxInlineUD}}); err != nil {
		return err
	}
	q.send.qp, q.groups.qp = q.qp, q.qp
	if err = q.recv.post(q.qp); err != nil {
		return err
	}
	if q.send.mem, err = q.dom.Pool(sends * SlotSize).Get(); err != nil {
		return err
	}
	port, err := dev.Port(q.id.Port())
	q.recv.zone = port.NetDev
	return err
}

// start readies the waits for completions. background says when a goroutine of the queue
// pair waits for receives.
func (q *queuePair) start(background cqwait.Background) {
	q.recv.start(cqwait.Config{BusyPoll: q.BusyPoll, Polls: !q.id.Device().Attr().Caps.Has(ibv.CapWaitReceives), Background: background})
	q.send.start()
}

// tick implements senders.
func (q *queuePair) tick() { q.owner.tick() }

// sender implements senders.
func (q *queuePair) sender(host, to netip.Addr, wc *ibv.WC) (from netip.AddrPort, own, ok bool) {
	return q.owner.sender(q, host, to, wc)
}

// privateData returns the private data of requests and replies of this queue pair.
func (q *queuePair) privateData() []byte {
	return PrivateData{Port: q.local.Port(), QPN: q.qp.QPN()}.Append(nil)
}

func (q *queuePair) info() Info {
	dev := q.id.Device()
	mtu, _ := portMTU(dev, q.id.Port())
	return Info{Device: dev.Name(), Transport: dev.Attr().Transport.String(), Port: q.id.Port(), QPN: q.qp.QPN(), MTU: mtu}
}

// portMTU returns how many bytes a datagram may have on a port.
func portMTU(dev ibv.Device, port int) (int, error) {
	attr, err := dev.Port(port)
	return min(attr.ActiveMTU, maxPayload), err
}

// event is called by the device. It has the queue pair dropped if that is of no use any
// more, or has lost a group, which the next one joins again. A port that is down may come
// back.
func (q *queuePair) event(e ibv.Event) {
	if e.Kind != ibv.EventQPFatal && e.Kind != ibv.EventDeviceRemoval && e.Kind != ibv.EventMulticastError {
		return
	}
	err := errors.New(e.Kind.String())
	if e.Err != nil {
		err = fmt.Errorf("%s: %w", e.Kind, e.Err)
	}
	go func() {
		q.send.by.mu.Lock()
		defer q.send.by.mu.Unlock()
		q.owner.failed(q, err)
	}()
}

// close releases everything, in the order that verbs want. Once the queue pair has groups the
// caller holds groups.mu.
func (q *queuePair) close() (err error) {
	err = q.groups.leaveAll()
	if q.qp != nil {
		err = errors.Join(err, q.qp.Close())
	}
	err = errors.Join(err, q.send.closeHandles())
	for _, cq := range []ibv.CQ{q.recv.cq, q.send.cq} {
		if cq != nil {
			err = errors.Join(err, cq.Close())
		}
	}
	err = errors.Join(err, q.id.Close())
	for _, b := range []*regmem.Buffer{q.recv.mem, q.send.mem} {
		if b != nil {
			b.Release()
		}
	}
	if q.dom != nil {
		err = errors.Join(err, q.dom.Release())
	}
	return err
}
