package rdmanet

import (
	"io"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// The receiver's side of large transfers; transfer.go has the protocol.
//
//  1. An offer joins the unread queue. Nothing is moved yet.
//  2. A Read with room for much has the device put the bytes straight into its
//     memory (fetchInto): they are not copied.
//  3. For a Read that takes little at a time they are fetched into scratch, some
//     ahead of it (readAhead), and copied from there.
//  4. What nobody reads for neglectAfter is fetched as well, as far as scratch
//     goes: two programs that write before they read would wait for each other. Not
//     before the program has accepted the connection, or strangers could take all scratch.
//
// The same with RDMA Writes, but that the peer is granted the memory instead.

// incoming is what a connection knows of the transfers that it receives.
type incoming struct {
	mode   transferMode
	last   uint32              // ID of the latest offer
	live   ring.Ring[*inbound] // those that the peer has not been told of, oldest first
	flying ring.Ring[*fetch]   // asked for and not there, oldest first
	untold ring.Ring[*fetch]   // grants to be sent, oldest first
	tell   bool                // the peer is to be told that
	done   uint32              // this transfer, and those before it,
	length int                 // are over, it after so many bytes

	depth   int      // RDMA Reads at a time
	pace    pace     // how many bytes may be under way
	reading int      // calls that read
	eager   bool     // the reader takes little at a time: read ahead
	ahead   int      // landings that are in use
	filling *landing // of these, the one that takes the next piece, nil for none
	refused error    // why there was no memory for one more
	keeps   bool     // a landing of its own,
	own     *landing // for a piece when there is no other memory, unless it is in use
	neglect *time.Timer

	unclaimed bool // the program has not accepted the connection: nothing is fetched
}

// trim gives back what the lists have grown by.
func (in *incoming) trim() {
	in.live.Trim()
	in.flying.Trim()
	in.untold.Trim()
}

// inbound is one transfer.
type inbound struct {
	id       uint32
	addr     uint64
	key      uint32
	length   int // bytes; fewer when it is withdrawn
	asked    int // for
	landed   int
	taken    int               // by the reader
	first    bool              // its message begins with it
	cut      bool              // and does not end
	recalled bool              // the peer waits for the memory
	dropped  bool              // nobody will read it
	pieces   ring.Ring[*fetch] // in scratch, oldest first
}

// fetch is a part of a transfer that has been asked for.
type fetch struct {
	x     *inbound
	b     []byte // where it goes to, which is
	in    *landing
	into  *straight // or the reader's memory
	addr  uint64    // of b, for a grant
	key   uint32
	mr    ibv.MR    // what the key belongs to, if it opens this piece only
	got   int       // bytes that have come
	under int       // bytes that were under way with it when it was asked for
	at    time.Time // when that was
	taken int
	over  bool // the device will not touch the memory any more
}

// landing is our own memory for data to be copied from: scratch, or a buffer of a
// receive's size where there is none.
type landing struct {
	b       []byte
	lkey    uint32
	scratch *scratch
	buf     *buffer
	mr      ibv.MR // by which the peer may write to it as long as it lives
	used    int    // bytes of b that pieces were made of
	pieces  int    // that have not been given back
	stuck   bool   // a region of it could not be closed: the peer may still write to it
}

const (
	fetchSize    = 4 << 20 // bytes of an RDMA Read at most, and of a reader's memory that is registered at a time
	aheadPieces  = 4       // of scratch, one connection and direction
	readSlots    = 8       // of the send queue, for RDMA Reads
	neglectAfter = 10 * time.Millisecond
)

// checkOffer checks an offer or a request, before the payload that comes with it joins
// the stream.
func (c *conn) checkOffer(m *delivery) error {
	in, t := &c.in, &m.t
	switch {
	case !m.opens || t.Length == 0: // payload only
		return nil
	case (t.Kind == transferOffer) != (in.mode == transferRead):
		return errTransferKind
	case t.ID != in.last+1:
		return errTransferID
	case in.live.Len() >= maxTransfers:
		return errTransferCount
	}
	return nil
}

// offered handles an offer or a request that checkOffer has passed. Its place among the
// unread is s.
func (c *conn) offered(t *transferHeader, s segment) {
	in := &c.in
	in.last++
	x := &inbound{id: t.ID, addr: t.Addr, key: t.Key, length: int(t.Length), first: s.size > 0}
	in.live.Push(x)
	c.stats.TransfersReceived++
	if c.deaf {
		c.discard(x)
		return
	}
	s.x = x
	c.unread.Push(s)
	switch {
	case in.eager:
		c.readAhead()
	case in.reading == 0:
		c.watchNeglect()
	}
}

// doneReading notes that a call that read has ended; what it has left is neglected
// if no other comes.
func (c *conn) doneReading() {
	c.in.reading--
	if c.closed {
		c.dropUnread() // Close leaves it to the call that reads
	}
	if n := c.in.live.Len(); c.in.reading == 0 && n > 0 && !c.closed {
		if x := *c.in.live.At(n - 1); x.asked < x.length {
			c.watchNeglect()
		}
	}
}

// watchNeglect has somebody look whether the reader comes.
func (c *conn) watchNeglect() {
	if c.in.neglect == nil {
		c.in.neglect = time.AfterFunc(neglectAfter, c.neglected)
	} else {
		c.in.neglect.Reset(neglectAfter)
	}
}

// claim notes that Accept hands the connection out.
func (c *conn) claim() *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in.unclaimed = false
	if c.in.live.Len() > 0 && c.in.reading == 0 && !c.closed {
		c.watchNeglect()
	}
	return c
}

