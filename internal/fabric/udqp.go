package fabric

import (
	"fmt"
	"net"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// udQP implements ibv.QP for datagrams. Fabric.mu guards it.
type udQP struct {
	qpBase
	id       *udID
	all      bool // every send is signalled
	state    ibv.QPState
	closed   bool
	attached map[ibv.GID]bool

	recvs  ring.Ring[recvReq]
	sends  ring.Ring[udSend] // sends that Stall holds back
	out    Packet            // memory for the datagram that is sent
	gather []byte            // and for its payload where that is several elements
	header [ibv.GRHLen]byte  // and for the header of one that is received
}

// udSend is a send that waits, with a payload of its own.
type udSend struct {
	id       uint64
	signaled bool
	Packet
}

func (i *udID) CreateQP(p ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	switch {
	case i.closed:
		return nil, net.ErrClosed
	case i.qp != nil:
		return nil, fmt.Errorf("%s: create queue pair: %w", deviceName, ibv.ErrState)
	}
	base, err := i.f.newBase(p, &init, maxInlineUD)
	if err != nil {
		return nil, fmt.Errorf("%s: create queue pair: %w", deviceName, err)
	}
	q := &udQP{qpBase: base, id: i, all: init.SignalAll, state: ibv.QPSRTS}
	i.qp = q
	i.f.udQPs[q.num] = q
	return q, nil
}

func (q *udQP) State() ibv.QPState {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return q.state
}

func (q *udQP) PostRecv(wrs []ibv.RecvWR) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	for i := range wrs {
		wr := &wrs[i]
		switch {
		case q.closed:
			return i, net.ErrClosed
		case q.state == ibv.QPSError:
			q.recvCQ.add(&ibv.WC{ID: wr.ID, Status: ibv.WCFlushErr, QPN: q.num}, false)
			continue
		}
		if err := pushRecv(&q.recvs, wr, &q.cap); err != nil {
			return i, fmt.Errorf("%s: post receive: %w", deviceName, err)
		}
	}
	return len(wrs), nil
}

