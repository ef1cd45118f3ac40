package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Opcode is the first byte of the Base Transport Header: transport and
// operation of a RoCE packet (InfiniBand Architecture Specification, volume 1,
// 9.2).
type Opcode uint8

// Transports, the upper three bits of an Opcode.
const (
	transportRC = 0x00
	transportUC = 0x20
	transportUD = 0x60

	opcodeCNP Opcode = 0x81 // congestion notification, RoCEv2
)

// class is what a packet is for.
type class uint8

const (
	classNone class = iota
	classSend
	classWrite
	classReadRequest
	classReadResponse
	classAck
	classAtomic
	classAtomicAck
)

// Flags of an opcode: its place in the message, and the extended headers that
// follow the BTH, in this order.
const (
	opFirst = 1 << iota
	opLast
	opDETH
	opRETH
	opAETH
	opAtomicETH
	opAtomicAck
	opImm
	opIETH
)

type opInfo struct {
	class class
	flags uint16
	name  string
}

// operations are the lower five bits of an Opcode; not every transport has all.
var operations = [32]opInfo{
	0x00: {classSend, opFirst, "SEND First"},
	0x01: {classSend, 0, "SEND Middle"},
	0x02: {classSend, opLast, "SEND Last"},
	0x03: {classSend, opLast | opImm, "SEND Last with Immediate"},
	0x04: {classSend, opFirst | opLast, "SEND Only"},
	0x05: {classSend, opFirst | opLast | opImm, "SEND Only with Immediate"},
	0x06: {classWrite, opFirst | opRETH, "RDMA WRITE First"},
	0x07: {classWrite, 0, "RDMA WRITE Middle"},
	0x08: {classWrite, opLast, "RDMA WRITE Last"},
	0x09: {classWrite, opLast | opImm, "RDMA WRITE Last with Immediate"},
	0x0a: {classWrite, opFirst | opLast | opRETH, "RDMA WRITE Only"},
	0x0b: {classWrite, opFirst | opLast | opRETH | opImm, "RDMA WRITE Only with Immediate"},
	0x0c: {classReadRequest, opFirst | opLast | opRETH, "RDMA READ Request"},
	0x0d: {classReadResponse, opFirst | opAETH, "RDMA READ Response First"},
	0x0e: {classReadResponse, 0, "RDMA READ Response Middle"},
	0x0f: {classReadResponse, opLast | opAETH, "RDMA READ Response Last"},
	0x10: {classReadResponse, opFirst | opLast | opAETH, "RDMA READ Response Only"},
	0x11: {classAck, opFirst | opLast | opAETH, "Acknowledge"},
	0x12: {classAtomicAck, opFirst | opLast | opAETH | opAtomicAck, "ATOMIC Acknowledge"},
	0x13: {classAtomic, opFirst | opLast | opAtomicETH, "CmpSwap"},
	0x14: {classAtomic, opFirst | opLast | opAtomicETH, "FetchAdd"},
	0x16: {classSend, opLast | opIETH, "SEND Last with Invalidate"},
	0x17: {classSend, opFirst | opLast | opIETH, "SEND Only with Invalidate"},
}

// opcodes has an entry for every Opcode; classNone where there is none.
var opcodes = func() (t [256]opInfo) {
	for i, op := range operations {
		t[transportRC|i] = op
		if i <= 0x0b { // UC neither answers nor invalidates
			t[transportUC|i] = op
		}
	}
	t[transportUD|4] = opInfo{classSend, opFirst | opLast | opDETH, "SEND Only"}
	t[transportUD|5] = opInfo{classSend, opFirst | opLast | opDETH | opImm, "SEND Only with Immediate"}
	return t
}()

func (o Opcode) transport() byte { return byte(o) & 0xe0 }

// String returns the name in the words of the specification, "RC SEND Only"
// for instance.
func (o Opcode) String() string {
	if o == opcodeCNP {
		return "CNP"
	}
	name := opcodes[o].name
	if name == "" {
		return fmt.Sprintf("opcode 0x%02x", uint8(o))
	}
	switch o.transport() {
	case transportRC:
		return "RC " + name
	case transportUC:
		return "UC " + name
	}
	return "UD " + name
}

// BTH is the Base Transport Header of a packet.
type BTH struct {
	Opcode     Opcode
	Solicited  bool
	Migrated   bool
	Pad        uint8 // Pad is how many bytes behind the payload fill the last word.
	PKey       uint16
	FECN, BECN bool
	DestQP     uint32
	AckReq     bool
	PSN        uint32
}

