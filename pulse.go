package rdmanet

import (
	"encoding/binary"

	"github.com/rdmanet/rdmanet/ibv"
)

// An RDMA Read asks the peer's device whether it is there, and has it say that it
// has got what was sent before: see keepalive.go and postBarrier. One of no bytes
// does, but for devices that may answer that with garbage
// (ibv.DeviceAttr.EmptyReadsGarbled). Their ends offer the peer one byte to read in
// its place, for as long as the connection lives: the pulse, a zero.

// pulse is where a peer's is, as the peer says behind its private data.
type pulse struct {
	addr uint64
	key  uint32
}

const (
	pulseLen   = 12
	pulseBytes = 1
)

func (p pulse) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, p.addr)
	return binary.BigEndian.AppendUint32(b, p.key)
}

// parsePulse finds the pulse in the private data of a request or a response, nil if
// there is none. It follows the early negotiation message, which would end at early.
func parsePulse(b []byte, early int) *pulse {
	at := privateLen
	features := parsePrivate(b).features
	if features&featureEarly != 0 {
		at = early
	}
	if features&featurePulse == 0 || len(b) < at+pulseLen {
		return nil
	}
	b = b[at:]
	return &pulse{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
}

// beat is this end's memory for pulses: the first byte is our own pulse, where mr
// opens it, and the second one where the peer's goes.
type beat struct {
	buf *buffer
	mr  ibv.MR
}

const beatBytes = 2 * pulseBytes

// hold gets the memory.
func (b *beat) hold(d *domain) error {
	if b.buf != nil {
		return nil
	}
	buf, err := d.pool(beatBytes).get()
	if err != nil {
		return err
	}
	clear(buf.b[:beatBytes])
	b.buf = buf
	return nil
}

// open lets the peer of the queue pair read our pulse.
func (b *beat) open(d *domain, qp ibv.QP) (*pulse, error) {
	if err := b.hold(d); err != nil {
		return nil, err
	}
	mr, err := d.regFor(qp, b.buf.b[:pulseBytes], ibv.AccessRemoteRead)
	if err != nil {
		return nil, noMemory(d.dev, pulseBytes, "MaxReceiveCredits", err)
	}
	b.mr = mr
	return &pulse{mr.Addr(), mr.RKey()}, nil
}

// feel has wr read the peer's pulse.
func (b *beat) feel(p *pulse, wr *ibv.SendWR) {
	wr.RemoteAddr, wr.RKey = p.addr, p.key
	wr.SGL = []ibv.SGE{{Buf: b.buf.b[pulseBytes:beatBytes], LKey: b.buf.lkey}}
}

// close gives the memory back. The queue pair is closed.
func (b *beat) close() (err error) {
	if b.mr != nil {
		err = b.mr.Close()
	}
	if b.buf != nil && err == nil { // else the device may still use it
		b.buf.release()
	}
	*b = beat{}
	return err
}
