package rdmanet

import (
	"encoding/binary"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// An RDMA Read asks the peer's device whether it is there, and has it say that it
// has got what was sent before: see keepalive.go and postBarrier. One of no bytes
// does, but for devices that may answer that with garbage
// (ibv.Quirks.EmptyReadsGarbled). Their ends offer the peer one byte to read in
// its place, for as long as the connection lives: the pulse, a zero.

// probeTarget is where a peer's is, as the peer says behind its private data.
type probeTarget struct {
	addr uint64
	key  uint32
}

const (
	probeTargetLen = 12
	probeBytes     = 1
)

func (p probeTarget) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, p.addr)
	return binary.BigEndian.AppendUint32(b, p.key)
}

// parseProbeTarget finds the pulse in the private data of a request or a response, nil if
// there is none. It follows the early negotiation message, which would end at early.
func parseProbeTarget(b []byte, early int) *probeTarget {
	at := privateLen
	features := parsePrivate(b).features
	if features&featureEarly != 0 {
		at = early
	}
	if features&featurePulse == 0 || len(b) < at+probeTargetLen {
		return nil
	}
	b = b[at:]
	return &probeTarget{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
}

// probeMemory is this end's memory for pulses: the first byte is our own pulse, where mr
// opens it, and the second one where the peer's goes.
type probeMemory struct {
	buf *regmem.Buffer
	mr  ibv.MR
}

const probeMemoryBytes = 2 * probeBytes

// hold gets the memory.
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

// open lets the peer of the queue pair read our pulse.
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

// answer is where the bytes of a peer's probe target go.
func (b *probeMemory) answer() []byte { return b.buf.B[probeBytes:probeMemoryBytes] }

// close gives the memory back. The queue pair is closed.
func (b *probeMemory) close() (err error) {
	if b.mr != nil {
		err = b.mr.Close()
	}
	if b.buf != nil && err == nil { // else the device may still use it
		b.buf.Release()
	}
	*b = probeMemory{}
	return err
}
