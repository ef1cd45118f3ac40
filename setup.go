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

// Setting a connection up: resources, the connection of the queue pairs, and
// SMB Direct negotiation ([MS-SMBD] 3.1.5.2, 3.1.5.3, 3.1.5.6, 3.1.5.7).

const (
	sendSlots    = 128 // work requests in the send queue
	negotiateBuf = 512 // bytes of a buffer for negotiation
	readDepth    = 16  // RDMA Reads at a time, where the device can
)

// setup is a connection in the making. What it has acquired is released by
// abandon, or handed over to the Conn.
type setup struct {
	set settings
	dom *regmem.Domain
	id  ibv.ID
	cq  ibv.CQ
	qp  ibv.QP
	due time.Time

	slots    int // work requests in the send queue, reads and probes included
	passive  bool
	probeMem probeMemory
	probe    *probeTarget // in it, ours, if the peer is to know one
	lasting  bool         // see acquireDomain
	gone     atomic.Pointer[ibv.Event]
	posted   []*regmem.Buffer // receives, oldest first
	recv     *regmem.Buffer   // the one that the negotiation message came in
	send     *regmem.Buffer
}

// begin acquires what a connection needs on the ID's device. It takes the ID
// over: on error it is closed.
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

// decline says why the connection is not accepted, as an early negotiation that
// fails: in the private data of the rejection. It is in vain after an Accept.
func (s *setup) decline(err error) {
	if !errors.Is(err, errno.ENOBUFS) && !errors.Is(err, errno.ENOMEM) || !parsePrivate(s.id.PrivateData()).rdmanet {
		return
	}
	var b [negotiateResponseLen]byte
	resp := refusal(statusInsufficientResources)
	s.id.Reject(s.param(b[:resp.put(b[:])]).Private)
}

func (s *setup) acquire() (err error) {
	dev := s.id.Device()
	if s.dom, err = acquireDomain(dev, s.lasting); err != nil {
		return err
	}
	attr := dev.Attr()
	// The completion queue has room for all that may be posted: one that overflows breaks the connection.
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
	// Many devices grant longer queues than were asked for. Only what the completion queue was made for is used.
	granted := s.qp.Cap()
	s.slots = min(s.slots, granted.MaxSendWR)
	// One more than the window may be posted, to have something to grant.
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

// abandon releases everything.
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

func (s *setup) releaseBuffers() {
	for _, b := range append(s.posted, s.recv, s.send) {
		if b != nil {
			b.Release()
		}
	}
	s.posted, s.recv, s.send = nil, nil, nil
}

// param is what the connection manager carries for us: early, if not nil, is a
// negotiation message.
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
		private.features |= featurePulse
	}
	p.Private = append(private.append(make([]byte, 0, privateLen+len(early)+probeTargetLen)), early...)
	if says {
		p.Private = s.probe.append(p.Private)
	}
	return p
}

// private is what we say of ourselves.
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

// connect is the active side: from a resolved ID to a connection. It takes the
// ID over.
func connect(ctx context.Context, cfg *Config, id ibv.ID) (*conn, error) {
	s, err := begin(cfg, id, false)
	if err != nil {
		return nil, err
	}
	if cfg.NegotiateTimeout > 0 { // else the device's own bound on connecting does
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, s.due)
		defer cancel()
	}
	c, err := s.initiate(ctx)
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		go s.abandon() // Linux keeps an iWARP ID until the peer has answered, or for 10 s
	default:
		s.abandon()
	}
	return nil, err
}

func (s *setup) initiate(ctx context.Context) (*conn, error) {
	// These are for the first messages, and can be granted right away.
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

// explain adds to a rejection what the peer said of the reason.
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

// accept is the passive side: from a connection request to a connection. It
// takes the ID over.
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

// respondEarly negotiates by private data if the peer began it there. It returns
// nothing where that cannot be done: without an answer the peer asks again by a
// message, and the answer to that can be a refusal.
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
		c.recall()
		return nil, err
	}
	c.start()
	return c, nil
}

