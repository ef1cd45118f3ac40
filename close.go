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

// This file ends a connection that the program closes.
//
//  1. Close marks the connection closed (beginClose). Calls in progress return, and what
//     arrives from then on is dropped.
//  2. endStream hands the end of the stream (FIN) to the device, waits until the device has
//     everything that was written, and disconnects. Where Sends are held the device ends this
//     side's direction by itself (closeSends).
//  3. The disconnect ends the phase in which work requests are posted (life.go). The peer's
//     device still takes what is on its way, with the receives that were posted for it, and
//     ends its direction in turn.
//  4. awaitPeer waits for that end, and meanwhile receives and drops what the peer still
//     sends. Without the wait the peer could lose what it has not read: a socket that is
//     closed with unread bytes resets its connection.
//  5. teardown releases the objects.
//
// Behind CloseWrite, where Sends are held, the direction has ended before Close, and step 2 has
// nothing to do. The peer does not know of Close, so step 4 ends sooner if it goes on sending.
//
// Close waits for steps 1 and 2, but only while the peer takes bytes and closeGrace at
// most. The goroutine of lingerOn does the rest, as the kernel does for a TCP socket that
// was closed.
//
// linger.go has the state, and state.go the end of a connection for other reasons.

const (
	// closeGrace is how long Close waits at most until everything that was written has left
	// the process.
	closeGrace = 100 * time.Millisecond

	// closeStall is how long Close waits while nothing moves.
	closeStall = 30 * time.Millisecond

	// closeStallShort takes the place of closeStall in the second after a Close has waited in
	// vain. A program such as net/http closes many connections one after another under a
	// lock, and should not wait long for each.
	closeStallShort = 2 * time.Millisecond

	// lingerTimes bounds the whole linger, as a multiple of Config.LingerTimeout. It ends a
	// linger whose peer takes a few bytes now and then.
	lingerTimes = 12
)

// maxLingering is how many closed connections of a process may linger. One more gives up
// the oldest.
var maxLingering = 4096

// lingering has the closed connections of the process that have not been torn down.
var lingering struct {
	mu    sync.Mutex
	conns list.List // conns has values of type *conn, the oldest first.
	stats LingerStats

	stalled time.Time // stalled is when a Close last gave up waiting.
}

