package capture

import "encoding/binary"

// SMB2 READ and WRITE, as far as they move data by RDMA: the request names the
// client's memory in Buffer Descriptors, and the response says how much of it
// was used ([MS-SMB2] 2.2.19 to 2.2.22).

const (
	smb2HeadLen = 512 // what of a message is looked at where data is not kept

	smb2Header = 64
	smb2Read   = 8
	smb2Write  = 9

	smb2ResponseFlag = 1
	smb2RDMA         = 1 // channel, also 2 where the key is to be invalidated

	maxTransfers = 4096
)

// smb2Upper follows the transfers of a connection.
type smb2Upper struct {
	*memories
	queue pendings
	open  map[transferKey]*transfer
}

type transferKey struct {
	client Side
	id     uint64 // MessageId
}

// transfer is a READ or WRITE that has been asked for.
type transfer struct {
	u    UpperMessage
	segs []*Segment
}

func (x *smb2Upper) access(m *Message) {
	x.memories.access(m)
	x.queue.pump()
}

// message looks through u, whose beginning is b: a request or response, or
// several in a compound.
func (x *smb2Upper) message(u *UpperMessage, b []byte) {
	le := binary.LittleEndian
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
		next := int(le.Uint32(b[20:]))
		if next < smb2Header || next > len(b) {
			break
		}
		b = b[next:]
	}
	x.queue.pump()
}

// request takes a READ or WRITE that names memory.
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
	if channel != smb2RDMA && channel != 2 || n == 0 || n%16 != 0 || off+n > len(b) {
		return
	}
	if !x.r.mem.take(waitCost) {
		x.r.lose(Loss{Conn: x.c, From: u.From, What: MemoryShort, Count: u.Size})
		return
	}
	t := &transfer{u: UpperMessage{
		Conn: u.Conn, From: u.From, Protocol: SMBDirect, Kind: Transfer, Time: u.Time,
		Offset: le.Uint64(body[8:]), ID: id, Complete: true,
	}}
	if command == smb2Read {
		t.u.From = u.From.Other()
	}
	for d := b[off : off+n]; len(d) > 0; d = d[16:] { // Buffer Descriptor V1, [MS-SMBD] 2.2.3.1
		g := ChunkSegment{Offset: le.Uint64(d), Handle: le.Uint32(d[8:]), Length: le.Uint32(d[12:])}
		t.segs = append(t.segs, x.name(u.From, g, true))
	}
	if x.open == nil {
		x.open = map[transferKey]*transfer{}
	}
	if len(x.open) >= maxTransfers {
		x.forget()
	}
	key := transferKey{u.From, id}
	x.close(key) // sent again
	x.open[key] = t
}

// response takes the answer to a READ or WRITE: data is handed out as soon as
// all is there.
func (x *smb2Upper) response(u *UpperMessage, command uint16, status uint32, id uint64, body []byte) {
	client := u.From.Other()
	t := x.open[transferKey{client, id}]
	const pendingStatus = 0x00000103
	if t == nil || status == pendingStatus || len(body) < 16 {
		return
	}
	delete(x.open, transferKey{client, id})
	x.r.mem.give(waitCost)
	size := uint64(0)
	switch le := binary.LittleEndian; {
	case status != 0:
	case command == smb2Read:
		size = uint64(le.Uint32(body[8:])) // DataRemaining, 2.2.20
	default:
		size = uint64(le.Uint32(body[4:])) // Count, 2.2.22
	}
	t.u.End = u.End
	t.u.Size = size
	if size == 0 {
		x.remove(client, t)
		return
	}
	// The descriptors are used one after the other.
	left := size
	for _, s := range t.segs {
		n := min(left, uint64(s.Length))
		if x.owned[client].At(s.Handle, s.Offset, 0) == s {
			x.owned[client].Add(s.Handle, s.Offset, uint32(n))
		}
		left -= n
	}
	x.queue.push(&pending{
		u: &t.u,
		ready: func() bool {
			for _, s := range t.segs {
				if !s.Complete() {
					return false
				}
			}
			return true
		},
		fill: func() {
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
			x.remove(client, t)
		},
		deadline: x.c.packets + 2*uint64(x.r.window),
	})
}

// close forgets a request without its response.
func (x *smb2Upper) close(key transferKey) {
	if t := x.open[key]; t != nil {
		delete(x.open, key)
		x.r.mem.give(waitCost)
		x.remove(key.client, t)
	}
}

func (x *smb2Upper) forget() {
	for key := range x.open {
		x.close(key)
	}
}

func (x *smb2Upper) remove(client Side, t *transfer) {
	for _, s := range t.segs {
		x.owned[client].Remove(s)
	}
}
