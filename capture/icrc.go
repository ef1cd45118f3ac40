package capture

import "hash/crc32"

// icrcScratch is where the headers that the ICRC covers are put together, with
// ones in place of what routers may change.
type icrcScratch [256]byte

// sum returns the invariant CRC of a RoCEv2 packet: ip is its IP header, udp
// what follows up to the ICRC (InfiniBand Architecture Specification, volume 1,
// annex A17). It is CRC-32 as Ethernet has it, over eight bytes of ones and the
// packet.
func (s *icrcScratch) sum(ip []byte, v6 bool, udp []byte) uint32 {
	const udpLen = 8
	n := 8 + len(ip) + udpLen + bthLen
	if n > len(s) || len(udp) < udpLen+bthLen {
		return 0
	}
	b := s[:n]
	for i := range 8 {
		b[i] = 0xff
	}
	copy(b[8:], ip)
	copy(b[8+len(ip):], udp[:udpLen+bthLen])

	h := b[8:]
	if v6 {
		h[0] |= 0x0f // traffic class and flow label
		h[1], h[2], h[3] = 0xff, 0xff, 0xff
		h[7] = 0xff // hop limit
	} else {
		h[1] = 0xff               // type of service
		h[8] = 0xff               // time to live
		h[10], h[11] = 0xff, 0xff // header checksum
	}
	h = h[len(ip):]
	h[6], h[7] = 0xff, 0xff // UDP checksum
	h[udpLen+4] = 0xff      // FECN, BECN and reserved bits of the BTH

	// The CRC is fastest from 64 bytes on.
	rest := udp[udpLen+bthLen:]
	if fill := 128 - n; fill > 0 && len(rest) >= fill {
		b = append(b, rest[:fill]...)
		rest = rest[fill:]
	}
	return crc32.Update(crc32.ChecksumIEEE(b), crc32.IEEETable, rest)
}