func (c *conn) neglected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.in.reading == 0 && !c.in.unclaimed && !c.deaf && c.dead == nil {
		c.readAhead()
		c.sendControl()
	}
}

// canAsk reports whether one more fetch may be under way.
func (c *conn) canAsk() bool {
	if c.dead != nil || c.hasFailed() || c.in.pace.next() == 0 {
		return false
	}
	if c.in.mode == transferRead {
		return c.in.flying.Len() < c.in.depth
	}
	return c.in.flying.Len() < maxTransfers
}

const fetchID = sendID | 1<<61

// peerWrites is the right that a peer needs that is to fill memory.
const peerWrites = ibv.AccessLocalWrite | ibv.AccessRemoteWrite

// fetch has the device bring the next bytes of x to f.b.
func (c *conn) fetch(f *fetch, lkey uint32) {
	x := f.x
	f.at, f.under = time.Now(), c.in.pace.ask(len(f.b))
	if c.in.mode == transferWrite {
		c.in.flying.Push(f)
		c.in.untold.Push(f)
		x.asked += len(f.b)
		return
	}
	wr := ibv.SendWR{ID: fetchID, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: f.b, LKey: lkey}},
		RemoteAddr: x.addr + uint64(x.asked), RKey: x.key}
	x.asked += len(f.b)
	if c.postAside(wr) != nil {
		c.landed(f)
		return
	}
	c.in.flying.Push(f)
	c.rouse() // it may sleep for receives only
}

// fetched handles the completion of an RDMA Read.
func (c *conn) fetched(wc *ibv.WC) {
	f := c.in.flying.Pop()
	if wc.Status == ibv.WCSuccess {
		c.heard, c.probing = true, false
		c.arrived(f, len(f.b))
		if f.x.recalled && f.x.landed < f.x.length {
			c.send.answer = true // for the peer's bearsWith
		}
		return
	}
	c.landed(f)
	c.status(wc, ibv.WCRead)
}

// written handles the peer's word that it has answered a grant.
func (c *conn) written(t *transferHeader) error {
	in := &c.in
	if in.mode != transferWrite {
		return errTransferKind
	}
	n := int(t.Length)
	if t.Flags&transferEnd == 0 {
		if in.flying.Len() == in.untold.Len() {
			return errTransferCount // nothing that it has been told of
		}
		if f := *in.flying.At(0); t.ID != f.x.id || n != len(f.b) {
			return errTransferLength
		}
		c.arrived(in.flying.Pop(), n)
		return nil
	}
	x, err := c.givenUp(t)
	if x == nil {
		return err
	}
	if n != 0 {
		return errTransferLength
	}
	for in.flying.Len() > 0 && (*in.flying.At(0)).x == x {
		f := in.flying.Pop()
		if f.into != nil {
			f.into.asked -= len(f.b) // what comes next goes there
		}
		c.landed(f)
	}
	for in.untold.Len() > 0 && (*in.untold.At(0)).x == x {
		in.untold.Pop()
	}
	x.asked = x.landed
	c.shorten(x, t)
	return nil
}

// arrived notes that n bytes of f are there.
func (c *conn) arrived(f *fetch, n int) {
	f.got = n
	f.x.landed += n
	if f.into != nil {
		f.into.got += n
	}
	c.stats.BytesReceived += uint64(n)
	c.stats.TransferBytesReceived += uint64(n)
	c.landed(f)
	c.retire()
	if c.in.eager || c.in.reading == 0 { // neglected, then
		c.readAhead()
	}
}

