package capture

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// roceBuilder makes packets of RoCEv2 between two hosts.
type roceBuilder struct {
	a, b    netip.Addr // who sends, who receives
	now     time.Time
	packets []Packet
}

func newRoCEBuilder() *roceBuilder {
	return &roceBuilder{
		a: netip.MustParseAddr("192.0.2.1"), b: netip.MustParseAddr("192.0.2.2"),
		now: time.Unix(1700000000, 0),
	}
}

// reversed has the other host send.
func (x *roceBuilder) reversed(f func()) {
	x.a, x.b = x.b, x.a
	f()
	x.a, x.b = x.b, x.a
}

// add appends a packet: extended headers and payload behind a BTH.
func (x *roceBuilder) add(op Opcode, qp, psn uint32, ext, payload []byte) {
	pad := -len(payload) & 3
	n := bthLen + len(ext) + len(payload) + pad + icrcLen
	be := binary.BigEndian
	var ip []byte
	if x.a.Is4() {
		ip = make([]byte, 20)
		ip[0], ip[8], ip[9] = 0x45, 64, protoUDP
		be.PutUint16(ip[2:], uint16(20+8+n))
		copy(ip[12:], x.a.AsSlice())
		copy(ip[16:], x.b.AsSlice())
	} else {
		ip = make([]byte, 40)
		ip[0], ip[6], ip[7] = 0x60, protoUDP, 64
		be.PutUint16(ip[4:], uint16(8+n))
		copy(ip[8:], x.a.AsSlice())
		copy(ip[24:], x.b.AsSlice())
	}
	udp := make([]byte, 8, 8+n)
	be.PutUint16(udp, 50000)
	be.PutUint16(udp[2:], rocePort)
	be.PutUint16(udp[4:], uint16(8+n))
	udp = append(udp, byte(op), byte(pad)<<4, 0xff, 0xff)
	udp = be.AppendUint32(udp, qp)
	udp = be.AppendUint32(udp, psn&psnMask)
	udp = append(udp, ext...)
	udp = append(udp, payload...)
	udp = append(udp, make([]byte, pad)...)
	var scratch icrcScratch
	udp = binary.LittleEndian.AppendUint32(udp, scratch.sum(ip, x.a.Is6(), udp))

	eth := make([]byte, 14, 14+len(ip)+len(udp))
	be.PutUint16(eth[12:], etherIPv4)
	if x.a.Is6() {
		be.PutUint16(eth[12:], etherIPv6)
	}
	x.now = x.now.Add(time.Microsecond)
	x.packets = append(x.packets, Packet{Time: x.now, Link: LinkEthernet, Data: append(append(eth, ip...), udp...)})
}

func reth(va uint64, key, length uint32) []byte {
	b := binary.BigEndian.AppendUint64(nil, va)
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, key), length)
}

func aeth(syndrome byte) []byte { return []byte{syndrome, 0, 0, 1} }

// write appends an RDMA Write in as many packets as it needs, and returns the
// PSN behind it.
func (x *roceBuilder) write(qp, psn uint32, va uint64, key uint32, data []byte, mtu int) uint32 {
	n := packets(uint32(len(data)), mtu)
	for i := range n {
		part := data[i*mtu : min((i+1)*mtu, len(data))]
		op, ext := Opcode(0x07), []byte(nil)
		switch {
		case n == 1:
			op = 0x0a
		case i == 0:
			op = 0x06
		case i == n-1:
			op = 0x08
		}
		if i == 0 {
			ext = reth(va, key, uint32(len(data)))
		}
		x.add(op, qp, psn+uint32(i), ext, part)
	}
	return psn + uint32(n)
}

// send is the same for a Send.
func (x *roceBuilder) send(qp, psn uint32, data []byte, mtu int) uint32 {
	n := packets(uint32(len(data)), mtu)
	for i := range n {
		op := Opcode(0x01)
		switch {
		case n == 1:
			op = 0x04
		case i == 0:
			op = 0x00
		case i == n-1:
			op = 0x02
		}
		x.add(op, qp, psn+uint32(i), nil, data[i*mtu:min((i+1)*mtu, len(data))])
	}
	return psn + uint32(n)
}

// respond appends the responses to an RDMA Read, from the packet with that
// index on.
func (x *roceBuilder) respond(qp, psn uint32, data []byte, mtu, from int) {
	n := packets(uint32(len(data)), mtu)
	for i := from; i < n; i++ {
		op, ext := Opcode(0x0e), []byte(nil)
		switch {
		case n == 1:
			op, ext = 0x10, aeth(0x1f)
		case i == 0:
			op, ext = 0x0d, aeth(0x1f)
		case i == n-1:
			op, ext = 0x0f, aeth(0x1f)
		}
		x.add(op, qp, psn+uint32(i), ext, data[i*mtu:min((i+1)*mtu, len(data))])
	}
}

func (x *roceBuilder) ack(qp, psn uint32) { x.add(0x11, qp, psn, aeth(0x1f), nil) }

// pattern returns n bytes that differ from those of another seed.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + seed*101)
	}
	return b
}
