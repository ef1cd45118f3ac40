package rdmanet

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// udQP is the UD queue pair by which a PacketConn sends and receives on one port of
// an RDMA device.
//
// Receiving, under the PacketConn's rmu:
//
//  1. Receives are always posted, udReceiveSlots of them, and posted again as soon as
//     what they were completed with is copied to the inbox.
//  2. A Read that finds the inbox empty polls, and then waits for the completion queue of
//     the first queue pair (package cqwait). Every other queue pair has a goroutine that
//     waits for its completion queue all the time.
//  3. While nobody reads, a goroutine in the background waits for the first one. So what the
//     inbox has no room for is dropped here and counted, and the device always finds a receive.
//
// Sending, under its wmu:
//
//  1. Slots go round. A datagram goes inline where the device can, else it is copied
//     to the slot's buffer, so the caller's is free at once.
//  2. Every send has a completion, so that Close knows what is out. They are looked
//     at when the queue is full.
type udQP struct {
	p    *packetConn
	id   ibv.ID
	dom  *regmem.Domain
	qp   ibv.QP
	zone string // of link-local addresses there

	recvCQ, sendCQ ibv.CQ
	recvMem        *regmem.Buffer
	sendMem        *regmem.Buffer
	inline         int    // bytes
	room           uint64 // sends that may be posted at a time

	// Under rmu.
	wait    cqwait.Waiter       // for receives
	dropped bool                // of no use any more
	hears   map[netip.Addr]bool // groups that are joined, false if only to send
	own     map[netip.Addr]bool // addresses that we send to them from
	wcs     [32]ibv.WC
	reposts [32]ibv.RecvWR
	slots   []ibv.SGE // of the receives

	spoke atomic.Bool // has sent something since something last came

	groups map[netip.Addr]*udGroup // under joining

	// Under wmu.
	sendWait     cqwait.Waiter
	posted, done uint64 // sends
	staged       int    // sends to be posted next, all at once
	sendWR       [sendChain]ibv.SendWR
	sendSGE      [sendChain]ibv.SGE
	sendWCs      [32]ibv.WC
	retired      []retiredAH
	creating     int // address handles
	failed       error
}

// retiredAH is an address handle that no more sends will name, and the number of
// sends that may.
type retiredAH struct {
	ah    ibv.AH
	after uint64
}

const (
	udReceiveSlots    = 256
	minUDReceiveSlots = 16
	udSendSlots       = 128
	sendChain         = 32 // sends that are posted at a time

	// udSlot is room for any datagram, whatever the MTU will be: 4096 is the
	// largest of InfiniBand and RoCE. It keeps slots on cache lines.
	maxUDPayload = 4096
	udSlot       = (ibv.GRHLen + maxUDPayload + 63) &^ 63
)

// newUDQP makes the queue pair on an ID, which it takes over.
func (p *packetConn) newUDQP(id ibv.ID) (*udQP, error) {
	l := &udQP{p: p, id: id}
	if err := l.acquire(); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *udQP) acquire() (err error) {
	dev := l.id.Device()
	if l.dom, err = acquireDomain(dev, l.p.lasting); err != nil {
		return err
	}
	attr := dev.Attr()
	recvs, sends := min(udReceiveSlots, attr.MaxQPWR, attr.MaxCQE), min(udSendSlots, attr.MaxQPWR, attr.MaxCQE)
	for {
		l.recvMem, err = l.dom.Pool(recvs * udSlot).Get()
		if err == nil || recvs/2 < minUDReceiveSlots || !errors.Is(err, errno.ENOBUFS) {
			break
		}
		recvs /= 2 // where little memory may be registered
	}
	if err != nil {
		return err
	}
	sends = min(sends, recvs)
	l.room = uint64(sends)
	if l.recvCQ, err = dev.CreateCQ(recvs); err != nil {
		return err
	}
	if l.sendCQ, err = dev.CreateCQ(sends); err != nil {
		return err
	}
	l.inline = attr.MaxInlineUD
	if l.qp, err = l.id.CreateQP(l.dom.PD, ibv.QPInit{SendCQ: l.sendCQ, RecvCQ: l.recvCQ,
		Cap: ibv.QPCap{MaxSendWR: sends, MaxRecvWR: recvs, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInline: l.inline}}); err != nil {
		return err
	}
	l.slots = make([]ibv.SGE, recvs)
	for i := range l.slots {
		l.slots[i] = ibv.SGE{Buf: l.recvMem.B[i*udSlot:][:udSlot:udSlot], LKey: l.recvMem.LKey}
	}
	wrs := make([]ibv.RecvWR, recvs)
	for i := range wrs {
		wrs[i] = ibv.RecvWR{ID: uint64(i), SGL: l.slots[i : i+1]}
	}
	if _, err = l.qp.PostRecv(wrs); err != nil {
		return err
	}
	l.sendMem, err = l.dom.Pool(sends * udSlot).Get()
	if err != nil {
		return err
	}
	port, err := dev.Port(l.id.Port())
	l.zone = port.NetDev
	return err
}

