package regmem

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// What follows is for tests and measurements.

// AdviseHuge asks for huge pages first where memory is to have small ones, on Linux, as a
// system does whose transparent_hugepage is "always". It is set before memory is mapped.
var AdviseHuge = false

// Counts says how much of the package the process has in use.
type Counts struct {
	Domains int // Domains counts shared and private domains.
	Chunks  int // Chunks counts the chunks of all devices, idle ones too.
	Spans   int // Spans counts the mappings that Memory is made of.
}

// InUse returns the counts of the moment.
func InUse() Counts {
	domains.mu.Lock()
	c := Counts{Domains: domains.live, Spans: len(memory.list())}
	domains.mu.Unlock()
	chunkPools.mu.Lock()
	pools := slices.Collect(maps.Values(chunkPools.pools))
	chunkPools.mu.Unlock()
	for _, p := range pools {
		p.mu.Lock()
		c.Chunks += p.chunks
		p.mu.Unlock()
	}
	return c
}

// SetDomainIdle sets how long a lasting domain outlives its last user, and returns how
// long that was before.
func SetDomainIdle(d time.Duration) (old time.Duration) {
	domains.mu.Lock()
	defer domains.mu.Unlock()
	old, domains.idle = domains.idle, d
	return old
}

// SetChunkIdle sets how long a chunk stays without a user until it is unmapped, and
// returns how long that was before. With 0 a chunk is unmapped when it is released.
func SetChunkIdle(d time.Duration) (old time.Duration) {
	chunkPools.mu.Lock()
	defer chunkPools.mu.Unlock()
	old, chunkPools.idle = chunkPools.idle, d
	return old
}

// SetTrimInterval sets how often a pool looks for memory to give back, and returns how
// often that was before.
func SetTrimInterval(d time.Duration) (old time.Duration) {
	return time.Duration(trimEvery.Swap(int64(d)))
}

// ChunksOf returns how many chunks a device has, idle ones too.
func ChunksOf(dev ibv.Device) int {
	p := poolOf(dev)
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.chunks
}

// TrimChunks unmaps the chunks of a device that have been idle for long enough.
func TrimChunks(dev ibv.Device) {
	if p := poolOf(dev); p != nil {
		p.trim()
	}
}

// CheckFree returns an error unless all buffers of the domain are free.
func (d *Domain) CheckFree() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pools {
		p.mu.Lock()
		total := 0
		for _, s := range p.slabs {
			total += len(s.buffers)
		}
		free := len(p.free)
		p.mu.Unlock()
		if free != total {
			return fmt.Errorf("pool of %d bytes: %d of %d buffers are free", p.Size, free, total)
		}
	}
	return nil
}

// EachSlab calls f with the memory of each slab of the domain, which stays mapped until f
// returns. f must not call this package.
func (d *Domain) EachSlab(f func(mem []byte)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pools {
		p.EachSlab(f)
	}
}

// EachSlab is [Domain.EachSlab] for the slabs of one pool.
func (p *Pool) EachSlab(f func(mem []byte)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.slabs {
		f(s.mem)
	}
}

// Uses returns how many calls and transfers borrow the memory.
func (m *Memory) Uses() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.uses
}
