package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// Protocol is the protocol that the Sends of a connection carry.
type Protocol uint8

// These are the protocols.
const (
	Detect    Protocol = iota // Detect: the protocol is not known yet.
	Unknown                   // Unknown: the protocol is none of the others.
	SMBDirect                 // SMBDirect is [MS-SMBD]. rdmanet's streams use it too.
	RPCRDMA                   // RPCRDMA is RPC-over-RDMA version 1, RFC 8166.
)

// String returns the protocol's name.
func (p Protocol) String() string {
	switch p {
	case SMBDirect:
		return "SMB Direct"
	case RPCRDMA:
		return "RPC-over-RDMA"
	}
	return "unknown"
}

// UpperKind is the kind of an UpperMessage.
type UpperKind uint8

// These are the kinds.
const (
	Negotiation UpperKind = iota + 1 // Negotiation is a Negotiate Request or Response of SMB Direct.
	Payload                          // Payload is a message of SMB Direct, of one Send or several.
	Credits                          // Credits is a Send of SMB Direct without payload.

	// Transfer is data that was moved by RDMA, of an SMB2 READ or WRITE or of an rdmanet
	// stream.
	Transfer

	Control // Control is a Send of rdmanet about a Transfer.
	Call    // Call is a call of RPC.
	Reply   // Reply is a reply of RPC.
	Fault   // Fault is RDMA_ERROR of RPC-over-RDMA.
	Strange // Strange is a message that cannot be decoded, or whose beginning is missing.
)

var upperKindNames = [...]string{"", "Negotiation", "Payload", "Credits", "Transfer", "Control", "Call", "Reply", "Fault", "Strange"}

// String returns the name of the constant.
func (k UpperKind) String() string {
	if k > 0 && int(k) < len(upperKindNames) {
		return upperKindNames[k]
	}
	return fmt.Sprintf("UpperKind(%d)", uint8(k))
}

// UpperMessage is a message of the protocol that the Sends of a connection carry. A
// function that is given an UpperMessage may use it, and all that it refers to, until the
// function returns.
type UpperMessage struct {
	Conn     *Conn
	From     Side
	Protocol Protocol
	Kind     UpperKind
	Time     time.Time // Time is the time of the first packet.
	End      time.Time // End is the time of the last packet that carried a part of the message.
	Sends    int

	Size     uint64 // Size is how many bytes the message has, as far as they are known.
	Got      uint64 // Got is how many of these bytes were captured.
	Complete bool
	Missing  []Range // Missing has the bytes of Size that were not captured.
	HeadLost bool    // HeadLost is set if bytes are missing in front of Size.
	TailLost bool    // TailLost is set if bytes are missing behind Size.

	// Data is the message, if Config.Data is set. It has Size bytes, and bytes that are
	// missing are zero. If the last bytes are missing, it may be shorter. If much is
	// missing, it may be nil. Read chunks of RPC are put where they were taken from. Write
	// chunks are not, because only the program knows where they belong.
	Data []byte

	Flags uint16 // Flags has the flags of all segments of SMB Direct together.

	XID        uint32  // XID is that of RPC.
	ReadChunks []Chunk // ReadChunks has the read chunks of a Call.

	// Writes has the write chunks: those that a Call offers, or those of a Reply, with
	// their data.
	Writes []Chunk

	ReplyChunk *Chunk // ReplyChunk is the reply chunk of a Call or of a Reply.

	// Offset is the place of a Transfer: in the file for SMB2, in the large transfer for
	// rdmanet.
	Offset uint64

	// ID is SMB2's MessageId for a Transfer. For a Transfer and a Control of rdmanet it is
	// the number of the large transfer.
	ID uint64

	// The next fields are for rdmanet's large transfers. Op is the operation of the Send.
	// A Transfer has Offer or Request, and so has a Payload that is a part of a longer
	// message. A Transfer of more than 16 MiB is handed out in parts, one after the other.
	Op        TransferOp
	Memory    ChunkSegment // Memory is the memory that the Send named. Its Length is that of the operation.
	Rest      uint64       // Rest is how many bytes of the message follow Size.
	Withdrawn bool         // Withdrawn is set if a Transfer has ended early, after Size bytes.
	Cut       bool         // Cut is set if the message ended with the Transfer, and has no end.
}

// Chunk is data of an RPC message that travels by RDMA.
type Chunk struct {
	Position uint32 // Position is the XDR position of a read chunk in the message.
	Segments []ChunkSegment
	Size     uint64
	Got      uint64
	Complete bool

	// Data has Size bytes if Config.Data is set. It may be nil if the chunk is not
	// complete.
	Data []byte
}

// ChunkSegment is a segment as RPC-over-RDMA names it.
type ChunkSegment struct {
	Handle uint32
	Length uint32
	Offset uint64
}

// clone copies u and what is valid only for a time.
func (u *UpperMessage) clone() UpperMessage {
	c := *u
	c.Data, c.Missing = bytes.Clone(u.Data), slices.Clone(u.Missing)
	return c
}

