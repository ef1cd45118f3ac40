package rdmanet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file sets a connection up: its resources, the connection of the queue pairs, and the
// SMB Direct negotiation ([MS-SMBD] 3.1.5.2, 3.1.5.3, 3.1.5.6, 3.1.5.7).
//
//  1. begin acquires the queues and buffers on the device of an ID.
//  2. The active side posts receives and connects (initiate). The passive side accepts
//     (respond). Between rdmanet peers both do so with the negotiation in the private data
//     (privatedata.go).
//  3. Otherwise the negotiation messages follow on the queue pair.
//  4. newConn makes the conn out of the agreement, and start lets it run.
//
// dial.go and listener.go call connect and accept, negotiate.go has the rules of the
// negotiation.

const (
	// sendSlots is how many work requests the queue pair's send queue has room for, RDMA
	// Reads apart.
	sendSlots = 128

	// negotiateBuf is the size in bytes of a buffer for a negotiation message.
	negotiateBuf = 512

	// readDepth is how many RDMA Reads at a time this side offers to serve, and asks the peer
	// to serve, if the devices can do so many. This side has no more than readSlots under way
	// for transfers, and one for queueBarrier.
	readDepth = 16
)

// setup is a connection that is being set up. abandon releases what it has acquired, unless
// the conn takes it over.
type setup struct {
	set settings
	dom *regmem.Domain
	id  ibv.ID
	cq  ibv.CQ
	qp  ibv.QP

	// due is when the negotiation must have ended.
	due time.Time

	// slots is how many work requests the queue pair's send queue has room for, RDMA Reads
	// and probes included.
	slots int

	passive  bool
	probeMem probeMemory

	// probe is this end's probe target, or nil if the device needs none.
	probe *probeTarget

	// lasting is the argument of that name of acquireDomain.
	lasting bool

	// event is the device's event for the end of the connection, or nil.
	event atomic.Pointer[ibv.Event]

	// posted has the buffers of the posted receives, oldest first.
	posted []*regmem.Buffer

	// recv is the buffer that the negotiation message arrived in, or nil.
	recv *regmem.Buffer

	// send is the buffer that a negotiation message is sent from, or nil.
	send *regmem.Buffer
}

// begin acquires what a connection needs on the device of an ID. It takes the ID over, and
// closes it on an error.
func begin(cfg *Config, id ibv.ID, passive bool) (*setup, error) {
	s := &setup{id: id, set: cfg.settings(id.Device(), passive), passive: passive, lasting: cfg.Provider == nil}
	s.due = time.Now().Add(s.set.negotiate)
	if err := s.acquire(); err != nil {
		if passive {
			s.decline(err)
		}
		s.abandon()
		return nil, err
	}
	return s, nil
}

// decline rejects a connection request for lack of memory, and gives the reason as a
// refusal in the private data. It has no effect after Accept, for other errors, and for a
// peer that is not rdmanet.
func (s *setup) decline(err error) {
	if !errors.Is(err, errno.ENOBUFS) && !errors.Is(err, errno.ENOMEM) || !parsePrivate(s.id.PrivateData()).rdmanet {
		return
	}
	var b [negotiateResponseLen]byte
	resp := refusal(statusInsufficientResources)
	s.id.Reject(s.param(b[:resp.put(b[:])]).Private)
}

// acquire creates the domain, the queues and the probe target.
func (s *setup) acquire() (err error) {
	dev := s.id.Device()
	if s.dom, err = acquireDomain(dev, s.lasting); err != nil {
		return err
	}
	attr := dev.Attr()
	// The completion queue has room for everything that may be posted. If it overflowed,
	// the connection would break.
	s.slots = min(sendSlots+readSlots, attr.MaxQPWR, attr.MaxCQE/2)
	recvs := min(s.set.maximum+1, attr.MaxQPWR, attr.MaxCQE-s.slots-1)
	if s.cq, err = dev.CreateCQ(s.slots + recvs + 1); err != nil {
		return err
	}
	init := ibv.QPInit{SendCQ: s.cq, RecvCQ: s.cq, Cap: ibv.QPCap{MaxSendWR: s.slots, MaxRecvWR: recvs,
		MaxSendSGE: 2, MaxRecvSGE: 1, MaxInline: min(attr.MaxInline, s.set.maxSend)}}
	if s.qp, err = s.id.CreateQP(s.dom.PD, init); err != nil {
		return err
	}
	// Many devices make longer queues than were asked for. A connection uses only what its
	// completion queue has room for.
	granted := s.qp.Cap()
	s.slots = min(s.slots, granted.MaxSendWR)
	// One receive more than the window may be posted, to be granted with the last credit.
	s.set.maximum = min(s.set.maximum, recvs-1, granted.MaxRecvWR-1)
	s.set.initial = min(s.set.initial, s.set.maximum)
	if attr.Quirks.EmptyReadsGarbled {
		s.probe, err = s.probeMem.open(s.dom, s.qp)
	}
	return err
}

