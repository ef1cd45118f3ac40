//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// qp implements ibv.QP.
type qp struct {
	dev    *device
	id     *id
	pd     *pd
	sendCQ *cq
	recvCQ *cq
	num    uint32
	cap    ibv.QPCap
	ud     bool
	limit  uint64 // limit is how many bytes a message may have.

	up     atomic.Bool // up is set when the connection is established, so that sends may be posted.
	failed atomic.Bool // failed is set when the queue pair is known to be in the error state.

	first    *time.Timer // first runs on siw until the peer's first message comes; sq.mu guards it.
	attached int         // attached is how many groups AttachMcast has attached; the ID's mu guards it.

	sq, rq queue
}

// queue is one of the two work queues: the lock, and memory for requests in the form of C.
type queue struct {
	mu     sync.Mutex
	c      *C.struct_rn_qp // c is nil once the queue pair is closed.
	wrs    []C.struct_rn_wr
	sges   []C.struct_rn_sge
	inline []byte
	ahs    []*ah  // ahs are named in wrs.
	ledger ledger // ledger is used on siw only.
}

func (i *id) CreateQP(domain ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	q, err := i.createQP(domain, &init)
	if err != nil {
		return nil, fmt.Errorf("%s: create queue pair: %w", i.dev.name, err)
	}
	return q, nil
}

