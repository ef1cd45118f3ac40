package capture

import (
	"bytes"
	"cmp"
	"iter"
	"net/netip"
	"slices"
)

// A RoCE packet names the QP that it goes to, and not the one that it is from. The messages
// of the connection manager show which two flows are a connection. If these were not
// captured, the acknowledgements show it. They have PSNs of the flow that they acknowledge.
// If these PSNs fit no other flow, the two flows are a connection.

func addrPort(a addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a.netip(), port) }

// Several queue pairs may use the same PSNs: libraries that connect them without the
// connection manager often begin all at 0. An answer then fits several requesters. So two
// flows are paired only if no other pairing is possible, and not at the first answer,
// because a flow that was not captured yet could be the right one.
const (
	// pairHold is how many answers must wait before their requester is looked for.
	// pairAgain is how many more must wait before the next try. Both are at most
	// Config.Window, because no more answers wait.
	pairHold  = 128
	pairAgain = 64

	// pairMargin is the distance between the PSNs of two flows from which on they are
	// distinguished, although some packets were not captured.
	pairMargin = 1024
)

// psnSpan is a range of PSNs that were captured, lo to hi.
type psnSpan struct {
	lo, hi uint32
	some   bool
}

// extend adds lo to hi.
func (s *psnSpan) extend(lo, hi uint32) {
	if !s.some {
		*s = psnSpan{lo, hi, true}
		return
	}
	if psnDiff(lo, s.lo) < 0 {
		s.lo = lo
	}
	if psnDiff(hi, s.hi) > 0 {
		s.hi = hi
	}
}

func (s *psnSpan) contains(psn uint32) bool {
	return s.some && psnDiff(psn, s.lo) >= 0 && psnDiff(psn, s.hi) <= 0
}

// near tells whether s and o have PSNs less than pairMargin apart.
func (s *psnSpan) near(o *psnSpan) bool {
	return s.some && o.some && psnDiff(o.lo, s.hi) < pairMargin && psnDiff(s.lo, o.hi) < pairMargin
}

// bygone has the PSNs of requests and answers of flows that were given up, if these had no
// peer or no answer. It rules out pairings as the flows did: a pairing is proved by
// everything that was captured, not only by the flows that are still open.
type bygone struct{ asked, answered psnSet }

// bygone returns the bygone of the flows from f's host to the other one. Several pairs of
// hosts may share one, which bounds the memory. Some more connections may stay unpaired
// because of that.
func (f *roceFlow) bygone() *bygone {
	n := uint(0)
	for i := range f.key.src {
		n = n*31 + uint(f.key.src[i])
		n = n*31 + uint(f.key.dst[i])
	}
	b := &f.r.bygone[n%uint(len(f.r.bygone))]
	if *b == nil {
		*b = &bygone{}
	}
	return *b
}

// psnSet has PSNs, in pieces of pairMargin: bit i stands for those from i*pairMargin on.
type psnSet [psnPieces / 64]uint64

const psnPieces = (psnMask + 1) / pairMargin

// add adds all of p.
func (s *psnSet) add(p psnSpan) {
	for i := range p.pieces(0) {
		s[i/64] |= 1 << (i % 64)
	}
}

// near tells whether s may have PSNs less than pairMargin away from p.
func (s *psnSet) near(p *psnSpan) bool {
	for i := range p.pieces(pairMargin) {
		if s[i/64]>>(i%64)&1 != 0 {
			return true
		}
	}
	return false
}

// pieces yields the pieces of a psnSet that have PSNs of s, or such as are not further
// away than margin.
func (s *psnSpan) pieces(margin uint32) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		if !s.some {
			return
		}
		last := (s.hi + margin) & psnMask / pairMargin
		for i := (s.lo - margin) & psnMask / pairMargin; yield(i) && i != last; i = (i + 1) % psnPieces {
		}
	}
}

