package capture

import "slices"

// This file follows memory that one side names in a message. The other side may read or
// write it until it answers. It is chunks of RPC-over-RDMA, and buffers of SMB2.
//
// The same memory may be named again as soon as the message was answered. The message and
// the answer may both be missing, or be overtaken. A Write or Read belongs to one use of
// the memory by its place among the messages of its side (Message.nth): it is behind the
// answers to other messages that have named the memory, and in front of the answer to this
// one. If one of those answers may be missing, it waits for the answer to this one. Data
// that is not certain even then is not used.

// use is the memory that one message names.
type use struct {
	owner Side
	id    uint64
	parts []part
	named bool   // named is set if the message was captured.
	sure  bool   // sure is set if all earlier messages of the owner were captured too.
	lacks bool   // lacks is set if there was no memory for some of the parts.
	gone  bool   // gone is set if nothing will be placed any more.
	seen  uint64 // seen is the value of Conn.packets when the use was named, or answered.
	prior []*use // prior has earlier uses of the same memory.

	// These are numbers of messages of the other side (Message.nth). end is the answer.
	// base is in front of all that is remembered. Up to floor there may be answers that
	// were not captured.
	end, base, floor uint64
}

// part is a segment of a use, as it was named and as far as it was used.
type part struct {
	*Segment // Segment is nil when it was handed out.
	named    ChunkSegment
	kind     Kind // kind is Write or Read.
}

// uses is what is known of the memory of one side.
type uses struct {
	byKey  map[uint32][]*use
	strays map[uint64]*use // strays were answered, but were not named yet.
	ended  []*use          // ended were answered. The first one was answered first.
	unsure bool            // unsure is set if messages are missing that may have named memory.

	// Answers, by Message.nth: the last that was a stray when it came, the last that
	// is forgotten, and the message behind which one may be missing.
	stray, past, gap uint64
	gapSeen          uint64 // gapSeen is the value of Conn.packets when gap was set, 0 if no message is missing.
}

// overtakes tells whether something that was captured first may have been sent after
// something that was captured later. early and late are values of Conn.packets.
func (x *memories) overtakes(early, late uint64) bool { return late-early <= 2*uint64(x.r.window) }

// newMemories returns the memories of a connection whose first message is being handed out
// to the upper layer.
func newMemories(r *Reassembler, c *Conn) memories {
	x := memories{r: r, c: c}
	if c.Sent[0].Messages[Send]+c.Sent[1].Messages[Send] > 1 { // those before this one were not understood
		x.gap(Initiator)
		x.gap(Responder)
	}
	return x
}

// begin takes the message that names memory of owner's: add follows for each
// segment, and then take. It returns nil if there is no memory.
func (x *memories) begin(owner Side, id uint64) *use {
	o := &x.uses[owner]
	u := o.strays[id]
	if u == nil {
		if u = x.newUse(owner, id); u == nil {
			o.unsure = true
			return nil
		}
	}
	delete(o.strays, id)
	u.named, u.sure = true, !o.unsure
	return u
}

// newUse returns a use, nil if there is no memory. It forgets those whose answers are
// so old that nothing can come any more that was sent before them.
func (x *memories) newUse(owner Side, id uint64) *use {
	o := &x.uses[owner]
	for len(o.ended) > 0 && !x.overtakes(o.ended[0].seen, x.c.packets) {
		x.discard(o.ended[0])
		o.ended = slices.Delete(o.ended, 0, 1)
	}
	if !x.r.mem.take(segmentCost) {
		return nil
	}
	return &use{owner: owner, id: id, seen: x.c.packets, end: never, base: o.past}
}

// discard forgets u, if it is not nil. Its segments can still be read.
func (x *memories) discard(u *use) {
	if u == nil || u.gone {
		return
	}
	u.gone = true
	o := &x.uses[u.owner]
	if o.strays[u.id] == u {
		delete(o.strays, u.id)
	}
	for _, p := range u.parts {
		list := o.byKey[p.named.Handle]
		if i := slices.Index(list, u); i >= 0 {
			list = slices.Delete(list, i, i+1)
		}
		if o.byKey[p.named.Handle] = list; len(list) == 0 {
			delete(o.byKey, p.named.Handle)
		}
	}
	x.r.mem.give(segmentCost * (1 + len(u.parts)))
	if u.end < never {
		o.past = max(o.past, u.end)
	} else {
		o.unsure = true
		u.close(Write)
		u.close(Read)
	}
	u.parts, u.prior = nil, nil
}

// close says that what was written, or read, has been handed out.
func (u *use) close(kind Kind) {
	for i := range u.parts {
		if p := &u.parts[i]; p.kind == kind && p.Segment != nil {
			p.buf.release()
			p.Segment = nil
		}
	}
}

