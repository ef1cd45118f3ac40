package capture

import "time"

// Config has the settings of a Reassembler. A Reassembler with the zero value only counts.
// The functions are called by Reassembler's methods, and must not call these.
type Config struct {
	// Message gets every operation of RDMA. Those of one side of a connection come in the
	// order in which they were sent. Sends and Writes come when they are over, Reads and
	// atomic operations when they are answered.
	Message func(*Message)

	// Upper gets every message of an upper layer. Those of one side of a connection come
	// in the order in which they were sent. SMB Direct's Sends without payload are an
	// exception: they do not wait for data that was moved by RDMA. Upper layers are
	// decoded only if this is set.
	Upper func(*UpperMessage)

	// Credit gets the state of credits after every message that changes it, if upper
	// layers are decoded.
	Credit func(Credit)

	// Loss gets a report of what is missing from the capture.
	Loss func(Loss)

	// Data asks for the bytes of messages. Without it the bytes are only counted, which is
	// several times as fast.
	Data bool

	// Protocol is what the Sends carry. Detect means that the Reassembler finds it out
	// from the Sends.
	Protocol Protocol

	// IgnoreChecksums makes the Reassembler use packets whose ICRC or CRC is wrong. Some
	// adapters hand out such packets to captures.
	IgnoreChecksums bool

	// Window is how many packets of the same connection and side may overtake one packet
	// before that one counts as lost. 0 means 1024.
	Window int

	// Memory bounds what is kept of packets that came too early and of incomplete
	// messages, in bytes. 0 means 256 MiB. What does not fit is given up and reported. In
	// addition there is a copy of the data that is being handed out, and some bookkeeping:
	// less than 8 KiB for each connection, or 64 KiB if upper layers are decoded; 256
	// bytes for each packet that came too early; and 256 KiB for all connections that were
	// given up.
	Memory int

	// Conns bounds the connections that are open at a time. 0 means 65536. If there is one
	// more, the connection that was silent for the longest time is given up.
	Conns int
}

// Stats counts what a Reassembler was given. A counter without a comment counts what its
// name says.
type Stats struct {
	Packets uint64
	Bytes   uint64 // Bytes counts bytes on the wire.

	RoCE    uint64
	Opcodes [256]uint64 // Opcodes counts RoCE packets by opcode, good and bad ones.
	FPDUs   [16]uint64  // FPDUs counts by RDMAP opcode.
	CM      [CMServiceReply + 1]uint64

	BadICRC, GoodICRC uint64
	NoICRC            uint64   // NoICRC counts RoCE packets whose ICRC was not captured.
	BadCRC, GoodCRC   uint64   // Both count FPDUs.
	NoCRC             uint64   // NoCRC counts FPDUs of connections without checksums.
	BadHeader         uint64   // BadHeader counts RoCE packets and FPDUs with wrong headers.
	CutShort          uint64   // CutShort counts packets whose end was not captured.
	Broken            uint64   // Broken counts packets with invalid IP, UDP or TCP headers.
	Fragments         uint64   // Fragments counts IP fragments, which are not used.
	OtherLinks        uint64   // OtherLinks counts packets of unknown link types.
	OtherLink         LinkType // OtherLink is the link type of the last of these packets.
	Repeats           uint64   // Repeats counts packets and TCP segments that came again.
	Reordered         uint64   // Reordered counts packets and TCP segments that came too early.
	Conns             uint64
	Evicted           uint64 // Evicted counts connections that were given up because of Config.Conns.
	MemoryPeak        int    // MemoryPeak is in bytes, at most Config.Memory.
}

// Reassembler puts together what the packets of a capture carry. It serves one
// goroutine at a time.
type Reassembler struct {
	cfg   Config
	stats Stats
	mem   memory

	window  int
	keep    uint64 // keep is how many bytes of a message are kept.
	ip      datagram
	pk      RoCE
	scratch icrcScratch
	now     time.Time

	flows   map[flowKey]*roceFlow
	recent  [64]*roceFlow // recent has the flows that were used last, by QP.
	pairs   map[hostPair][]*roceFlow
	bygone  [64]*bygone
	born    int // born counts the flows so far.
	cm      cmTable
	streams map[streamKey]*tcpDir

	conns          int
	newest, oldest *Conn
	lastID         int

	ops  []*Message // ops has messages to be used again.
	held [][]byte   // held has buffers of packets, to be used again.
}

const (
	defaultWindow = 1024
	defaultMemory = 256 << 20
	defaultConns  = 1 << 16

	// headLen is how much of a Send is kept in any case, for the headers of
	// upper layers.
	headLen = 4096
)

