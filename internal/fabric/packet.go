package fabric

import (
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// A Packet is a datagram as it is on the wire.
type Packet struct {
	From, To       netip.Addr
	SrcQPN, DstQPN uint32
	QKey           uint32
	Imm            uint32
	HasImm         bool
	NoGRH          bool
	Payload        []byte

	solicited bool
}

// Inject delivers a datagram that nobody has sent.
func (f *Fabric) Inject(p *Packet) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gate.RLock()
	defer f.gate.RUnlock()
	f.deliver(p)
}

// Members returns how many queue pairs are attached to a group.
func (f *Fabric) Members(group netip.Addr) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, q := range f.udQPs {
		if q.hears(group) {
			n++
		}
	}
	return n
}

// deliver takes a datagram to its queue pair, or to all of its group. The caller holds mu
// and gate.
func (f *Fabric) deliver(p *Packet) {
	if p.DstQPN != ibv.MulticastQPN {
		f.deliverTo(f.udQPs[p.DstQPN], p)
		return
	}
	for _, q := range f.udQPs {
		if q.hears(p.To) {
			f.deliverTo(q, p)
		}
	}
}

func (f *Fabric) deliverTo(q *udQP, p *Packet) {
	if f.deaf || q == nil || p.QKey != ibv.QKeyUDP || q.state != ibv.QPSRTS || q.recvs.Len() == 0 {
		f.lost++
		return
	}
	q.receive(p)
}

// putGRH writes the header as RoCE does: that of IPv6, or of IPv4 at the end.
func putGRH(b []byte, from, to netip.Addr) {
	clear(b[:ibv.GRHLen])
	if from.Is4() {
		h := b[ibv.GRHLen-20 : ibv.GRHLen]
		h[0] = 0x45
		src, dst := from.As4(), [4]byte{}
		if to.Is4() {
			dst = to.As4()
		}
		copy(h[12:], src[:])
		copy(h[16:], dst[:])
		var sum uint32
		for i := 0; i < len(h); i += 2 {
			sum += uint32(h[i])<<8 | uint32(h[i+1])
		}
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		h[10], h[11] = byte(^sum>>8), byte(^sum)
		return
	}
	b[0] = 0x60
	src, dst := from.As16(), to.As16()
	copy(b[8:], src[:])
	copy(b[24:], dst[:])
}