// expect posts n receives of size bytes.
func (s *setup) expect(n, size int) error {
	for range n {
		buf, err := s.dom.Pool(size).Get()
		if err != nil {
			return err
		}
		if _, err := s.qp.PostRecv([]ibv.RecvWR{{SGL: []ibv.SGE{buf.SGE(size)}}}); err != nil {
			buf.Release()
			return err
		}
		s.posted = append(s.posted, buf)
	}
	return nil
}

// abandon releases everything that was acquired.
func (s *setup) abandon() {
	if s.qp != nil {
		s.qp.Close()
	}
	s.probeMem.close()
	s.releaseBuffers()
	if s.cq != nil {
		s.cq.Close()
	}
	s.id.Close()
	if s.dom != nil {
		s.dom.Release()
	}
}

// releaseBuffers releases the buffers that the setup has.
func (s *setup) releaseBuffers() {
	for _, b := range append(s.posted, s.recv, s.send) {
		if b != nil {
			b.Release()
		}
	}
	s.posted, s.recv, s.send = nil, nil, nil
}

// param returns what the connection manager carries to the peer. early is a negotiation
// message, or nil.
func (s *setup) param(early []byte) ibv.ConnParam {
	attr := s.id.Device().Attr()
	private := s.private()
	p := ibv.ConnParam{ResponderResources: int(private.ird), InitiatorDepth: int(private.ord)}
	if early != nil && privateLen+len(early) <= attr.MaxPrivateData {
		private.features |= featureEarly
	} else {
		early = nil
	}
	says := s.probe != nil && privateLen+len(early)+probeTargetLen <= attr.MaxPrivateData
	if says {
		private.features |= featureProbeTarget
	}
	p.Private = append(private.append(make([]byte, 0, privateLen+len(early)+probeTargetLen)), early...)
	if says {
		p.Private = s.probe.append(p.Private)
	}
	return p
}

// private returns this end's private data, without the negotiation message and the probe
// target.
func (s *setup) private() privateData {
	attr := s.id.Device().Attr()
	p := privateData{
		ird:        uint32(min(readDepth, attr.MaxQPRdAtom)),
		ord:        uint32(min(readDepth, attr.MaxQPInitRdAtom)),
		rdmanet:    true,
		features:   s.set.features(),
		maxReceive: uint32(s.set.maxReceive),
	}
	if attr.Quirks.EmptyReadsGarbled {
		p.features |= featureNoEmptyRead
	}
	return p
}

// connect makes a connection on the active side out of a resolved ID, which it takes over.
func connect(ctx context.Context, cfg *Config, id ibv.ID) (*conn, error) {
	s, err := begin(cfg, id, false)
	if err != nil {
		return nil, err
	}
	// Without a NegotiateTimeout the device bounds the connecting itself.
	if cfg.NegotiateTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, s.due)
		defer cancel()
	}
	c, err := s.initiate(ctx)
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		// Linux keeps an iWARP ID until the peer has answered, or for 10 s.
		go s.abandon()
	default:
		s.abandon()
	}
	return nil, err
}