func (i *id) createQP(domain ibv.PD, init *ibv.QPInit) (ibv.QP, error) {
	p, ok := domain.(*pd)
	if !ok || p.dev != i.dev {
		return nil, fmt.Errorf("protection domain of another device: %w", syscall.EINVAL)
	}
	q := &qp{dev: i.dev, id: i, pd: p, ud: i.ud, limit: i.dev.attr.MaxMessageSize}
	q.sendCQ, ok = init.SendCQ.(*cq)
	recvCQ, ok2 := init.RecvCQ.(*cq)
	if !ok || !ok2 || q.sendCQ.dev != i.dev || recvCQ.dev != i.dev {
		return nil, fmt.Errorf("completion queue of another device: %w", syscall.EINVAL)
	}
	q.recvCQ = recvCQ
	kind, maxInline := C.int(typeRC), i.dev.attr.MaxInline
	if i.ud {
		mtu, err := i.dev.mtu(i.port)
		if err != nil {
			return nil, err
		}
		q.limit = uint64(mtu)
		kind, maxInline = typeUD, i.dev.attr.MaxInlineUD
	}
	if err := i.dev.checkCap(&init.Cap, maxInline); err != nil {
		return nil, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || i.qp != nil {
		return nil, ibv.ErrState
	}
	undo, err := q.use()
	if err != nil {
		return nil, err
	}
	c := C.struct_rn_qp_cap{
		max_send_wr:     C.uint32_t(max(init.Cap.MaxSendWR, 1)),
		max_recv_wr:     C.uint32_t(max(init.Cap.MaxRecvWR, 1)),
		max_send_sge:    C.uint32_t(max(init.Cap.MaxSendSGE, 1)),
		max_recv_sge:    C.uint32_t(max(init.Cap.MaxRecvSGE, 1)),
		max_inline_data: C.uint32_t(init.Cap.MaxInline),
	}
	if i.dev.siw {
		c.max_send_wr += nudges
	}
	var signalAll C.int
	if init.SignalAll {
		signalAll = 1
	}
	if err := errno(C.rn_create_qp(i.c, p.c, i.handle, q.sendCQ.c, q.recvCQ.c, kind, signalAll, &c)); err != nil {
		undo()
		return nil, memoryError(err)
	}
	q.sq.c, q.rq.c = i.c.qp, i.c.qp
	q.num = uint32(i.c.qp.qp_num)
	q.cap = ibv.QPCap{MaxSendWR: int(c.max_send_wr), MaxRecvWR: int(c.max_recv_wr), MaxSendSGE: int(c.max_send_sge),
		MaxRecvSGE: int(c.max_recv_sge), MaxInline: int(c.max_inline_data)}
	if i.dev.siw {
		q.cap.MaxSendWR -= nudges
		q.sq.ledger.ring = make([]entry, q.cap.MaxSendWR)
		q.rq.ledger.ring = make([]entry, q.cap.MaxRecvWR)
	}
	q.sendCQ.join(q)
	q.recvCQ.join(q)
	i.qp = q
	q.up.Store(i.ud)
	return q, nil
}

// checkCap refuses capacities above the device's limits. Some drivers would accept them and
// fail later.
func (d *device) checkCap(c *ibv.QPCap, maxInline int) error {
	for _, l := range []struct {
		what        string
		want, limit int
	}{
		{"send work requests", c.MaxSendWR, d.attr.MaxQPWR},
		{"receive work requests", c.MaxRecvWR, d.attr.MaxQPWR},
		{"elements a send", c.MaxSendSGE, d.attr.MaxSGE},
		{"elements a receive", c.MaxRecvSGE, d.attr.MaxSGE},
		{"bytes inline", c.MaxInline, maxInline},
	} {
		if l.want < 0 {
			return fmt.Errorf("%d %s: %w", l.want, l.what, syscall.EINVAL)
		}
		if l.want > l.limit {
			return fmt.Errorf("%d %s (limit %d): %w", l.want, l.what, l.limit, ibv.ErrLimit)
		}
	}
	return nil
}

// use keeps the objects that the queue pair depends on open, until undo is called.
func (q *qp) use() (undo func(), err error) {
	if err := q.pd.use(); err != nil {
		return nil, err
	}
	if err := q.sendCQ.use(); err != nil {
		q.pd.unuse()
		return nil, err
	}
	if err := q.recvCQ.use(); err != nil {
		q.sendCQ.unuse()
		q.pd.unuse()
		return nil, err
	}
	return q.unuse, nil
}

func (q *qp) unuse() {
	q.recvCQ.unuse()
	q.sendCQ.unuse()
	q.pd.unuse()
}

func (q *qp) QPN() uint32    { return q.num }
func (q *qp) Cap() ibv.QPCap { return q.cap }

func (q *qp) State() ibv.QPState {
	q.sq.mu.Lock()
	defer q.sq.mu.Unlock()
	if q.sq.c == nil || q.failed.Load() {
		return ibv.QPSError
	}
	if s := C.rn_qp_state(q.sq.c); s >= 0 {
		return ibv.QPState(s)
	}
	return ibv.QPSError
}

// Flags and operations of infiniband/verbs.h.
const (
	sendFence     = 1 << 0
	sendSignaled  = 1 << 1
	sendSolicited = 1 << 2
	sendInline    = 1 << 3
)

var opcodes = [...]C.uint32_t{
	ibv.OpSend:     2,
	ibv.OpSendImm:  3,
	ibv.OpSendInv:  9,
	ibv.OpWrite:    0,
	ibv.OpWriteImm: 1,
	ibv.OpRead:     4,
	ibv.OpCmpSwap:  5,
	ibv.OpFetchAdd: 6,
	ibv.OpLocalInv: 7,
}

// needs has the capability that an operation needs, if not every device has it.
var needs = [...]ibv.Caps{
	ibv.OpSendImm:  ibv.CapSendImm,
	ibv.OpSendInv:  ibv.CapSendInvalidate,
	ibv.OpWriteImm: ibv.CapWriteImm,
	ibv.OpCmpSwap:  ibv.CapAtomic,
	ibv.OpFetchAdd: ibv.CapAtomic,
	ibv.OpLocalInv: ibv.CapLocalInvalidate,
}

func (q *qp) PostSend(wrs []ibv.SendWR) (int, error) {
	s := &q.sq
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.c == nil:
		return 0, q.postError("send", net.ErrClosed)
	case !q.up.Load() && !q.failed.Load():
		return 0, q.postError("send", ibv.ErrState)
	}
	s.clear(wrs)
	good := 0
	var err error
	for good < len(wrs) {
		if err = q.addSend(&wrs[good]); err != nil {
			break // The requests before it are posted.
		}
		good++
	}
	if good > 0 && !q.flushesItself() {
		if posted, e := q.dev.postSend(s.c, s.wrs[:good], s.elements()); e != nil {
			good -= s.ledger.takeBack(good - posted)
			err = e
		}
	}
	s.releaseAHs()
	if q.flushesItself() {
		q.sendCQ.flushes(q)
	}
	if err != nil {
		return good, q.postError("send", err)
	}
	return good, nil
}

// flushesItself reports whether this package flushes work requests, because the device does
// not. siw leaves requests in its queue that are posted in the error state.
func (q *qp) flushesItself() bool { return q.dev.siw && q.failed.Load() }

// clear makes room; inline data must not move while it is gathered.
func (s *queue) clear(wrs []ibv.SendWR) {
	s.wrs, s.sges = s.wrs[:0], s.sges[:0]
	n := 0
	for i := range wrs {
		if wrs[i].Flags&ibv.SendInline != 0 {
			for _, e := range wrs[i].SGL {
				n += len(e.Buf)
			}
		}
	}
	if cap(s.inline) < n {
		s.inline = make([]byte, 0, n)
	}
	s.inline = s.inline[:0]
}

func (s *queue) elements() *C.struct_rn_sge {
	return unsafe.SliceData(s.sges)
}