// landed notes that the device is done with the memory of f.
func (c *conn) landed(f *fetch) {
	f.over = true
	if f.got > 0 {
		c.in.pace.land(len(f.b), f.under, f.at, time.Now())
	} else {
		c.in.pace.drop(len(f.b))
	}
	if f.mr != nil {
		if f.mr.Close() != nil && f.in != nil { // before anybody looks at what came
			f.in.stuck = true
		}
		f.mr = nil
	}
	if f.into != nil {
		f.into.pending--
	}
	if f.x.dropped {
		c.dropPieces(f.x)
	}
	c.readable.Broadcast()
	c.rouse()
}

// retire tells the peer of transfers of which everything is there.
func (c *conn) retire() {
	in := &c.in
	for in.live.Len() > 0 {
		x := *in.live.At(0)
		if x.landed < x.length {
			return
		}
		in.live.Pop()
		if in.mode == transferRead || x.dropped { // else it knows
			in.tell, in.done, in.length = true, x.id, x.length
		}
	}
}

// withdrawn handles the peer's wish to have a transfer back: what has been asked
// for comes, nothing more.
func (c *conn) withdrawn(t *transferHeader) error {
	in := &c.in
	if in.mode != transferRead {
		return errTransferKind
	}
	x, err := c.givenUp(t)
	if x == nil {
		return err
	}
	x.recalled = true
	c.shorten(x, t)
	return nil
}

// shorten ends a transfer with what has been asked for. If that is all it is too late.
func (c *conn) shorten(x *inbound, t *transferHeader) {
	if x.asked == x.length {
		return
	}
	x.length = x.asked
	x.cut = t.Flags&transferCut != 0 && (x.length > 0 || !x.first)
	if x.length == 0 && x.first {
		c.reasm.undo()
	}
	c.forget(x)
	c.retire()
	c.readable.Broadcast()
}

// forget takes a transfer that was withdrawn as a whole off the unread queue: a peer
// could fill memory with such while nobody reads. It stays if it tells of the end of
// its message, if there is something behind it, or for a call that reads, which may
// be at it and must not take the next one for it.
func (c *conn) forget(x *inbound) {
	if x.length > 0 || c.in.reading > 0 || c.unread.Len() == 0 {
		return
	}
	s := c.unread.At(c.unread.Len() - 1)
	if s.x == x && (x.first || x.cut || !s.last) {
		c.dropPieces(x)
		*s = segment{}
		c.unread.Undo()
	}
}

// receivesNews reports whether nextInbound has something.
func (in *incoming) receivesNews() bool { return in.tell || in.untold.Len() > 0 }

// nextInbound returns what the peer is to be told next of the transfers that
// come in.
func (c *conn) nextInbound() transferHeader {
	in := &c.in
	if in.tell {
		in.tell = false
		return transferHeader{Kind: transferDone, ID: in.done, Length: uint32(in.length)}
	}
	f := in.untold.Pop()
	return transferHeader{Kind: transferGrant, ID: f.x.id, Addr: f.addr, Key: f.key, Length: uint32(len(f.b))}
}

// givenUp returns the transfer that the peer gives up: the latest, and only one
// that is alone. nil and no error means that it was over here before the peer knew.
func (c *conn) givenUp(t *transferHeader) (*inbound, error) {
	live := &c.in.live
	switch {
	case t.ID != c.in.last || live.Len() > 1:
		return nil, errTransferID
	case live.Len() == 0:
		return nil, nil
	}
	return *live.At(0), nil
}

// readAhead asks for what is offered, into scratch.
func (c *conn) readAhead() {
	for i := 0; i < c.in.live.Len(); i++ {
		x := *c.in.live.At(i)
		for x.asked < x.length {
			if c.in.filling == nil && c.in.ahead >= aheadPieces || !c.canAsk() || !c.askPiece(x) {
				return
			}
		}
	}
}

// askPiece asks for the next piece of x. Pieces that are shorter than a landing share it,
// if they are of one transfer.
func (c *conn) askPiece(x *inbound) bool {
	l := c.in.filling
	if l == nil {
		if l = c.landing(); l == nil {
			return false
		}
		l.used, l.pieces = 0, 0
	}
	f := &fetch{x: x, in: l, b: l.b[l.used:][:min(len(l.b)-l.used, x.length-x.asked, c.in.pace.next())]}
	if c.in.mode == transferWrite && !c.openPiece(f) {
		return false
	}
	l = f.in
	if l.pieces++; l.pieces == 1 {
		c.in.ahead++
	}
	l.used += len(f.b)
	c.in.filling = nil
	if l.used < len(l.b) && x.asked+len(f.b) < x.length {
		c.in.filling = l
	}
	x.pieces.Push(f)
	c.fetch(f, f.in.lkey)
	return true
}

