package rdmanet

import (
	"io"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/ring"
)

// The receiver's side of large transfers; transfer.go has the protocol.
//
//  1. An offer joins the unread queue. Nothing is moved yet.
//  2. A Read with room for much has the device put the bytes straight into its
//     memory (readDirect): they are not copied.
//  3. For a Read that takes little at a time they are fetched into scratch, some
//     ahead of it (readAhead), and copied from there.
//  4. What nobody reads for prefetchAfter is fetched as well, as far as scratch
//     goes: two programs that write before they read would wait for each other. Not
//     before the program has accepted the connection, or strangers could take all scratch.
//
// The same with RDMA Writes, but that the peer is granted the memory instead.

// transferReceiver is what a connection knows of the transfers that it receives.
type transferReceiver struct {
	mode         transferMode
	last         uint32                   // ID of the latest offer
	live         ring.Ring[*recvTransfer] // those that the peer has not been told of, oldest first
	inFlight     ring.Ring[*fetch]        // asked for and not there, oldest first
	unsentGrants ring.Ring[*fetch]        // grants to be sent, oldest first
	doneDue      bool                     // the peer is to be told that
	done         uint32                   // this transfer, and those before it,
	length       int                      // are over, it after so many bytes

	depth         int           // RDMA Reads at a time
	pace          pace          // how many bytes may be under way
	reading       int           // calls that read
	readsAhead    bool          // the reader takes little at a time: read ahead
	bounceBuffers int           // landings that are in use
	filling       *bounceBuffer // of these, the one that takes the next piece, nil for none
	refused       error         // why there was no memory for one more
	hasReserved   bool          // a landing of its own,
	reserved      *bounceBuffer // for a piece when there is no other memory, unless it is in use
	prefetchTimer *time.Timer

	notAccepted bool // the program has not accepted the connection: nothing is fetched
}

// trim gives back what the lists have grown by.
func (in *transferReceiver) trim() {
	in.live.Trim()
	in.inFlight.Trim()
	in.unsentGrants.Trim()
}

// recvTransfer is one transfer.
type recvTransfer struct {
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
	x     *recvTransfer
	b     []byte // where it goes to, which is
	in    *bounceBuffer
	into  *directRead // or the reader's memory
	addr  uint64      // of b, for a grant
	key   uint32
	mr    ibv.MR    // what the key belongs to, if it opens this piece only
	got   int       // bytes that have come
	under int       // bytes that were under way with it when it was asked for
	at    time.Time // when that was
	taken int
	over  bool // the device will not touch the memory any more
}

// bounceBuffer is our own memory for data to be copied from: scratch, or a buffer of a
// receive's size where there is none.
type bounceBuffer struct {
	b      []byte
	lkey   uint32
	chunk  *regmem.Chunk
	buf    *regmem.Buffer
	mr     ibv.MR // by which the peer may write to it as long as it lives
	used   int    // bytes of b that pieces were made of
	pieces int    // that have not been given back
	stuck  bool   // a region of it could not be closed: the peer may still write to it
}

const (
	fetchSize        = 4 << 20 // bytes of an RDMA Read at most, and of a reader's memory that is registered at a time
	maxBounceBuffers = 4       // of scratch, one connection and direction
	readSlots        = 8       // of the send queue, for RDMA Reads
	prefetchAfter    = 10 * time.Millisecond
)

// checkOffer checks an offer or a request, before the payload that comes with it joins
// the stream.
func (c *conn) checkOffer(m *delivery) error {
	in, t := &c.rx, &m.t
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
	in := &c.rx
	in.last++
	x := &recvTransfer{id: t.ID, addr: t.Addr, key: t.Key, length: int(t.Length), first: s.size > 0}
	in.live.Push(x)
	c.stats.TransfersReceived++
	if c.discarding {
		c.discard(x)
		return
	}
	s.transfer = x
	c.unread.Push(s)
	switch {
	case in.readsAhead:
		c.readAhead()
	case in.reading == 0:
		c.startPrefetchTimer()
	}
}

// doneReading notes that a call that read has ended; what it has left is neglected
// if no other comes.
func (c *conn) doneReading() {
	c.rx.reading--
	if c.closed {
		c.dropUnread() // Close leaves it to the call that reads
	}
	if n := c.rx.live.Len(); c.rx.reading == 0 && n > 0 && !c.closed {
		if x := *c.rx.live.At(n - 1); x.asked < x.length {
			c.startPrefetchTimer()
		}
	}
}

