package rdmanet

import (
	"errors"
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
//  2. The active side posts receives and connects (initiate, setup_active.go). The passive
//     side accepts (respond, setup_passive.go). Between rdmanet peers both do so with the
//     negotiation in the private data (privatedata.go).
//  3. Otherwise the negotiation messages follow on the queue pair (setup_messages.go).
//  4. newConn makes the conn out of the agreement, and start lets it run (setup_conn.go).
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
		MaxSendSGE: 2, MaxRecvSGE: 1, MaxInline: min(attr.MaxInline, s.set.maxSend)}, HoldSends: s.set.hold}
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

// expect posts n receives of size bytes, by one call. On an error fewer may be posted. Those
// are in s.posted.
func (s *setup) expect(n, size int) error {
	wrs, sges, bufs := make([]ibv.RecvWR, 0, n), make([]ibv.SGE, n), make([]*regmem.Buffer, 0, n)
	var short error
	for i := range n {
		buf, err := s.dom.Pool(size).Get()
		if err != nil {
			short = err
			break
		}
		sges[i] = buf.SGE(size)
		wrs, bufs = append(wrs, ibv.RecvWR{SGL: sges[i : i+1 : i+1]}), append(bufs, buf)
	}
	if len(wrs) == 0 {
		return short
	}
	posted, err := s.qp.PostRecv(wrs)
	for _, buf := range bufs[posted:] {
		buf.Release()
	}
	s.posted = append(s.posted, bufs[:posted]...)
	if err != nil {
		return err
	}
	return short
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