// initiate connects and negotiates on the active side.
func (s *setup) initiate(ctx context.Context) (*conn, error) {
	// The receives are for the first messages, and are granted in an early negotiation.
	err := s.expect(s.set.initial, s.set.maxReceive)
	if errors.Is(err, errno.ENOBUFS) && len(s.posted) >= minCredits {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	var b [negotiateRequestLen + 2]byte
	lim := s.set.limits(privateData{rdmanet: true})
	req := lim.request()
	n := req.put(b[:])
	binary.LittleEndian.PutUint16(b[n:], uint16(len(s.posted)))
	if err := s.id.Connect(ctx, s.param(b[:])); err != nil {
		return nil, explain(err)
	}
	peer := parsePrivate(s.id.PrivateData())
	if answer := earlyResponse(s.id.PrivateData()); answer != nil {
		a, err := lim.acceptResponse(answer)
		if err != nil {
			return nil, err
		}
		c, err := s.newConn(a, peer, true)
		if err == nil {
			c.early = true
			c.start()
		}
		return c, err
	}
	lim = s.set.limits(peer)
	req = lim.request()
	if err := s.sendMessage(b[:req.put(b[:])]); err != nil {
		return nil, err
	}
	answer, err := s.receiveMessage(ctx)
	if err != nil {
		return nil, fmt.Errorf("smb direct negotiation: %w", err)
	}
	a, err := lim.acceptResponse(answer)
	if err != nil {
		return nil, err
	}
	return s.establish(a, peer, nil)
}

// explain adds the peer's reason to the error of a rejected connection, if the rejection
// carries one.
func explain(err error) error {
	var r *ibv.RejectError
	if !errors.As(err, &r) {
		return err
	}
	if answer := earlyResponse(r.Private); answer != nil {
		if _, why := new(limits).acceptResponse(answer); why != nil {
			return fmt.Errorf("%w: %w", err, why)
		}
	}
	return err
}

// accept makes a connection on the passive side out of a connection request, whose ID it
// takes over.
func accept(ctx context.Context, cfg *Config, id ibv.ID) (*conn, error) {
	s, err := begin(cfg, id, true)
	if err != nil {
		return nil, err
	}
	c, err := s.respond(ctx)
	if err != nil {
		s.decline(err)
		s.abandon()
		return nil, err
	}
	return c, nil
}

// respond accepts and negotiates on the passive side.
func (s *setup) respond(ctx context.Context) (*conn, error) {
	peer := parsePrivate(s.id.PrivateData())
	lim := s.set.limits(peer)
	if c, err := s.respondEarly(ctx, lim, peer); c != nil || err != nil {
		return c, err
	}
	if err := s.expect(1, negotiateBuf); err != nil {
		return nil, err
	}
	if err := s.id.Accept(ctx, s.param(nil)); err != nil {
		return nil, err
	}
	request, err := s.receiveMessage(ctx)
	if err != nil {
		return nil, fmt.Errorf("smb direct negotiation: %w", err)
	}
	a, resp, status, err := lim.acceptRequest(request)
	if err != nil {
		if status != statusOK {
			s.refuse(ctx, resp)
		}
		return nil, err
	}
	c, err := s.establish(a, peer, &resp)
	if errors.Is(err, errno.ENOBUFS) {
		s.refuse(ctx, refusal(statusInsufficientResources))
	}
	return c, err
}

// respondEarly negotiates by the private data if the peer has begun so. It returns nil
// without an error if that cannot be done. Without an answer the peer asks again by a
// message, and the answer to that message can be a refusal.
func (s *setup) respondEarly(ctx context.Context, lim limits, peer privateData) (*conn, error) {
	request, granted := earlyRequest(s.id.PrivateData())
	if request == nil || !s.id.MaySendFirst() || s.id.Device().Attr().MaxPrivateData < earlyResponseLen {
		return nil, nil
	}
	a, resp, _, err := lim.acceptRequest(request)
	if err != nil {
		return nil, nil
	}
	a.sendCredits = granted
	c, err := s.newConn(a, peer, false)
	if errors.Is(err, errno.ENOBUFS) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var b [negotiateResponseLen]byte
	resp.CreditsGranted = c.credits.grantAll()
	if err := s.id.Accept(ctx, s.param(b[:resp.put(b[:])])); err != nil {
		c.discardUnstarted()
		return nil, err
	}
	c.early = true
	c.start()
	return c, nil
}

// refuse sends a refusal and disconnects, and gives both time to arrive.
func (s *setup) refuse(ctx context.Context, resp negotiateResponse) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var b [negotiateResponseLen]byte
	if s.sendMessage(b[:resp.put(b[:])]) != nil {
		return
	}
	// Disconnect could flush a refusal that was not sent.
	for sent := false; !sent; {
		wc, err := s.completion(ctx)
		if err != nil {
			return
		}
		sent = wc.ID&sendID != 0
	}
	if s.id.Disconnect() != nil {
		return
	}
	for {
		if _, err := s.completion(ctx); err != nil {
			return
		}
	}
}

