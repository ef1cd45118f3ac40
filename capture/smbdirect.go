package capture

import "encoding/binary"

// SMB Direct, [MS-SMBD]: each Send is a negotiation message, or a header and at
// most one segment of a message. What rdmanet adds for large transfers is in
// transfer.go, what SMB2 moves by RDMA in smb2.go.

const (
	smbdHeaderLen   = 20
	smbdRequestLen  = 20
	smbdResponseLen = 32
	smbdVersion     = 0x0100

	smbdResponseRequested = 0x0001
	smbdFIN               = 0x8000 // rdmanet: the end of the sender's stream
	smbdMessage           = 0x3c00 // rdmanet: how a message of the upper layer was sent
)

// smbdHeader is the header of a Data Transfer message, [MS-SMBD] 2.2.3.
type smbdHeader struct {
	requested, granted, flags uint16
	remaining                 uint32 // bytes of the message behind this segment
	offset, length            uint32
}

// parse reads the header of a Send of size bytes, of which b is the beginning;
// false if it cannot be one.
func (h *smbdHeader) parse(b []byte, size uint64) bool {
	if len(b) < smbdHeaderLen {
		return false
	}
	le := binary.LittleEndian
	h.requested, h.granted, h.flags = le.Uint16(b), le.Uint16(b[2:]), le.Uint16(b[4:])
	h.remaining, h.offset, h.length = le.Uint32(b[8:]), le.Uint32(b[12:]), le.Uint32(b[16:])
	return h.offset%8 == 0 && uint64(h.offset)+uint64(h.length) <= size && (h.length == 0 || h.offset >= smbdHeaderLen)
}

// smbdNegotiation tells whether b, of size bytes, is a Negotiate Request or
// Response, as the side has it send.
func smbdNegotiation(b []byte, size uint64, from Side) bool {
	le := binary.LittleEndian
	if len(b) < smbdRequestLen || le.Uint16(b) != smbdVersion || le.Uint16(b[2:]) != smbdVersion {
		return false
	}
	if from == Initiator {
		return size == smbdRequestLen && le.Uint16(b[4:]) == 0 && le.Uint16(b[6:]) != 0
	}
	return size == smbdResponseLen && len(b) == smbdResponseLen && le.Uint16(b[6:]) == 0 &&
		(le.Uint16(b[4:]) == smbdVersion || le.Uint32(b[12:]) != 0)
}

// smbdUpper follows a connection of SMB Direct.
type smbdUpper struct {
	memories
	dirs    [2]smbdDir
	hand    [2]int // credits
	smb2    smb2Upper
	session session
}

// smbdDir is what one side sends.
type smbdDir struct {
	begun     bool          // something was sent
	unsynced  bool          // Sends are missing: a message may have begun before
	open      *UpperMessage // message that is not complete
	buf       buffer
	remaining uint32
	one       UpperMessage // to hand out messages of one segment
}

func newSMBDirect(r *Reassembler, c *Conn) *smbdUpper {
	x := &smbdUpper{memories: newMemories(r, c)}
	x.smb2 = smb2Upper{memories: &x.memories, queue: pendings{r: r, c: c}}
	x.session = session{memories: &x.memories}
	x.session.active, x.session.known = agreed(c)
	for i, e := range c.Ends {
		// The private data of two rdmanet ends may carry the negotiation, and
		// the responder's credits.
		const early = 1 << 4
		if b := e.Private; len(b) >= 42 && string(b[8:12]) == "RDNT" && binary.BigEndian.Uint16(b[14:])&early != 0 {
			if Side(i) == Initiator {
				x.hand[Responder] += int(binary.LittleEndian.Uint16(b[40:]))
			} else if len(b) >= 52 {
				x.hand[Initiator] += int(binary.LittleEndian.Uint16(b[20+10:]))
			}
		}
	}
	return x
}

func (x *smbdUpper) access(m *Message) {
	if x.session.active {
		x.session.access(m)
	} else {
		x.smb2.access(m)
	}
}

func (x *smbdUpper) gap(from Side) {
	x.memories.gap(from)
	if x.session.active || !x.session.known {
		x.dropPieces(from) // the word is perhaps missing that would have ended their use
	}
	x.session.gap(from)
}