func (l *udQP) info() PacketInfo {
	dev := l.id.Device()
	mtu, _ := udMTU(dev, l.id.Port())
	return PacketInfo{Device: dev.Name(), Transport: dev.Attr().Transport.String(), Port: l.id.Port(), QPN: l.qp.QPN(), MTU: mtu}
}

// udMTU is how many bytes a datagram may have on a port.
func udMTU(dev ibv.Device, port int) (int, error) {
	attr, err := dev.Port(port)
	return min(attr.ActiveMTU, maxUDPayload), err
}

// event hears from the device that the queue pair is of no use any more, or has lost a
// group, which a new one joins again. A port that is down may come back.
func (l *udQP) event(e ibv.Event) {
	if e.Kind != ibv.EventQPFatal && e.Kind != ibv.EventDeviceRemoval && e.Kind != ibv.EventMulticastError {
		return
	}
	err := errors.New(e.Kind.String())
	if e.Err != nil {
		err = fmt.Errorf("%s: %w", e.Kind, e.Err)
	}
	go func() {
		l.p.wmu.Lock()
		defer l.p.wmu.Unlock()
		l.giveUp(err)
	}()
}

// listen readies the waits for completions. others says that readers wait for another queue
// pair, so that a goroutine waits for this one's receives all the time.
func (l *udQP) listen(others bool) {
	p := l.p
	background := cqwait.WhenVacant
	if others {
		background = cqwait.Always
	}
	l.wait.Init(cqwait.Config{Owner: (*udReceives)(l), CQ: l.recvCQ, Lock: &p.rmu, Groups: []*cqwait.Group{&p.readers},
		BusyPoll: p.cfg.BusyPoll, Polls: !l.id.Device().Attr().Caps.Has(ibv.CapWaitReceives), Background: background})
	l.sendWait.Init(cqwait.Config{Owner: (*udSends)(l), CQ: l.sendCQ, Lock: &p.wmu, Groups: []*cqwait.Group{&p.writers}, BusyPoll: -1})
}

// answerDue reports whether a Read that waits does so for the answer to a datagram.
func (l *udQP) answerDue() bool { return l.spoke.Load() && l.p.quiet() }

// udReceives is the receive side as package cqwait sees it, under rmu.
type udReceives udQP

func (o *udReceives) Poll() int {
	if o.p.closed.Load() {
		return 0
	}
	return (*udQP)(o).poll()
}

func (o *udReceives) Arrived() bool     { return o.p.in.len() > 0 }
func (o *udReceives) Stopped(bool) bool { return o.dropped || !o.p.quiet() }
func (o *udReceives) Over() bool        { return o.dropped || o.p.closed.Load() }
func (o *udReceives) Silent() bool      { return o.Over() }
func (o *udReceives) Solicited() bool   { return false }
func (o *udReceives) Background() bool  { return !o.Over() }
func (o *udReceives) Failed(err error)  { (*udQP)(o).broken(err) }

// udSends is the send side as package cqwait sees it, under wmu.
type udSends udQP

func (o *udSends) Poll() int         { return (*udQP)(o).reap() }
func (o *udSends) Arrived() bool     { return false }
func (o *udSends) Stopped(bool) bool { return o.failed != nil }
func (o *udSends) Over() bool        { return o.failed != nil }
func (o *udSends) Silent() bool      { return o.failed != nil }
func (o *udSends) Solicited() bool   { return false }
func (o *udSends) Background() bool  { return false }
func (o *udSends) Failed(err error)  { (*udQP)(o).sendFailed(err) }