// establish makes the connection after a negotiation by messages. On the passive side it
// posts receives and sends resp. On the active side resp is nil, and the first message
// grants the receives. Without an error the conn takes the setup's resources over.
func (s *setup) establish(a agreement, peer privateData, resp *negotiateResponse) (*conn, error) {
	c, err := s.newConn(a, peer, false)
	if err != nil {
		return nil, err
	}
	if resp != nil {
		resp.CreditsGranted = c.credits.grantAll()
		var b [negotiateResponseLen]byte
		if err := s.sendMessage(b[:resp.put(b[:])]); err != nil {
			c.discardUnstarted()
			return nil, err
		}
		// The buffer is released when the first signaled send completes.
		if s.send != nil {
			var bufs regmem.Buffers
			bufs.Push(s.send)
			c.lane.signaled.Push(signaledSend{bufs: bufs})
			s.send = nil
		}
	}
	c.start()
	return c, nil
}

// findProbe finds out which RDMA Read, if any, the peer's device answers whatever its
// program does. If the devices of a transport differ in that, only an rdmanet peer
// announces it.
func (s *setup) findProbe(c *conn) error {
	switch {
	case s.id.Param().InitiatorDepth == 0:
		return nil
	case !c.peer.rdmanet:
		c.live.answersReads = s.id.Device().Attr().Caps.Has(ibv.CapEmptyReads)
		return nil
	}
	early := earlyResponseLen
	if s.passive {
		early = earlyRequestLen
	}
	c.live.target = parseProbeTarget(s.id.PrivateData(), early)
	c.live.answersReads = c.live.target != nil || c.peer.features&featureNoEmptyRead == 0
	if c.live.target != nil {
		return s.probeMem.hold(s.dom)
	}
	return nil
}

// newConn makes the conn with its receives posted, and start lets it run. granted is set if
// the peer was granted the receives that were posted before.
func (s *setup) newConn(a agreement, peer privateData, granted bool) (*conn, error) {
	c := newConn(s.set, s.dom, s.id, s.cq, s.qp, s.slots)
	attr := s.id.Device().Attr()
	c.startWaiting(&attr)
	c.agreed, c.peer = a, peer
	c.fin = peer.rdmanet && peer.features&featureFIN != 0
	c.messages = c.fin && peer.features&featureMessages != 0
	c.tx.mode, c.rx.mode = transferModes(s.private(), peer)
	c.rx.notAccepted = s.passive
	c.in.reasm = reassembler{max: a.maxFragmentedReceive, fin: c.fin, messages: c.messages}
	c.pool, c.lane.buffers = s.dom.Pool(int(a.maxReceive)), s.dom.Pool(int(a.maxSend))
	c.rx.receiverParts = receiverParts{lane: &c.lane, life: &c.life, stats: &c.stats, dom: c.dom, pool: c.pool, memory: s.set.transferMemory,
		readers: &c.readers, wait: &c.wait, prefetch: c.prefetch}
	c.tx.writers, c.tx.wait = &c.writers, &c.wait
	c.credits = credits{
		have:         int(a.sendCredits),
		target:       max(int(a.receiveCreditTarget), minCredits),
		window:       s.set.initial,
		initial:      s.set.initial,
		maximum:      s.set.maximum,
		charge:       s.dom.Budget.Share(int64(s.set.receiveMemory), int64(c.pool.Size)),
		readerWaited: true,
	}
	if c.rx.mode != TransferNone {
		c.credits.transferReserve = 1
	}
	if c.fin {
		c.credits.reserveOut, c.credits.reserveIn = 1, 1
	}
	for _, buf := range s.posted {
		c.in.posted.Push(buf)
	}
	c.credits.post(len(s.posted))
	if granted {
		c.credits.ungranted = 0
	}
	s.posted = nil
	s.releaseBuffers()
	err := s.findProbe(c)
	if err == nil {
		err = c.provision()
	}
	if err != nil {
		c.discardUnstarted()
		return nil, err
	}
	c.live.memory, s.probeMem = s.probeMem, probeMemory{}
	return c, nil
}

// start lets the connection run: it receives events, posts batches and waits for
// completions from now on.
func (c *conn) start() {
	c.mu.Lock()
	defer c.unlock()
	c.lane.id.Notify(c.notify)
	c.lane.open = true
	// One RDMA Read is left for queueBarrier.
	c.rx.depth = max(1, min(c.rx.depth, c.lane.id.Param().InitiatorDepth-1))
	fetches := c.rx.depth
	if c.rx.mode == TransferWrite {
		fetches = maxTransfers
	}
	c.rx.pace = newPace(fetches)
	c.startTimer()
	// The buffers may have pages that another connection has written to.
	c.scheduleTrim()
	// The active side's first grant goes with the first Write, or before the first Read
	// that waits. If neither comes, a leader in the background sends it.
	c.wait.Start()
}

