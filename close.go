package rdmanet

import (
	"container/list"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// The end of a connection that the program closes.
//
//  1. Close marks the connection closed. Calls in progress return, and what arrives from
//     then on is dropped.
//  2. endStream hands the end of the stream (FIN) to the device, waits until the device has
//     everything that was written, and disconnects.
//  3. The disconnect ends the phase in which work requests are posted (life.go): neither a
//     send nor a receive is posted afterwards. The peer's device reads what is on its way, with
//     the receives that it has posted for it, and ends its direction in turn.
//  4. awaitPeer waits for that end, and meanwhile receives and drops what the peer still
//     sends: a socket that is closed with bytes unread resets the connection, and the
//     peer would lose what it has not read.
//  5. teardown releases the objects.
//
// Close waits for steps 1 and 2, closeGrace at most and no longer than the peer takes
// bytes. The goroutine of lingerOn sees to the rest, as the kernel does for a TCP socket
// that was closed.

const (
	// closeGrace bounds the time for which Close waits until everything that was
	// written has left the process.
	closeGrace = 100 * time.Millisecond

	// closeStall is how long Close waits while nothing moves. A program may close many
	// connections one after another, under a lock as net/http does: when one of them
	// has stalled, those that follow within a second wait for closeHurry only.
	closeStall = 30 * time.Millisecond
	closeHurry = 2 * time.Millisecond

	// lingerTimes is how many times Config.LingerTimeout a connection lingers at most
	// after Close, if its peer takes a few bytes now and then.
	lingerTimes = 12
)

// maxLingering is how many closed connections of a process may wait for their peers. For
// one more the oldest is given up.
var maxLingering = 4096

// lingering holds the closed connections of the process whose peers have not ended
// their direction yet.
var lingering struct {
	mu    sync.Mutex
	conns list.List // of *conn, the oldest first
	stats LingerStats

	stalled time.Time // when a Close last gave up waiting
}

// LingerStats counts connections that were closed by the program and that the peer has
// not ended yet; see Config.LingerTimeout.
type LingerStats struct {
	Now     int    // connections that linger at this moment
	Total   uint64 // connections that were closed since the process began, however short they lingered
	Expired uint64 // of these, connections that were given up after LingerTimeout
	Evicted uint64 // of these, connections that were given up because 4096 others lingered
}

// Lingering returns the counters of the process.
func Lingering() LingerStats {
	l := &lingering
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Now = l.conns.Len()
	return s
}

// Close implements [Conn.Close].
func (c *conn) Close() error {
	if !c.beginClose() {
		return c.opError("close", net.ErrClosed)
	}
	c.closeWithin(closeBound())
	go c.lingerOn(enterLingering(c))
	return nil
}

// CloseContext implements [Conn.CloseContext].
func (c *conn) CloseContext(ctx context.Context) error {
	if !c.beginClose() {
		return c.opError("close", net.ErrClosed)
	}
	over := make(chan struct{})
	c.mu.Lock()
	c.end.over = over
	c.unlock()
	go c.lingerOn(enterLingering(c))
	select {
	case <-over:
		return c.opError("close", c.end.result)
	case <-ctx.Done():
		return c.opError("close", dialError(ctx.Err()))
	}
}

// beginClose marks the connection closed. It reports false if it was before.
func (c *conn) beginClose() bool {
	c.mu.Lock()
	defer c.unlock()
	if c.life.closed {
		return false
	}
	c.life.closed, c.in.discarding = true, true
	c.wakeAll()
	return true
}

// abort closes the connection without lingering: the peer is reset. Nobody has used it.
func (c *conn) abort() {
	if c.beginClose() {
		c.teardown()
	}
}

// closeBound is how long Close waits.
func closeBound() bound {
	l := &lingering
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	p := bound{stall: closeStall, ends: now.Add(closeGrace)}
	if now.Sub(l.stalled) < time.Second {
		p.stall = closeHurry
	}
	return p
}

// closeWithin flushes the connection and waits until nothing of it is left on this host,
// while p allows.
func (c *conn) closeWithin(p bound) {
	c.mu.Lock()
	defer c.unlock()
	if c.set.linger < 0 {
		return
	}
	c.allow(p)
	defer c.writeDue.Stop()
	done := c.endStream()
	for pause := 20 * time.Microsecond; done && c.unsent() > 0; pause = min(2*pause, time.Millisecond) {
		if !c.lingers() {
			done = false
			break
		}
		c.unlocked(func() { time.Sleep(pause) })
	}
	if !done && c.writeDue.Expired() {
		lingering.mu.Lock()
		lingering.stalled = time.Now()
		lingering.mu.Unlock()
	}
}

// lingerOn sees the connection off after Close. place is its place in lingering.
func (c *conn) lingerOn(place *list.Element) {
	c.mu.Lock()
	if c.set.linger >= 0 {
		c.allow(bound{stall: c.set.linger, ends: time.Now().Add(lingerTimes * c.set.linger)})
		if c.endStream() {
			c.awaitPeer()
		}
	}
	c.end.result = c.lost()
	expired := c.end.result == errLingered && c.writeDue.Expired() && !c.end.evicted && c.set.linger >= 0
	c.unlock()
	if err := c.teardown(); err != nil {
		c.set.log.Debug("rdmanet: release of a connection", "local", c.local, "remote", c.remote, "err", err)
	}
	leaveLingering(place, expired)
	c.mu.Lock()
	over := c.end.over
	c.unlock()
	if over != nil {
		close(over)
	}
}

// enterLingering counts a connection among those that linger, and gives up the oldest
// where there are too many. The caller does not hold mu.
func enterLingering(c *conn) *list.Element {
	l := &lingering
	l.mu.Lock()
	place := l.conns.PushBack(c)
	l.stats.Total++
	var oldest *conn
	if l.conns.Len() > maxLingering {
		oldest = l.conns.Remove(l.conns.Front()).(*conn)
		l.stats.Evicted++
	}
	l.mu.Unlock()
	if oldest != nil {
		oldest.mu.Lock()
		oldest.end.evicted = true
		oldest.wakeAll()
		oldest.unlock()
	}
	return place
}

func leaveLingering(place *list.Element, expired bool) {
	l := &lingering
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns.Remove(place) // no effect on one that was evicted
	if expired {
		l.stats.Expired++
	}
}

// allow begins a wait that p bounds.
func (c *conn) allow(p bound) {
	p.seen = c.progress()
	c.end.bound = p
	c.writeDue.Set(time.Now().Add(p.stall))
}

// lingers reports whether the wait may go on: something has moved in the last
// bound.stall, or that is not over yet.
func (c *conn) lingers() bool {
	p := &c.end.bound
	switch {
	case c.end.evicted, p.over:
		return false
	case !c.writeDue.Expired():
		return true
	}
	seen, now := c.progress(), time.Now()
	if p.over = seen == p.seen || !now.Before(p.ends); p.over {
		return false
	}
	p.seen = seen
	c.writeDue.Set(now.Add(min(p.stall, p.ends.Sub(now))))
	return true
}

func (c *conn) progress() progress {
	return progress{sent: c.lane.done, received: c.stats.received(), unsent: c.unsent()}
}

// unsent is how many bytes of what was written are still on this host, as far as the
// device can tell.
func (c *conn) unsent() int {
	if f, ok := c.lane.id.(ibv.Unsender); ok {
		return f.Unsent()
	}
	return 0
}

// endStream takes the steps up to the disconnect that were not taken yet, for as long as
// lingers says so. It reports whether all are. The caller holds mu.
func (c *conn) endStream() bool {
	e, s := &c.end, &c.send
	going := func() bool { return !c.life.over() && c.lingers() }
	for !e.turn {
		if !c.queue.busy {
			c.queue.acquire(normal)
			e.turn = true
		} else if c.writers.Wait(); !going() {
			return c.life.draining()
		}
	}
	if c.rx.reading == 0 { // else doneReading does it
		c.unlocked(c.readMu.Lock) // CloseRead, or a call that has just ended, may be holding it
		c.dropUnread()
		c.readMu.Unlock()
	}
	for c.fin && !s.finSent && !s.truncated && !c.queue.partial && going() { // no end where a message has none
		if !c.queueFIN() {
			c.waitToSend()
		}
	}
	for c.tx.live.Len() > 0 && going() {
		c.await(&c.writers)
	}
	if !e.marked && going() {
		buffered := c.lane.id.Device().Attr().Quirks.SendsBuffered
		if buffered {
			c.awaitSends(func() bool { return s.barrier && going() }) // keep-alive's is not behind everything
		}
		c.signalAll(going)
		if going() {
			if buffered {
				c.queueBarrier()
			}
			e.last, e.marked = c.lane.seq, true // what is sent from here on, such as grants, may be lost
		}
	}
	c.awaitSends(func() bool { return (c.lane.done < e.last || s.barrier) && going() })
	for !c.lane.quiet() && going() { // a grant, which must not meet the disconnect
		c.lane.awaitQuiet()
	}
	if going() && e.marked && c.lane.id.Disconnect() == nil {
		c.life.drain()
	}
	return c.life.draining()
}

// ending reports whether this side has disconnected and the peer has not ended yet: the
// link lives, and the peer's device may be at work on memory that it was granted.
func (c *conn) ending() bool { return c.life.draining() && c.event.Load() == nil }

// awaitSends waits for completions of sends while wanted says so.
func (c *conn) awaitSends(wanted func() bool) {
	for wanted() {
		c.wantsSendCompletion = true
		c.await(&c.writers)
	}
}

// awaitPeer waits until the peer has ended its direction.
func (c *conn) awaitPeer() {
	for c.event.Load() == nil && c.lingers() {
		c.await(&c.writers)
	}
}

var (
	errLingered = &resetError{syscall.ETIMEDOUT, errors.New("the peer did not end the connection in the time that it had after Close: Config.LingerTimeout")}
	errUntaken  = &resetError{errno.ECONNRESET, errors.New("the peer ended the connection before its device had taken all that was written")}
)

// lost returns why the peer may not have everything that was written, nil if it has.
func (c *conn) lost() error {
	event := c.event.Load()
	if event != nil {
		c.poll() // of sends that failed
	}
	switch {
	case c.life.draining() && event != nil && event.Err != nil && !errors.Is(event.Err, io.ErrUnexpectedEOF):
		return broken(event.Err)
	case c.sendsLost() && !c.lane.id.Device().Attr().Quirks.SendsBuffered: // with that quirk, sends that have arrived may fail too
		return errUntaken
	case c.life.draining() && event != nil:
		return nil // also where the peer's device has met our end in the middle of what it sent
	case c.life.draining(), !c.life.over():
		return errLingered
	case !c.life.peerClosed():
		return c.life.cause
	case c.tx.live.Len() > 0:
		return errUntaken
	case c.fin && !c.in.eof:
		return errTruncated
	}
	return nil // the peer closed first, in an orderly way, and the device knows of nothing that it did not take
}

// teardown releases what the connection holds, in the order that verbs want.
func (c *conn) teardown() error {
	c.mu.Lock()
	c.life.giveUp()
	if c.event.Load() == nil {
		c.lane.qp.SetError() // calls that wait for the device get its answer
	}
	c.wakeAll()
	c.unlock()
	c.readMu.Lock() // a call that copies from a buffer, or reads by RDMA, is over now
	defer c.readMu.Unlock()
	c.mu.Lock()
	for c.queue.busy && !c.end.turn {
		c.writers.Wait()
	}
	c.queue.acquire(normal)
	c.end.turn = true
	for !c.lane.quiet() {
		c.lane.awaitQuiet()
	}
	c.lane.open = false
	c.unlock()

	err := c.lane.qp.Close()
	c.mu.Lock()
	defer c.unlock()
	c.wait.Stop()
	c.readDue.Stop()
	c.writeDue.Stop()
	if c.live.timer != nil {
		c.live.timer.Stop()
	}
	if c.rx.prefetchTimer != nil {
		c.rx.prefetchTimer.Stop()
	}
	for c.in.posted.Len() > 0 {
		c.in.posted.Pop().Release()
	}
	c.dropUnread()
	c.credits.charge.Lower(0)
	c.releaseFetches()
	c.releaseTransfers()
	c.lane.release(unwritten)
	return errors.Join(err, c.live.memory.close(), c.lane.cq.Close(), c.lane.id.Close(), c.dom.Release())
}

// CloseRead implements [Conn.CloseRead].
func (c *conn) CloseRead() error {
	if !c.beginDiscarding() {
		return c.opError("close", net.ErrClosed)
	}
	c.readMu.Lock() // whoever copies from a buffer is out now
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	c.dropUnread()
	return nil
}

// beginDiscarding has what arrives dropped from now on. It reports false after Close.
func (c *conn) beginDiscarding() bool {
	c.mu.Lock()
	defer c.unlock()
	if c.life.closed {
		return false
	}
	c.in.discarding = true
	c.wakeAll()
	return true
}