// poll takes the datagrams that are there and returns how many receives were
// completed. The caller holds rmu.
func (l *udQP) poll() (total int) {
	for !l.dropped {
		n, err := l.recvCQ.Poll(l.wcs[:])
		if err != nil {
			l.broken(err)
			break
		}
		if n == 0 {
			break
		}
		total += n
		l.p.ud.peers.tick(l.p.now())
		again := 0
		for i := range l.wcs[:n] {
			wc := &l.wcs[i]
			if wc.Status != ibv.WCSuccess {
				l.broken(&ibv.WCError{Status: wc.Status, Op: ibv.WCRecv, ID: wc.ID, VendorErr: wc.VendorErr, Device: l.id.Device().Name()})
				continue
			}
			l.received(wc)
			l.reposts[again] = ibv.RecvWR{ID: wc.ID, SGL: l.slots[wc.ID : wc.ID+1]}
			again++
		}
		if _, err := l.qp.PostRecv(l.reposts[:again]); err != nil {
			l.broken(err)
		}
		if n < len(l.wcs) || l.p.in.len() > 0 && !l.wait.InBackground() {
			break
		}
	}
	if l.p.in.len() > 0 {
		l.spoke.Store(false)
	}
	l.p.rouse()
	return total
}

// received takes one datagram.
func (l *udQP) received(wc *ibv.WC) {
	host, to, payload, ok := openDatagram(wc, l.slots[wc.ID].Buf)
	if ok && host.IsLinkLocalUnicast() && host.Is6() {
		host = host.WithZone(l.zone)
	}
	var from netip.AddrPort
	own := false
	switch {
	case !ok:
	case to.IsMulticast():
		from, own, ok = l.fromGroup(host, to, wc)
	default:
		from, ok = l.p.ud.sender(l, host, wc)
	}
	switch {
	case !ok:
		l.p.stats.strays.Add(1)
	case own && l.p.deaf.Load():
		l.p.stats.looped.Add(1)
	default:
		l.p.deliver(from, payload)
	}
}

// broken gives the queue pair up over an error of its receive side. The caller holds
// rmu.
func (l *udQP) broken(err error) {
	if !l.dropped {
		l.dropped = true
		l.giveUp(err)
	}
}

// giveUp has the queue pair dropped. The caller holds rmu or wmu.
func (l *udQP) giveUp(err error) {
	if p := l.p; !p.closed.Load() {
		p.wg.Go(func() { p.ud.drop(l, err) })
	}
}

// errNoRoom says that the send queue is full.
var errNoRoom = errors.New("the send queue is full")

// post sends a datagram. The caller holds wmu.
func (l *udQP) post(b []byte, w *way) error {
	err := l.stage(b, w)
	if err == nil {
		_, err = l.flush()
	}
	return err
}

// stage makes a send of a datagram, which must not change before flush. The caller
// holds wmu until then.
func (l *udQP) stage(b []byte, w *way) error {
	next := l.posted + uint64(l.staged)
	full := l.staged == len(l.sendWR) || next-l.done == l.room && l.reap() == 0
	switch {
	case l.failed != nil:
		return l.failed
	case full:
		return errNoRoom
	}
	sge, wr := l.sendSGE[l.staged:l.staged+1], &l.sendWR[l.staged]
	*wr = ibv.SendWR{ID: next, Op: ibv.OpSendImm, Flags: ibv.SendSignaled, Imm: immediateOf(l.p.local.Port()),
		AH: w.ah, RemoteQPN: w.to.QPN, RemoteQKey: w.to.QKey}
	switch {
	case w.plain:
		wr.Imm = l.qp.QPN()
	case w.group != 0:
		wr.Imm = groupImmediate(l.p.local.Port(), w.group)
	}
	switch {
	case len(b) == 0:
	case len(b) <= l.inline:
		sge[0].Buf = b
		wr.Flags |= ibv.SendInline
		wr.SGL = sge
	default:
		slot := l.sendMem.B[int(next%l.room)*udSlot:]
		sge[0] = ibv.SGE{Buf: slot[:copy(slot[:udSlot], b)], LKey: l.sendMem.LKey}
		wr.SGL = sge
	}
	l.staged++
	return nil
}

