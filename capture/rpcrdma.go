package capture

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
)

// This file handles RPC-over-RDMA version 1, RFC 8166.

const (
	rpcMsg   = 0
	rpcNoMsg = 1
	rpcMsgP  = 2
	rpcDone  = 3
	rpcError = 4

	rpcVersion = 1
	maxCalls   = 4096 // maxCalls is how many calls of one side may wait for their replies.

	maxRPCHeader = 64 << 10 // maxRPCHeader is how many bytes of a Send are decoded.
)

var errRPC = errors.New("rpc-over-rdma: not a header")

// rpcHeader is the header of a message.
type rpcHeader struct {
	xid, credits, proc uint32
	reads              []readSegment
	writes             [][]ChunkSegment
	reply              []ChunkSegment
	hasReply           bool
	size               int // size is the length of the header in bytes.
}

type readSegment struct {
	position uint32
	ChunkSegment
}

// xdr reads words. bad is set when no words are left.
type xdr struct {
	b   []byte
	at  int
	bad bool
}

func (x *xdr) word() uint32 {
	if len(x.b)-x.at < 4 {
		x.bad = true
		return 0
	}
	x.at += 4
	return binary.BigEndian.Uint32(x.b[x.at-4:])
}

func (x *xdr) segment() ChunkSegment {
	g := ChunkSegment{Handle: x.word(), Length: x.word()}
	g.Offset = uint64(x.word())<<32 | uint64(x.word())
	return g
}

// more reads the word in front of an element of a list.
func (x *xdr) more() bool {
	v := x.word()
	x.bad = x.bad || v > 1
	return v == 1 && !x.bad
}

func (x *xdr) segments() []ChunkSegment {
	n := x.word()
	if x.bad || uint64(n) > uint64(len(x.b)-x.at)/16 {
		x.bad = true
		return nil
	}
	list := make([]ChunkSegment, n)
	for i := range list {
		list[i] = x.segment()
	}
	return list
}

// parse reads the header at the beginning of b.
func (h *rpcHeader) parse(b []byte) error {
	x := xdr{b: b}
	*h = rpcHeader{xid: x.word()}
	version := x.word()
	h.credits, h.proc = x.word(), x.word()
	if x.bad || version != rpcVersion || h.proc > rpcError {
		return errRPC
	}
	switch h.proc {
	case rpcMsgP:
		x.word() // alignment
		x.word() // threshold
		fallthrough
	case rpcMsg, rpcNoMsg:
		for x.more() {
			h.reads = append(h.reads, readSegment{x.word(), x.segment()})
		}
		for x.more() {
			h.writes = append(h.writes, x.segments())
		}
		if h.hasReply = x.more(); h.hasReply {
			h.reply = x.segments()
		}
	}
	h.size = x.at
	if x.bad {
		return errRPC
	}
	return nil
}

// rpcUpper follows a connection of RPC-over-RDMA. Calls may go both ways.
type rpcUpper struct {
	memories
	queues [2]pendings         // queues is by the side that sends.
	calls  [2]map[uint32]*call // calls is by the side that calls, and by XID.
	asked  [2]uint64           // asked counts the calls, by the side that calls.
}

// call is a call that waits for its reply, or for its data.
type call struct {
	use   *use // use is nil if the call names no memory.
	reads []*Segment
	at    []uint32 // at has the positions of the read chunks.
	wait  *pending // wait is nil when the call was handed out.
	nth   uint64   // nth is the number of the call.
}

func newRPC(r *Reassembler, c *Conn) *rpcUpper {
	x := &rpcUpper{memories: newMemories(r, c)}
	for i := range x.queues {
		x.queues[i] = pendings{r: r, c: c}
		x.calls[i] = map[uint32]*call{}
	}
	return x
}

func (x *rpcUpper) access(m *Message) {
	x.memories.access(m)
	x.pump()
}

func (x *rpcUpper) pump() {
	for i := range x.queues {
		if len(x.queues[i].queue) > 0 {
			x.queues[i].pump()
		}
	}
}

func (x *rpcUpper) gap(from Side) {
	x.memories.gap(from)
	// The reply that would have set a time may be missing.
	x.queues[from.Other()].limit()
}