// openPiece lets the peer write to f.b. What cannot be registered is made smaller,
// or replaced by what this connection keeps.
func (c *conn) openPiece(f *fetch) bool {
	mr, err := f.in.mr, error(nil)
	at := f.in.used // of mr's bytes
	if mr == nil {
		at = 0
		mr, err = c.expose(f.b, peerWrites)
		if err != nil && c.in.ahead == 0 && !c.in.keeps && len(f.b) > pageSize {
			f.b = f.b[:pageSize]
			mr, err = c.expose(f.b, peerWrites)
		}
		f.mr = mr
	}
	if err != nil {
		c.in.refused = err
		if f.in == c.in.filling {
			c.in.filling = nil // goes with its last piece
			return false
		}
		c.putLanding(f.in)
		if f.in = c.lastResort(); f.in == nil {
			return false
		}
		f.in.used, f.in.pieces = 0, 0
		f.b, at = f.in.b[:min(len(f.in.b), len(f.b))], 0
		mr = f.in.mr
	}
	f.addr, f.key = mr.Addr()+uint64(at), mr.RKey()
	return true
}

// landing returns memory for one piece. When there is no scratch, one buffer at a
// time has to do. nil means neither.
func (c *conn) landing() *landing {
	get := c.getSink
	if c.in.mode == transferWrite { // registered for each grant
		get = func() (*scratch, error) { return c.getScratch(), nil }
	}
	if s, err := get(); s != nil {
		return &landing{b: s.b, lkey: s.sink.lkey, scratch: s}
	} else if err != nil {
		c.in.refused = err
	}
	if l := c.lastResort(); l != nil || c.in.ahead > 0 || c.in.keeps {
		return l
	}
	buf, err := c.pool.get()
	if err != nil {
		c.in.refused = err
		return nil
	}
	return &landing{b: buf.b, lkey: buf.lkey, buf: buf}
}

// lastResort returns the landing that this connection keeps, nil if it keeps none
// or it is in use.
func (c *conn) lastResort() *landing {
	if c.in.ahead > 0 {
		return nil
	}
	l := c.in.own
	c.in.own = nil
	return l
}

// putLanding takes back what landing has returned.
func (c *conn) putLanding(l *landing) {
	over := c.closed || c.dead != nil
	switch {
	case l.stuck, l.scratch != nil && over && !l.scratch.unregister():
		// The device may still use it.
	case l.buf != nil && !over && c.in.keeps && c.in.own == nil:
		c.in.own = l // there may be scratch next time
	default:
		l.release()
	}
}

// keepOwn gets the memory without which what the peer offers could not be read
// when no more can be registered. What the peer is to write to is registered for
// that beforehand: it holds nothing but what this peer has sent.
func (c *conn) keepOwn() error {
	if c.in.mode == transferNone || !c.id.Device().Attr().PinsMemory {
		return nil
	}
	buf, err := c.pool.get()
	if err != nil {
		return err
	}
	l := &landing{b: buf.b, lkey: buf.lkey, buf: buf}
	if c.in.mode == transferWrite {
		if l.mr, err = c.expose(l.b, peerWrites); err != nil {
			buf.release()
			return err
		}
	}
	c.in.keeps, c.in.own = true, l
	return nil
}

func (c *conn) releaseOwn() {
	if c.in.own != nil {
		c.in.own.release()
		c.in.own = nil
	}
}

func (l *landing) release() {
	switch {
	case l.mr != nil && l.mr.Close() != nil:
		// The device may still use it.
	case l.buf != nil:
		l.buf.release()
	default:
		l.scratch.release()
	}
}

// donePiece gives back the memory of a piece that has been read.
func (c *conn) donePiece(f *fetch) {
	if f.in.pieces--; f.in.pieces == 0 {
		if c.in.filling == f.in {
			c.in.filling = nil
		}
		c.in.ahead--
		c.putLanding(f.in)
	}
	if c.in.eager {
		c.readAhead()
	}
}

// discard ends a transfer that nobody will read. The peer is told that it was
// taken.
func (c *conn) discard(x *inbound) {
	x.dropped = true
	x.landed += x.length - x.asked // as if
	x.asked = x.length
	c.retire()
}

// dropPieces gives back the pieces that are there of a transfer that nobody will
// read.
func (c *conn) dropPieces(x *inbound) {
	for x.pieces.Len() > 0 && (*x.pieces.At(0)).over {
		c.donePiece(x.pieces.Pop())
	}
}

