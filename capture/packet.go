package capture

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// LinkType is the type of header that a captured packet begins with, by the numbers of pcap
// files.
type LinkType uint32

// The link types that are understood.
const (
	LinkNull      LinkType = 0 // loopback of BSD: a protocol family in front of IP
	LinkEthernet  LinkType = 1
	LinkRawBSD    LinkType = 12  // LinkRaw, from programs that write the number of most systems for it
	LinkRawOpen   LinkType = 14  // the same with the number of OpenBSD
	LinkRaw       LinkType = 101 // IP of either version
	LinkLoop      LinkType = 108
	LinkLinuxSLL  LinkType = 113 // "any" device of Linux
	LinkIPv4      LinkType = 228
	LinkIPv6      LinkType = 229
	LinkLinuxSLL2 LinkType = 276
)

// Packet is one packet as it was captured.
type Packet struct {
	Time   time.Time
	Link   LinkType
	Data   []byte // Data is read during the call that it is given to, and not kept.
	Length int    // Length is how many bytes were on the wire, if that is more than Data has. 0 means that nothing was cut.
}

const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd

	protoTCP = 6
	protoUDP = 17

	rocePort = 4791 // RoCEv2, UDP
)

// addr is an IP address as a map key: IPv4 in the form ::ffff:a.b.c.d.
type addr [16]byte

func (a addr) netip() netip.Addr { return netip.AddrFrom16(a).Unmap() }

// datagram is an IP packet, its parts in place.
type datagram struct {
	src, dst addr
	v6       bool
	proto    byte
	header   []byte // IP header, extension headers included
	payload  []byte // what was captured of the payload
	size     int    // bytes of payload on the wire, at least len(payload)
}

// decodeResult is the result of decoding a packet.
type decodeResult uint8

const (
	decoded   decodeResult = iota
	notIP                  // notIP: the packet has another protocol.
	otherLink              // otherLink: the link type is not known.
	broken                 // broken: headers contradict themselves, or were cut off.
	fragment               // fragment: it is a fragment of an IP packet.
)

// decode finds the IP packet in p.
func (d *datagram) decode(p *Packet) decodeResult {
	b := p.Data
	cut := max(p.Length-len(b), 0) // bytes that the wire had behind b
	switch p.Link {
	case LinkEthernet:
		if len(b) < 14 {
			return broken
		}
		return d.decodeEther(binary.BigEndian.Uint16(b[12:]), b[14:], cut)
	case LinkLinuxSLL:
		if len(b) < 16 {
			return broken
		}
		return d.decodeEther(binary.BigEndian.Uint16(b[14:]), b[16:], cut)
	case LinkLinuxSLL2:
		if len(b) < 20 {
			return broken
		}
		return d.decodeEther(binary.BigEndian.Uint16(b), b[20:], cut)
	case LinkNull, LinkLoop:
		if len(b) < 4 {
			return broken
		}
		return d.decodeIP(b[4:], cut)
	case LinkRawBSD, LinkRawOpen, LinkRaw, LinkIPv4, LinkIPv6:
		return d.decodeIP(b, cut)
	}
	return otherLink
}

// decodeEther goes by the EtherType. Cooked captures, too, have VLAN tags behind
// it: libpcap puts back those that the adapter took off.
func (d *datagram) decodeEther(kind uint16, b []byte, cut int) decodeResult {
	for kind == 0x8100 || kind == 0x88a8 || kind == 0x9100 { // VLAN tags
		if len(b) < 4 {
			return broken
		}
		kind, b = binary.BigEndian.Uint16(b[2:]), b[4:]
	}
	if kind != etherIPv4 && kind != etherIPv6 {
		return notIP
	}
	return d.decodeIP(b, cut)
}

func (d *datagram) decodeIP(b []byte, cut int) decodeResult {
	if len(b) == 0 {
		return broken
	}
	switch b[0] >> 4 {
	case 4:
		return d.decodeIPv4(b, cut)
	case 6:
		return d.decodeIPv6(b, cut)
	}
	return notIP
}

func (d *datagram) decodeIPv4(b []byte, cut int) decodeResult {
	if len(b) < 20 {
		return broken
	}
	head, total := int(b[0]&0x0f)*4, int(binary.BigEndian.Uint16(b[2:]))
	if total == 0 { // the kernel has not cut the packet into segments yet
		total = len(b) + cut
	}
	if head < 20 || len(b) < head || total < head || total > len(b)+cut {
		return broken
	}
	if binary.BigEndian.Uint16(b[6:])&0x3fff != 0 { // more fragments, or an offset
		return fragment
	}
	d.src, d.dst = mapped(b[12:16]), mapped(b[16:20])
	d.v6, d.proto, d.header = false, b[9], b[:head]
	d.payload, d.size = b[head:min(total, len(b))], total-head
	return decoded
}

func mapped(b []byte) (a addr) {
	a[10], a[11] = 0xff, 0xff
	copy(a[12:], b)
	return a
}

func (d *datagram) decodeIPv6(b []byte, cut int) decodeResult {
	const fixed = 40
	if len(b) < fixed {
		return broken
	}
	total := fixed + int(binary.BigEndian.Uint16(b[4:]))
	if total == fixed {
		total = len(b) + cut
	}
	if total > len(b)+cut {
		return broken
	}
	next, head := b[6], fixed
	for next == 0 || next == 43 || next == 60 { // hop-by-hop, routing, destination options
		if len(b) < head+8 {
			return broken
		}
		n := 8 + int(b[head+1])*8
		next, head = b[head], head+n
		if len(b) < head || total < head {
			return broken
		}
	}
	if next == 44 {
		return fragment
	}
	copy(d.src[:], b[8:24])
	copy(d.dst[:], b[24:40])
	d.v6, d.proto, d.header = true, next, b[:head]
	d.payload, d.size = b[head:min(total, len(b))], total-head
	return decoded
}