// provision posts the first receives, and gets the memory without which the connection
// could come to a halt. It fails with fewer than minCredits receives.
func (c *conn) provision() (err error) {
	c.mu.Lock()
	defer c.unlock()
	if int(c.agreed.maxSend) > c.lane.inline {
		if err = c.lane.reserve(); err != nil {
			return err
		}
	}
	if err := c.rx.reserve(); err != nil {
		return err
	}
	least := make([]*regmem.Buffer, 0, minCredits)
	for c.in.posted.Len()+len(least) < min(minCredits, c.set.initial) {
		buf, err := c.pool.Get()
		if err != nil {
			for _, buf := range least {
				buf.Release()
			}
			return err
		}
		least = append(least, buf)
	}
	for _, buf := range least {
		c.postRecv(buf)
	}
	c.replenish()
	if c.life.over() {
		return fmt.Errorf("post receives: %w", c.life.cause)
	}
	c.idle.pagesTouched = c.lane.reserved != nil && c.lane.reserved.Stale
	for i := range c.in.posted.Len() {
		c.idle.pagesTouched = c.idle.pagesTouched || (*c.in.posted.At(i)).Stale
	}
	return nil
}

// discardUnstarted gives back what the conn of a failed set-up holds.
func (c *conn) discardUnstarted() {
	c.credits.charge.Lower(0)
	if c.in.posted.Len() > 0 {
		c.lane.qp.Close()
	}
	for c.in.posted.Len() > 0 {
		c.in.posted.Pop().Release()
	}
	c.lane.release(unwritten)
	c.rx.releaseReserved()
	c.live.memory.close()
}

// sendMessage sends a negotiation message, which needs no credit.
func (s *setup) sendMessage(b []byte) error {
	wr := ibv.SendWR{ID: sendID, Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited, SGL: []ibv.SGE{{Buf: b}}}
	if len(b) <= s.qp.Cap().MaxInline {
		wr.Flags |= ibv.SendInline
	} else {
		var err error
		if s.send, err = s.dom.Pool(negotiateBuf).Get(); err != nil {
			return err
		}
		copy(s.send.B, b)
		wr.SGL[0] = s.send.SGE(len(b))
	}
	_, err := s.qp.PostSend([]ibv.SendWR{wr})
	return err
}

// notify receives the device's events during the negotiation.
func (s *setup) notify(e ibv.Event) {
	s.event.CompareAndSwap(nil, &e)
	s.cq.Interrupt()
}

// receiveMessage waits for the peer's negotiation message.
func (s *setup) receiveMessage(ctx context.Context) ([]byte, error) {
	for {
		wc, err := s.completion(ctx)
		if err != nil {
			return nil, err
		}
		if wc.ID&sendID == 0 {
			s.recv, s.posted = s.posted[0], s.posted[1:]
			return s.recv.B[:wc.ByteLen], nil
		}
	}
}

// completion waits for the next successful completion, or returns why there will be none.
func (s *setup) completion(ctx context.Context) (*ibv.WC, error) {
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, s.cq.Interrupt)
		defer stop()
	}
	s.id.Notify(s.notify)
	var wcs [1]ibv.WC
	for {
		// The event is loaded before the poll, so that everything that completed before it
		// is handled.
		end := s.event.Load()
		if err := s.cq.Arm(false); err != nil {
			return nil, err
		}
		n, err := s.cq.Poll(wcs[:])
		if err != nil {
			return nil, err
		}
		wc := &wcs[0]
		switch {
		case n == 1 && wc.Status == ibv.WCSuccess:
			return wc, nil
		case n == 1 && wc.Status == ibv.WCFlushErr:
			// The event has the cause.
			continue
		case n == 1:
			op := ibv.WCRecv
			if wc.ID&sendID != 0 {
				op = ibv.WCSend
			}
			return nil, broken(&ibv.WCError{Status: wc.Status, Op: op, ID: wc.ID &^ sendID, Device: s.id.Device().Name()})
		case end != nil && end.Err == nil:
			return nil, broken(io.ErrUnexpectedEOF)
		case end != nil:
			return nil, broken(end.Err)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := s.cq.Wait(s.due); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
			return nil, err
		}
	}
}
