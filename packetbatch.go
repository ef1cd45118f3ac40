package rdmanet

import (
	"net/netip"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Datagram is one of those that [PacketConn.ReadBatch] and [PacketConn.WriteBatch]
// take.
type Datagram struct {
	Buf  []byte         // what is sent; where a received one goes
	N    int            // how many bytes of Buf were received; WriteBatch sends all of Buf
	Addr netip.AddrPort // whom it is for, or from; an IPv4 address from there has four bytes
}

// ReadBatch implements [PacketConn.ReadBatch].
func (p *packetConn) ReadBatch(ds []Datagram) (n int, err error) {
	if len(ds) == 0 {
		return 0, nil
	}
	usable, held := borrowAll(ds)
	if usable == 0 {
		return 0, p.opError("read", regmem.ErrFreed)
	}
	ds = ds[:usable]
	defer returnAll(held)
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if err := p.awaitDatagram(); err != nil {
		return 0, p.opError("read", err)
	}
	for n < len(ds) && p.in.len() > 0 {
		d := &ds[n]
		d.N, d.Addr = p.take(d.Buf)
		n++
	}
	return n, nil
}

// WriteBatch implements [PacketConn.WriteBatch].
func (p *packetConn) WriteBatch(ds []Datagram) (n int, err error) {
	usable, held := borrowAll(ds)
	defer returnAll(held)
	if n, err = p.writeAll(ds[:usable]); err == nil && n < len(ds) {
		err = regmem.ErrFreed
	}
	if err != nil {
		return n, opError("write", p.laddr, udpAddr(p.target(&ds[n])), err)
	}
	return n, nil
}

// borrowAll is regmem.Borrow for the memory of a batch. It returns how many of the datagrams may
// be used, as the one behind those, if there is one, names memory after Free, and the
// Buffers that it holds.
func borrowAll(ds []Datagram) (usable int, held []*regmem.Memory) {
	for i := range ds {
		buf, err := regmem.Borrow(ds[i].Buf)
		if err != nil {
			return i, held
		}
		if buf != nil {
			held = append(held, buf)
		}
	}
	return len(ds), held
}

// returnAll gives back what borrowAll has borrowed.
func returnAll(held []*regmem.Memory) {
	for _, buf := range held {
		buf.Return(nil)
	}
}

// target is whom a datagram is for.
func (p *packetConn) target(d *Datagram) netip.AddrPort {
	if p.remote.IsValid() && !d.Addr.IsValid() {
		return p.remote
	}
	return netip.AddrPortFrom(plainZone(d.Addr.Addr().Unmap()), d.Addr.Port())
}

// writeAll sends datagrams and returns how many, and why not the next one.
func (p *packetConn) writeAll(ds []Datagram) (n int, err error) {
	for n < len(ds) && err == nil {
		var k, bytes int
		if p.ud != nil {
			k, err = p.ud.write(ds[n:])
		} else {
			k, err = p.writeSoft(ds[n:])
		}
		for i := range k {
			bytes += len(ds[n+i].Buf)
		}
		p.stats.datagramsSent.Add(uint64(k))
		p.stats.bytesSent.Add(uint64(bytes))
		n += k
	}
	return n, err
}
