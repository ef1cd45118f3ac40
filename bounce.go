package rdmanet

import (
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file has the memory that fetched data waits in for a reader with less room.
// fetch.go asks for the data, and read_transfer.go copies from the memory.

// release gives the memory back, unless the device may still use it.
func (l *bounceBuffer) release() {
	switch {
	case l.mr != nil && l.mr.Close() != nil:
		// The device may still use the memory, so it is never used again.
	case l.buf != nil:
		l.buf.Release()
	default:
		l.chunk.Release()
	}
}

// getBounceBuffer returns memory for fetches, or nil if there is none. If there is no
// chunk, the connection has one bounce buffer at a time: its reserved one, or else a
// receive buffer.
func (in *transferReceiver) getBounceBuffer() *bounceBuffer {
	var s *regmem.Chunk
	var err error
	limit := in.limit(in.memory)
	// For RDMA Writes the chunk is registered anew for each memory grant.
	if in.mode == TransferWrite {
		s = in.dom.GetChunk(limit)
	} else {
		s, err = in.dom.GetRegisteredChunk(limit, in)
	}
	if s != nil {
		return &bounceBuffer{b: s.B, lkey: s.LKey(), chunk: s}
	} else if err != nil {
		in.refused = err
	}
	if l := in.takeReserved(); l != nil || in.bounceBuffers > 0 || in.hasReserved {
		return l
	}
	buf, err := in.pool.Get()
	if err != nil {
		in.refused = err
		return nil
	}
	return &bounceBuffer{b: buf.B, lkey: buf.LKey, buf: buf}
}

// limit returns how much of the memory that connections share this one may use up. Peers that no
// program has accepted leave half of it to the others.
func (in *transferReceiver) limit(memory int) int {
	if in.notAccepted {
		return memory / 2
	}
	return memory
}

// takeReserved returns the reserved bounce buffer, or nil. It returns nil also while any
// other bounce buffer is in use.
func (in *transferReceiver) takeReserved() *bounceBuffer {
	if in.bounceBuffers > 0 {
		return nil
	}
	l := in.reserved
	in.reserved = nil
	return l
}

// putBounceBuffer takes back what getBounceBuffer or takeReserved has returned.
func (in *transferReceiver) putBounceBuffer(l *bounceBuffer) {
	over := in.life.closed || in.life.over()
	switch {
	case l.stuck, l.chunk != nil && over && !l.chunk.Unregister():
		// The device may still use the memory, so it is never used again.
	case l.buf != nil && !over && in.hasReserved && in.reserved == nil:
		// The buffer stays reserved for the next time that there is no chunk.
		in.reserved = l
	default:
		l.release()
	}
}

// reserve reserves a bounce buffer on devices that pin memory. Without it a
// transfer could not be read when no more memory can be registered. For RDMA Writes the
// buffer is registered for the peer in advance: it never holds data of another peer.
func (in *transferReceiver) reserve() error {
	if in.mode == TransferNone || !regmem.PinsMemory(in.lane.id.Device()) {
		return nil
	}
	buf, err := in.pool.Get()
	if err != nil {
		return err
	}
	l := &bounceBuffer{b: buf.B, lkey: buf.LKey, buf: buf}
	if in.mode == TransferWrite {
		if l.mr, err = in.dom.Expose(in.lane.qp, l.b, peerWrites); err != nil {
			buf.Release()
			return err
		}
	}
	in.hasReserved, in.reserved = true, l
	return nil
}

// releaseReserved releases the reserved bounce buffer, if it is not in use.
func (in *transferReceiver) releaseReserved() {
	if in.reserved != nil {
		in.reserved.release()
		in.reserved = nil
	}
}

// peerWrites is the access of a peer that fills memory by RDMA Write.
const peerWrites = ibv.AccessLocalWrite | ibv.AccessRemoteWrite