// flush posts what is staged and returns how many, the last ones, were not.
func (l *udQP) flush() (unsent int, err error) {
	k := l.staged
	l.spoke.Store(true)
	n, err := l.qp.PostSend(l.sendWR[:k])
	clear(l.sendSGE[:k])
	clear(l.sendWR[:k])
	l.staged = 0
	l.posted += uint64(n)
	switch {
	case errors.Is(err, ibv.ErrQueueFull):
		err = errNoRoom
	case errors.Is(err, ibv.ErrLimit): // the port's MTU is not what it was
		err = fmt.Errorf("%w: %w", errno.EMSGSIZE, err)
	}
	return k - n, err
}

// reap takes the completions of sends that are there and returns how many. The caller
// holds wmu.
func (l *udQP) reap() (total int) {
	for {
		n, err := l.sendCQ.Poll(l.sendWCs[:])
		if err != nil {
			l.sendFailed(err)
			return total
		}
		for i := range l.sendWCs[:n] {
			wc := &l.sendWCs[i]
			if wc.Status != ibv.WCSuccess {
				l.sendFailed(&ibv.WCError{Status: wc.Status, Op: ibv.WCSend, ID: wc.ID, VendorErr: wc.VendorErr, Device: l.id.Device().Name()})
			}
		}
		l.done += uint64(n)
		total += n
		if n < len(l.sendWCs) {
			break
		}
	}
	for len(l.retired) > 0 && l.retired[0].after <= l.done {
		l.retired[0].ah.Close()
		l.retired = l.retired[1:]
	}
	return total
}

// sendFailed gives the queue pair up over an error of its send side.
func (l *udQP) sendFailed(err error) {
	if l.failed == nil {
		l.failed = err
		l.giveUp(err)
	}
}

// awaitRoom waits for the send queue, until something may have changed. The caller
// holds wmu.
func (l *udQP) awaitRoom() {
	l.p.stats.stalls.Add(1)
	l.sendWait.Await(&l.p.writers, false)
}

// createAH has the address handle of a way created, which may take a while. The caller
// holds wmu, but not meanwhile.
func (l *udQP) createAH(w *way, create func(ibv.PD) (ibv.AH, error)) (err error) {
	if l.failed != nil {
		return l.failed
	}
	l.creating++
	l.p.wmu.Unlock()
	w.ah, err = create(l.dom.PD)
	l.p.wmu.Lock()
	l.creating--
	l.p.writers.WakeAll()
	return err
}

// retire closes an address handle once no send can name it any more. The caller holds
// wmu.
func (l *udQP) retire(ah ibv.AH) {
	if l.posted != l.done {
		l.reap() // or they pile up where peers come and go and little is sent
	}
	if l.posted == l.done && l.staged == 0 {
		ah.Close()
		return
	}
	l.retired = append(l.retired, retiredAH{ah, l.posted + uint64(l.staged)})
}

// drain waits for what was posted to be sent, in a PacketConn that is shut.
func (l *udQP) drain(until time.Time) {
	for l.posted != l.done && l.failed == nil {
		if n, err := l.sendCQ.Poll(l.sendWCs[:]); err != nil {
			return
		} else if n > 0 {
			l.done += uint64(n)
			continue
		}
		if err := l.sendCQ.Arm(false); err != nil {
			return
		}
		n, err := l.sendCQ.Poll(l.sendWCs[:])
		if l.done += uint64(n); err != nil || n > 0 {
			continue
		}
		if err := l.sendCQ.Wait(until); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
			return
		}
	}
}

// close releases everything, in the order that verbs want. Once it has groups the caller
// holds joining.
func (l *udQP) close() (err error) {
	for group := range l.groups {
		err = errors.Join(err, l.leave(group))
	}
	if l.qp != nil {
		err = errors.Join(err, l.qp.Close())
	}
	for _, r := range l.retired {
		err = errors.Join(err, r.ah.Close())
	}
	l.retired = nil
	for _, cq := range []ibv.CQ{l.recvCQ, l.sendCQ} {
		if cq != nil {
			err = errors.Join(err, cq.Close())
		}
	}
	err = errors.Join(err, l.id.Close())
	for _, b := range []*regmem.Buffer{l.recvMem, l.sendMem} {
		if b != nil {
			b.Release()
		}
	}
	if l.dom != nil {
		err = errors.Join(err, l.dom.Release())
	}
	return err
}