func (x *rpcUpper) send(m *Message) {
	u := &UpperMessage{Conn: x.c, From: m.From, Protocol: RPCRDMA, Time: m.Time, End: m.End, Sends: 1, Complete: m.Complete}
	if m.lost > 0 {
		x.uses[m.From].unsure = true
	}
	var h rpcHeader
	head := knownHead(m)
	head = head[:min(len(head), maxRPCHeader)]
	if m.HeadLost || h.parse(head) != nil {
		x.gap(m.From)
		u.Kind, u.Complete, u.HeadLost = Strange, false, m.HeadLost
		u.Size, u.Got = m.Size, m.Got
		if x.r.cfg.Data {
			u.Data = slices.Clone(m.Data)
		}
		u.Missing = slices.Clone(m.Missing)
		x.push(m.From, u, nil)
		return
	}
	x.r.credit(Credit{Conn: x.c, From: m.From, Time: m.Time, Requested: int(h.credits), Granted: int(h.credits)})

	// This is the inline data, counted from behind the header.
	skip := uint64(h.size)
	u.XID, u.Size, u.Got = h.xid, m.Size-skip, m.Got-skip
	u.TailLost = m.TailLost
	for _, g := range m.Missing {
		u.Missing = append(u.Missing, Range{g.From - skip, g.To - skip})
	}
	if x.r.cfg.Data && m.Data != nil {
		u.Data = slices.Clone(m.Data[skip:])
	}
	rest := xdr{b: head[h.size:]}
	rest.word() // The XID comes again.
	switch direction := rest.word(); {
	case h.proc == rpcError:
		u.Kind = Fault
		x.reply(u, &h, m.nth)
	case h.proc == rpcDone:
		u.Kind = Strange
		x.push(m.From, u, nil)
	case h.proc != rpcNoMsg && rest.bad: // either of the two
		x.gap(m.From)
		u.Kind, u.Complete = Strange, false
		x.push(m.From, u, nil)
	case h.proc == rpcNoMsg && len(h.reads) > 0, h.proc != rpcNoMsg && direction == 0:
		x.call(u, &h)
	default:
		u.Kind = Reply
		x.reply(u, &h, m.nth)
	}
}

func (x *rpcUpper) push(from Side, u *UpperMessage, p *pending) {
	if p == nil {
		p = &pending{u: u, ready: func() bool { return true }, fill: func() {}}
	}
	x.queues[from].push(p)
	x.pump()
}

// call records the segments that a call names. If some are to be read, the call is complete
// when they were read.
func (x *rpcUpper) call(u *UpperMessage, h *rpcHeader) {
	u.Kind = Call
	side := u.From
	if old := x.calls[side][h.xid]; old != nil {
		x.end(side, h.xid, old) // The call was sent again.
	}
	if len(x.calls[side]) >= maxCalls {
		x.forgetOld(side)
	}
	names := len(h.reads)+len(h.writes) > 0 || h.hasReply || x.uses[side].strays[uint64(h.xid)] != nil
	x.asked[side]++
	c := &call{nth: x.asked[side]}
	room := x.r.mem.take(waitCost)
	if room && names {
		if c.use = x.begin(side, uint64(h.xid)); c.use == nil {
			x.r.mem.give(waitCost)
			room = false
		}
	}
	if !room {
		x.uses[side].unsure = true
		x.r.lose(Loss{Conn: x.c, From: side, What: MemoryShort, Count: u.Size})
		u.Complete = false
		x.push(side, u, nil)
		return
	}
	// Each chunk is put where it belongs once those in front of it are there. The list may have
	// the chunks in any order, and their segments among each other.
	slices.SortStableFunc(h.reads, func(a, b readSegment) int { return cmp.Compare(a.position, b.position) })
	for _, g := range h.reads {
		c.reads = append(c.reads, x.add(c.use, g.ChunkSegment, Read))
		c.at = append(c.at, g.position)
	}
	for _, list := range h.writes {
		u.Writes = append(u.Writes, Chunk{Segments: list})
		x.offer(c.use, list)
	}
	if h.hasReply {
		u.ReplyChunk = &Chunk{Segments: h.reply}
		x.offer(c.use, h.reply)
	}
	x.take(c.use)
	x.calls[side][h.xid] = c
	answered := c.use != nil && c.use.end < never
	if answered { // The reply has overtaken the call.
		x.end(side, h.xid, c)
	}
	if len(c.reads) == 0 {
		x.push(side, u, nil)
		return
	}
	c.wait = &pending{
		u: u,
		ready: func() bool {
			for _, s := range c.reads {
				if !s.Complete() {
					return false
				}
			}
			return true
		},
		fill: func() {
			x.fillCall(u, c)
			c.wait = nil
			for _, s := range c.reads {
				s.buf.release()
			}
			if c.use != nil {
				c.use.close(Read)
			}
			c.reads, c.at = nil, nil
		},
	}
	if answered {
		c.wait.deadline = x.c.packets + 2*uint64(x.r.window)
	}
	x.push(side, u, c.wait)
}

// offer records memory that may be written, unless the reply came before.
func (x *rpcUpper) offer(u *use, list []ChunkSegment) {
	if u == nil || u.end < never {
		return
	}
	for _, g := range list {
		x.add(u, g, Write)
	}
}