// RoCE is a packet of RoCEv2 behind its UDP header. Parse sets only the fields of headers
// that the packet's opcode has.
type RoCE struct {
	BTH

	// Addr and RKey are in the RETH, and in the AtomicETH.
	Addr   uint64
	RKey   uint32
	Length uint32 // Length is the number of bytes of the whole Read or Write, from the RETH.

	// Swap and Compare are in the AtomicETH. FetchAdd adds Swap.
	Swap, Compare uint64

	Original uint64 // Original is the value before an atomic operation, from the AtomicAckETH.

	Syndrome uint8 // Syndrome and MSN are in the AETH.
	MSN      uint32

	QKey, SrcQP uint32 // QKey and SrcQP are in the DETH.
	Imm         uint32
	Invalidate  uint32 // Invalidate is the key to invalidate, from the IETH.

	Payload []byte // Payload is the captured part of the payload. It aliases the packet.
	Size    int    // Size is how many bytes of payload were on the wire.
	ICRC    uint32 // ICRC is the one that was sent, 0 if it was not captured.
	Whole   bool   // Whole is set if everything was captured, the ICRC included.
}

// These are the reasons for refusing a packet.
var (
	errRoCEShort  = errors.New("roce: packet ends inside its headers")
	errRoCEOpcode = errors.New("roce: unknown opcode")
	errRoCEPad    = errors.New("roce: more padding than payload")
)

const (
	bthLen  = 12
	icrcLen = 4
)

// Parse decodes a packet. b is what was captured behind the UDP header, and size is how
// many bytes were on the wire there. Payload aliases b.
func (p *RoCE) Parse(b []byte, size int) error {
	if len(b) < bthLen || size < bthLen+icrcLen {
		return errRoCEShort
	}
	be := binary.BigEndian
	qp, psn := be.Uint32(b[4:]), be.Uint32(b[8:])
	p.BTH = BTH{
		Opcode:    Opcode(b[0]),
		Solicited: b[1]&0x80 != 0,
		Migrated:  b[1]&0x40 != 0,
		Pad:       b[1] >> 4 & 3,
		PKey:      be.Uint16(b[2:]),
		FECN:      b[4]&0x80 != 0,
		BECN:      b[4]&0x40 != 0,
		DestQP:    qp & 0xffffff,
		AckReq:    b[8]&0x80 != 0,
		PSN:       psn & 0xffffff,
	}
	op := &opcodes[b[0]]
	at := bthLen
	if p.Opcode == opcodeCNP {
		at += 16 // reserved
		if size < at+icrcLen {
			return errRoCEShort
		}
	} else if op.class == classNone {
		return errRoCEOpcode
	}
	if op.flags&^(opFirst|opLast) != 0 {
		var ok bool
		if at, ok = p.parseExtended(b, at, op.flags); !ok {
			return errRoCEShort
		}
	}
	p.Size = size - at - icrcLen - int(p.Pad)
	if p.Size < 0 {
		if size-at-icrcLen < 0 {
			return errRoCEShort
		}
		return errRoCEPad
	}
	p.Payload = nil
	if at < len(b) {
		p.Payload = b[at:min(at+p.Size, len(b))]
	}
	p.Whole = len(b) >= size
	p.ICRC = 0
	if p.Whole {
		p.ICRC = binary.LittleEndian.Uint32(b[size-icrcLen:])
	}
	return nil
}

// parseExtended reads the extended headers from offset at and returns where the
// payload begins; ok is false if b ends before.
func (p *RoCE) parseExtended(b []byte, at int, flags uint16) (end int, ok bool) {
	be := binary.BigEndian
	if flags&opDETH != 0 {
		if len(b) < at+8 {
			return at, false
		}
		p.QKey, p.SrcQP = be.Uint32(b[at:]), be.Uint32(b[at+4:])&0xffffff
		at += 8
	}
	if flags&opRETH != 0 {
		if len(b) < at+16 {
			return at, false
		}
		p.Addr, p.RKey, p.Length = be.Uint64(b[at:]), be.Uint32(b[at+8:]), be.Uint32(b[at+12:])
		at += 16
	}
	if flags&opAtomicETH != 0 {
		if len(b) < at+28 {
			return at, false
		}
		p.Addr, p.RKey = be.Uint64(b[at:]), be.Uint32(b[at+8:])
		p.Swap, p.Compare = be.Uint64(b[at+12:]), be.Uint64(b[at+20:])
		at += 28
	}
	if flags&opAETH != 0 {
		if len(b) < at+4 {
			return at, false
		}
		v := be.Uint32(b[at:])
		p.Syndrome, p.MSN = uint8(v>>24), v&0xffffff
		at += 4
	}
	if flags&opAtomicAck != 0 {
		if len(b) < at+8 {
			return at, false
		}
		p.Original = be.Uint64(b[at:])
		at += 8
	}
	if flags&opImm != 0 {
		if len(b) < at+4 {
			return at, false
		}
		p.Imm = be.Uint32(b[at:])
		at += 4
	}
	if flags&opIETH != 0 {
		if len(b) < at+4 {
			return at, false
		}
		p.Invalidate = be.Uint32(b[at:])
		at += 4
	}
	return at, true
}

// psnDiff returns a-b in the arithmetic of 24-bit sequence numbers: positive
// where a comes after b.
func psnDiff(a, b uint32) int {
	return int(int32((a-b)<<8) >> 8)
}

const psnMask = 0xffffff
