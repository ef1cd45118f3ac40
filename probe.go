package rdmanet

import (
	"encoding/binary"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// This file has the memory for keep-alive probes by RDMA Read. Such a Read asks the peer's
// device whether it is there, and whether it has got what was sent before (queueBarrier).
//
// A Read of no bytes does, except with devices that may answer it with stale bytes
// (ibv.Quirks.EmptyReadsGarbled). An end with such a device offers the peer a probe target:
// one byte, a zero, that the peer may read as long as the connection exists. keepalive.go
// and close.go decide when to read it.

// probeTarget is where a probe target is, as the peer's private data gives it.
type probeTarget struct {
	addr uint64
	key  uint32
}

const (
	probeTargetLen = 12
	probeBytes     = 1
)

// append adds the wire form to b, big-endian.
func (p probeTarget) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, p.addr)
	return binary.BigEndian.AppendUint32(b, p.key)
}

// parseProbeTarget returns the probe target in the private data b of a request or a
// response, or nil. It follows the early negotiation message, which would end at early.
func parseProbeTarget(b []byte, early int) *probeTarget {
	at := privateLen
	features := parsePrivate(b).features
	if features&featureEarly != 0 {
		at = early
	}
	if features&featureProbeTarget == 0 || len(b) < at+probeTargetLen {
		return nil
	}
	b = b[at:]
	return &probeTarget{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
}

// probeMemory is this end's memory for probes. The first byte is its own probe target,
// which mr opens to the peer. The second byte is where the peer's probe target is read to.
type probeMemory struct {
	buf *regmem.Buffer
	mr  ibv.MR
}

const probeMemoryBytes = 2 * probeBytes

// hold gets the memory, unless that was done before.
func (b *probeMemory) hold(d *regmem.Domain) error {
	if b.buf != nil {
		return nil
	}
	buf, err := d.Pool(probeMemoryBytes).Get()
	if err != nil {
		return err
	}
	clear(buf.B[:probeMemoryBytes])
	b.buf = buf
	return nil
}

// open lets the peer of the queue pair read this end's probe target.
func (b *probeMemory) open(d *regmem.Domain, qp ibv.QP) (*probeTarget, error) {
	if err := b.hold(d); err != nil {
		return nil, err
	}
	mr, err := b.buf.Expose(qp, probeBytes, ibv.AccessRemoteRead)
	if err != nil {
		return nil, err
	}
	b.mr = mr
	return &probeTarget{mr.Addr(), mr.RKey()}, nil
}

// answer returns the memory that the peer's probe target is read to.
func (b *probeMemory) answer() []byte { return b.buf.B[probeBytes:probeMemoryBytes] }

// close gives the memory back. The queue pair is closed.
func (b *probeMemory) close() (err error) {
	if b.mr != nil {
		err = b.mr.Close()
	}
	// If the registration could not be closed, the device may still use the memory.
	if b.buf != nil && err == nil {
		b.buf.Release()
	}
	*b = probeMemory{}
	return err
}