// Credit is the state of credits after a message that uses or grants some.
type Credit struct {
	Conn      *Conn
	From      Side
	Time      time.Time
	Requested int // Requested is how many credits From asks for.
	Granted   int // Granted is how many credits From grants with this message.

	// InHand is how many messages each side may send now. It is too small if the capture
	// began late.
	InHand [2]int
}

// upper is a protocol above RDMA. It gets the messages of a connection, of each
// side in order.
type upper interface {
	send(m *Message)
	access(m *Message) // a Write or a Read
	gap(from Side)     // packets of that side are missing
	flush()
	forget()
}

// decide sets the protocol of m's connection, if m shows it.
func (r *Reassembler) decide(m *Message) {
	c := m.Conn
	if m.Kind > Read || c.Protocol == Unknown {
		return
	}
	switch c.Protocol = r.detect(m); c.Protocol {
	case SMBDirect:
		c.upper = newSMBDirect(r, c)
	case RPCRDMA:
		c.upper = newRPC(r, c)
	}
}

// endUpper ends what was above c; it may begin anew.
func (c *Conn) endUpper() {
	if c.upper != nil {
		c.upper.flush()
		c.upper.forget()
		c.upper = nil
	}
}

// toUpper hands m on to the protocol of its connection.
func (c *Conn) toUpper(m *Message) {
	switch m.Kind {
	case Send:
		c.upper.send(m)
	case Write, Read:
		c.upper.access(m)
	}
}

// detect finds out what a connection carries: by what was asked for, by the
// private data of rdmanet, by the usual ports, by the looks of a Send.
func (r *Reassembler) detect(m *Message) Protocol {
	const undecided = 16 // Sends after which to give up
	c := m.Conn
	if r.cfg.Protocol != Detect {
		return r.cfg.Protocol
	}
	for _, e := range c.Ends {
		if len(e.Private) >= 13 && string(e.Private[8:12]) == "RDNT" {
			return SMBDirect
		}
		switch e.Addr.Port() {
		case 445, 5445:
			return SMBDirect
		case 20049:
			return RPCRDMA
		}
	}
	switch {
	case m.Kind != Send || m.HeadLost:
	case looksLikeSMBDirect(m):
		return SMBDirect
	case looksLikeRPC(m):
		return RPCRDMA
	}
	if c.Sent[0].Messages[Send]+c.Sent[1].Messages[Send] >= undecided {
		return Unknown
	}
	return Detect
}

func looksLikeSMBDirect(m *Message) bool {
	if smbdNegotiation(m.head, m.Size, Initiator) || smbdNegotiation(m.head, m.Size, Responder) {
		return true
	}
	var h smbdHeader
	if !h.parse(m.head, m.Size) || h.requested == 0 || h.flags&^(smbdResponseRequested|smbdFIN|smbdTransfer|smbdMessage) != 0 ||
		binary.LittleEndian.Uint16(m.head[6:]) != 0 {
		return false
	}
	start := uint64(transferStart)
	if h.flags&smbdTransfer != 0 {
		var t transferHeader
		if start = transferEnd; !t.parse(m.head, &h) {
			return false
		}
	}
	if h.length == 0 {
		return (m.Size == smbdHeaderLen || m.Size == transferEnd && start == transferEnd) && h.offset == 0 && h.remaining == 0
	}
	return uint64(h.offset) == start && m.Size == start+uint64(h.length)
}

func looksLikeRPC(m *Message) bool {
	var h rpcHeader
	if h.parse(m.head) != nil || h.proc > rpcNoMsg {
		return false
	}
	rest := m.head[h.size:]
	return h.proc == rpcNoMsg || len(rest) >= 8 &&
		binary.BigEndian.Uint32(rest) == h.xid && binary.BigEndian.Uint32(rest[4:]) <= 1
}

// memories is the memory that both sides have told each other the keys of.
type memories struct {
	r      *Reassembler
	c      *Conn
	uses   [2]uses    // by who owns it
	pieces [2][]piece // the same: what was written or read, and does not certainly belong to one
}

// piece is one Write or Read of memory that nobody has told the key of yet: the
// packet that does may have been overtaken.
type piece struct {
	kind       Kind
	key        uint32
	addr, size uint64
	headless   bool // addr is not that of the first byte
	missing    []Range
	data       []byte
	from       Side
	nth, seen  uint64 // Message.nth; Conn.packets at that time
}

const (
	maxPieces = 1024 // of one side's memory
	pieceCost = 256  // bytes accounted for one, beside its data
)

// held returns how many bytes p is accounted for with.
func (p *piece) held() int { return pieceCost + len(p.data) + 16*len(p.missing) }

// placeless tells that it is not known where m went, or what it was.
func placeless(m *Message) bool {
	return m.Kind == Write && m.HeadLost && m.Conn.Transport == RoCE2 || m.Overflow
}

// piece returns a copy of m; ok is false if it is of no use, or there is no memory.
func (x *memories) piece(m *Message) (p piece, ok bool) {
	if placeless(m) || m.Size == 0 {
		return p, false
	}
	p = x.pieceOf(m)
	if !x.r.mem.take(p.held()) {
		x.r.lose(Loss{Conn: x.c, From: m.From, What: MemoryShort, Count: m.Size})
		return p, false
	}
	p.missing, p.data = slices.Clone(m.Missing), bytes.Clone(m.Data)
	return p, true
}