// NewReassembler returns a Reassembler that has seen nothing yet.
func NewReassembler(cfg Config) *Reassembler {
	r := &Reassembler{
		cfg:     cfg,
		window:  cfg.Window,
		flows:   map[flowKey]*roceFlow{},
		pairs:   map[hostPair][]*roceFlow{},
		streams: map[streamKey]*tcpDir{},
	}
	if r.window <= 0 {
		r.window = defaultWindow
	}
	r.mem.limit = cfg.Memory
	if r.mem.limit <= 0 {
		r.mem.limit = defaultMemory
	}
	if r.cfg.Conns <= 0 {
		r.cfg.Conns = defaultConns
	}
	if cfg.Data {
		r.keep = 1 << 40
	}
	return r
}

// Add takes the next packet of the capture.
func (r *Reassembler) Add(p *Packet) {
	r.stats.Packets++
	r.stats.Bytes += uint64(max(p.Length, len(p.Data)))
	if p.Length > len(p.Data) {
		r.stats.CutShort++
	}
	r.now = p.Time
	d := &r.ip
	switch d.decode(p) {
	case broken:
		r.stats.Broken++
		return
	case fragment:
		r.stats.Fragments++
		return
	case otherLink:
		r.stats.OtherLinks++
		r.stats.OtherLink = p.Link
		return
	case notIP:
		return
	}
	switch d.proto {
	case protoUDP:
		r.addUDP(d)
	case protoTCP:
		r.addTCP(d)
	}
}

// Flush gives up waiting for packets that have not come: everything that is
// open is handed out as it is. It is called at the end of a capture; the
// Reassembler may be used further.
func (r *Reassembler) Flush() {
	r.pairAll()
	for c := r.oldest; c != nil; c = c.newer {
		r.flushConn(c)
	}
	for r.oldest != nil {
		r.drop(r.oldest)
	}
	r.cm.clear()
	r.bygone = [len(r.bygone)]*bygone{}
}

// Stats returns the counts up to now.
func (r *Reassembler) Stats() Stats {
	s := r.stats
	s.MemoryPeak = r.mem.peak
	return s
}

// Conns calls yield with every connection that is open and had a message, the
// one that was heard last first, until it returns false.
func (r *Reassembler) Conns(yield func(*Conn) bool) {
	for c := r.newest; c != nil; c = c.older {
		if c.ID != 0 && !yield(c) {
			return
		}
	}
}

// newConn returns a connection with nothing in it yet.
func (r *Reassembler) newConn(t Transport) *Conn {
	if r.conns >= r.cfg.Conns {
		r.pairLast(r.oldest) // which may make one connection of two
	}
	if r.conns >= r.cfg.Conns {
		old := r.oldest
		r.stats.Evicted++
		r.flushConn(old)
		r.drop(old)
	}
	c := &Conn{Transport: t, Opened: r.now, Last: r.now}
	r.conns++
	r.link(c)
	return c
}

func (r *Reassembler) link(c *Conn) {
	c.older = r.newest
	if r.newest != nil {
		r.newest.newer = c
	}
	r.newest = c
	if r.oldest == nil {
		r.oldest = c
	}
}

func (r *Reassembler) unlink(c *Conn) {
	if c.older != nil {
		c.older.newer = c.newer
	} else {
		r.oldest = c.newer
	}
	if c.newer != nil {
		c.newer.older = c.older
	} else {
		r.newest = c.older
	}
	c.newer, c.older = nil, nil
}

// touch notes a packet of c.
func (r *Reassembler) touch(c *Conn, from Side, size int) {
	c.Last = r.now
	c.packets++
	c.Sent[from].Packets++
	c.Sent[from].Bytes += uint64(size)
	if r.newest != c {
		r.unlink(c)
		r.link(c)
	}
}

// flushConn hands out everything that c has.
func (r *Reassembler) flushConn(c *Conn) {
	for _, step := range []func(*roceFlow){(*roceFlow).flushRequests, (*roceFlow).flushReads, (*roceFlow).flushAnswers} {
		for _, f := range c.roce {
			if f != nil {
				step(f)
			}
		}
	}
	if c.tcp != nil {
		c.tcp.flush()
	}
	if c.upper != nil {
		c.upper.flush()
	}
}

// drop forgets c, which must have been flushed.
func (r *Reassembler) drop(c *Conn) {
	for _, f := range c.roce {
		if f != nil {
			f.forget()
		}
	}
	if c.tcp != nil {
		c.tcp.forget()
	}
	if c.upper != nil {
		c.upper.forget()
	}
	c.upper, c.roce, c.tcp = nil, [2]*roceFlow{}, nil // c may be held on to
	r.cm.forget(c)
	r.unlink(c)
	r.conns--
}

