package capture

import "encoding/binary"

// This file handles SMB2 READ and WRITE that move data by RDMA. The request names the
// client's memory in Buffer Descriptors, and the response says how much of it was used
// ([MS-SMB2] 2.2.19 to 2.2.22).

const (
	smb2HeadLen = 512 // smb2HeadLen is how many bytes of a message are decoded if data is not kept.

	smb2Header = 64
	smb2Read   = 8
	smb2Write  = 9

	smb2ResponseFlag = 1
	smb2RDMA         = 1 // smb2RDMA is the channel. It is 2 if the key is to be invalidated.

	maxTransfers = 4096
)

// smb2Upper follows the transfers of a connection.
type smb2Upper struct {
	*memories
	queue  pendings
	asked  uint64                    // asked counts the requests.
	open   map[transferKey]*transfer // open has transfers that were requested.
	strays map[transferKey]*transfer // strays were answered before they were requested.
}

type transferKey struct {
	client Side
	id     uint64 // id is the MessageId.
}

// transfer is a READ or WRITE.
type transfer struct {
	u     UpperMessage
	use   *use // use is nil if the data is in the messages themselves.
	segs  []*Segment
	asked bool
	nth   uint64 // nth is the number of the request.
}

func (x *smb2Upper) access(m *Message) {
	x.memories.access(m)
	x.queue.pump()
}

// message decodes u, whose beginning is b. It is a request or response, or several of these
// in a compound.
func (x *smb2Upper) message(u *UpperMessage, b []byte) {
	le := binary.LittleEndian
	kept, next := uint64(len(b)), 0
	for len(b) >= smb2Header && string(b[:4]) == "\xfeSMB" {
		response := le.Uint32(b[16:])&smb2ResponseFlag != 0
		command, status, id := le.Uint16(b[12:]), le.Uint32(b[8:]), le.Uint64(b[24:])
		if command == smb2Read || command == smb2Write {
			if body := b[smb2Header:]; response {
				x.response(u, command, status, id, body)
			} else {
				x.request(u, command, id, b, body)
			}
		}
		if next = int(le.Uint32(b[20:])); next < smb2Header || next > len(b) {
			break
		}
		b = b[next:]
	}
	if next >= smb2Header && kept < u.Size {
		x.memories.gap(u.From) // The rest of the compound was not kept.
	}
	x.queue.pump()
}

// request handles a READ or WRITE that names memory.
func (x *smb2Upper) request(u *UpperMessage, command uint16, id uint64, b, body []byte) {
	le := binary.LittleEndian
	if len(body) < 48 {
		return
	}
	channel, at := le.Uint32(body[36:]), 44 // 2.2.19
	if command == smb2Write {
		channel, at = le.Uint32(body[32:]), 40 // 2.2.21
	}
	off, n := int(le.Uint16(body[at:])), int(le.Uint16(body[at+2:]))
	var memory []byte // Buffer Descriptors V1, [MS-SMBD] 2.2.3.1
	if (channel == smb2RDMA || channel == 2) && n%16 == 0 && off+n <= len(b) {
		memory = b[off : off+n]
	}
	key := transferKey{u.From, id}
	t := x.strays[key]
	stray := t != nil
	if !stray {
		t = &transfer{}
	}
	room := stray || x.r.mem.take(waitCost)
	if room && len(memory) > 0 {
		if t.use = x.begin(u.From, id); t.use == nil && !stray {
			x.r.mem.give(waitCost)
			room = false
		}
	}
	if !room {
		x.uses[u.From].unsure = true
		x.r.lose(Loss{Conn: x.c, From: u.From, What: MemoryShort, Count: u.Size})
		return
	}
	t.asked = true
	end, size := t.u.End, t.u.Size
	t.u = UpperMessage{
		Conn: u.Conn, From: u.From, Protocol: SMBDirect, Kind: Transfer, Time: u.Time, End: end, Size: size,
		Offset: le.Uint64(body[8:]), ID: id, Complete: true,
	}
	if command == smb2Read {
		t.u.From = u.From.Other()
	}
	for d := memory; len(d) > 0; d = d[16:] {
		g := ChunkSegment{Offset: le.Uint64(d), Handle: le.Uint32(d[8:]), Length: le.Uint32(d[12:])}
		kind := Read
		if command == smb2Read {
			kind = Write
		}
		t.segs = append(t.segs, x.add(t.use, g, kind))
	}
	x.take(t.use)
	switch {
	case stray:
		t.limit(size)
		return
	case t.use != nil && t.use.end < never: // Nothing was moved.
		x.r.mem.give(waitCost)
		t.release()
		return
	}
	if x.open == nil {
		x.open = map[transferKey]*transfer{}
	}
	x.close(key) // The request was sent again.
	if len(x.open) >= maxTransfers {
		x.forgetOld()
	}
	x.asked++
	t.nth = x.asked
	x.open[key] = t
}