// addSend converts a work request to the form of C.
func (q *qp) addSend(wr *ibv.SendWR) error {
	s := &q.sq
	if int(wr.Op) >= len(opcodes) {
		return fmt.Errorf("operation %d: %w", wr.Op, syscall.EINVAL)
	}
	if int(wr.Op) < len(needs) && !q.dev.attr.Caps.Has(needs[wr.Op]) {
		return ibv.Unsupported(q.dev.name, wr.Op.String())
	}
	limit := q.cap.MaxSendSGE
	if wr.Op == ibv.OpRead {
		limit = min(limit, q.dev.attr.MaxSGERead)
	}
	if len(wr.SGL) > limit {
		return fmt.Errorf("%d elements (limit %d): %w", len(wr.SGL), limit, ibv.ErrLimit)
	}
	w := C.struct_rn_wr{
		id:          C.uint64_t(wr.ID),
		opcode:      opcodes[wr.Op],
		remote_addr: C.uint64_t(wr.RemoteAddr),
		rkey:        C.uint32_t(wr.RKey),
		compare_add: C.uint64_t(wr.CompareAdd),
		swap:        C.uint64_t(wr.Swap),
	}
	if q.ud {
		if err := q.address(wr, &w); err != nil {
			return err
		}
	}
	switch wr.Op {
	case ibv.OpSendImm, ibv.OpWriteImm:
		w.imm_or_key = C.uint32_t(networkOrder(wr.Imm))
	case ibv.OpSendInv, ibv.OpLocalInv:
		w.imm_or_key = C.uint32_t(wr.InvKey)
	}
	if wr.Flags&ibv.SendFence != 0 && !(q.dev.siw && wr.Op == ibv.OpRead) {
		w.flags |= sendFence // siw stops at a Read with a fence, and its Reads are in order without one.
	}
	if wr.Flags&ibv.SendSignaled != 0 {
		w.flags |= sendSignaled
	}
	if wr.Flags&ibv.SendSolicited != 0 {
		w.flags |= sendSolicited
	}
	total := uint64(0)
	for _, e := range wr.SGL {
		total += uint64(len(e.Buf))
	}
	if total > q.limit {
		return fmt.Errorf("%d bytes (limit %d): %w", total, q.limit, ibv.ErrLimit)
	}
	if wr.Flags&ibv.SendInline != 0 {
		if wr.Op == ibv.OpRead || wr.Op >= ibv.OpCmpSwap {
			return fmt.Errorf("inline %v: %w", wr.Op, syscall.EINVAL)
		}
		if total > uint64(q.cap.MaxInline) {
			return fmt.Errorf("%d bytes inline (limit %d): %w", total, q.cap.MaxInline, ibv.ErrLimit)
		}
		w.flags |= sendInline
		// The data is copied to memory of this package first: the device copies it during
		// the call, but the caller's bytes may be on a stack, which moves.
		at := len(s.inline)
		for _, e := range wr.SGL {
			s.inline = append(s.inline, e.Buf...)
		}
		if total > 0 {
			w.num_sge = 1
			s.sges = append(s.sges, sge(s.inline[at:], 0))
		}
	} else {
		w.num_sge = s.add(wr.SGL)
		if q.dev.siw && wr.Op == ibv.OpRead && w.num_sge == 0 {
			// siw assumes that a Read has an element. Without one it uses the length of
			// the request that was in the same place of the queue before.
			w.num_sge = 1
			s.sges = append(s.sges, C.struct_rn_sge{})
		}
	}
	if q.dev.siw {
		e := entry{id: wr.ID, read: wr.Op == ibv.OpRead, fenced: wr.Flags&ibv.SendFence != 0}
		if e.read && len(wr.SGL) > 0 {
			e.sink = wr.SGL[0].LKey
		}
		n, ok := s.ledger.add(e)
		if !ok {
			return ibv.ErrQueueFull
		}
		w.id = C.uint64_t(n)
	}
	s.wrs = append(s.wrs, w)
	return nil
}

// add converts elements to the form of C. It leaves out empty ones, because InfiniBand
// takes a length of zero for 2 GiB.
func (s *queue) add(sgl []ibv.SGE) (n C.uint32_t) {
	for _, e := range sgl {
		if len(e.Buf) > 0 {
			s.sges = append(s.sges, sge(e.Buf, e.LKey))
			n++
		}
	}
	return n
}

func sge(b []byte, lkey uint32) C.struct_rn_sge {
	return C.struct_rn_sge{
		addr:   C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(b)))),
		length: C.uint32_t(len(b)),
		lkey:   C.uint32_t(lkey),
	}
}

