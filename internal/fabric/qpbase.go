package fabric

import (
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
)

// qpBase is the part of a queue pair that does not depend on its kind.
type qpBase struct {
	f              *Fabric
	pd             *pd
	num            uint32
	cap            ibv.QPCap
	sendCQ, recvCQ *cq
}

// newBase takes what a queue pair needs. inline is the most bytes of an inline send. The
// caller holds Fabric.mu.
func (f *Fabric) newBase(p ibv.PD, init *ibv.QPInit, inline int) (b qpBase, err error) {
	if err := checkCap(init.Cap, inline); err != nil {
		return b, err
	}
	domain, ok0 := p.(*pd)
	sendCQ, ok1 := init.SendCQ.(*cq)
	recvCQ, ok2 := init.RecvCQ.(*cq)
	if !ok0 || !ok1 || !ok2 || domain.f != f || sendCQ.f != f || recvCQ.f != f {
		return b, fmt.Errorf("objects of another device: %w", syscall.EINVAL)
	}
	c := init.Cap
	c.MaxSendSGE, c.MaxRecvSGE = max(c.MaxSendSGE, 1), max(c.MaxRecvSGE, 1)
	if err := domain.use(); err != nil {
		return b, err
	}
	if err := sendCQ.use(); err != nil {
		domain.unuse()
		return b, fmt.Errorf("completion queue: %w", err)
	}
	if err := recvCQ.use(); err != nil {
		sendCQ.unuse()
		domain.unuse()
		return b, fmt.Errorf("completion queue: %w", err)
	}
	return qpBase{f: f, pd: domain, num: f.number(), cap: c, sendCQ: sendCQ, recvCQ: recvCQ}, nil
}

// release gives back what newBase has taken.
func (b *qpBase) release() {
	b.sendCQ.unuse()
	b.recvCQ.unuse()
	b.pd.unuse()
}

func (b *qpBase) QPN() uint32    { return b.num }
func (b *qpBase) Cap() ibv.QPCap { return b.cap }
