package rdmanet

import (
	"encoding/binary"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// What two ends that send each other datagrams tell beside them; see
// docs/protocol.md. A datagram over a UD queue pair says which host it is from
// and which queue pair, but not which port, so that is put in the immediate
// data. Nothing is added to the payload.

// datagramMark is the upper half of the immediate data. Others put their queue
// pair number there, which has 24 bits.
const datagramMark = uint32('R')<<24 | uint32('D')<<16

// immediateOf is the immediate data of a datagram that is from port.
func immediateOf(port uint16) uint32 { return datagramMark | uint32(port) }

// portOf is the port that immediate data tells of.
func portOf(imm uint32) (port uint16, ok bool) {
	return uint16(imm), imm&0xffff0000 == datagramMark && uint16(imm) != 0
}

// groupImmediate is the immediate data of a datagram to a group, which knows no ports
// either: the one that it is from, and the one that it is for.
func groupImmediate(from, to uint16) uint32 { return uint32(from)<<16 | uint32(to) }

// minGroupPort is the least port that a datagram to a group is from: below are the queue
// pair numbers of others.
const minGroupPort = 1 << 8

func groupPorts(imm uint32) (from, to uint16, ok bool) {
	from, to = uint16(imm>>16), uint16(imm)
	return from, to, from >= minGroupPort && to != 0
}

// greeting is the private data of a question, which queue pair serves an
// address, and of the answer: who it is that says so.
type greeting struct {
	port uint16 // whose questions the sender answers
	qpn  uint32 // it sends from
}

const (
	greetingLen     = 12
	greetingMagic   = "RDND"
	greetingVersion = 1

	maxQPN = 1<<24 - 1
)

func (g greeting) append(b []byte) []byte {
	b = append(b, greetingMagic...)
	b = append(b, greetingVersion, 0)
	b = binary.BigEndian.AppendUint16(b, g.port)
	return binary.BigEndian.AppendUint32(b, g.qpn)
}

// parseGreeting reports whether the peer is rdmanet. What comes behind is padding,
// or for later versions.
func parseGreeting(b []byte) (g greeting, ok bool) {
	if len(b) < greetingLen || string(b[:4]) != greetingMagic || b[4] != greetingVersion {
		return greeting{}, false
	}
	g = greeting{port: binary.BigEndian.Uint16(b[6:]), qpn: binary.BigEndian.Uint32(b[8:])}
	if g.port == 0 || g.qpn > maxQPN {
		return greeting{}, false
	}
	return g, true
}

// openDatagram takes what a receive was completed with apart: the host that it
// claims to be from, the host or group that it is for, and the payload. b is the
// receive's buffer.
func openDatagram(wc *ibv.WC, b []byte) (from, to netip.Addr, payload []byte, ok bool) {
	if wc.Flags&ibv.WCGRH == 0 || wc.ByteLen < ibv.GRHLen || int64(wc.ByteLen) > int64(len(b)) {
		return from, to, nil, false
	}
	from, to, ok = ibv.GRHAddrs(b)
	if !ok || from.IsUnspecified() || isGroup(from) {
		return from, to, nil, false
	}
	return from, to, b[ibv.GRHLen:wc.ByteLen], true
}

var broadcast4 = netip.AddrFrom4([4]byte{255, 255, 255, 255})
