package ibv

import (
	"encoding/binary"
	"net/netip"
)

// QKeyUDP is the key of every queue pair in rdma_cm's port space of UDP. The receiver's
// device drops a datagram that names another key.
const QKeyUDP uint32 = 0x01234567

// GRHLen is the length of the space at the beginning of every buffer that a datagram is
// received into. [WC.ByteLen] includes it. With [WCGRH] it has a header, which [GRHAddrs]
// reads. So a receive for any datagram needs GRHLen and [PortAttr.ActiveMTU] bytes.
const GRHLen = 40

// An AH is an address handle: the path of datagrams to a port of a peer. [PD.CreateAH] or
// [PD.CreateAHFromWC] creates it. It does not name a queue pair, so one handle serves all
// queue pairs of the port.
type AH interface {
	// Close releases the handle. Datagrams that name it must have completed.
	Close() error
}

// AHAttr describes the path to a peer, after struct ibv_ah_attr. [ID.UDParam] returns it,
// and programs pass it on unchanged.
type AHAttr struct {
	Port int // Port is the port of this side's device, counted from 1.

	// Global is set when datagrams carry the address of the peer, as they always do on
	// RoCE. Then the next five fields describe it.
	Global       bool
	GID          GID   // GID is that of the peer.
	SGIDIndex    uint8 // SGIDIndex is the index of this side's GID in the port's table.
	FlowLabel    uint32
	HopLimit     uint8
	TrafficClass uint8

	// These fields are for InfiniBand's own switches.
	DLID        uint16
	SL          uint8
	SrcPathBits uint8
	StaticRate  uint8
}

// UDParam names the peer's queue pair and the path to it, after struct rdma_ud_param.
type UDParam struct {
	AH   AHAttr
	QPN  uint32
	QKey uint32
}

// MulticastQPN is the queue pair number that stands for all members of a group
// (InfiniBand volume 1, section 3.5.12).
const MulticastQPN uint32 = 0xffffff

// JoinFlags is the way in which a multicast group is joined, after enum
// rdma_cm_mc_join_flags.
type JoinFlags uint8

// These are the ways to join.
const (
	JoinFullMember JoinFlags = iota // JoinFullMember: the member sends and receives.
	JoinSendOnly                    // JoinSendOnly: the member only sends.
)

// GRHAddrs returns the addresses in the first [GRHLen] bytes of a buffer that a datagram
// was received into. The peer may have forged them. On RoCE they are those of the IP
// header, on InfiniBand GIDs in IPv6 notation.
func GRHAddrs(b []byte) (src, dst netip.Addr, ok bool) {
	if len(b) < GRHLen {
		return src, dst, false
	}
	// RoCE over IPv4 puts its header at the end and leaves what is before it
	// undefined, so that this may look like one of IPv6.
	v4 := b[GRHLen-ipv4Len : GRHLen]
	six, four := b[0]>>4 == 6, v4[0] == 4<<4|ipv4Len/4
	switch {
	case four && (!six || ipv4Sum(v4) == 0xffff):
		return netip.AddrFrom4([4]byte(v4[12:16])), netip.AddrFrom4([4]byte(v4[16:20])), true
	case six:
		return netip.AddrFrom16([16]byte(b[8:24])).Unmap(), netip.AddrFrom16([16]byte(b[24:40])).Unmap(), true
	}
	return src, dst, false
}

const ipv4Len = 20

// ipv4Sum returns the sum of a header by RFC 1071. It is all ones if the header's checksum
// is right.
func ipv4Sum(h []byte) uint32 {
	var sum uint32
	for ; len(h) > 0; h = h[2:] {
		sum += uint32(binary.BigEndian.Uint16(h))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return sum
}
