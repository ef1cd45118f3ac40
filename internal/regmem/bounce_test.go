package regmem

import (
	"math"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// chunkUser is a user of chunks.
type chunkUser struct {
	dom   *Domain
	limit int // limit is in bytes.
}

// unregistered returns a user of chunks that registers none.
func unregistered(dev ibv.Device, chunks int) *chunkUser {
	return &chunkUser{&Domain{Dev: dev}, chunks*ChunkSize + 1}
}

func (u *chunkUser) get() *Chunk { return u.dom.GetChunk(u.limit) }

func (u *chunkUser) getRegistered() (*Chunk, error) { return u.dom.GetRegisteredChunk(u.limit, u) }

// chunkDevices returns devices when there are no chunks of earlier tests.
func chunkDevices(t *testing.T, n int) (devs []ibv.Device) {
	require.True(t, eventually(func() bool { return InUse().Chunks == 0 }))
	for range n {
		all, err := newSwitch(t, nil).Devices()
		require.NoError(t, err)
		devs = append(devs, all[0])
	}
	return devs
}

// The users of a device together stay within each one's limit.
func TestChunkLimit(t *testing.T) {
	checkLeaks(t)
	devs := chunkDevices(t, 2)
	setChunkIdle(t, time.Hour)
	a, b, other := unregistered(devs[0], 3), unregistered(devs[0], 5), unregistered(devs[1], 1)
	var held []*Chunk
	take := func(u *chunkUser) bool {
		c := u.get()
		if c != nil {
			require.Len(t, c.B, ChunkSize)
			held = append(held, c)
		}
		return c != nil
	}
	for range 3 {
		require.True(t, take(a))
	}
	require.False(t, take(a))
	require.True(t, take(b))
	require.True(t, take(b))
	require.False(t, take(b))
	require.True(t, take(other), "another device's")
	require.False(t, take(other))
	require.Equal(t, 6, InUse().Chunks)
	require.Equal(t, 5, ChunksOf(devs[0]))
	for i, c := range held {
		for j := range c.B {
			c.B[j] = byte(i)
		}
	}
	for i, c := range held {
		require.Equal(t, byte(i), c.B[0])
		require.Equal(t, byte(i), c.B[ChunkSize-1])
	}
	last := held[4]
	for _, c := range held[:5] {
		c.Release()
	}
	require.Equal(t, 6, InUse().Chunks, "kept for the next one")
	require.Same(t, last, a.get(), "the warmest first")
	require.Nil(t, other.get())
	last.Release()
	held[5].Release()
	for _, u := range []*chunkUser{a, other} {
		setChunkIdle(t, 0)
		TrimChunks(u.dom.Dev)
		require.Nil(t, poolOf(u.dom.Dev), "nothing of a device stays")
	}
}

// What nobody uses goes back to the system, what is in use stays.
func TestChunksAreGivenBack(t *testing.T) {
	checkLeaks(t)
	u := unregistered(chunkDevices(t, 1)[0], 100)
	before := InUse().Chunks
	setChunkIdle(t, time.Millisecond)
	var chunks []*Chunk
	for range 10 {
		chunks = append(chunks, u.get())
	}
	for _, c := range chunks[1:] {
		c.Release()
	}
	require.True(t, eventually(func() bool { return InUse().Chunks == before+1 }))
	chunks[0].B[0] = 1
	chunks[0].Release()
	require.True(t, eventually(func() bool { return InUse().Chunks == before }))

	setChunkIdle(t, 0)
	c := u.get()
	require.Equal(t, before+1, InUse().Chunks)
	c.Release()
	require.Equal(t, before, InUse().Chunks, "at once")
}

func TestChunksConcurrent(t *testing.T) {
	checkLeaks(t)
	devs := chunkDevices(t, 2)
	setChunkIdle(t, 50*time.Microsecond)
	var wg sync.WaitGroup
	for g := range 6 {
		u := unregistered(devs[g%2], 2)
		wg.Go(func() {
			for i := range heavy(2000) {
				if c := u.get(); c != nil {
					c.B[i%ChunkSize] = byte(g)
					if InUse().Chunks > 4 {
						panic("more than the two devices may have")
					}
					c.Release()
				}
			}
		})
	}
	wg.Wait()
}

// A chunk stays registered for its owner, and no longer than the owner says.
func TestChunkStaysRegistered(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, nil)
	setChunkIdle(t, time.Hour)
	owner, other := &chunkUser{r.Domain, 2 * ChunkSize}, &chunkUser{r.Domain, 2 * ChunkSize}
	c, err := owner.getRegistered()
	require.NoError(t, err)
	r.fill(c.B, c.LKey())
	c.Release()
	calls := r.sw.Calls(verbstest.RegMR)
	again, err := owner.getRegistered()
	require.NoError(t, err)
	require.Same(t, c, again)
	require.Equal(t, calls, r.sw.Calls(verbstest.RegMR), "registered twice")
	r.fill(c.B, c.LKey())
	c.Release()
	second, err := other.getRegistered()
	require.NoError(t, err)
	require.NotSame(t, c, second, "there may be one more")
	second.Release()
	require.Equal(t, 2, r.regions())
	r.UnregisterChunks(owner)
	require.Equal(t, 1, r.regions())
	require.Nil(t, c.owner)
	r.UnregisterChunks(other)
	require.Zero(t, r.regions())
	setChunkIdle(t, 0)
	TrimChunks(r.Dev)
	require.Zero(t, ChunksOf(r.Dev))
}

