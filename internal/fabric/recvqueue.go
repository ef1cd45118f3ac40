package fabric

import (
	"fmt"
	"sync"

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

// recvQueue is the receive queue of a connection.
type recvQueue struct {
	mu     sync.Mutex
	reqs   ring.Ring[recvReq]
	wanted bool      // the peer's oldest request waits for a receive
	spare  []ibv.SGE // the list of the receive that was taken last
}

// take removes the oldest receive for a message of the peer. The caller may use its list
// until the next take, while PostRecv appends receives. If there is no receive, take notes
// that one is wanted.
func (s *recvQueue) take() (r recvReq, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reqs.Len() == 0 {
		s.wanted = true
		return r, false
	}
	head := s.reqs.At(0)
	r = *head
	clear(s.spare)
	head.sgl, s.spare = s.spare, r.sgl
	s.reqs.Drop()
	return r, true
}
