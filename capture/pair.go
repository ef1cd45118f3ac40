package capture

import (
	"bytes"
	"net/netip"
	"slices"
)

// A RoCE packet names the QP that it goes to, and no other. Which two flows are
// a connection shows in the messages of the connection manager, where these
// were captured; else in the acknowledgements: they bear PSNs that only the
// flow has that they belong to.

func addrPort(a addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a.netip(), port) }

// widen notes that f has sent the request pk.
func (f *roceFlow) widen(pk *RoCE) {
	hi := pk.PSN
	if opcodes[pk.Opcode].class == classReadRequest {
		mtu := f.conn.MTU
		if mtu == 0 {
			mtu = 4096 // too narrow rather than too wide
		}
		hi = (pk.PSN + uint32(packets(pk.Length, mtu)) - 1) & psnMask
	}
	if !f.ranged {
		f.lo, f.hi, f.ranged = pk.PSN, hi, true
		return
	}
	if psnDiff(pk.PSN, f.lo) < 0 {
		f.lo = pk.PSN
	}
	if psnDiff(hi, f.hi) > 0 {
		f.hi = hi
	}
}

// covers tells whether f has sent a request that psn may answer.
func (f *roceFlow) covers(psn uint32) bool {
	return f.ranged && psnDiff(psn, f.lo) >= 0 && psnDiff(psn, f.hi) <= 0
}

// searches tells whether it is time to look for a peer: at first always, then
// now and then, for there may be none in the capture.
func (f *roceFlow) searches() bool {
	f.tries++
	return f.tries <= 256 || f.tries%64 == 0
}

// findPeerBy looks for the flow whose request psn answers.
func (f *roceFlow) findPeerBy(psn uint32) {
	if !f.searches() {
		return
	}
	var found *roceFlow
	for _, g := range f.r.pairs[hostPair{f.key.dst, f.key.src}] {
		if g.peer == nil && g != f && g.covers(psn) {
			if found != nil {
				return // it may be either
			}
			found = g
		}
	}
	if found != nil {
		f.link(found)
	}
}

// findPeer looks for the flow that has answers to f's requests.
func (f *roceFlow) findPeer() {
	if !f.searches() {
		return
	}
	var found *roceFlow
	for _, g := range f.r.pairs[hostPair{f.key.dst, f.key.src}] {
		if g.peer != nil || g == f {
			continue
		}
		for i := range g.early.len() {
			if f.covers(g.early.at(i).pk.PSN) {
				if found != nil {
					return
				}
				found = g
				break
			}
		}
	}
	if found != nil {
		f.link(found)
	}
}

// link makes f and g the two directions of one connection, that of which more
// is known, or the older one.
func (f *roceFlow) link(g *roceFlow) {
	r := f.r
	f.peer, g.peer = g, f
	f.unlist()
	g.unlist()
	if g.conn.ID != 0 && (f.conn.ID == 0 || g.conn.ID < f.conn.ID) || f.conn.ID == 0 && g.conn.Opened.Before(f.conn.Opened) {
		f, g = g, f
	}
	kept, gone := f.conn, g.conn
	if kept != gone {
		gone.endUpper()
		old := g.side
		gone.roce[old] = nil
		kept.MTU = max(kept.MTU, gone.MTU)
		if gone.Opened.Before(kept.Opened) {
			kept.Opened = gone.Opened
		}
		kept.packets += gone.packets
		kept.Sent[f.side.Other()] = gone.Sent[old]
		for _, m := range slices.Concat(g.reads, []*Message{g.cur}) {
			if m != nil {
				m.Conn, m.From = kept, f.side.Other()
			}
		}
		if kept.upper != nil && gone.Sent[old].begun > 0 { // which was not told of those
			kept.upper.gap(Initiator)
			kept.upper.gap(Responder)
		}
		g.join(kept, f.side.Other())
		r.cm.forget(gone)
		r.unlink(gone)
		r.conns--
	}
	f.settleBoth(g)
}

// settleBoth goes on with what had to wait for the peer.
func (f *roceFlow) settleBoth(g *roceFlow) {
	for _, x := range []*roceFlow{f, g} {
		if x.started {
			x.drain()
		}
	}
}

// unlist takes f out of the flows without a peer.
func (f *roceFlow) unlist() {
	r, hosts := f.r, hostPair{f.key.src, f.key.dst}
	list := r.pairs[hosts]
	if i := slices.Index(list, f); i >= 0 {
		if list = slices.Delete(list, i, i+1); len(list) == 0 {
			delete(r.pairs, hosts)
		} else {
			r.pairs[hosts] = list
		}
	}
}

// cmKey names a side of a connection that is being set up.
type cmKey struct {
	src, dst addr
	id       uint32
}

// cmTable holds the connections of which the connection manager speaks, under
// the communication ID of either side.
type cmTable struct {
	conns map[cmKey]*cmConn
}

type cmConn struct {
	conn     *Conn
	init     cmKey // of the side that asked
	resp     cmKey // of the other, once it has answered
	req, rep *CM
}

func (t *cmTable) clear() { t.conns = nil }

func (t *cmTable) add(k cmKey, c *cmConn) {
	if t.conns == nil {
		t.conns = map[cmKey]*cmConn{}
	}
	t.conns[k] = c
}

// forget removes c.
func (t *cmTable) forget(c *Conn) {
	for _, k := range c.cmKeys {
		if x := t.conns[k]; x != nil && x.conn == c {
			delete(t.conns, k)
		}
	}
	c.cmKeys = nil
}