// limit applies the size in the answer. The descriptors are used one after the other.
func (t *transfer) limit(size uint64) {
	for _, s := range t.segs {
		n := min(size, uint64(s.Length))
		s.resize(uint32(n), s.buf.keep > 0)
		size -= n
	}
}

// response handles the answer to a READ or WRITE. Data is handed out as soon as all of it
// was captured.
func (x *smb2Upper) response(u *UpperMessage, command uint16, status uint32, id uint64, body []byte) {
	client := u.From.Other()
	const pendingStatus = 0x00000103
	if status == pendingStatus {
		return
	}
	// The first word of the body says what the answer is, as far as there is one. The status
	// alone does not: a READ that fills less than a message of a pipe has one of a warning, and
	// its data.
	size := uint64(0)
	switch le := binary.LittleEndian; {
	case len(body) >= 16 && le.Uint16(body) == 17 && command == smb2Read:
		size = uint64(le.Uint32(body[8:])) // DataRemaining, 2.2.20
	case len(body) >= 16 && le.Uint16(body) == 17:
		size = uint64(le.Uint32(body[4:])) // Count, 2.2.22
	case len(body) >= 2 && le.Uint16(body) == 17:
		x.memories.gap(u.From) // The answer was not kept.
		return
	case status == 0 && (len(body) < 2 || le.Uint16(body) != 9): // 9 is an error, 2.2.2
		return
	}
	key := transferKey{client, id}
	t := x.open[key]
	switch {
	case t != nil:
		delete(x.open, key)
		if t.use != nil {
			x.answered(client, id, t.use, x.c.Sent[u.From].begun)
			x.take(t.use)
		}
		if size == 0 || len(t.segs) == 0 {
			x.r.mem.give(waitCost)
			t.release()
			return
		}
	case x.strays[key] != nil:
		return // The answer came again.
	default:
		if x.answered(client, id, nil, x.c.Sent[u.From].begun); size == 0 || !x.r.mem.take(waitCost) {
			return
		}
		if x.strays == nil {
			x.strays = map[transferKey]*transfer{}
		}
		t = &transfer{}
		x.strays[key] = t
	}
	t.u.End, t.u.Size = u.End, size
	t.limit(size)
	p := &pending{u: &t.u, deadline: x.c.packets + 2*uint64(x.r.window)}
	p.ready = func() bool {
		for _, s := range t.segs {
			if !s.Complete() {
				return false
			}
		}
		return t.asked
	}
	p.fill = func() {
		if x.strays[key] == t {
			delete(x.strays, key)
		}
		x.r.mem.give(waitCost)
		defer t.release()
		if len(t.segs) == 0 {
			p.u = nil // The data was in the messages.
			return
		}
		c := x.r.chunk(t.segs)
		t.u.Got, t.u.Data, t.u.Complete = c.Got, c.Data, c.Complete && c.Size == size
		at := uint64(0)
		for _, s := range t.segs {
			for _, gap := range s.Missing() {
				t.u.Missing = append(t.u.Missing, Range{at + gap.From, at + gap.To})
			}
			at += uint64(s.Length)
		}
		if at < size {
			t.u.Missing = append(t.u.Missing, Range{at, size})
		}
	}
	x.queue.push(p)
}

// release releases the memory.
func (t *transfer) release() {
	for _, s := range t.segs {
		s.buf.release()
	}
	if t.use != nil {
		t.use.close(Read)
		t.use.close(Write)
	}
}

// close forgets a request without its response.
func (x *smb2Upper) close(key transferKey) {
	if t := x.open[key]; t != nil {
		delete(x.open, key)
		x.r.mem.give(waitCost)
		x.discard(t.use)
		t.release()
	}
}

// forgetOld forgets the requests that wait for their answers while many later ones have come.
// Their answers have not been captured.
func (x *smb2Upper) forgetOld() {
	var given [2]uint64
	for key, t := range x.open {
		if x.asked-t.nth >= maxTransfers/2 {
			x.close(key)
			given[key.client]++
		}
	}
	for client, n := range given {
		if n > 0 {
			x.r.lose(Loss{Conn: x.c, From: Side(client), What: AnswersLost, Count: n})
		}
	}
}

func (x *smb2Upper) closeAll() {
	for key := range x.open {
		x.close(key)
	}
}