// startPrefetchTimer has somebody look whether the reader comes.
func (c *conn) startPrefetchTimer() {
	if c.rx.prefetchTimer == nil {
		c.rx.prefetchTimer = time.AfterFunc(prefetchAfter, c.prefetch)
	} else {
		c.rx.prefetchTimer.Reset(prefetchAfter)
	}
}

// markAccepted notes that Accept hands the connection out.
func (c *conn) markAccepted() *conn {
	c.mu.Lock()
	defer c.unlock()
	c.rx.notAccepted = false
	if c.rx.live.Len() > 0 && c.rx.reading == 0 && !c.closed {
		c.startPrefetchTimer()
	}
	return c
}

func (c *conn) prefetch() {
	c.mu.Lock()
	defer c.unlock()
	if c.rx.reading == 0 && !c.rx.notAccepted && !c.discarding && c.dead == nil {
		c.readAhead()
	}
}

// canAsk reports whether one more fetch may be under way.
func (c *conn) canAsk() bool {
	if c.dead != nil || c.hasFailed() || c.rx.pace.next() == 0 {
		return false
	}
	if c.rx.mode == transferRead {
		return c.rx.inFlight.Len() < c.rx.depth
	}
	return c.rx.inFlight.Len() < maxTransfers
}

// peerWrites is the right that a peer needs that is to fill memory.
const peerWrites = ibv.AccessLocalWrite | ibv.AccessRemoteWrite

// fetch has the device bring the next bytes of x to f.b.
func (c *conn) fetch(f *fetch, lkey uint32) {
	x := f.x
	f.at, f.under = time.Now(), c.rx.pace.ask(len(f.b))
	if c.rx.mode == transferWrite {
		c.rx.inFlight.Push(f)
		c.rx.unsentGrants.Push(f)
		x.asked += len(f.b)
		return
	}
	wr := ibv.SendWR{ID: fetchID, Op: ibv.OpRead, Flags: ibv.SendSignaled, RemoteAddr: x.addr + uint64(x.asked), RKey: x.key}
	x.asked += len(f.b)
	if c.dead != nil {
		c.landed(f)
		return
	}
	c.rx.inFlight.Push(f)
	c.lane.enqueueAlone(wr, ibv.SGE{Buf: f.b, LKey: lkey})
	c.wait.Interrupt() // it may sleep for receives only
}

// fetched handles the completion of an RDMA Read.
func (c *conn) fetched(wc *ibv.WC) {
	f := c.rx.inFlight.Pop()
	if wc.Status == ibv.WCSuccess {
		c.receivedSince, c.probing = true, false
		c.arrived(f, len(f.b))
		if f.x.recalled && f.x.landed < f.x.length {
			c.send.responseDue = true // for the peer's remainingPatience
		}
		return
	}
	c.landed(f)
	c.status(wc, ibv.WCRead)
}

// fetchCanceled ends the latest fetch, whose RDMA Read was not posted.
func (c *conn) fetchCanceled() {
	last := c.rx.inFlight.At(c.rx.inFlight.Len() - 1)
	f := *last
	*last = nil
	c.rx.inFlight.Undo()
	c.landed(f)
}

// written handles the peer's word that it has answered a grant.
func (c *conn) written(t *transferHeader) error {
	in := &c.rx
	if in.mode != transferWrite {
		return errTransferKind
	}
	n := int(t.Length)
	if t.Flags&transferEnd == 0 {
		if in.inFlight.Len() == in.unsentGrants.Len() {
			return errTransferCount // nothing that it has been told of
		}
		if f := *in.inFlight.At(0); t.ID != f.x.id || n != len(f.b) {
			return errTransferLength
		}
		c.arrived(in.inFlight.Pop(), n)
		return nil
	}
	x, err := c.findWithdrawn(t)
	if x == nil {
		return err
	}
	if n != 0 {
		return errTransferLength
	}
	for in.inFlight.Len() > 0 && (*in.inFlight.At(0)).x == x {
		f := in.inFlight.Pop()
		if f.into != nil {
			f.into.asked -= len(f.b) // what comes next goes there
		}
		c.landed(f)
	}
	for in.unsentGrants.Len() > 0 && (*in.unsentGrants.At(0)).x == x {
		in.unsentGrants.Pop()
	}
	x.asked = x.landed
	c.truncate(x, t)
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
	if c.rx.readsAhead || c.rx.reading == 0 { // neglected, then
		c.readAhead()
	}
}