func (q *udQP) PostSend(wrs []ibv.SendWR) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	for i := range wrs {
		if err := q.post(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (q *udQP) post(wr *ibv.SendWR) error {
	q.f.gate.RLock()
	defer q.f.gate.RUnlock()
	if q.closed {
		return net.ErrClosed
	}
	if q.state == ibv.QPSError {
		q.sendCQ.add(&ibv.WC{ID: wr.ID, Status: ibv.WCFlushErr, QPN: q.num}, false)
		return nil
	}
	if err := q.check(wr); err != nil {
		return err
	}
	q.out = Packet{From: q.id.local.Addr().WithZone(""), To: wr.AH.(*ah).to, SrcQPN: q.num, DstQPN: wr.RemoteQPN,
		QKey: wr.RemoteQKey, Imm: wr.Imm, HasImm: wr.Op == ibv.OpSendImm, Payload: q.payload(wr.SGL),
		solicited: wr.Flags&ibv.SendSolicited != 0}
	s := udSend{id: wr.ID, signaled: q.all || wr.Flags&ibv.SendSignaled != 0}
	if !q.f.stalled {
		q.transmit(&s)
		return nil
	}
	s.Packet = q.out
	s.Payload = append([]byte(nil), q.out.Payload...)
	q.sends.Push(s)
	return nil
}

// check reports why a request cannot be sent. The caller holds Fabric.gate.
func (q *udQP) check(wr *ibv.SendWR) error {
	a, ok := wr.AH.(*ah)
	n, fits := sizeOf(wr.SGL, q.f.mtu)
	inline := wr.Flags&ibv.SendInline != 0
	switch {
	case q.sends.Len() >= q.cap.MaxSendWR:
		return ibv.ErrQueueFull
	case wr.Op != ibv.OpSend && wr.Op != ibv.OpSendImm:
		return ibv.Unsupported(deviceName, "datagram by "+wr.Op.String())
	case !ok || a.pd != q.pd || a.closed:
		return fmt.Errorf("%s: address handle: %w", deviceName, syscall.EINVAL)
	case len(wr.SGL) > q.cap.MaxSendSGE, !fits, inline && n > q.cap.MaxInline:
		return fmt.Errorf("%s: datagram of %d elements: %w", deviceName, len(wr.SGL), ibv.ErrLimit)
	case !inline && !q.pd.mayUse(wr.SGL, false):
		return fmt.Errorf("%s: datagram: %w", deviceName, ibv.WCLocProtErr)
	}
	return nil
}

// payload returns the bytes of a list, which stay where they are if they are one element.
func (q *udQP) payload(sgl []ibv.SGE) []byte {
	switch len(sgl) {
	case 0:
		return nil
	case 1:
		return sgl[0].Buf
	}
	q.gather = q.gather[:0]
	for i := range sgl {
		q.gather = append(q.gather, sgl[i].Buf...)
	}
	return q.gather
}

// run sends what had to wait. The caller holds Fabric.mu.
func (q *udQP) run() {
	q.f.gate.RLock()
	defer q.f.gate.RUnlock()
	for !q.f.stalled && q.sends.Len() > 0 {
		s := q.sends.Pop()
		q.out = s.Packet
		q.transmit(&s)
	}
}

// transmit sends the datagram in out. The caller holds Fabric.mu and Fabric.gate.
func (q *udQP) transmit(s *udSend) {
	q.f.deliver(&q.out)
	q.out = Packet{}
	if s.signaled {
		q.sendCQ.add(&ibv.WC{ID: s.id, Op: ibv.WCSend, QPN: q.num}, false)
	}
}

// receive puts a datagram into the oldest receive. The caller holds Fabric.mu and
// Fabric.gate.
func (q *udQP) receive(p *Packet) {
	r := q.recvs.At(0)
	n := ibv.GRHLen + len(p.Payload)
	wc := ibv.WC{ID: r.id, Op: ibv.WCRecv, QPN: q.num, SrcQP: p.SrcQPN, ByteLen: uint32(n)}
	switch {
	case n > r.size:
		wc.Status = ibv.WCLocLenErr
	case !q.pd.mayUse(r.sgl, true):
		wc.Status = ibv.WCLocProtErr
	default:
		q.place(p, r.sgl, &wc)
	}
	r.drop(&q.recvs)
	q.recvCQ.add(&wc, p.solicited)
	if wc.Status != ibv.WCSuccess {
		q.fail()
	}
}

// place copies a datagram, behind the room for its header.
func (q *udQP) place(p *Packet, dst []ibv.SGE, wc *ibv.WC) {
	if p.HasImm {
		wc.Flags |= ibv.WCWithImm
		wc.Imm = p.Imm
	}
	clear(q.header[:])
	if !p.NoGRH {
		wc.Flags |= ibv.WCGRH
		putGRH(q.header[:], p.From, p.To)
	}
	move(dst, []ibv.SGE{{Buf: q.header[:]}, {Buf: p.Payload}})
}

// fail moves the queue pair to the error state. The caller holds Fabric.mu.
func (q *udQP) fail() {
	q.state = ibv.QPSError
	for q.recvs.Len() > 0 {
		r := q.recvs.At(0)
		q.recvCQ.add(&ibv.WC{ID: r.id, Status: ibv.WCFlushErr, QPN: q.num}, false)
		r.drop(&q.recvs)
	}
	for q.sends.Len() > 0 {
		q.sendCQ.add(&ibv.WC{ID: q.sends.Pop().id, Status: ibv.WCFlushErr, QPN: q.num}, false)
	}
}

func (q *udQP) SetError() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if q.closed {
		return net.ErrClosed
	}
	q.fail()
	return nil
}

// RegMR returns an error that matches errors.ErrUnsupported: no peer names a key to a queue
// pair for datagrams.
func (q *udQP) RegMR([]byte, ibv.Access) (ibv.MR, error) {
	return nil, ibv.Unsupported(deviceName, "regions of a queue pair for datagrams")
}

func (q *udQP) Close() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	switch {
	case q.closed:
		return net.ErrClosed
	case len(q.attached) > 0 || q.id.member():
		return fmt.Errorf("%s: close: queue pair %d is in a group: %w", deviceName, q.num, ibv.ErrBusy)
	}
	q.closed = true
	delete(q.f.udQPs, q.num)
	q.id.qp = nil
	q.release()
	return nil
}