func (x *smbdUpper) send(m *Message) {
	d := &x.dirs[m.From]
	if m.lost > 0 {
		x.uses[m.From].unsure = true
	}
	if m.lost > 0 && (d.begun || !smbdNegotiation(m.head, m.Size, m.From)) {
		x.interrupt(m.From)
	}
	u := &d.one
	*u = UpperMessage{Conn: x.c, From: m.From, Protocol: SMBDirect, Time: m.Time, End: m.End, Sends: 1, Complete: true, Missing: u.Missing[:0]}
	var h smbdHeader
	switch {
	case m.HeadLost || len(m.Missing) > 0 && m.Missing[0].From < smbdHeaderLen || !m.HeadLost && uint64(len(m.head)) < min(m.Size, smbdHeaderLen):
		x.interrupt(m.From)
		x.memories.gap(m.From)
		u.Kind, u.HeadLost = Strange, true
	case !d.begun && smbdNegotiation(m.head, m.Size, m.From):
		u.Kind, u.Size, u.Got, u.Data = Negotiation, m.Size, m.Got, m.Data
		if m.From == Responder {
			x.hand[Initiator] += int(binary.LittleEndian.Uint16(m.head[10:]))
		}
	case !h.parse(m.head, m.Size):
		x.interrupt(m.From)
		x.memories.gap(m.From)
		u.Kind, u.Size, u.Got, u.Data, u.Complete = Strange, m.Size, m.Got, m.Data, false
	default:
		d.begun = true
		x.credits(m, &h)
		x.segment(m, &h)
		return
	}
	d.begun = true
	x.session.handOut(u)
}

func (x *smbdUpper) credits(m *Message, h *smbdHeader) {
	x.hand[m.From]--
	x.hand[m.From.Other()] += int(h.granted)
	x.r.credit(Credit{Conn: x.c, From: m.From, Time: m.Time, Requested: int(h.requested), Granted: int(h.granted), InHand: x.hand})
}

// segment takes a Data Transfer message.
func (x *smbdUpper) segment(m *Message, h *smbdHeader) {
	d := &x.dirs[m.From]
	u := &d.one
	u.Flags = h.flags
	var t transferHeader
	if h.flags&smbdTransfer != 0 && (x.session.active || !x.session.known) {
		head := knownHead(m)
		switch is := t.parse(head, h); {
		case is:
			x.session.active = true
			x.transfer(m, h, &t)
			return
		case x.session.active || len(head) < transferEnd && m.Size >= transferEnd:
			x.interrupt(m.From)
			u.Kind, u.Size, u.Got, u.Complete = Strange, m.Size, m.Got, false
			x.session.handOut(u)
			return
		}
	}
	if h.length == 0 && h.remaining == 0 {
		u.Kind, u.Complete = Credits, m.Complete
		x.r.emit(u)
		return
	}
	u.Kind = Payload
	if d.open != nil && uint64(h.length)+uint64(h.remaining) != uint64(d.remaining) {
		x.interrupt(m.From) // [MS-SMBD] 3.1.5.8
	}
	payload := segmentPayload(m, h)
	got := uint64(h.length) - lostIn(m, h)

	if d.open == nil && (h.remaining == 0 || d.unsynced) {
		// A message of one segment, or what is left of one.
		u.HeadLost, u.TailLost = d.unsynced, h.remaining > 0
		if h.remaining == 0 {
			d.unsynced = false
		}
		u.Size, u.Got = uint64(h.length), got
		u.Complete = m.Complete
		if got < u.Size {
			u.Missing = append(u.Missing, Range{got, u.Size})
		}
		if x.r.cfg.Data {
			u.Data = payload
		}
		x.finished(u, payload)
		return
	}

	if d.open == nil {
		d.open = &UpperMessage{}
		*d.open = *u
		d.open.Missing = nil
		d.open.Sends = 0
		d.open.Size = uint64(h.length) + uint64(h.remaining)
		keep := uint64(smb2HeadLen)
		if x.r.cfg.Data {
			keep = d.open.Size
		}
		d.buf.reset(keep, &x.r.mem)
	}
	o := d.open
	o.Sends++
	o.End = m.End
	o.Flags |= h.flags
	o.Complete = o.Complete && m.Complete
	at := o.Size - uint64(h.length) - uint64(h.remaining)
	d.buf.put(at, payload)
	d.buf.note(at, at+got) // without Data not all of it was kept
	if d.remaining = h.remaining; h.remaining == 0 {
		x.close(m.From)
	}
}