// fillCall puts the read chunks of a call in their places. A chunk has all read segments of
// one position, which counts from the beginning of the whole message (RFC 8166). The
// message itself may be the chunk of position 0.
func (x *rpcUpper) fillCall(u *UpperMessage, c *call) {
	for i := 0; i < len(c.reads); {
		j := i + 1
		for j < len(c.reads) && c.at[j] == c.at[i] {
			j++
		}
		k := x.r.chunk(c.reads[i:j])
		k.Position = c.at[i]
		u.ReadChunks = append(u.ReadChunks, k)
		u.insert(&k, c.reads[i:j])
		i = j
	}
}

// insert puts chunk k into u at its position.
func (u *UpperMessage) insert(k *Chunk, segs []*Segment) {
	pad := uint64(0)
	if k.Position != 0 {
		pad = uint64(xdrPad(int(k.Size)))
	}
	at := uint64(k.Position)
	if at > u.Size { // There is no such place.
		u.Complete = false
		at = u.Size
	}
	n := k.Size + pad
	for i := range u.Missing {
		if u.Missing[i].From >= at {
			u.Missing[i].From += n
			u.Missing[i].To += n
		} else if u.Missing[i].To > at {
			u.Missing[i].To += n // The hole grows on both sides.
		}
	}
	pos := at
	for _, s := range segs {
		for _, gap := range s.Missing() {
			u.Missing = append(u.Missing, Range{pos + gap.From, pos + gap.To})
		}
		pos += uint64(s.Length)
	}
	slices.SortFunc(u.Missing, func(a, b Range) int {
		if a.From < b.From {
			return -1
		}
		return 1
	})
	u.Size += n
	u.Got += k.Got + pad
	u.Complete = u.Complete && k.Complete
	switch {
	case k.Data == nil:
		u.Data = nil
	case uint64(len(u.Data)) < at: // Some of the data is missing.
		u.Data = nil
	default:
		u.Data = slices.Insert(u.Data, int(at), append(slices.Clone(k.Data), make([]byte, pad)...)...)
	}
}

// reply handles the chunks that a reply reports as written. The lengths in the reply are
// those that were used.
func (x *rpcUpper) reply(u *UpperMessage, h *rpcHeader, nth uint64) {
	caller := u.From.Other()
	c := x.calls[caller][h.xid]
	var of *use
	if c == nil || c.use != nil {
		if c != nil {
			of = c.use
		}
		of = x.answered(caller, uint64(h.xid), of, nth)
	}
	enter := func(list []ChunkSegment) []*Segment {
		segs := make([]*Segment, len(list))
		for i, g := range list {
			segs[i] = x.used(of, g)
		}
		return segs
	}
	var writes [][]*Segment
	for _, list := range h.writes {
		writes = append(writes, enter(list))
	}
	chunk := enter(h.reply)
	x.take(of)
	if c != nil {
		x.end(caller, h.xid, c)
		x.queues[caller].pump() // The call is handed out before its reply.
	}
	for _, segs := range writes {
		k := x.r.chunk(segs)
		u.Writes = append(u.Writes, k)
		u.Complete = u.Complete && k.Complete
	}
	if h.hasReply {
		k := x.r.chunk(chunk)
		u.ReplyChunk = &k
		if h.proc == rpcNoMsg {
			u.insert(&k, chunk) // It is the whole reply.
		}
		u.Complete = u.Complete && k.Complete
	}
	if of != nil {
		of.close(Write)
	}
	x.push(u.From, u, nil)
}

// end removes a call that was answered. If its data is missing, it has the window to come.
func (x *rpcUpper) end(side Side, xid uint32, c *call) {
	delete(x.calls[side], xid)
	x.r.mem.give(waitCost)
	if c.use != nil && c.use.end == never {
		x.discard(c.use)
	}
	if c.wait != nil && c.wait.deadline == 0 {
		c.wait.deadline = x.c.packets + 2*uint64(x.r.window)
	}
}

// forgetOld forgets the calls of a side that wait for their replies while many later ones have
// come. Their replies have not been captured.
func (x *rpcUpper) forgetOld(side Side) {
	before := len(x.calls[side])
	for xid, c := range x.calls[side] {
		if x.asked[side]-c.nth >= maxCalls/2 {
			x.end(side, xid, c)
		}
	}
	x.r.lose(Loss{Conn: x.c, From: side, What: AnswersLost, Count: uint64(before - len(x.calls[side]))})
}

func (x *rpcUpper) flush() {
	for i := range x.queues {
		x.queues[i].flush()
	}
}

func (x *rpcUpper) forget() {
	for side := range x.calls {
		for xid, c := range x.calls[side] {
			x.end(Side(side), xid, c)
		}
	}
	x.memories.forget()
}
