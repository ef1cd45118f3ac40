package rdmanet

import (
	"io"
	"slices"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// Scratch memory is where large writes from and to ordinary memory pass through.
// It belongs to no domain. A connection registers the part that it has written, for the
// time of the transfer, by expose, and a chunk that it wants filled by land. So what an
// earlier user has left in a chunk reaches nobody, and nothing need be cleared in between.
//
// A connection has a chunk for as long as there is data in it, or on the way to it, and no
// longer. One that was filled stays registered behind that, and the same connection most
// likely gets it again as it is, but others get it before they go without.

const scratchBytes = 256 << 10

// scratch is a chunk of scratchBytes bytes.
type scratch struct {
	b     []byte
	pool  *scratchPool
	since time.Time // idle
	by    *conn     // the connection that has registered it, nil if none has
	sink  sink      // if one has, what that has registered
}

// scratchPool is the scratch memory of one device.
type scratchPool struct {
	dev     ibv.Device
	chunks  int        // that there are
	idle    []*scratch // of these, the longest idle first
	trimmed bool       // a timer will see to it
}

var scratches struct {
	mu    sync.Mutex
	pools map[ibv.Device]*scratchPool // of those that have chunks
}

// scratchIdle is how long a chunk stays unused until it goes back to the system.
var scratchIdle = time.Second

// getScratch returns a chunk for one user, to be released, or nil when
// connections of the device have as much as this one's Config.TransferMemory or
// the system gives none.
func (c *conn) getScratch() *scratch { return c.takeScratch(nil) }

// getSink is getScratch for a chunk that is registered for the device to fill.
func (c *conn) getSink() (*scratch, error) {
	s := c.takeScratch(c)
	if s == nil || s.by == c {
		return s, nil
	}
	var err error
	if s.sink, err = c.land(s.b); err != nil && s.pool.unregisterIdle() {
		s.sink, err = c.land(s.b) // there is room for it now
	}
	if err != nil {
		s.release()
		return nil, err
	}
	s.by = c
	return s, nil
}

// takeScratch returns a chunk that is registered by the given connection or by none.
func (c *conn) takeScratch(by *conn) *scratch {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	p := scratches.pools[c.dom.dev]
	if p == nil {
		p = &scratchPool{dev: c.dom.dev}
	}
	if s := p.reuse(c, by, (p.chunks+1)*scratchBytes > c.set.transferMemory); s != nil {
		return s
	}
	if (p.chunks+1)*scratchBytes > c.set.transferMemory {
		return nil
	}
	mem, err := allocPages(scratchBytes)
	if err != nil {
		return p.reuse(c, by, true)
	}
	if p.chunks++; p.chunks == 1 {
		if scratches.pools == nil {
			scratches.pools = make(map[ibv.Device]*scratchPool)
		}
		scratches.pools[p.dev] = p
	}
	return &scratch{b: mem, pool: p}
}

// reuse returns an idle chunk that pick finds, nil if c may have none.
func (p *scratchPool) reuse(c, by *conn, full bool) *scratch {
	for (p.chunks-len(p.idle)+1)*scratchBytes <= c.set.transferMemory {
		i := p.pick(by, full)
		if i < 0 {
			break
		}
		s := p.idle[i]
		p.idle = slices.Delete(p.idle, i, i+1)
		if s.by == by || s.unregister() {
			return s
		}
	}
	return nil
}

// pick returns which of the idle chunks one gets that wants it registered by the given
// connection, -1 for none: the warmest that is, or that is not registered at all. What
// others have registered is theirs as long as there may be more chunks.
func (p *scratchPool) pick(by *conn, full bool) int {
	best := -1
	for i, s := range slices.Backward(p.idle) {
		switch {
		case s.by == by:
			return i
		case s.by == nil && best < 0:
			best = i
		}
	}
	if best < 0 && full && len(p.idle) > 0 {
		return 0
	}
	return best
}

// unregister ends the registration and reports whether that went well: otherwise the
// device may still use the chunk, and it must be kept.
func (s *scratch) unregister() bool {
	s.by = nil
	return s.sink.close() == nil
}

// unregisterIdle ends the registrations of all idle chunks and reports whether there were any.
func (p *scratchPool) unregisterIdle() (found bool) {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	p.idle = slices.DeleteFunc(p.idle, func(s *scratch) bool {
		if s.by == nil {
			return false
		}
		gone := s.unregister()
		found = found || gone
		return !gone
	})
	return found
}

// releaseSinks ends what the connection has registered of the idle chunks.
func (c *conn) releaseSinks() {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	if p := scratches.pools[c.dom.dev]; p != nil {
		p.idle = slices.DeleteFunc(p.idle, func(s *scratch) bool { return s.by == c && !s.unregister() })
	}
}

// fill reads into the chunk, which is given back if the program's reader panics or
// says that it has read more than there was room for.
func (s *scratch) fill(r io.Reader) (n int, err error) {
	filled := false
	defer func() {
		if !filled {
			s.release()
		}
	}()
	n, err = r.Read(s.b)
	_ = s.b[:n]
	filled = true
	return n, err
}

// release gives the chunk back. But for its sink it must not be registered any more: if
// a region of it could not be closed it must be kept.
func (s *scratch) release() {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	p := s.pool
	s.since = time.Now()
	p.idle = append(p.idle, s)
	switch {
	case scratchIdle == 0:
		p.free(len(p.idle))
	case !p.trimmed:
		p.trimmed = true
		time.AfterFunc(scratchIdle, p.trim)
	}
}

// trim frees what has been idle for scratchIdle and comes back for the rest.
func (p *scratchPool) trim() {
	for p.trimOne() {
	}
}

// trimOne frees the chunk that has been idle for longest, if that is scratchIdle, and
// reports whether there may be another. The lock is not held for all of them at once, as
// to end a registration takes its time.
func (p *scratchPool) trimOne() bool {
	scratches.mu.Lock()
	defer scratches.mu.Unlock()
	p.trimmed = len(p.idle) > 0
	if !p.trimmed {
		return false
	}
	left := scratchIdle - time.Since(p.idle[0].since)
	if left > 0 {
		time.AfterFunc(left, p.trim)
		return false
	}
	p.free(1)
	return true
}

// free unmaps the n chunks that have been idle for longest.
func (p *scratchPool) free(n int) {
	for _, s := range p.idle[:n] {
		if s.unregister() {
			freePages(s.b)
			p.chunks--
		}
	}
	p.idle = slices.Delete(p.idle, 0, n)
	if p.chunks == 0 {
		delete(scratches.pools, p.dev)
	}
}
