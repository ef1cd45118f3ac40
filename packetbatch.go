package rdmanet

import "net/netip"

// Datagram is one of those that [PacketConn.ReadBatch] and [PacketConn.WriteBatch]
// take.
type Datagram struct {
	Buf  []byte         // what is sent; where a received one goes
	N    int            // how many bytes of Buf were received; WriteBatch sends all of Buf
	Addr netip.AddrPort // whom it is for, or from; an IPv4 address from there has four bytes
}

// ReadBatch waits for a datagram and takes it, and those behind it that are there
// too, as far as ds goes. It returns how many; of those N and Addr are set. What does
// not fit into a Buf is lost, as in ReadFrom, whose errors it has. If ds is empty it
// returns at once.
//
// It allocates nothing.
func (p *PacketConn) ReadBatch(ds []Datagram) (n int, err error) {
	if len(ds) == 0 {
		return 0, nil
	}
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

// WriteBatch sends datagrams in the order of ds, each as WriteTo sends one, and hands
// those that go by an RDMA device to it up to 32 at a time, which takes less than as
// many calls. On a connected one Addr may be missing, or the peer's.
//
// It returns how many were written. If that is not all of them err says why the next
// one was not: the errors of WriteTo, and of Write for a connected one. Those behind it
// may be written by another call.
//
// Of a batch to an address that has yet to be resolved no more is kept than of single
// datagrams; PacketStats.Unsent counts the rest.
//
// It allocates nothing.
func (p *PacketConn) WriteBatch(ds []Datagram) (n int, err error) {
	if n, err = p.writeAll(ds); err != nil {
		return n, opError("write", p.laddr, udpAddr(p.target(&ds[n])), err)
	}
	return n, nil
}

// target is whom a datagram is for.
func (p *PacketConn) target(d *Datagram) netip.AddrPort {
	if p.remote.IsValid() && !d.Addr.IsValid() {
		return p.remote
	}
	return netip.AddrPortFrom(plainZone(d.Addr.Addr().Unmap()), d.Addr.Port())
}

// writeAll sends datagrams and returns how many, and why not the next one.
func (p *PacketConn) writeAll(ds []Datagram) (n int, err error) {
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