// landed notes that the device is done with the memory of f.
func (c *conn) landed(f *fetch) {
	f.over = true
	if f.got > 0 {
		c.rx.pace.land(len(f.b), f.under, f.at, time.Now())
	} else {
		c.rx.pace.drop(len(f.b))
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
	c.readers.WakeAll()
	c.wait.Interrupt()
}

// retire tells the peer of transfers of which everything is there.
func (c *conn) retire() {
	in := &c.rx
	for in.live.Len() > 0 {
		x := *in.live.At(0)
		if x.landed < x.length {
			return
		}
		in.live.Pop()
		if in.mode == transferRead || x.dropped { // else it knows
			in.doneDue, in.done, in.length = true, x.id, x.length
		}
	}
}

// withdrawn handles the peer's wish to have a transfer back: what has been asked
// for comes, nothing more.
func (c *conn) withdrawn(t *transferHeader) error {
	in := &c.rx
	if in.mode != transferRead {
		return errTransferKind
	}
	x, err := c.findWithdrawn(t)
	if x == nil {
		return err
	}
	x.recalled = true
	c.truncate(x, t)
	return nil
}

// truncate ends a transfer with what has been asked for. If that is all it is too late.
func (c *conn) truncate(x *recvTransfer, t *transferHeader) {
	if x.asked == x.length {
		return
	}
	x.length = x.asked
	x.cut = t.Flags&transferCut != 0 && (x.length > 0 || !x.first)
	if x.length == 0 && x.first {
		c.reasm.undo()
	}
	c.dropWithdrawn(x)
	c.retire()
	c.readers.WakeAll()
}

// dropWithdrawn takes a transfer that was withdrawn as a whole off the unread queue: a peer
// could fill memory with such while nobody reads. It stays if it tells of the end of
// its message, if there is something behind it, or for a call that reads, which may
// be at it and must not take the next one for it.
func (c *conn) dropWithdrawn(x *recvTransfer) {
	if x.length > 0 || c.rx.reading > 0 || c.unread.Len() == 0 {
		return
	}
	s := c.unread.At(c.unread.Len() - 1)
	if s.transfer == x && (x.first || x.cut || !s.last) {
		c.dropPieces(x)
		*s = segment{}
		c.unread.Undo()
	}
}

// hasControl reports whether nextReceiverControl has something.
func (in *transferReceiver) hasControl() bool { return in.doneDue || in.unsentGrants.Len() > 0 }

// nextReceiverControl returns what the peer is to be told next of the transfers that
// come in.
func (c *conn) nextReceiverControl() transferHeader {
	in := &c.rx
	if in.doneDue {
		in.doneDue = false
		return transferHeader{Kind: transferDone, ID: in.done, Length: uint32(in.length)}
	}
	f := in.unsentGrants.Pop()
	return transferHeader{Kind: transferGrant, ID: f.x.id, Addr: f.addr, Key: f.key, Length: uint32(len(f.b))}
}

// findWithdrawn returns the transfer that the peer gives up: the latest, and only one
// that is alone. nil and no error means that it was over here before the peer knew.
func (c *conn) findWithdrawn(t *transferHeader) (*recvTransfer, error) {
	live := &c.rx.live
	switch {
	case t.ID != c.rx.last || live.Len() > 1:
		return nil, errTransferID
	case live.Len() == 0:
		return nil, nil
	}
	return *live.At(0), nil
}

// readAhead asks for what is offered, into scratch.
func (c *conn) readAhead() {
	for i := 0; i < c.rx.live.Len(); i++ {
		x := *c.rx.live.At(i)
		for x.asked < x.length {
			if c.rx.filling == nil && c.rx.bounceBuffers >= maxBounceBuffers || !c.canAsk() || !c.askPiece(x) {
				return
			}
		}
	}
}

// askPiece asks for the next piece of x. Pieces that are shorter than a landing share it,
// if they are of one transfer.
func (c *conn) askPiece(x *recvTransfer) bool {
	l := c.rx.filling
	if l == nil {
		if l = c.getBounceBuffer(); l == nil {
			return false
		}
		l.used, l.pieces = 0, 0
	}
	f := &fetch{x: x, in: l, b: l.b[l.used:][:min(len(l.b)-l.used, x.length-x.asked, c.rx.pace.next())]}
	if c.rx.mode == transferWrite && !c.openPiece(f) {
		return false
	}
	l = f.in
	if l.pieces++; l.pieces == 1 {
		c.rx.bounceBuffers++
	}
	l.used += len(f.b)
	c.rx.filling = nil
	if l.used < len(l.b) && x.asked+len(f.b) < x.length {
		c.rx.filling = l
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
		mr, err = c.dom.Expose(c.lane.qp, f.b, peerWrites)
		if err != nil && c.rx.bounceBuffers == 0 && !c.rx.hasReserved && len(f.b) > regmem.PageSize {
			f.b = f.b[:regmem.PageSize]
			mr, err = c.dom.Expose(c.lane.qp, f.b, peerWrites)
		}
		f.mr = mr
	}
	if err != nil {
		c.rx.refused = err
		if f.in == c.rx.filling {
			c.rx.filling = nil // goes with its last piece
			return false
		}
		c.putBounceBuffer(f.in)
		if f.in = c.takeReserved(); f.in == nil {
			return false
		}
		f.in.used, f.in.pieces = 0, 0
		f.b, at = f.in.b[:min(len(f.in.b), len(f.b))], 0
		mr = f.in.mr
	}
	f.addr, f.key = mr.Addr()+uint64(at), mr.RKey()
	return true
}

// getBounceBuffer returns memory for one piece. When there is no scratch, one buffer at a
// time has to do. nil means neither.
func (c *conn) getBounceBuffer() *bounceBuffer {
	var s *regmem.Chunk
	var err error
	if c.rx.mode == transferWrite { // registered for each grant
		s = c.dom.GetChunk(c.set.transferMemory)
	} else {
		s, err = c.dom.GetRegisteredChunk(c.set.transferMemory, c)
	}
	if s != nil {
		return &bounceBuffer{b: s.B, lkey: s.LKey(), chunk: s}
	} else if err != nil {
		c.rx.refused = err
	}
	if l := c.takeReserved(); l != nil || c.rx.bounceBuffers > 0 || c.rx.hasReserved {
		return l
	}
	buf, err := c.pool.Get()
	if err != nil {
		c.rx.refused = err
		return nil
	}
	return &bounceBuffer{b: buf.B, lkey: buf.LKey, buf: buf}
}

// takeReserved returns the landing that this connection keeps, nil if it keeps none
// or it is in use.
func (c *conn) takeReserved() *bounceBuffer {
	if c.rx.bounceBuffers > 0 {
		return nil
	}
	l := c.rx.reserved
	c.rx.reserved = nil
	return l
}

// putBounceBuffer takes back what landing has returned.
func (c *conn) putBounceBuffer(l *bounceBuffer) {
	over := c.closed || c.dead != nil
	switch {
	case l.stuck, l.chunk != nil && over && !l.chunk.Unregister():
		// The device may still use it.
	case l.buf != nil && !over && c.rx.hasReserved && c.rx.reserved == nil:
		c.rx.reserved = l // there may be scratch next time
	default:
		l.release()
	}
}

// reserveBounceBuffer gets the memory without which what the peer offers could not be read
// when no more can be registered. What the peer is to write to is registered for
// that beforehand: it holds nothing but what this peer has sent.
func (c *conn) reserveBounceBuffer() error {
	if c.rx.mode == transferNone || !regmem.PinsMemory(c.lane.id.Device()) {
		return nil
	}
	buf, err := c.pool.Get()
	if err != nil {
		return err
	}
	l := &bounceBuffer{b: buf.B, lkey: buf.LKey, buf: buf}
	if c.rx.mode == transferWrite {
		if l.mr, err = c.dom.Expose(c.lane.qp, l.b, peerWrites); err != nil {
			buf.Release()
			return err
		}
	}
	c.rx.hasReserved, c.rx.reserved = true, l
	return nil
}

func (c *conn) releaseReserved() {
	if c.rx.reserved != nil {
		c.rx.reserved.release()
		c.rx.reserved = nil
	}
}

func (l *bounceBuffer) release() {
	switch {
	case l.mr != nil && l.mr.Close() != nil:
		// The device may still use it.
	case l.buf != nil:
		l.buf.Release()
	default:
		l.chunk.Release()
	}
}

// donePiece gives back the memory of a piece that has been read.
func (c *conn) donePiece(f *fetch) {
	if f.in.pieces--; f.in.pieces == 0 {
		if c.rx.filling == f.in {
			c.rx.filling = nil
		}
		c.rx.bounceBuffers--
		c.putBounceBuffer(f.in)
	}
	if c.rx.readsAhead {
		c.readAhead()
	}
}

// discard ends a transfer that nobody will read. The peer is told that it was
// taken.
func (c *conn) discard(x *recvTransfer) {
	x.dropped = true
	x.landed += x.length - x.asked // as if
	x.asked = x.length
	c.retire()
}

// dropPieces gives back the pieces that are there of a transfer that nobody will
// read.
func (c *conn) dropPieces(x *recvTransfer) {
	for x.pieces.Len() > 0 && (*x.pieces.At(0)).over {
		c.donePiece(x.pieces.Pop())
	}
}

// releaseFetches gives back the memory of what will not arrive. The queue pair is
// closed, and what was unread has been dropped.
func (c *conn) releaseFetches() {
	for c.rx.inFlight.Len() > 0 {
		c.landed(c.rx.inFlight.Pop())
	}
	c.dom.UnregisterChunks(c)
	c.releaseReserved()
}

// takeTransfer takes bytes of the transfer at the head of the unread queue. With
// wait it waits until something has changed if there are none; message bounds it
// to one message, and last says that this has ended. A return of 0 and no error
// means to look again, or without wait that nothing is there.
func (c *conn) takeTransfer(p []byte, wait, message bool) (n int, last bool, err error) {
	x := c.unread.At(0).transfer
	switch {
	case x.taken == x.length:
		return 0, c.popFinished(), nil
	case x.pieces.Len() > 0:
		return c.takePiece(p, wait)
	case !wait:
		return 0, false, nil
	}
	if c.rx.readsAhead = len(p) < min(directReadMin, c.set.ofBuffer); !c.rx.readsAhead {
		if n, last, err := c.readDirect(p, message); n > 0 || err != nil || x.taken == x.length {
			return n, last, err
		}
		c.rx.readsAhead = true // p cannot be registered, or nothing may be asked for now
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
		return c.stopReadErr()
	}
	c.await(&c.readers)
	return nil
}

// stopsReading reports whether a Read that waits has a reason not to.
func (c *conn) stopsReading() bool {
	return c.closed || c.discarding || c.readDue.expired || c.dead != nil
}

// stopReadErr is readErr where there is something in the queue that cannot be had.
func (c *conn) stopReadErr() error {
	switch {
	case c.closed, c.readDue.expired:
		return c.readErr()
	case c.discarding:
		return io.EOF
	case c.dead == errPeerClosed:
		return errTruncated
	}
	return c.dead
}

// takeFetch takes the next piece, in scratch, of the transfer at the head of the
// unread queue. nil and no error means to look again.
func (c *conn) takeFetch() (*fetch, error) {
	x := c.unread.At(0).transfer
	c.rx.readsAhead = true
	c.readAhead()
	switch {
	case x.taken == x.length:
		c.popFinished()
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
	c.popFinished()
	return f, nil
}

// awaitPiece waits until a piece of x can be asked for, or returns why there is no
// memory for one. What was asked for and did not come ends the connection soon.
func (c *conn) awaitPiece(x *recvTransfer) error {
	if c.rx.bounceBuffers > 0 || x.asked == x.length || !c.canAsk() {
		return c.awaitRead()
	}
	return c.rx.refused
}

// noPiece handles a piece at the head that did not come.
func (c *conn) noPiece(x *recvTransfer) error {
	if c.dead != nil {
		return c.stopReadErr()
	}
	c.donePiece(x.pieces.Pop()) // it was withdrawn
	return nil
}

// takePiece copies from the oldest piece of the transfer at the head.
func (c *conn) takePiece(p []byte, wait bool) (n int, last bool, err error) {
	x := c.unread.At(0).transfer
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
	c.unlocked(func() { n = copy(p, data) }) // only the reader, who holds readMu, takes from the queue
	c.stats.BytesCopied += uint64(n)
	f.taken += n
	x.taken += n
	if f.taken == f.got {
		c.donePiece(x.pieces.Pop())
	}
	return n, c.popFinished(), nil
}

// popFinished takes transfers that have been read off the queue and reports whether
// a message has ended.
func (c *conn) popFinished() (last bool) {
	for c.unread.Len() > 0 {
		s := c.unread.At(0)
		if s.transfer == nil || s.transfer.taken < s.transfer.length {
			if s.transfer != nil && s.transfer.taken > 0 {
				s.size = 0
			}
			return false
		}
		last = s.last && !s.transfer.cut
		c.consumed()
		if last {
			return true
		}
	}
	return last
}