// widen notes that f has sent the request pk. Of a Read it is not known how many PSNs
// it takes before the path MTU is: asked has those that it takes in any case, and
// perhaps all that it may take.
func (f *roceFlow) widen(pk *RoCE) {
	least, most := pk.PSN, pk.PSN
	if opcodes[pk.Opcode].class == classReadRequest {
		small, large := 256, 4096
		if f.conn.MTU > 0 {
			small, large = f.conn.MTU, f.conn.MTU
		}
		least = (pk.PSN + uint32(packets(pk.Length, large)) - 1) & psnMask
		most = (pk.PSN + uint32(packets(pk.Length, small)) - 1) & psnMask
	}
	if f.perhaps.some && (psnDiff(pk.PSN, f.perhaps.hi) > jump || psnDiff(pk.PSN, f.perhaps.lo) < -jump) {
		f.bygone().asked.add(f.formerly)
		f.formerly, f.asked, f.perhaps = f.perhaps, psnSpan{}, psnSpan{} // they have begun anew
	}
	f.asked.extend(pk.PSN, least)
	f.perhaps.extend(pk.PSN, most)
}

// mayHaveAsked tells whether f can have sent requests that the answers of g belong to.
func (f *roceFlow) mayHaveAsked(g *roceFlow) bool {
	return f.perhaps.near(&g.answered) || f.formerly.near(&g.answered)
}

// witness notes an answer of f's: its requester is one that had sent such a request by
// then.
func (f *roceFlow) witness(psn uint32) {
	f.answers++
	if f.answered.some && (psnDiff(psn, f.answered.hi) > jump || psnDiff(psn, f.answered.lo) < -jump) {
		f.bygone().answered.add(f.answered)
		f.mixed, f.answered = true, psnSpan{} // answers of two connections, one after the other
	}
	f.answered.extend(psn, psn)
	if f.asker != nil || f.mixed {
		return
	}
	if f.answers > pairHold && f.answers%pairAgain != 0 {
		return // perhaps there is none in the capture
	}
	for _, g := range f.reverse() {
		if g.asked.contains(psn) {
			f.asker = g
			return
		}
	}
}

// reverse returns the flows without a peer the other way.
func (f *roceFlow) reverse() []*roceFlow { return f.r.pairs[hostPair{f.key.dst, f.key.src}] }

// pair looks for the flow whose requests f has answered, and links them if that is
// proved: it had sent such a request when an answer came, no other flow can have asked
// for any of f's answers, and no other flow's answers can be to its requests. The other
// flows include those that were given up.
func (f *roceFlow) pair() {
	if f.asker != nil && !f.asker.listed {
		f.asker = nil // which has another peer, or was given up
	}
	g := f.asker
	if f.peer != nil || g == nil || f.mixed || !f.answered.some {
		return
	}
	if g.bygone().asked.near(&f.answered) {
		return
	}
	if gone := f.bygone(); gone.answered.near(&g.perhaps) || gone.answered.near(&g.formerly) {
		return
	}
	for _, h := range f.reverse() {
		if h != g && h.mayHaveAsked(f) {
			return
		}
	}
	if d := psnDiff(f.answered.hi, g.perhaps.hi); d >= pairMargin || !g.perhaps.near(&f.answered) {
		return
	}
	for _, h := range g.reverse() {
		if h != f && g.mayHaveAsked(h) {
			return
		}
	}
	f.link(g)
}

// pairDue tells whether so many answers have come that pair is to be tried. It goes by
// those that came, not by those that wait: of these there are never more than the window.
func (f *roceFlow) pairDue() bool {
	hold, again := min(pairHold, f.r.window), min(pairAgain, f.r.window)
	return f.answers >= hold && (f.answers-hold)%again == 0
}

// pairLast pairs the flows of c as far as that is proved, before c is given up.
func (r *Reassembler) pairLast(c *Conn) {
	for _, f := range c.roce {
		if f == nil || f.peer != nil {
			continue
		}
		f.pair()
		for _, g := range slices.Clone(f.reverse()) {
			if f.peer == nil && g.asker == f {
				g.pair()
			}
		}
	}
}