// addCM takes a message of the connection manager.
func (r *Reassembler) addCM(src, dst addr, m *CM, size int) {
	r.stats.CM[m.Attribute]++
	var x *cmConn
	from := Initiator
	switch m.Attribute {
	case CMConnect, CMServiceLookup:
		k := cmKey{src, dst, m.LocalID}
		if x = r.cm.conns[k]; x != nil && x.req != nil && (x.req.Attribute != m.Attribute || x.req.QPN != m.QPN) {
			x = nil // the ID is used again
		}
		if x == nil {
			x = r.newCM(k)
		}
		if x.req == nil {
			x.req = m.clone()
		}
	case CMReply, CMServiceReply:
		from = Responder
		id := m.RemoteID
		if m.Attribute == CMServiceReply {
			id = m.LocalID // the request's
		}
		k := cmKey{dst, src, id}
		if x = r.cm.conns[k]; x == nil || x.rep != nil && x.rep.QPN != m.QPN {
			x = r.newCM(k)
		}
		if x.rep == nil {
			x.rep = m.clone()
			if m.Attribute == CMReply {
				x.resp = cmKey{src, dst, m.LocalID}
				r.cm.add(x.resp, x)
				x.conn.cmKeys = append(x.conn.cmKeys, x.resp)
			}
		}
	default:
		if x = r.cm.conns[cmKey{src, dst, m.LocalID}]; x == nil {
			x = r.cm.conns[cmKey{dst, src, m.RemoteID}]
		}
		if x == nil {
			x = r.newCM(cmKey{src, dst, m.LocalID})
		}
		if x.init.src != src {
			from = Responder
		}
	}
	c := x.conn
	r.touch(c, from, size)
	if x.req != nil && x.rep != nil && x.req.Attribute == CMConnect && x.rep.Attribute == CMReply {
		r.connect(x)
	}
	if m.Attribute == CMDisconnect || m.Attribute == CMDisconnected || m.Attribute == CMReject {
		c.Closed = true
	}
	msg := r.newMessage(c, from, Management)
	msg.CM, msg.Size, msg.Packets = m, madLen, 1
	msg.buf.have.add(0, madLen)
	r.finish(msg, nil)
}

func (r *Reassembler) newCM(k cmKey) *cmConn {
	c := r.newConn(RoCE2)
	c.Ends[0].Addr, c.Ends[1].Addr = addrPort(k.src, 0), addrPort(k.dst, 0)
	x := &cmConn{conn: c, init: k}
	r.cm.add(k, x)
	c.cmKeys = append(c.cmKeys, k)
	return x
}

func (m *CM) clone() *CM {
	c := *m
	c.Private = bytes.Clone(m.Private)
	return &c
}

// connect sets up the flows of x, of which request and reply are known. Both
// may have come several times.
func (r *Reassembler) connect(x *cmConn) {
	c := x.conn
	if c.SetUp {
		return
	}
	from, to := x.req.ports()
	c.SetUp = true
	c.Ends[0] = End{addrPort(x.init.src, from), x.req.QPN, x.req.consumerPrivate()}
	c.Ends[1] = End{addrPort(x.init.dst, to), x.rep.QPN, x.rep.consumerPrivate()}
	if c.MTU == 0 {
		c.MTU = x.req.MTU
	}
	// Each names the first PSN that it expects to receive.
	f := r.adopt(c, flowKey{x.init.src, x.init.dst, x.rep.QPN}, Initiator, x.rep.StartPSN)
	g := r.adopt(c, flowKey{x.init.dst, x.init.src, x.req.QPN}, Responder, x.req.StartPSN)
	f.peer, g.peer = g, f
	for _, f := range []*roceFlow{f, g} {
		f.unlist()
	}
	f.begun(x.rep.StartPSN)
	g.begun(x.req.StartPSN)
	f.settleBoth(g)
}

// adopt makes the flow with that key, whose first PSN is start, what side sends
// of c. If the flow was heard before it may be that the set-up came late, or
// that an older connection had the same QP.
func (r *Reassembler) adopt(c *Conn, key flowKey, side Side, start uint32) *roceFlow {
	f := r.flows[key]
	if f != nil && (f.conn.SetUp || f.outlived(start)) {
		old := f.conn
		r.flushConn(old)
		r.drop(old)
		f = nil
	}
	if f == nil {
		f = &roceFlow{r: r, key: key}
		r.flows[key] = f
		r.recent = [len(r.recent)]*roceFlow{}
	} else if old := f.conn; old != c {
		old.roce[f.side] = nil
		c.Sent[side] = old.Sent[f.side]
		c.MTU = max(c.MTU, old.MTU)
		c.packets += old.packets
		if old.Opened.Before(c.Opened) {
			c.Opened = old.Opened
		}
		for _, m := range slices.Concat(f.reads, []*Message{f.cur}) {
			if m != nil {
				m.Conn, m.From = c, side
			}
		}
		if old.roce[f.side.Other()] == nil {
			old.endUpper()
			r.unlink(old)
			r.conns--
		}
	}
	f.join(c, side)
	return f
}

// outlived tells whether the requests seen so far are those of another connection
// than the one that counts from start on.
func (f *roceFlow) outlived(start uint32) bool {
	psn := f.next
	if !f.started {
		if f.held.len() == 0 {
			return false
		}
		psn = f.held.first().pk.PSN
	}
	d := psnDiff(psn, start)
	return d < 0 || d > jump
}

// begun says what the first PSN of f is.
func (f *roceFlow) begun(start uint32) {
	if !f.started {
		f.start(start)
	}
}
