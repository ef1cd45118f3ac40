package regmem

import (
	"io"
	"slices"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// ChunkSize is the length of a [Chunk] in bytes.
const ChunkSize = 256 << 10

// A Chunk is bounce memory of ChunkSize bytes, through which data passes that is not
// read or written where it lies. It has one user from [Domain.GetChunk], or
// [Domain.GetRegisteredChunk], to [Chunk.Release].
//
// A Chunk belongs to no domain. The user exposes only what it has written there, and has
// the device fill a part before it reads that. So what an earlier user has left reaches
// nobody, and nothing is cleared between two users.
//
// A user has a Chunk while data is in it or on the way to it, and no longer. A Chunk that
// the device has filled stays registered after Release. Most likely the same owner gets
// it again as it is, but other users get it before they go without.
type Chunk struct {
	B []byte // B is the memory.

	pool  *chunkPool
	since time.Time    // since is when it was released.
	owner any          // owner is the one whose registration reg is, nil if it is not registered.
	reg   Registration // reg is that of owner's domain.
}

// chunkPool has the chunks of one device. Its lock is held while a registration ends,
// which may take long: only users of the same device wait for that.
type chunkPool struct {
	dev ibv.Device

	mu      sync.Mutex
	chunks  int      // chunks counts all of the device.
	idle    []*Chunk // idle has those without a user. The first one was released first.
	trimmed bool     // trimmed is set while a timer will call trim.
}

// chunkPools has the pools of the devices that have chunks.
var chunkPools = struct {
	mu    sync.Mutex // mu is taken by who holds the lock of a pool, or no lock.
	pools map[ibv.Device]*chunkPool
	idle  time.Duration // idle is how long a chunk stays without a user until it is unmapped.
}{pools: make(map[ibv.Device]*chunkPool), idle: time.Second}

func chunkIdle() time.Duration {
	chunkPools.mu.Lock()
	defer chunkPools.mu.Unlock()
	return chunkPools.idle
}

// poolOf returns the pool of a device, nil if the device has no chunks.
func poolOf(dev ibv.Device) *chunkPool {
	chunkPools.mu.Lock()
	defer chunkPools.mu.Unlock()
	return chunkPools.pools[dev]
}

// lockPool returns the pool of a device, locked. It makes the pool if there is none.
func lockPool(dev ibv.Device) *chunkPool {
	for {
		chunkPools.mu.Lock()
		p := chunkPools.pools[dev]
		if p == nil {
			p = &chunkPool{dev: dev}
			chunkPools.pools[dev] = p
		}
		chunkPools.mu.Unlock()
		p.mu.Lock()
		if poolOf(dev) == p {
			return p
		}
		p.mu.Unlock() // Its last chunk was unmapped meanwhile.
	}
}

// unlock unlocks the pool, and forgets it if the device has no chunks.
func (p *chunkPool) unlock() {
	if p.chunks == 0 {
		chunkPools.mu.Lock()
		if chunkPools.pools[p.dev] == p {
			delete(chunkPools.pools, p.dev)
		}
		chunkPools.mu.Unlock()
	}
	p.mu.Unlock()
}

// GetChunk returns a chunk that is not registered. It returns nil when the chunks of all
// users of the device together would have more than limit bytes, and when the system has
// no memory.
func (d *Domain) GetChunk(limit int) *Chunk { return d.takeChunk(limit, nil) }

// GetRegisteredChunk is GetChunk for a chunk that the device may fill by its LKey. owner
// is any comparable value but nil that tells this user's registrations from those of
// others; [Domain.UnregisterChunks] ends them. Where the device cannot register a chunk
// the error matches syscall.ENOBUFS, and the chunk is nil.
func (d *Domain) GetRegisteredChunk(limit int, owner any) (*Chunk, error) {
	c := d.takeChunk(limit, owner)
	if c == nil || c.owner == owner {
		return c, nil
	}
	var err error
	for c.reg, err = d.RegisterTarget(c.B); err != nil && c.pool.unregisterOldest(); {
		c.reg, err = d.RegisterTarget(c.B) // There may be room for it now.
	}
	if err != nil {
		c.Release()
		return nil, err
	}
	c.owner = owner
	return c, nil
}

// takeChunk returns a chunk that is registered by owner or by nobody.
func (d *Domain) takeChunk(limit int, owner any) *Chunk {
	p := lockPool(d.Dev)
	defer p.unlock()
	full := (p.chunks+1)*ChunkSize > limit
	if c := p.reuse(limit, owner, full); c != nil || full {
		return c
	}
	mem, err := AllocPages(ChunkSize)
	if err != nil {
		return p.reuse(limit, owner, true)
	}
	p.chunks++
	return &Chunk{B: mem, pool: p}
}

// reuse returns the idle chunk that pick chooses, nil if there is none or the limit is
// reached. full says that no chunk can be made.
func (p *chunkPool) reuse(limit int, owner any, full bool) *Chunk {
	for (p.chunks-len(p.idle)+1)*ChunkSize <= limit {
		i := p.pick(owner, full)
		if i < 0 {
			break
		}
		c := p.idle[i]
		p.idle = slices.Delete(p.idle, i, i+1)
		if c.owner == owner || c.Unregister() {
			return c
		}
	}
	return nil
}

// pick returns the index of an idle chunk for a user that wants it registered by owner, -1
// for none. It chooses the one that was released last of those that are registered so, or
// else of those that are not registered. One that others have registered is left to them,
// unless the pool is full.
func (p *chunkPool) pick(owner any, full bool) int {
	best := -1
	for i, c := range slices.Backward(p.idle) {
		switch {
		case c.owner == owner:
			return i
		case c.owner == nil && best < 0:
			best = i
		}
	}
	if best < 0 && full && len(p.idle) > 0 {
		return 0
	}
	return best
}

// LKey returns the local key of a chunk from [Domain.GetRegisteredChunk].
func (c *Chunk) LKey() uint32 { return c.reg.LKey }

// Unregister ends the registration of the chunk, if there is one, and reports whether
// that went well. Otherwise the device may still use the chunk, and it must not be
// released. Only the chunk's user may call it.
func (c *Chunk) Unregister() bool {
	c.owner = nil
	return c.reg.Close() == nil
}

// unregisterOldest ends the registration of the chunk that was released first of those
// that are registered, and reports whether there was one.
func (p *chunkPool) unregisterOldest() bool {
	p.mu.Lock()
	defer p.unlock()
	for i := 0; i < len(p.idle); {
		switch c := p.idle[i]; {
		case c.owner == nil:
			i++
		case c.Unregister():
			return true
		default:
			p.idle = slices.Delete(p.idle, i, i+1)
		}
	}
	return false
}

// UnregisterChunks ends the registrations of owner's idle chunks. An owner calls it
// before it releases the domain.
func (d *Domain) UnregisterChunks(owner any) {
	if p := poolOf(d.Dev); p != nil {
		p.mu.Lock()
		defer p.unlock()
		p.idle = slices.DeleteFunc(p.idle, func(c *Chunk) bool { return c.owner == owner && !c.Unregister() })
	}
}

// Fill reads into the chunk once, and returns what r does. The chunk is released if r
// panics, or makes Fill panic by saying that it has read more than there was room for.
func (c *Chunk) Fill(r io.Reader) (n int, err error) {
	filled := false
	defer func() {
		if !filled {
			c.Release()
		}
	}()
	n, err = r.Read(c.B)
	_ = c.B[:n]
	filled = true
	return n, err
}

// Release gives the chunk back to its pool. A registration of [Domain.GetRegisteredChunk]
// may stay. The user has closed the regions that it has made of the chunk itself. If one of
// them could not be closed, the user must not call Release, because the device may still
// use the memory. The chunk then stays mapped until the process ends.
func (c *Chunk) Release() {
	p := c.pool
	p.mu.Lock()
	defer p.unlock()
	c.since = time.Now()
	p.idle = append(p.idle, c)
	switch {
	case chunkIdle() == 0:
		p.free(len(p.idle))
	case !p.trimmed:
		p.trimmed = true
		time.AfterFunc(chunkIdle(), p.trim)
	}
}

// trim unmaps the chunks that have been idle for long enough, and sets a timer for the
// others.
func (p *chunkPool) trim() {
	for p.trimOne() {
	}
}

// trimOne unmaps the chunk that was released first, if that is long enough ago, and
// reports whether there may be another. The end of a registration may take long, so the
// lock is not held for all of them.
func (p *chunkPool) trimOne() bool {
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

// free unmaps the n chunks that were released first. The caller holds mu.
func (p *chunkPool) free(n int) {
	for _, c := range p.idle[:n] {
		if c.Unregister() {
			FreePages(c.B)
			p.chunks--
		}
	}
	p.idle = slices.Delete(p.idle, 0, n)
}