// add enters a segment of u that may be written, or read.
func (x *memories) add(u *use, g ChunkSegment, kind Kind) *Segment {
	s := &Segment{Handle: g.Handle, Offset: g.Offset, Length: g.Length}
	s.buf.mem = &x.r.mem
	if x.r.cfg.Data {
		s.buf.keep = uint64(g.Length)
	}
	s.buf.full = true // nothing will be placed here
	if u == nil || u.gone {
		return s
	}
	o := &x.uses[u.owner]
	if !x.r.mem.take(segmentCost) {
		u.lacks, o.unsure = true, true
		return s
	}
	s.buf.full = false
	mine := false
	for _, v := range o.byKey[g.Handle] {
		if mine = mine || v == u; v != u && v.overlaps(&g, kind) && !slices.Contains(u.prior, v) {
			u.prior = append(u.prior, v)
		}
	}
	if !mine {
		if o.byKey == nil {
			o.byKey = map[uint32][]*use{}
		}
		o.byKey[g.Handle] = append(o.byKey[g.Handle], u)
	}
	u.parts = append(u.parts, part{s, g, kind})
	return s
}

func (u *use) overlaps(g *ChunkSegment, kind Kind) bool {
	for i := range u.parts {
		if p := &u.parts[i]; p.kind == kind && p.named.overlaps(g) {
			return true
		}
	}
	return false
}

// used says that the answer to u names a segment as written: with the length
// that was used. Without the message before it there is nothing here yet.
func (x *memories) used(u *use, g ChunkSegment) *Segment {
	if u != nil {
		for i := range u.parts {
			if p := &u.parts[i]; p.kind == Write && p.Segment != nil &&
				p.named.Handle == g.Handle && p.named.Offset == g.Offset && p.named.Length >= g.Length {
				p.resize(g.Length, x.r.cfg.Data)
				return p.Segment
			}
		}
	}
	return x.add(u, g, Write)
}

// resize sets the length.
func (s *Segment) resize(length uint32, keep bool) {
	if length < s.Length {
		s.buf.clear(uint64(length), uint64(s.Length))
	}
	if s.Length = length; keep {
		s.buf.keep = uint64(length)
	}
}

// answered takes the answer to u, which is nil if that was not named yet. nth is
// that of the message. It returns u, or what is known of it, nil if there is no
// memory.
func (x *memories) answered(owner Side, id uint64, u *use, nth uint64) *use {
	o := &x.uses[owner]
	floor := max(o.gap, o.stray, o.past)
	if u == nil || u.lacks {
		o.stray = nth
	}
	if u == nil {
		if u = o.strays[id]; u != nil {
			return u // once more
		}
		if u = x.newUse(owner, id); u == nil {
			return nil
		}
		if o.strays == nil {
			o.strays = map[uint64]*use{}
		}
		o.strays[id] = u
	}
	u.end, u.floor, u.seen = nth, floor, x.c.packets
	if !u.gone {
		o.ended = append(o.ended, u)
	}
	for _, v := range u.prior {
		if v.end == never {
			x.discard(v) // its answer was missed
		}
	}
	return u
}

// take gives u what has waited for it.
func (x *memories) take(u *use) {
	if u == nil {
		return
	}
	list := x.pieces[u.owner]
	kept := list[:0]
	for i := range list {
		p := &list[i]
		if s := x.claim(u, p); s != nil {
			x.place(s, p)
			x.r.mem.give(p.held())
		} else {
			kept = append(kept, *p)
		}
	}
	clear(list[len(kept):])
	x.pieces[u.owner] = kept
}

// claim returns where p goes if it certainly belongs to u.
func (x *memories) claim(u *use, p *piece) *Segment {
	for i := range u.parts {
		q := &u.parts[i]
		if q.kind == p.kind && q.Segment != nil && (&ChunkSegment{q.Handle, q.Length, q.Offset}).contains(p.key, p.addr, p.size) {
			if p.nth < u.end && p.nth > x.from(u) && (u.end < never || p.seen > u.seen || x.overtakes(p.seen, u.seen)) {
				return q.Segment
			}
			return nil
		}
	}
	return nil
}

// from returns the last message of the other side before the time of u; never as
// long as that is not certain.
func (x *memories) from(u *use) uint64 {
	o := &x.uses[u.owner]
	from, certain := u.base, u.sure
	for _, v := range u.prior {
		if v.end == never {
			certain = false
		} else if v.end < u.end {
			from = max(from, v.end)
		}
	}
	switch {
	case u.end < never && certain:
		return from
	case u.end < never:
		return max(from, u.floor)
	case certain && (o.gapSeen == 0 || o.gapSeen < u.seen && !x.overtakes(o.gapSeen, u.seen)):
		return from
	}
	return never
}

func (x *memories) place(s *Segment, p *piece) {
	before := s.buf.full
	if s.placed(p.addr, p.size, p.missing, p.data); s.buf.full && !before {
		x.r.lose(Loss{Conn: x.c, From: p.from, What: MemoryShort, Count: p.size})
	}
}

// access takes a Write or Read, in the order of its side.
func (x *memories) access(m *Message) {
	if placeless(m) || m.Size == 0 {
		return
	}
	p := x.pieceOf(m)
	for _, u := range x.uses[m.From.Other()].byKey[m.Key] {
		if s := x.claim(u, &p); s != nil {
			x.place(s, &p)
			return
		}
	}
	x.wait(m)
}

// gap notes that messages of a side are missing, or not understood: perhaps one that
// names memory, or answers one.
func (x *memories) gap(from Side) {
	x.uses[from].unsure = true
	o := &x.uses[from.Other()]
	o.gap, o.gapSeen = x.c.Sent[from].begun, max(x.c.packets, 1)
}
