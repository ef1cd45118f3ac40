package rdmanet

import (
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
)

// Memory of the caller's, for one transfer. The garbage collector moves nothing
// and the caller holds on to the slice for the time of the call, so ordinary
// memory of Go's heap may be registered too; only it must not stay so.

// expose opens exactly b to this connection's peer, and to nobody else's, until
// the region is closed: on a device without regions of one queue pair the
// domain is this connection's own. Memory that the peer may write to is cleared,
// as a peer may say of bytes that it has written them and not have. Memory that
// cannot be registered matches syscall.ENOBUFS.
//
// A Buffer that b lies in stays until the region is closed.
func (c *conn) expose(b []byte, access ibv.Access) (ibv.MR, error) {
	buf := holdRegion(b)
	if access&ibv.AccessRemoteWrite != 0 {
		clear(b)
	}
	mr, err := c.dom.regFor(c.qp, b, access)
	switch {
	case err != nil:
		buf.unhold(nil)
		return nil, noMemory(c.dom.dev, len(b), "TransferMemory", err)
	case buf != nil:
		h := &heldMR{MR: mr}
		h.buf.Store(buf)
		return h, nil
	}
	return mr, nil
}

// regFor registers b for the peer of one queue pair of the domain.
func (d *domain) regFor(qp ibv.QP, b []byte, access ibv.Access) (ibv.MR, error) {
	if d.private {
		return d.pd.RegMR(b, access)
	}
	return qp.RegMR(b, access)
}

// holdRegion returns the Buffer that b lies in, held: the call that b was given to
// holds it besides.
func holdRegion(b []byte) *Buffer {
	if buf := findRegion(b); buf != nil && buf.share() {
		return buf
	}
	return nil
}

// heldMR is a region in a Buffer that is held as long.
type heldMR struct {
	ibv.MR
	buf atomic.Pointer[Buffer]
}

func (h *heldMR) Close() error {
	err := h.MR.Close()
	if buf := h.buf.Swap(nil); buf != nil {
		buf.unhold(err)
	}
	return err
}

// A sink is memory that this connection's device may use, by its local key.
type sink struct {
	lkey uint32
	mr   ibv.MR  // to be closed, nil where the registration stays
	buf  *Buffer // held, nil for ordinary memory
}

// close ends it. On an error the device may still use the memory.
func (s *sink) close() (err error) {
	if s.mr != nil {
		err = s.mr.Close()
	}
	s.buf.unhold(err)
	*s = sink{}
	return err
}

// land registers b for data that the device is to put there: RDMA Reads of this
// side, receives. Nobody else gets a right to it. Where peers may read all the
// same what their domain has, b is cleared first: what lay there may be another
// connection's. Memory that cannot be registered matches syscall.ENOBUFS.
func (c *conn) land(b []byte) (sink, error) {
	if c.dom.unchecked {
		clear(b)
	}
	return c.register(b, ibv.AccessLocalWrite)
}

// source is land for data that the device is to take from b: RDMA Writes and
// sends of this side. b may be memory that cannot be written.
func (c *conn) source(b []byte) (sink, error) { return c.register(b, 0) }

func (c *conn) register(b []byte, access ibv.Access) (sink, error) {
	s := sink{buf: holdRegion(b)}
	if s.buf != nil && s.buf.span.ours && !c.dom.unchecked {
		mr, err := s.buf.keyIn(c.dom)
		if err == nil {
			s.lkey = mr.LKey()
			return s, nil
		}
		// Perhaps there is room for the part that is needed.
	}
	mr, err := c.dom.pd.RegMR(b, access)
	if err != nil {
		s.close()
		return sink{}, noMemory(c.dom.dev, len(b), "TransferMemory", err)
	}
	s.mr, s.lkey = mr, mr.LKey()
	return s, nil
}