// pairAll pairs all flows as far as that is proved, when nothing more comes.
func (r *Reassembler) pairAll() {
	var all []*roceFlow
	for _, list := range r.pairs {
		all = append(all, list...)
	}
	slices.SortFunc(all, func(a, b *roceFlow) int { return cmp.Compare(a.born, b.born) })
	for _, f := range all {
		f.pair()
	}
}

// link makes f and g the two directions of one connection. If they have a connection each,
// it keeps the one that has an ID. If both have an ID, it keeps the one with the lower ID.
// If neither has one, it keeps the one that was opened first.
func (f *roceFlow) link(g *roceFlow) {
	r := f.r
	f.peer, g.peer = g, f
	f.unlist()
	g.unlist()
	if g.conn.ID != 0 && (f.conn.ID == 0 || g.conn.ID < f.conn.ID) || f.conn.ID == 0 && g.conn.Opened.Before(f.conn.Opened) {
		f, g = g, f
	}
	kept, gone := f.conn, g.conn
	kept.Unpaired, gone.Unpaired = false, false
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

// settleBoth handles what had to wait for the peer.
func (f *roceFlow) settleBoth(g *roceFlow) {
	for _, x := range []*roceFlow{f, g} {
		if x.started {
			x.drain()
		}
	}
}

// giveUp takes f out of the flows without a peer, but not out of the proofs.
func (f *roceFlow) giveUp() {
	b := f.bygone()
	b.asked.add(f.open())
	if f.peer == nil {
		b.asked.add(f.perhaps)
		b.asked.add(f.formerly)
		b.answered.add(f.answered)
	}
	f.unlist()
}

// open returns the requests that f's peer has not answered.
func (f *roceFlow) open() psnSpan {
	return psnSpan{f.due, (f.next - 1) & psnMask, f.started && f.due != f.next}
}

// unlist takes f out of the flows without a peer.
func (f *roceFlow) unlist() {
	f.listed = false
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
	// Each names the first PSN that it expects to receive.
	there, back := flowKey{x.init.src, x.init.dst, x.rep.QPN}, flowKey{x.init.dst, x.init.src, x.req.QPN}
	if there == back {
		return // a queue pair and itself, which have one flow
	}
	from, to := x.req.ports()
	c.SetUp = true
	c.Ends[0] = End{addrPort(x.init.src, from), x.req.QPN, x.req.consumerPrivate()}
	c.Ends[1] = End{addrPort(x.init.dst, to), x.rep.QPN, x.rep.consumerPrivate()}
	if c.MTU == 0 {
		c.MTU = x.req.MTU
	}
	f := r.adopt(c, there, back, Initiator, x.rep.StartPSN)
	g := r.adopt(c, back, there, Responder, x.req.StartPSN)
	c.Unpaired = false
	f.peer, g.peer = g, f
	for _, f := range []*roceFlow{f, g} {
		f.unlist()
	}
	f.begun(x.rep.StartPSN)
	g.begun(x.req.StartPSN)
	f.settleBoth(g)
}

// adopt makes the flow with that key one side of c. start is its first PSN. If packets of
// the flow were captured before, the set-up may have come late. Or an older connection had
// the same QP, for instance one with another peer.
func (r *Reassembler) adopt(c *Conn, key, peer flowKey, side Side, start uint32) *roceFlow {
	f := r.flows[key]
	if f != nil && (f.conn.SetUp || f.outlived(start) || f.peer != nil && f.peer.key != peer) {
		r.pairLast(f.conn)
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

// outlived tells whether the requests that were captured so far are of another connection
// than the one whose PSNs begin at start.
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

// begun sets the first PSN of f.
func (f *roceFlow) begun(start uint32) {
	if !f.started {
		f.start(start)
	}
}