// Where no more can be registered a user gets what others keep registered and do not
// use.
func TestChunksUnderMemoryLimit(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, nil)
	setChunkIdle(t, time.Hour)
	user := func() *chunkUser { return &chunkUser{r.Domain, math.MaxInt} }
	owner, other := user(), user()
	kept, err := owner.getRegistered()
	require.NoError(t, err)
	r.sw.LimitMemory(r.sw.RegisteredBytes())
	_, err = other.getRegistered()
	require.ErrorIs(t, err, syscall.ENOBUFS, "it is in use")
	kept.Release()
	got, err := other.getRegistered()
	require.NoError(t, err)
	_, err = owner.getRegistered()
	require.ErrorIs(t, err, syscall.ENOBUFS)
	got.Release()

	r.sw.LimitMemory(0)
	var both []*Chunk
	for range 2 {
		c, err := owner.getRegistered()
		require.NoError(t, err)
		both = append(both, c)
	}
	for _, c := range both {
		c.Release()
	}
	r.sw.LimitMemory(r.sw.RegisteredBytes() - ChunkSize)
	got, err = other.getRegistered()
	require.NoError(t, err, "two idle registrations make room for one")
	setChunkIdle(t, 0)
	got.Release()
	require.Zero(t, ChunksOf(r.Dev))
}

// A chunk that could not be taken from the device stays with it, and counts.
func TestChunkThatStaysWithDevice(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, nil)
	setChunkIdle(t, time.Hour)
	user := func(chunks int) *chunkUser { return &chunkUser{r.Domain, chunks * ChunkSize} }
	owner, other := user(1), user(1)
	kept, err := owner.getRegistered()
	require.NoError(t, err)
	regions := []ibv.MR{kept.reg.mr}
	kept.Release()
	f := r.sw.FailNth(1, nil, verbstest.CloseMR)
	require.Nil(t, other.get(), "the device may use it")
	require.True(t, f.Fired())
	require.Nil(t, owner.get())

	second, err := user(2).getRegistered()
	require.NoError(t, err)
	require.NotSame(t, kept, second)
	regions = append(regions, second.reg.mr)
	second.Release()
	require.Equal(t, 2, ChunksOf(r.Dev))
	f = r.sw.FailNth(1, nil, verbstest.CloseMR)
	setChunkIdle(t, 0)
	p := poolOf(r.Dev)
	p.trim()
	require.True(t, f.Fired())
	require.Equal(t, 2, p.chunks, "neither was unmapped")
	for i, c := range []*Chunk{kept, second} { // now it is done with them
		require.NoError(t, regions[i].Close())
		c.Release()
	}
	require.Zero(t, p.chunks)
}

// tactless is a reader that panics, or says that it has read more than there was room
// for.
type tactless struct{ lies bool }

func (r tactless) Read(p []byte) (int, error) {
	if r.lies {
		return len(p) + 1, nil
	}
	panic("read")
}

func TestChunkFillPanics(t *testing.T) {
	checkLeaks(t)
	u := unregistered(chunkDevices(t, 1)[0], 1)
	for _, lies := range []bool{false, true} {
		c := u.get()
		require.NotNil(t, c)
		require.Panics(t, func() { c.Fill(tactless{lies}) })
		require.Zero(t, ChunksOf(u.dom.Dev), "it is released")
	}
}

// slowMR is a region whose Close waits.
type slowMR struct {
	ibv.MR
	closing, release chan struct{}
}

func (r *slowMR) Close() error {
	close(r.closing)
	<-r.release
	return nil
}

// A device that takes long to end a registration holds up no user of another one.
func TestChunksOfSlowDevice(t *testing.T) {
	checkLeaks(t)
	devs := chunkDevices(t, 2)
	setChunkIdle(t, time.Hour)
	mr := &slowMR{closing: make(chan struct{}), release: make(chan struct{})}
	owner := unregistered(devs[0], 1)
	kept := owner.get()
	kept.owner, kept.reg = owner, Registration{mr: mr}
	kept.Release()
	taken := make(chan *Chunk)
	go func() { taken <- unregistered(devs[0], 1).get() }()
	<-mr.closing
	within(t, "a chunk of the other device", func() {
		c := unregistered(devs[1], 1).get()
		setChunkIdle(t, 0)
		c.Release()
	})
	close(mr.release)
	(<-taken).Release()
	require.Zero(t, InUse().Chunks)
}