// newMessage returns a message that begins now.
func (r *Reassembler) newMessage(c *Conn, from Side, kind Kind) *Message {
	var m *Message
	if n := len(r.ops); n > 0 {
		m = r.ops[n-1]
		r.ops = r.ops[:n-1]
	} else {
		m = &Message{}
	}
	buf, missing := m.buf, m.Missing[:0]
	s := &c.Sent[from]
	s.begun++
	*m = Message{Conn: c, From: from, Kind: kind, Time: r.now, End: r.now, nth: s.begun, buf: buf, Missing: missing}
	keep := r.keep
	if kind == Send && r.cfg.Upper != nil {
		keep = max(keep, headLen)
	}
	m.buf.reset(keep, &r.mem)
	return m
}

// finish hands out m, which is over, and takes it back. whole is the payload if
// it came in one piece that is still there; then m's own buffer is not used.
func (r *Reassembler) finish(m *Message, whole []byte) {
	c := m.Conn
	if whole != nil {
		whole = whole[:min(uint64(len(whole)), m.Size)]
		m.Got = uint64(len(whole))
		if m.Got < m.Size {
			m.Missing = append(m.Missing, Range{m.Got, m.Size})
		}
		m.head = whole
		if r.cfg.Data {
			m.Data = whole
		}
	} else {
		m.Got = m.buf.have.total(m.Size)
		m.Missing = m.buf.have.missing(m.Missing, m.Size)
		if m.head = m.buf.data; m.buf.full {
			m.head = nil // there are gaps in it that nobody knows of
		}
		if r.cfg.Data {
			if m.Overflow = m.buf.full; !m.Overflow {
				m.Data = m.buf.data[:min(m.Size, uint64(len(m.buf.data)))]
			}
		}
	}
	m.Complete = len(m.Missing) == 0 && !m.HeadLost && !m.TailLost && !m.Overflow
	s := &c.Sent[m.From]
	s.Messages[m.Kind]++
	if m.Kind == Read {
		c.Sent[m.From.Other()].Payload += m.Got // that is where it came from
	} else {
		s.Payload += m.Got
	}
	if !m.Complete {
		s.Partial++
	}
	if m.Overflow {
		r.lose(Loss{Conn: c, From: m.From, What: MemoryShort, Count: m.Size})
	}
	r.name(c)
	if r.cfg.Upper != nil && c.upper == nil {
		r.decide(m)
	}
	if r.cfg.Message != nil {
		r.cfg.Message(m)
	}
	if c.upper != nil {
		c.toUpper(m)
	}
	r.free(m)
}

func (r *Reassembler) free(m *Message) {
	if m.buf.held() > 128<<10 || len(r.ops) >= 256 {
		m.buf.release()
	}
	if cap(m.Missing) > freeRanges {
		m.Missing = nil
	}
	if len(r.ops) < 256 {
		r.ops = append(r.ops, m)
	}
}

// name numbers c, when it is first spoken of.
func (r *Reassembler) name(c *Conn) {
	if c.ID == 0 {
		r.lastID++
		c.ID = r.lastID
		r.stats.Conns++
	}
}

func (r *Reassembler) lose(l Loss) {
	l.Time = r.now
	if l.Conn != nil {
		r.name(l.Conn)
	}
	if r.cfg.Loss != nil {
		r.cfg.Loss(l)
	}
}

// hold copies the payload of a packet that has to wait; ok is false if there is
// no memory.
func (r *Reassembler) hold(b []byte) (kept []byte, ok bool) {
	if len(b) == 0 {
		return nil, true
	}
	for n := len(r.held); n > 0; n = len(r.held) {
		kept, r.held = r.held[n-1], r.held[:n-1]
		if cap(kept) >= len(b) {
			kept = kept[:len(b)]
			copy(kept, b)
			return kept, true
		}
		r.mem.give(cap(kept))
	}
	size := (len(b) + 1023) &^ 1023
	if !r.mem.take(size) {
		return nil, false
	}
	kept = make([]byte, len(b), size)
	copy(kept, b)
	return kept, true
}

// letGo takes back what hold returned.
func (r *Reassembler) letGo(b []byte) {
	if cap(b) == 0 {
		return
	}
	if len(r.held) < 256 && cap(b) <= 16<<10 {
		r.held = append(r.held, b[:0])
		return
	}
	r.mem.give(cap(b))
}
