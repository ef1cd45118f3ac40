package udconn

import (
	"encoding/binary"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// The formats of docs/protocol.md for datagrams. A datagram over a UD queue pair carries the
// host and the queue pair that it is from, but no port. So the port is put in the immediate
// data. Nothing is added to the payload.

// immediateMark is the upper half of the immediate data of a datagram to one peer. Programs
// that are not rdmanet put their queue pair number there, which has 24 bits.
const immediateMark = uint32('R')<<24 | uint32('D')<<16

// Immediate returns the immediate data of a datagram to one peer, which is from port.
func Immediate(port uint16) uint32 { return immediateMark | uint32(port) }

// PortOf returns the port of immediate data that Immediate has made.
func PortOf(imm uint32) (port uint16, ok bool) {
	return uint16(imm), imm&0xffff0000 == immediateMark && uint16(imm) != 0
}

// minGroupPort is the lowest port that a datagram to a group is from. With a lower one the
// immediate data would pass for the queue pair number of a program that is not rdmanet.
const minGroupPort = 1 << 8

// GroupImmediate returns the immediate data of a datagram to a group: the port that it is
// from and the port that it is for.
func GroupImmediate(from, to uint16) uint32 { return uint32(from)<<16 | uint32(to) }

// GroupPorts returns the ports of immediate data that GroupImmediate has made.
func GroupPorts(imm uint32) (from, to uint16, ok bool) {
	from, to = uint16(imm>>16), uint16(imm)
	return from, to, from >= minGroupPort && to != 0
}

// PrivateData is the private data of the request that resolves an address to a queue pair,
// and of its reply.
type PrivateData struct {
	Port uint16 // Port is where the sender of the private data answers requests.
	QPN  uint32 // QPN is the queue pair that it sends datagrams from.
}

const (
	privateDataLen     = 12
	privateDataMagic   = "RDND"
	privateDataVersion = 1

	maxQPN = 1<<24 - 1
)

// Append appends the encoded form to b.
func (p PrivateData) Append(b []byte) []byte {
	b = append(b, privateDataMagic...)
	b = append(b, privateDataVersion, 0)
	b = binary.BigEndian.AppendUint16(b, p.Port)
	return binary.BigEndian.AppendUint32(b, p.QPN)
}

// ParsePrivateData decodes private data. ok is false for a peer that is not rdmanet. Bytes
// behind the encoded form are padding, or belong to later versions.
func ParsePrivateData(b []byte) (p PrivateData, ok bool) {
	if len(b) < privateDataLen || string(b[:4]) != privateDataMagic || b[4] != privateDataVersion {
		return PrivateData{}, false
	}
	p = PrivateData{Port: binary.BigEndian.Uint16(b[6:]), QPN: binary.BigEndian.Uint32(b[8:])}
	if p.Port == 0 || p.QPN > maxQPN {
		return PrivateData{}, false
	}
	return p, true
}

// openDatagram takes apart what a receive was completed with: the host that the datagram
// claims to be from, the host or group that it is for, and the payload. b is the buffer of
// the receive.
func openDatagram(wc *ibv.WC, b []byte) (from, to netip.Addr, payload []byte, ok bool) {
	if wc.Flags&ibv.WCGRH == 0 || wc.ByteLen < ibv.GRHLen || int64(wc.ByteLen) > int64(len(b)) {
		return from, to, nil, false
	}
	from, to, ok = ibv.GRHAddrs(b)
	if !ok || from.IsUnspecified() || IsGroup(from) {
		return from, to, nil, false
	}
	return from, to, b[ibv.GRHLen:wc.ByteLen], true
}