// pieceOf returns m, whose bytes it does not copy.
func (x *memories) pieceOf(m *Message) piece {
	return piece{m.Kind, m.Key, m.Addr, m.Size, m.HeadLost, m.Missing, m.Data, m.From, m.nth, x.c.packets}
}

// wait keeps m for as long as its key may yet be told.
func (x *memories) wait(m *Message) {
	list := &x.pieces[m.From.Other()]
	for len(*list) > 0 && (len(*list) >= maxPieces || !x.overtakes((*list)[0].seen, x.c.packets) && !x.wanted(&(*list)[0])) {
		x.dropPiece(m.From.Other(), 0)
	}
	if p, ok := x.piece(m); ok {
		*list = append(*list, p)
	}
}

// wanted tells whether p may belong to memory that is in use.
func (x *memories) wanted(p *piece) bool {
	for _, u := range x.uses[p.from.Other()].byKey[p.key] {
		if u.end == never {
			return true
		}
	}
	return false
}

func (x *memories) dropPiece(owner Side, i int) {
	x.r.mem.give(x.pieces[owner][i].held())
	x.pieces[owner] = slices.Delete(x.pieces[owner], i, i+1)
}

// dropPieces forgets the pieces that from has moved.
func (x *memories) dropPieces(from Side) {
	for owner := range x.pieces {
		for i := 0; i < len(x.pieces[owner]); i++ {
			if x.pieces[owner][i].from == from {
				x.dropPiece(Side(owner), i)
				i--
			}
		}
	}
}

func (x *memories) forget() {
	x.dropPieces(Initiator)
	x.dropPieces(Responder)
	for i := range x.uses {
		for _, u := range x.uses[i].ended {
			x.discard(u)
		}
		x.uses[i] = uses{}
	}
}

// pending is a message that waits for data, in the order in which it is to be
// handed out.
type pending struct {
	u        *UpperMessage // nil in the end if there is none
	ready    func() bool
	fill     func() // completes u
	deadline uint64 // Conn.packets; 0: there is no reason to give up
	held     int    // bytes accounted for
}

// pendings hands out messages in order.
type pendings struct {
	r     *Reassembler
	c     *Conn
	queue []*pending
}

const maxPending = 4096

func (q *pendings) push(p *pending) {
	if len(q.queue) == 0 && p.ready() {
		if p.fill(); p.u != nil {
			q.r.emit(p.u)
		}
		return
	}
	p.held = waitCost + len(p.u.Data)
	if !q.r.mem.take(p.held) {
		q.r.lose(Loss{Conn: q.c, From: p.u.From, What: MemoryShort, Count: p.u.Size})
		p.held = 0
		q.flush() // none can wait any more
	}
	if q.queue = append(q.queue, p); p.held == 0 || len(q.queue) > maxPending {
		q.first()
	}
	q.pump()
}

// pump hands out what is ready, or has waited for long enough.
func (q *pendings) pump() {
	for len(q.queue) > 0 {
		p := q.queue[0]
		if !p.ready() && (p.deadline == 0 || q.c.packets <= p.deadline) {
			return
		}
		q.first()
	}
}

func (q *pendings) first() {
	p := q.queue[0]
	q.queue = slices.Delete(q.queue, 0, 1)
	p.fill()
	if p.u != nil {
		q.r.emit(p.u)
	}
	q.r.mem.give(p.held)
}

// limit sets a time until which the messages wait that have none.
func (q *pendings) limit() {
	for _, p := range q.queue {
		if p.deadline == 0 {
			p.deadline = q.c.packets + 2*uint64(q.r.window)
		}
	}
}

func (q *pendings) flush() {
	for len(q.queue) > 0 {
		q.first()
	}
}

// emit hands out u.
func (r *Reassembler) emit(u *UpperMessage) {
	u.Complete = u.Complete && len(u.Missing) == 0 && !u.HeadLost && !u.TailLost
	r.cfg.Upper(u)
}

func (r *Reassembler) credit(k Credit) {
	if r.cfg.Credit != nil {
		r.cfg.Credit(k)
	}
}

// chunk returns what is in segs, which may be shorter than they were offered.
func (r *Reassembler) chunk(segs []*Segment) Chunk {
	c := Chunk{Complete: true}
	for _, s := range segs {
		c.Segments = append(c.Segments, ChunkSegment{s.Handle, s.Length, s.Offset})
		c.Size += uint64(s.Length)
		c.Got += uint64(s.Size(false))
		c.Complete = c.Complete && s.Complete()
	}
	if r.cfg.Data && c.Size <= uint64(r.mem.limit) && (c.Complete || c.Size <= 4*c.Got+1<<20) {
		c.Data = make([]byte, 0, c.Size)
		for _, s := range segs {
			c.Data = append(c.Data, s.Data(false)...)
		}
	}
	return c
}