// LingerStats counts connections that the program has closed and that linger, or have
// lingered; see Config.LingerTimeout.
type LingerStats struct {
	// Now is the number of connections that linger at this moment.
	Now int

	// Total is the number of connections that were closed since the process began, however
	// short they lingered.
	Total uint64

	// Expired is the number of connections of Total that were given up after LingerTimeout.
	Expired uint64

	// Evicted is the number of connections of Total that were given up because 4096 others
	// lingered.
	Evicted uint64
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

func (c *conn) close() error {
	if !c.beginClose() {
		return net.ErrClosed
	}
	c.closeWithin(closeBound())
	go c.lingerOn(enterLingering(c))
	return nil
}

func (c *conn) closeContext(ctx context.Context) error {
	if !c.beginClose() {
		return net.ErrClosed
	}
	over := make(chan struct{})
	c.mu.Lock()
	c.end.over = over
	c.unlock()
	go c.lingerOn(enterLingering(c))
	select {
	case <-over:
		return c.end.told
	case <-ctx.Done():
		return dialError(ctx.Err())
	}
}

// beginClose marks the connection closed. It reports false if that was done before.
func (c *conn) beginClose() bool {
	c.mu.Lock()
	defer c.unlock()
	if c.life.closed {
		return false
	}
	c.life.closed, c.in.discarding, c.end.half = true, true, c.send.closed
	c.wakeAll()
	return true
}

// abort closes a connection that no program has used, without lingering. The peer is reset.
func (c *conn) abort() {
	if c.beginClose() {
		c.teardown()
	}
}

// closeBound returns the bound for the wait of Close.
func closeBound() bound {
	l := &lingering
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	p := bound{stall: closeStall, ends: now.Add(closeGrace)}
	if now.Sub(l.stalled) < time.Second {
		p.stall = closeStallShort
	}
	return p
}

// closeWithin ends the stream and waits until nothing of it is left on this host, as long
// as p allows.
func (c *conn) closeWithin(p bound) {
	c.mu.Lock()
	defer c.unlock()
	if c.set.linger < 0 {
		return
	}
	c.beginWait(p)
	defer c.writeDue.Stop()
	done := c.endStream() && c.lookUntil(func() bool { return c.lane.unsent() == 0 })
	if !done && c.writeDue.Expired() {
		lingering.mu.Lock()
		lingering.stalled = time.Now()
		lingering.mu.Unlock()
	}
}

// lingerOn does what is left of the end of a connection after Close. place is its place in
// lingering.
func (c *conn) lingerOn(place *list.Element) {
	c.mu.Lock()
	if c.set.linger >= 0 {
		c.beginWait(bound{stall: c.set.linger, ends: time.Now().Add(lingerTimes * c.set.linger)})
		if c.endStream() || c.life.peerClosed() {
			if c.end.over != nil && c.awaitAcknowledged() {
				c.tellResult()
			}
			c.awaitPeer()
		}
	}
	c.end.result = c.lost()
	expired := c.end.result == errLingered && c.writeDue.Expired() && !c.end.evicted && c.set.linger >= 0
	c.unlock()
	if err := c.teardown(); err != nil {
		c.set.failureLog.Debug("rdmanet: release of a connection", "local", c.local, "remote", c.remote, "err", err)
	}
	leaveLingering(place, expired)
	c.mu.Lock()
	c.tellResult()
	c.unlock()
}

// tellResult ends the wait of CloseContext, if there is one.
func (c *conn) tellResult() {
	if c.end.over != nil {
		c.end.told = c.end.result
		close(c.end.over)
		c.end.over = nil
	}
}

// enterLingering adds a connection to those that linger, and gives up the oldest if there
// are too many. The caller does not hold mu.
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

// leaveLingering removes a connection from those that linger. expired is set if it was
// given up after LingerTimeout.
func leaveLingering(place *list.Element, expired bool) {
	l := &lingering
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns.Remove(place) // Remove does nothing for a connection that was evicted.
	if expired {
		l.stats.Expired++
	}
}

// beginWait begins a wait that p limits.
func (c *conn) beginWait(p bound) {
	p.seen = c.progress()
	c.end.bound = p
	c.writeDue.Set(time.Now().Add(p.stall))
}

// lingers reports whether the wait may go on. It may while something has moved in the last
// bound.stall, and until bound.ends.
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

// progress returns what has moved until now.
func (c *conn) progress() progress {
	return progress{sent: c.lane.done, received: c.stats.received(), unsent: c.lane.unsent()}
}

// endStream takes those steps up to the disconnect that were not taken before, as long as
// lingers allows. It reports whether this side's direction has ended. Behind CloseWrite there is no
// disconnect: that direction has ended. The caller holds mu.
func (c *conn) endStream() bool {
	e, s := &c.end, &c.send
	going := func() bool { return !c.life.over() && c.lingers() }
	for !e.hasQueue {
		if !c.queue.busy {
			c.queue.acquire(normal)
			e.hasQueue = true
		} else if c.writers.Wait(); !going() {
			return c.life.draining()
		}
	}
	// If a call reads, doneReading drops the unread data.
	if c.rx.reading == 0 {
		// CloseRead, or a call that has just ended, may hold readMu.
		c.unlocked(c.readMu.Lock)
		c.dropUnread()
		c.readMu.Unlock()
	}
	if e, ok := c.lane.id.(ibv.Ender); ok && c.credits.have > 0 && c.tx.live.Len() == 0 && !s.ended {
		e.Ending() // Nothing but FIN, and what goes with it, is to be sent.
	}
	if e.half {
		// The peer does not know of Close, and may go on sending. That is dropped.
		for c.life.failing() && going() {
			c.await(&c.writers) // The device will tell why, which may be the peer's orderly end.
		}
		return c.life.posts()
	}
	// FIN is not sent if a message has no end, except where an end without it is no error. To a
	// peer that has closed its sends only, the disconnect tells as much, unless a message has no
	// end.
	cut := s.truncated || c.queue.partial
	told := c.holds && c.in.eof && !c.in.reasm.ended && !cut
	for c.fin && !s.ended && !told && (c.holds || !cut) && going() {
		if !c.queueFIN() {
			c.waitToSend()
		}
	}
	for c.tx.live.Len() > 0 && going() {
		c.await(&c.writers)
	}
	if c.holds {
		e.last, e.marked = c.lane.done, true // closeSends is enough: nothing that was posted is lost.
	}
	if !e.marked && going() {
		buffered := c.lane.id.Device().Attr().Quirks.SendsBuffered
		if buffered {
			// A Read that keep-alive has queued is not behind everything.
			c.awaitSends(func() bool { return s.barrier && going() })
		}
		c.signalAll(going)
		if going() {
			if buffered {
				c.queueBarrier()
			}
			// What is sent from here on, such as grants, may be lost.
			e.last, e.marked = c.lane.seq, true
		}
	}
	c.awaitSends(func() bool { return (c.lane.done < e.last || s.barrier) && going() })
	// A grant that is being posted must not meet the disconnect.
	for !c.lane.quiet() && going() {
		c.lane.awaitQuiet()
	}
	if c.holds && !s.closed && going() {
		c.closeSends()
	}
	if going() && e.marked && c.lane.id.Disconnect() == nil {
		c.life.drain()
	}
	return c.life.draining()
}

// ending reports whether this side has disconnected and the peer has not ended its
// direction yet. The queue pair still works then, and the peer's device may use memory that
// it was granted.
func (c *conn) ending() bool { return c.life.draining() && c.event.Load() == nil }

// awaitSends waits for completions of sends as long as pending reports true.
func (c *conn) awaitSends(pending func() bool) {
	for pending() {
		c.wantsSendCompletion = true
		c.await(&c.writers)
	}
}

// awaitPeer waits until the peer has ended its direction. Behind CloseWrite the peer may go on for
// ever, as it does not know of Close. Once it has found the end of this side's direction it can
// be reset without a loss, as TCP does with what comes after close(2).
func (c *conn) awaitPeer() {
	for c.event.Load() == nil && !(c.end.half && c.send.endSeen) && c.lingers() {
		c.await(&c.writers)
	}
}

// lookUntil waits until done reports true, and looks again and again because nothing wakes it. It
// reports false if lingers ends the wait.
func (c *conn) lookUntil(done func() bool) bool {
	for pause := 20 * time.Microsecond; !done(); pause = min(2*pause, time.Millisecond) {
		if !c.lingers() {
			return false
		}
		c.unlocked(func() { time.Sleep(pause) })
	}
	return true
}

// awaitAcknowledged waits until the peer's host has everything that was sent, with the end of the
// stream, and reports whether it has. Its reader may take its time then. This side's direction has
// ended.
func (c *conn) awaitAcknowledged() bool {
	c.lookUntil(func() bool { return c.acknowledged() != ibv.AckPending })
	return c.acknowledged() == ibv.AckAll
}

// acknowledged tells whether the peer's host has everything that was sent.
func (c *conn) acknowledged() ibv.Ack {
	if a, ok := c.lane.id.(ibv.Acknowledger); ok && c.holds {
		return a.Acknowledged()
	}
	return ibv.AckUnknown
}

var (
	errLingered = &resetError{syscall.ETIMEDOUT, errors.New("the peer did not end the connection in the time that it had after Close: Config.LingerTimeout")}
	errUntaken  = &resetError{errno.ECONNRESET, errors.New("the peer ended the connection before its device had taken all that was written")}
)

// lost returns why the peer may not have everything that was written, or nil if it has.
func (c *conn) lost() error {
	event := c.event.Load()
	if event != nil {
		// Completions of sends that failed may not have been handled.
		c.poll()
	}
	ack := c.acknowledged()
	switch {
	case c.life.draining() && event != nil && event.Err != nil && !errors.Is(event.Err, io.ErrUnexpectedEOF):
		return broken(event.Err)
	case c.sendsLost() || ack == ibv.AckNever:
		return errUntaken
	case c.send.closed && (ack == ibv.AckAll || c.send.endSeen):
		return nil
	case c.life.draining() && event != nil && ack == ibv.AckUnknown:
		// The peer's device may have met this side's end in the middle of what it sent,
		// which is no loss.
		return nil
	case c.life.draining(), !c.life.over(), ack == ibv.AckPending:
		return errLingered
	case !c.life.peerClosed():
		return c.life.cause
	case c.tx.live.Len() > 0:
		return errUntaken
	case c.fin && !c.in.eof:
		return errTruncated
	}
	// The peer closed first, in an orderly way, and the device knows of nothing that it did
	// not take.
	return nil
}

// teardown releases what the connection holds, in the order that verbs require.
func (c *conn) teardown() error {
	c.mu.Lock()
	c.life.giveUp()
	if c.event.Load() == nil {
		// The device completes the requests that calls wait for.
		c.lane.qp.SetError()
	}
	c.wakeAll()
	c.unlock()
	// With readMu held, no call copies from a buffer or reads by RDMA.
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	for c.queue.busy && !c.end.hasQueue {
		c.writers.Wait()
	}
	c.queue.acquire(normal)
	c.end.hasQueue = true
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
	if c.in.watch.timer != nil {
		c.in.watch.timer.Stop()
	}
	for c.in.posted.Len() > 0 {
		c.in.posted.Pop().Release()
	}
	c.dropUnread()
	c.credits.charge.Lower(0)
	c.rx.release()
	c.tx.release()
	c.dropJoined()
	c.lane.release(unwritten)
	return errors.Join(err, c.live.memory.close(), c.lane.cq.Close(), c.lane.id.Close(), c.dom.Release())
}

func (c *conn) closeRead() error {
	if !c.beginDiscarding() {
		return net.ErrClosed
	}
	// With readMu held, no call copies from a buffer.
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.mu.Lock()
	defer c.unlock()
	c.dropUnread()
	return nil
}

// beginDiscarding has all that arrives dropped. It reports false after Close.
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
