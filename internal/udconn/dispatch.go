package udconn

import (
	"net"
	"net/netip"
	"os"
)

// Datagram is a datagram to send, or room for one to receive. Its fields are those of
// Datagram of package rdmanet.
type Datagram struct {
	Buf  []byte
	N    int
	Addr netip.AddrPort
}

// dispatcher sends datagrams where RDMA devices serve. It decides for each by which device
// it leaves.
type dispatcher struct {
	*shared
	res  *resolver
	send *sender
}

// route is where a datagram goes.
type route int

const (
	byQueuePair  route = iota // It is posted to the queue pair of the peer's path.
	whenResolved              // It waits until the peer is resolved.
	nowhere                   // It is dropped and counted.
	whenJoined                // It is looked at again when the path to its group is known.
	byUDP                     // It is sent by the UDP socket.
)

// target returns the address that a datagram is for.
func (s *shared) target(d *Datagram) netip.AddrPort {
	if s.connected() && !d.Addr.IsValid() {
		return s.remote
	}
	return Normal(d.Addr)
}

// route returns where a datagram goes. It may be called again for the same one. The caller
// holds sender.mu.
func (w *dispatcher) route(d *Datagram) (pe *peer, to route, err error) {
	addr := w.target(d)
	switch err := w.check(d.Buf, addr); {
	case err != nil:
		return nil, 0, err
	case w.closed.Load():
		return nil, 0, net.ErrClosed
	case w.send.due.Expired():
		return nil, 0, os.ErrDeadlineExceeded
	case w.onlyUDP(addr):
		return nil, byUDP, nil
	}
	now := w.now()
	if pe = w.res.peer(addr); pe == nil {
		return nil, nowhere, nil
	}
	pe.used = now
	switch {
	case pe.path == nil && pe.err != nil && now < pe.next:
		return pe, 0, pe.err
	case pe.path == nil && addr.Addr().IsMulticast():
		return pe, whenJoined, nil
	case pe.viaUDP && now >= pe.next && !w.res.peers.sendsByUDP(addr, now):
		w.res.start(pe)
	case pe.path == nil && !pe.viaUDP, pe.mustConfirm(now):
		w.res.start(pe)
		return pe, whenResolved, nil
	case len(pe.waiting) > 0:
		return pe, whenResolved, nil
	case !pe.viaUDP && pe.stale(now):
		w.res.start(pe)
	}
	if pe.viaUDP {
		return pe, byUDP, nil
	}
	return pe, byQueuePair, nil
}

// write sends the first datagrams: as many as one queue pair takes in one chain, then one that
// goes elsewhere. It returns how many, and why not the next one. It returns
// none and no error if it had to wait. Between two calls other writers have their turn.
func (w *dispatcher) write(ds []Datagram) (n int, err error) {
	w.send.mu.Lock()
	defer w.send.mu.Unlock()
	var q *sendQueue // q has ds[:n] staged, which is posted before sender.mu is let go of.
	var pe *peer
	var to route
	for n < len(ds) {
		if pe, to, err = w.route(&ds[n]); err != nil || to != byQueuePair || q != nil && q != &pe.path.qp.send {
			break
		}
		if err = pe.path.qp.send.stage(ds[n].Buf, &pe.path.destination); err != nil {
			break
		}
		q = &pe.path.qp.send
		n++
	}
	if q != nil {
		unsent, failed := q.flush()
		n -= unsent
		switch {
		case failed == errNoRoom:
			q.awaitRoom()
			return n, nil
		case failed != nil:
			return n, failed
		case err == errNoRoom:
			return n, nil
		}
	}
	switch {
	case err == errNoRoom:
		pe.path.qp.send.awaitRoom()
		return n, nil
	case err != nil, to == byQueuePair:
		return n, err
	}
	switch d := &ds[n]; to {
	case whenJoined:
		w.res.await(pe)
		return n, nil
	case whenResolved:
		err = w.res.keep(pe, d.Buf)
	case nowhere:
		w.unsent.Add(1)
	case byUDP:
		udp := w.res.udp
		w.send.mu.Unlock()
		err = udp.send(d.Buf, w.target(d))
		w.send.mu.Lock()
	}
	if err != nil {
		return n, err
	}
	return n + 1, nil
}