// transfer takes a Data Transfer message with a transfer header.
func (x *smbdUpper) transfer(m *Message, h *smbdHeader, t *transferHeader) {
	d := &x.dirs[m.From]
	u := &d.one
	u.Op, u.ID, u.Memory = t.op, uint64(t.id), t.memory
	if t.op > Request {
		u.Kind, u.Complete = Control, m.Complete
		x.r.emit(u)
		x.session.control(m, t)
		return
	}
	if d.open != nil {
		x.interrupt(m.From)
	}
	u.HeadLost = d.unsynced
	d.unsynced = d.unsynced && t.rest > 0
	payload := segmentPayload(m, h)
	u.Size, u.Got, u.Complete = uint64(h.length), uint64(h.length)-lostIn(m, h), m.Complete
	if u.Got < u.Size {
		u.Missing = append(u.Missing, Range{u.Got, u.Size})
	}
	if t.memory.Length > 0 {
		u.Kind = Transfer
		x.session.begin(u, t, payload)
		return
	}
	u.Kind, u.Rest = Payload, t.rest
	if x.r.cfg.Data {
		u.Data = payload
	}
	x.session.handOut(u)
}

// knownHead returns the beginning of m as far as it is known to be right.
func knownHead(m *Message) []byte {
	if len(m.Missing) > 0 {
		return m.head[:min(uint64(len(m.head)), m.Missing[0].From)]
	}
	return m.head
}

// segmentPayload returns the payload of a segment as far as it is known to be
// right, from the first byte on.
func segmentPayload(m *Message, h *smbdHeader) []byte {
	head := knownHead(m)
	end := min(uint64(h.offset)+uint64(h.length), uint64(len(head)))
	if end <= uint64(h.offset) {
		return nil
	}
	return head[h.offset:end]
}

// lostIn returns how many bytes at the end of a segment are not in the capture.
func lostIn(m *Message, h *smbdHeader) uint64 {
	end := uint64(h.offset) + uint64(h.length)
	if len(m.Missing) > 0 && m.Missing[0].From < end {
		return min(end-m.Missing[0].From, uint64(h.length))
	}
	return 0
}

// close hands out the message that is open.
func (x *smbdUpper) close(from Side) {
	d := &x.dirs[from]
	u := d.open
	d.open, d.remaining = nil, 0
	u.Got = d.buf.have.total(u.Size)
	u.Missing = d.buf.have.missing(nil, u.Size)
	u.Complete = u.Complete && (!d.buf.full || !x.r.cfg.Data)
	if d.buf.full && x.r.cfg.Data {
		x.r.lose(Loss{Conn: x.c, From: from, What: MemoryShort, Count: u.Size})
	} else if x.r.cfg.Data {
		u.Data = d.buf.data
	}
	head := d.buf.data
	x.finished(u, head)
	if cap(d.buf.data) > 64<<10 {
		d.buf.release()
	}
}

// finished hands out a message with payload, and looks for SMB2 in it. b is the
// message or its beginning.
func (x *smbdUpper) finished(u *UpperMessage, b []byte) {
	complete := u.Complete && len(u.Missing) == 0 && !u.HeadLost && !u.TailLost
	x.session.handOut(u)
	switch {
	case x.session.active:
	case complete:
		x.smb2.message(u, b)
	default:
		x.memories.gap(u.From)
	}
}

// interrupt notes that Sends of a side are missing, or useless: the message that is open
// will not be completed, and what comes may be the rest of another.
func (x *smbdUpper) interrupt(from Side) {
	d := &x.dirs[from]
	d.begun, d.unsynced = true, true
	if d.open != nil {
		x.close(from)
	}
	x.smb2.queue.limit()
	x.session.interrupt(from)
	x.session.gap(from) // it may have been the word that a transfer is done
}

func (x *smbdUpper) flush() {
	for _, s := range []Side{Initiator, Responder} {
		if x.dirs[s].open != nil {
			x.close(s)
		}
	}
	x.smb2.queue.flush()
	x.session.flush()
}

func (x *smbdUpper) forget() {
	for i := range x.dirs {
		x.dirs[i].buf.release()
	}
	x.session.forget()
	x.smb2.closeAll()
	x.memories.forget()
}