// releaseFetches gives back the memory of what will not arrive. The queue pair is
// closed, and what was unread has been dropped.
func (c *conn) releaseFetches() {
	for c.in.flying.Len() > 0 {
		c.landed(c.in.flying.Pop())
	}
	c.releaseSinks()
	c.releaseOwn()
}

// takeTransfer takes bytes of the transfer at the head of the unread queue. With
// wait it waits until something has changed if there are none; message bounds it
// to one message, and last says that this has ended. A return of 0 and no error
// means to look again, or without wait that nothing is there.
func (c *conn) takeTransfer(p []byte, wait, message bool) (n int, last bool, err error) {
	x := c.unread.At(0).x
	switch {
	case x.taken == x.length:
		return 0, c.passed(), nil
	case x.pieces.Len() > 0:
		return c.takePiece(p, wait)
	case !wait:
		return 0, false, nil
	}
	if c.in.eager = len(p) < min(straightFrom, c.set.ofBuffer); !c.in.eager {
		if n, last, err := c.fetchInto(p, message); n > 0 || err != nil || x.taken == x.length {
			return n, last, err
		}
		c.in.eager = true // p cannot be registered, or nothing may be asked for now
	}
	c.readAhead()
	if x.pieces.Len() > 0 || x.taken == x.length {
		return 0, false, nil
	}
	return 0, false, c.awaitPiece(x)
}

// awaitRead waits for something to happen and returns why a Read cannot go on.
func (c *conn) awaitRead() error {
	if c.stopsReading() {
		return c.whyNotRead()
	}
	if c.control(true) {
		return nil
	}
	c.await(&c.readable, &c.readers)
	return nil
}

// stopsReading reports whether a Read that waits has a reason not to.
func (c *conn) stopsReading() bool {
	return c.closed || c.deaf || c.readDue.expired || c.dead != nil
}

// whyNotRead is readErr where there is something in the queue that cannot be had.
func (c *conn) whyNotRead() error {
	switch {
	case c.closed, c.readDue.expired:
		return c.readErr()
	case c.deaf:
		return io.EOF
	case c.dead == errPeerClosed:
		return errTruncated
	}
	return c.dead
}

// takeFetch takes the next piece, in scratch, of the transfer at the head of the
// unread queue. nil and no error means to look again.
func (c *conn) takeFetch() (*fetch, error) {
	x := c.unread.At(0).x
	c.in.eager = true
	c.readAhead()
	switch {
	case x.taken == x.length:
		c.passed()
		return nil, nil
	case x.pieces.Len() == 0:
		return nil, c.awaitPiece(x)
	}
	f := *x.pieces.At(0)
	switch {
	case !f.over:
		return nil, c.awaitRead()
	case f.got == 0:
		return nil, c.noPiece(x)
	}
	x.pieces.Pop()
	x.taken += f.got - f.taken
	c.passed()
	return f, nil
}

// awaitPiece waits until a piece of x can be asked for, or returns why there is no
// memory for one. What was asked for and did not come ends the connection soon.
func (c *conn) awaitPiece(x *inbound) error {
	if c.in.ahead > 0 || x.asked == x.length || !c.canAsk() {
		return c.awaitRead()
	}
	return c.in.refused
}

// noPiece handles a piece at the head that did not come.
func (c *conn) noPiece(x *inbound) error {
	if c.dead != nil {
		return c.whyNotRead()
	}
	c.donePiece(x.pieces.Pop()) // it was withdrawn
	return nil
}

// takePiece copies from the oldest piece of the transfer at the head.
func (c *conn) takePiece(p []byte, wait bool) (n int, last bool, err error) {
	x := c.unread.At(0).x
	f := *x.pieces.At(0)
	if !f.over {
		if wait {
			err = c.awaitRead()
		}
		return 0, false, err
	}
	if f.got == 0 {
		return 0, false, c.noPiece(x)
	}
	data := f.b[f.taken:f.got]
	c.mu.Unlock()
	n = copy(p, data) // only the reader, who holds readMu, takes from the queue
	c.mu.Lock()
	c.stats.BytesCopied += uint64(n)
	f.taken += n
	x.taken += n
	if f.taken == f.got {
		c.donePiece(x.pieces.Pop())
	}
	return n, c.passed(), nil
}

// passed takes transfers that have been read off the queue and reports whether
// a message has ended.
func (c *conn) passed() (last bool) {
	for c.unread.Len() > 0 {
		s := c.unread.At(0)
		if s.x == nil || s.x.taken < s.x.length {
			if s.x != nil && s.x.taken > 0 {
				s.size = 0
			}
			return false
		}
		last = s.last && !s.x.cut
		c.consumed()
		if last {
			return true
		}
	}
	return last
}
