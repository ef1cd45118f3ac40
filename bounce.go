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

const chunkBytes = 256 << 10

// bounceChunk is a chunk of chunkBytes bytes.
type bounceChunk struct {
	b     []byte
	pool  *bouncePool
	since time.Time // idle
	by    *conn     // the connection that has registered it, nil if none has
	sink  sink      // if one has, what that has registered
}

// bouncePool is the scratch memory of one device. Its lock is held while a registration
// ends, which may take its time: only connections of the same device wait for that.
type bouncePool struct {
	dev ibv.Device

	mu      sync.Mutex
	chunks  int            // that there are
	idle    []*bounceChunk // of these, the longest idle first
	trimmed bool           // a timer will see to it
}

var bouncePools = struct {
	mu    sync.Mutex // taken when that of a pool is held, or alone
	pools map[ibv.Device]*bouncePool
	idle  time.Duration // how long a chunk stays unused until it goes back to the system
}{pools: make(map[ibv.Device]*bouncePool), idle: time.Second}

func chunkIdle() time.Duration {
	bouncePools.mu.Lock()
	defer bouncePools.mu.Unlock()
	return bouncePools.idle
}

// poolOf returns the pool of a device, nil if the device has no chunks.
func poolOf(dev ibv.Device) *bouncePool {
	bouncePools.mu.Lock()
	defer bouncePools.mu.Unlock()
	return bouncePools.pools[dev]
}

// lockPool returns the pool of a device, locked. It is made if there is none.
func lockPool(dev ibv.Device) *bouncePool {
	for {
		bouncePools.mu.Lock()
		p := bouncePools.pools[dev]
		if p == nil {
			p = &bouncePool{dev: dev}
			bouncePools.pools[dev] = p
		}
		bouncePools.mu.Unlock()
		p.mu.Lock()
		if poolOf(dev) == p {
			return p
		}
		p.mu.Unlock() // its last chunk went meanwhile
	}
}

// unlock lets go of the pool, which is forgotten while it has no chunks.
func (p *bouncePool) unlock() {
	if p.chunks == 0 {
		bouncePools.mu.Lock()
		if bouncePools.pools[p.dev] == p {
			delete(bouncePools.pools, p.dev)
		}
		bouncePools.mu.Unlock()
	}
	p.mu.Unlock()
}

// getChunk returns a chunk for one user, to be released, or nil when
// connections of the device have as much as this one's Config.TransferMemory or
// the system gives none.
func (c *conn) getChunk() *bounceChunk { return c.takeChunk(nil) }

// getReceiveChunk is getChunk for a chunk that is registered for the device to fill.
func (c *conn) getReceiveChunk() (*bounceChunk, error) {
	s := c.takeChunk(c)
	if s == nil || s.by == c {
		return s, nil
	}
	var err error
	for s.sink, err = c.land(s.b); err != nil && s.pool.unregisterOldest(); {
		s.sink, err = c.land(s.b) // there may be room for it now
	}
	if err != nil {
		s.release()
		return nil, err
	}
	s.by = c
	return s, nil
}

// takeChunk returns a chunk that is registered by the given connection or by none.
func (c *conn) takeChunk(by *conn) *bounceChunk {
	p := lockPool(c.dom.dev)
	defer p.unlock()
	full := (p.chunks+1)*chunkBytes > c.set.transferMemory
	if s := p.reuse(c, by, full); s != nil || full {
		return s
	}
	mem, err := allocPages(chunkBytes)
	if err != nil {
		return p.reuse(c, by, true)
	}
	p.chunks++
	return &bounceChunk{b: mem, pool: p}
}

// reuse returns an idle chunk that pick finds, nil if c may have none.
func (p *bouncePool) reuse(c, by *conn, full bool) *bounceChunk {
	for (p.chunks-len(p.idle)+1)*chunkBytes <= c.set.transferMemory {
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
func (p *bouncePool) pick(by *conn, full bool) int {
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
func (s *bounceChunk) unregister() bool {
	s.by = nil
	return s.sink.close() == nil
}

// unregisterOldest ends the registration of the chunk that has been idle for longest, of
// those that have one, and reports whether there was any.
func (p *bouncePool) unregisterOldest() bool {
	p.mu.Lock()
	defer p.unlock()
	for i := 0; i < len(p.idle); {
		switch s := p.idle[i]; {
		case s.by == nil:
			i++
		case s.unregister():
			return true
		default:
			p.idle = slices.Delete(p.idle, i, i+1)
		}
	}
	return false
}

// releaseChunks ends what the connection has registered of the idle chunks.
func (c *conn) releaseChunks() {
	if p := poolOf(c.dom.dev); p != nil {
		p.mu.Lock()
		defer p.unlock()
		p.idle = slices.DeleteFunc(p.idle, func(s *bounceChunk) bool { return s.by == c && !s.unregister() })
	}
}

// fill reads into the chunk, which is given back if the program's reader panics or
// says that it has read more than there was room for.
func (s *bounceChunk) fill(r io.Reader) (n int, err error) {
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
func (s *bounceChunk) release() {
	p := s.pool
	p.mu.Lock()
	defer p.unlock()
	s.since = time.Now()
	p.idle = append(p.idle, s)
	switch {
	case chunkIdle() == 0:
		p.free(len(p.idle))
	case !p.trimmed:
		p.trimmed = true
		time.AfterFunc(chunkIdle(), p.trim)
	}
}

// trim frees what has been idle for long enough and comes back for the rest.
func (p *bouncePool) trim() {
	for p.trimOne() {
	}
}

// trimOne frees the chunk that has been idle for longest, if that is long enough, and
// reports whether there may be another. The lock is not held for all of them at once, as
// to end a registration takes its time.
func (p *bouncePool) trimOne() bool {
	p.mu.Lock()
	defer p.unlock()
	p.trimmed = len(p.idle) > 0
	if !p.trimmed {
		return false
	}
	left := chunkIdle() - time.Since(p.idle[0].since)
	if left > 0 {
		time.AfterFunc(left, p.trim)
		return false
	}
	p.free(1)
	return true
}

// free unmaps the n chunks that have been idle for longest.
func (p *bouncePool) free(n int) {
	for _, s := range p.idle[:n] {
		if s.unregister() {
			freePages(s.b)
			p.chunks--
		}
	}
	p.idle = slices.Delete(p.idle, 0, n)
}
