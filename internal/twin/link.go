package twin

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/internal/errno"
)

const (
	linkChunk = 4 << 10 // linkChunk is how many bytes a shaped link carries at a time.
	linkQueue = 8       // linkQueue is how many chunks are on their way. That is 32 KiB.

	straightChunk = 64 << 10 // straightChunk is linkChunk for a link that is neither slow nor far.
)

// A link is a TCP proxy for one connection. It implements a Link between two ends.
type link struct {
	spec   Link
	ln     *net.TCPListener
	target string

	carried atomic.Int64 // carried counts the bytes of both directions.
	done    sync.WaitGroup
	over    chan struct{} // close closes over.

	mu      sync.Mutex
	start   time.Time
	conns   []*net.TCPConn
	began   []bool // began is set for the faults that have begun.
	stopped time.Time
	frozen  bool
	events  []Event
	wake    chan struct{} // wake is closed, and made anew, when stopped or frozen changes.
}

// An Event is a fault of the link that has begun, and the time since the beginning.
type Event struct {
	Fault
	When time.Duration
}

func newLink(spec Link, target string) (*link, error) {
	ln, err := listenSmall(!spec.shaped())
	if err != nil {
		return nil, err
	}
	l := &link{spec: spec, ln: ln, target: target, began: make([]bool, len(spec.Faults)),
		over: make(chan struct{}), wake: make(chan struct{})}
	l.done.Add(1)
	go l.run()
	return l, nil
}

// shaped reports whether the link keeps a short queue.
func (l Link) shaped() bool { return l.Delay > 0 || l.Rate > 0 }

func (l *link) addr() string { return l.ln.Addr().String() }

// begin is called when the ends are connected. The times of faults count from here.
func (l *link) begin(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.start = now
	for i, f := range l.spec.Faults {
		if f.At > 0 {
			l.done.Add(1)
			go func() {
				defer l.done.Done()
				select {
				case <-l.over:
				case <-time.After(f.At):
					l.fault(i)
				}
			}()
		}
	}
}

// fault makes a fault begin, once.
func (l *link) fault(i int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.began[i] || l.start.IsZero() {
		return
	}
	l.began[i] = true
	f := l.spec.Faults[i]
	l.events = append(l.events, Event{f, time.Since(l.start)})
	switch f.Do {
	case Stop:
		l.stopped = time.Now().Add(f.For)
	case Freeze:
		l.frozen = true
	case Reset:
		for _, c := range l.conns {
			c.SetLinger(0)
			c.Close()
		}
	}
	close(l.wake)
	l.wake = make(chan struct{})
}

// count counts bytes that were carried. A fault may begin then.
func (l *link) count(n int) {
	total := l.carried.Add(int64(n))
	for i, f := range l.spec.Faults {
		if f.Bytes > 0 && total >= f.Bytes && total-int64(n) < f.Bytes {
			l.fault(i)
		}
	}
}

// pass waits until the link carries data. It returns false if the link is over.
func (l *link) pass() bool {
	for {
		l.mu.Lock()
		wait, frozen, wake := time.Until(l.stopped), l.frozen, l.wake
		l.mu.Unlock()
		if !frozen && wait <= 0 {
			return true
		}
		if frozen {
			wait = time.Hour
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-wake:
			t.Stop()
		case <-l.over:
			t.Stop()
			return false
		}
	}
}

// sleep waits until a moment. It returns false if the link is over.
func (l *link) sleep(until time.Time) bool {
	d := time.Until(until)
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-l.over:
		return false
	}
}

// close ends the link. It resets the connections that still exist.
func (l *link) close() {
	close(l.over)
	l.ln.Close()
	l.mu.Lock()
	for _, c := range l.conns {
		c.SetLinger(0)
		c.Close()
	}
	l.mu.Unlock()
	l.done.Wait()
}

// faults returns the faults that have begun.
func (l *link) faults() []Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Event(nil), l.events...)
}

func (l *link) run() {
	defer l.done.Done()
	for {
		a, err := l.ln.AcceptTCP()
		if err != nil {
			return
		}
		nb, err := dialSmall(l.target, !l.spec.shaped())
		if err != nil {
			a.SetLinger(0)
			a.Close()
			continue
		}
		l.mu.Lock()
		l.conns = append(l.conns, a, nb)
		select {
		case <-l.over:
			a.Close()
			nb.Close()
			l.mu.Unlock()
			return
		default:
		}
		l.mu.Unlock()
		there, back := make(chan struct{}), make(chan struct{})
		l.done.Add(2)
		var forth, backward direction
		go l.pump(nb, a, &forth, &backward, there, back)
		go l.pump(a, nb, &backward, &forth, back, there)
	}
}

// A chunk is data on its way, with the time at which it is due at the other end. The last
// chunk has no bytes, and has the kind of the stream's end.
type chunk struct {
	data []byte
	due  time.Time
	err  error
}

// direction is what the two pumps of a connection know of each other.
type direction struct {
	writing atomic.Bool // writing is set while a Write is under way.
	failed  atomic.Bool // failed is set when a Write has failed.
}

// reset reports whether the end of a stream that was read is really a reset. Linux reports
// a reset once. If it has reported it to a Write, the next Read returns EOF.
func (d *direction) reset() bool {
	for end := time.Now().Add(100 * time.Millisecond); d.writing.Load() && time.Now().Before(end); {
		time.Sleep(100 * time.Microsecond)
	}
	return d.failed.Load()
}

// pump carries what src sends to dst, and calls done when it has carried everything. It
// passes a reset of one side on to the other, behind what came before the reset.
func (l *link) pump(dst, src *net.TCPConn, mine, opposite *direction, done, other chan struct{}) {
	defer l.done.Done()
	size, depth := straightChunk, 1
	if l.spec.shaped() {
		size, depth = linkChunk, linkQueue-2 // One more is being read, and one is being written.
	}
	queue := make(chan chunk, depth)
	l.done.Add(1)
	go func() {
		defer l.done.Done()
		defer close(queue)
		for {
			b := make([]byte, size)
			if !l.pass() {
				return
			}
			n, err := src.Read(b)
			if err == io.EOF && opposite.reset() {
				err = errno.ECONNRESET
			}
			c := chunk{b[:n], time.Now().Add(l.spec.Delay), err}
			select {
			case queue <- c:
			case <-l.over:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() {
		for range queue { // The queue is emptied, so that the reader does not wait. The reader ends with src.
		}
	}()
	defer close(done)
	var free time.Time // free is when the wire is free again.
	for c := range queue {
		if !l.sleep(c.due) || !l.pass() {
			return
		}
		if len(c.data) > 0 {
			if l.spec.Rate > 0 {
				if now := time.Now(); free.Before(now.Add(-5 * time.Millisecond)) {
					free = now
				}
				free = free.Add(time.Duration(len(c.data)) * time.Second / time.Duration(l.spec.Rate))
				if !l.sleep(free) {
					return
				}
			}
			mine.writing.Store(true)
			_, err := dst.Write(c.data)
			if err != nil {
				mine.failed.Store(true)
			}
			mine.writing.Store(false)
			if err != nil {
				// The far end takes no more. Its own stream ends first.
				l.done.Add(1)
				go func() {
					defer l.done.Done()
					select {
					case <-other:
					case <-l.over:
					}
					src.SetLinger(0)
					src.Close()
				}()
				return
			}
			l.count(len(c.data))
		}
		switch {
		case c.err == io.EOF:
			dst.CloseWrite()
			return
		case c.err != nil:
			dst.SetLinger(0)
			dst.Close()
			src.Close()
			return
		}
	}
}