// refuse sends a failure response and gives it time to arrive.
func (s *setup) refuse(ctx context.Context, resp negotiateResponse) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var b [negotiateResponseLen]byte
	if s.sendMessage(b[:resp.put(b[:])]) != nil {
		return
	}
	for sent := false; !sent; { // else Disconnect may flush it
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

// establish makes the connection out of what was agreed. On the passive side
// resp is sent once receives are posted; on the active side the first message
// grants ours. The setup's resources are the Conn's from then on, unless there
// is an error.
func (s *setup) establish(a agreement, peer privateData, resp *negotiateResponse) (*conn, error) {
	c, err := s.newConn(a, peer, false)
	if err != nil {
		return nil, err
	}
	if resp != nil {
		resp.CreditsGranted = c.credits.grantAll()
		var b [negotiateResponseLen]byte
		if err := s.sendMessage(b[:resp.put(b[:])]); err != nil {
			c.recall()
			return nil, err
		}
		if s.send != nil { // free with the first send that completes
			var bufs regmem.Buffers
			bufs.Push(s.send)
			c.lane.signaled.Push(signaledSend{bufs: bufs})
			s.send = nil
		}
	}
	c.start()
	return c, nil
}

// findProbe finds out by what RDMA Read, if by any, the peer's device can be asked
// whatever it does. Where devices differ in that, only a peer that is rdmanet tells.
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

// newConn makes the Conn, with receives posted, that start sets going. granted
// says that the peer knows of those that were posted before.
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
	c.credits = credits{
		have:         int(a.sendCredits),
		target:       max(int(a.receiveCreditTarget), minCredits),
		window:       s.set.initial,
		initial:      s.set.initial,
		maximum:      s.set.maximum,
		charge:       s.dom.Budget.Share(int64(s.set.receiveMemory), int64(c.pool.Size)),
		readerWaited: true,
	}
	if c.rx.mode != transferNone {
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
		c.recall()
		return nil, err
	}
	c.live.memory, s.probeMem = s.probeMem, probeMemory{}
	return c, nil
}

// start hears of events from now on.
func (c *conn) start() {
	c.mu.Lock()
	defer c.unlock()
	c.lane.id.Notify(c.notify)
	c.lane.open = true
	c.rx.depth = max(1, min(c.rx.depth, c.lane.id.Param().InitiatorDepth-1)) // one is for queueBarrier
	fetches := c.rx.depth
	if c.rx.mode == transferWrite {
		fetches = maxTransfers
	}
	c.rx.pace = newPace(fetches)
	c.startTimer()
	c.scheduleTrim() // its buffers may have pages that another connection has filled
	// The active side's grant goes with the first Write, or ahead of the first
	// Read that waits; if neither comes, a leader in the background sends it.
	c.wait.Start()
}

// provision posts the first receives and gets what sending cannot do without.
// With fewer than minCredits the connection could come to a halt.
func (c *conn) provision() (err error) {
	c.mu.Lock()
	defer c.unlock()
	if int(c.agreed.maxSend) > c.lane.inline {
		if err = c.lane.reserve(); err != nil {
			return err
		}
	}
	if err := c.reserveBounceBuffer(); err != nil {
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

// recall gives back what a failed set-up holds.
func (c *conn) recall() {
	c.credits.charge.Lower(0)
	if c.in.posted.Len() > 0 {
		c.lane.qp.Close()
	}
	for c.in.posted.Len() > 0 {
		c.in.posted.Pop().Release()
	}
	c.lane.release(unwritten)
	c.releaseReserved()
	c.live.memory.close()
}

// sendMessage sends a negotiation message. It costs no credit.
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

func (s *setup) notify(e ibv.Event) {
	s.gone.CompareAndSwap(nil, &e)
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

// completion waits for the next success. The error is why there will be none.
func (s *setup) completion(ctx context.Context) (*ibv.WC, error) {
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, s.cq.Interrupt)
		defer stop()
	}
	s.id.Notify(s.notify)
	var wcs [1]ibv.WC
	for {
		end := s.gone.Load() // before the last look at what was completed
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
			continue // the event tells why
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