func (q *qp) PostRecv(wrs []ibv.RecvWR) (int, error) {
	r := &q.rq
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.c == nil {
		return 0, q.postError("receive", net.ErrClosed)
	}
	r.wrs, r.sges = r.wrs[:0], r.sges[:0]
	var err error
	good := 0
	for good < len(wrs) {
		wr := &wrs[good]
		if len(wr.SGL) > q.cap.MaxRecvSGE {
			err = fmt.Errorf("%d elements (limit %d): %w", len(wr.SGL), q.cap.MaxRecvSGE, ibv.ErrLimit)
			break
		}
		if slices.ContainsFunc(wr.SGL, func(e ibv.SGE) bool { return uint64(len(e.Buf)) > math.MaxUint32 }) {
			err = fmt.Errorf("an element of 4 GiB: %w", ibv.ErrLimit)
			break
		}
		id, ok := wr.ID, true
		if q.dev.siw {
			if id, ok = r.ledger.add(entry{id: id}); !ok {
				err = ibv.ErrQueueFull
				break
			}
		}
		n := r.add(wr.SGL)
		if n == 0 && q.dev.siw {
			r.sges = append(r.sges, C.struct_rn_sge{}) // The device accepts no receive without an element.
			n = 1
		}
		r.wrs = append(r.wrs, C.struct_rn_wr{id: C.uint64_t(id), num_sge: n})
		good++
	}
	if good > 0 && !q.flushesItself() {
		if posted, e := q.dev.postRecv(r.c, r.wrs[:good], r.elements()); e != nil {
			good -= r.ledger.takeBack(good - posted)
			err = e
		}
	}
	if q.failed.Load() {
		switch {
		case q.dev.siw:
			q.recvCQ.flushes(q)
		case q.dev.rxe:
			C.rn_qp_error(r.c) // The device looks at them only when the state is set again.
		}
	}
	if err != nil {
		return good, q.postError("receive", err)
	}
	return good, nil
}

func (q *qp) postError(what string, err error) error {
	if errors.Is(err, syscall.ENOMEM) {
		err = ibv.ErrQueueFull // as ibv_post_send(3) has it
	}
	return fmt.Errorf("%s: post %s: %w", q.dev.name, what, err)
}

func (q *qp) SetError() error {
	defer q.lock()()
	if q.sq.c == nil {
		return net.ErrClosed
	}
	if err := errno(C.rn_qp_error(q.sq.c)); err != nil {
		return fmt.Errorf("%s: move queue pair to the error state: %w", q.dev.name, err)
	}
	q.setFailed()
	return nil
}

// lock keeps posts out until unlock.
func (q *qp) lock() (unlock func()) {
	q.sq.mu.Lock()
	q.rq.mu.Lock()
	return func() {
		q.rq.mu.Unlock()
		q.sq.mu.Unlock()
	}
}

// setFailed notes that the device has stopped and flushed its requests. The caller holds
// the locks of both queues, so that no post is missed.
func (q *qp) setFailed() {
	q.failed.Store(true)
	if q.dev.siw {
		q.sendCQ.flushes(q)
		q.recvCQ.flushes(q)
	}
}

// fail is called when a failure has shown that the queue pair is in the error state, or
// will be. The software devices must be told then, so that requests that were posted
// meanwhile are flushed too.
func (q *qp) fail() {
	defer q.lock()()
	if q.sq.c == nil {
		return
	}
	if q.dev.siw || q.dev.rxe {
		C.rn_qp_error(q.sq.c)
	}
	q.setFailed()
}

func (q *qp) Close() error {
	q.id.calling.Lock()
	defer q.id.calling.Unlock()
	c, err := q.detach()
	if err != nil {
		return err
	}
	// Afterwards another queue pair may have the number.
	failed := append(q.sendCQ.leave(q), q.recvCQ.leave(q)...)
	C.rn_destroy_qp(c)
	q.unuse()
	for _, other := range failed {
		other.fail()
	}
	return nil
}

// detach removes the queue pair from all objects that use it. The caller destroys it,
// without locks: siw waits up to 10 s there for a peer that does not answer. Goroutines
// that take events or close a region must not wait so long.
func (q *qp) detach() (*C.struct_rn_qp, error) {
	q.id.mu.Lock()
	defer q.id.mu.Unlock()
	defer q.lock()()
	c := q.sq.c
	if c == nil {
		return nil, net.ErrClosed
	}
	if q.attached > 0 || q.id.groups.hold() {
		return nil, fmt.Errorf("%s: close queue pair %d: member of a group: %w", q.dev.name, q.num, ibv.ErrBusy)
	}
	if q.first != nil {
		q.first.Stop()
	}
	if q.dev.siw {
		C.rn_qp_error(c) // for endReads, which does not find it any more, and for leave
	}
	q.dev.lib.events.Lock()
	q.id.c.qp = nil
	q.dev.lib.events.Unlock()
	q.sq.c, q.rq.c = nil, nil
	q.id.qp = nil
	return c, nil
}
