package fabric

import (
	"fmt"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// recvReq is a work request in a receive queue. Its keys are checked when a message comes,
// as adapters do.
type recvReq struct {
	id   uint64
	size int // bytes
	sgl  []ibv.SGE
}

// pushRecv appends a receive to the requests of a queue pair with the capacities c.
func pushRecv(reqs *ring.Ring[recvReq], wr *ibv.RecvWR, c *ibv.QPCap) error {
	if reqs.Len() >= c.MaxRecvWR {
		return ibv.ErrQueueFull
	}
	size, fits := sizeOf(wr.SGL, maxMessage)
	if len(wr.SGL) > c.MaxRecvSGE || !fits {
		return fmt.Errorf("%d elements: %w", len(wr.SGL), ibv.ErrLimit)
	}
	r := reqs.Next()
	*r = recvReq{id: wr.ID, size: size, sgl: append(r.sgl[:0], wr.SGL...)}
	return nil
}

// drop removes the request, which is the oldest one. A later request uses the memory of its
// list again.
func (r *recvReq) drop(reqs *ring.Ring[recvReq]) {
	clear(r.sgl)
	reqs.Drop()
}
