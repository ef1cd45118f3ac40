package rdmanet

import (
	"bytes"
	"math"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// scratchConn is as much of a connection as scratch memory takes.
func scratchConn(dev ibv.Device, chunks int) *Conn {
	return &Conn{&conn{dom: &domain{dev: dev}, set: settings{transferMemory: chunks*chunkBytes + 1}}}
}

// scratchDevices returns devices when there is no scratch memory of earlier tests.
func scratchDevices(t *testing.T, n int) (devs []ibv.Device) {
	require.True(t, eventually(func() bool { return countScratch() == 0 }))
	for range n {
		all, err := newSwitch(t, nil).Devices()
		require.NoError(t, err)
		devs = append(devs, all[0])
	}
	return devs
}

// The connections of a device together stay within each one's bound.
func TestScratchBudget(t *testing.T) {
	checkLeaks(t)
	devs := scratchDevices(t, 2)
	setScratchIdle(t, time.Hour)
	a, b, other := scratchConn(devs[0], 3), scratchConn(devs[0], 5), scratchConn(devs[1], 1)
	var held []*bounceChunk
	take := func(c *Conn) bool {
		s := c.getChunk()
		if s != nil {
			require.Len(t, s.b, chunkBytes)
			held = append(held, s)
		}
		return s != nil
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
	require.Equal(t, 6, countScratch())
	for i, s := range held {
		for j := range s.b {
			s.b[j] = byte(i)
		}
	}
	for i, s := range held {
		require.Equal(t, byte(i), s.b[0])
		require.Equal(t, byte(i), s.b[chunkBytes-1])
	}
	last := held[4]
	for _, s := range held[:5] {
		s.release()
	}
	require.Equal(t, 6, countScratch(), "kept for the next one")
	require.Same(t, last, a.getChunk(), "the warmest first")
	require.Nil(t, other.getChunk())
	last.release()
	held[5].release()
	for _, c := range []*Conn{a, other} {
		p := poolOf(c.dom.dev)
		setScratchIdle(t, 0)
		p.trim()
		require.Nil(t, poolOf(c.dom.dev), "nothing of a device stays")
	}
}

// What nobody uses goes back to the system, what is in use stays.
func TestScratchIsGivenBack(t *testing.T) {
	checkLeaks(t)
	c := scratchConn(scratchDevices(t, 1)[0], 100)
	before := countScratch()
	setScratchIdle(t, time.Millisecond)
	var chunks []*bounceChunk
	for range 10 {
		chunks = append(chunks, c.getChunk())
	}
	for _, s := range chunks[1:] {
		s.release()
	}
	require.True(t, eventually(func() bool { return countScratch() == before+1 }))
	chunks[0].b[0] = 1
	chunks[0].release()
	require.True(t, eventually(func() bool { return countScratch() == before }))

	setScratchIdle(t, 0)
	s := c.getChunk()
	require.Equal(t, before+1, countScratch())
	s.release()
	require.Equal(t, before, countScratch(), "at once")
}

func TestScratchConcurrent(t *testing.T) {
	checkLeaks(t)
	devs := scratchDevices(t, 2)
	setScratchIdle(t, 50*time.Microsecond)
	var wg sync.WaitGroup
	for g := range 6 {
		c := scratchConn(devs[g%2], 2)
		wg.Go(func() {
			for i := range heavy(2000) {
				if s := c.getChunk(); s != nil {
					s.b[i%chunkBytes] = byte(g)
					if countScratch() > 4 {
						panic("more than the two devices may have")
					}
					s.release()
				}
			}
		})
	}
	wg.Wait()
}

// A connection that has received much and is not idle otherwise holds no memory back from
// others: where there is a single chunk they take turns.
func TestScratchIsLeftToOthers(t *testing.T) {
	checkLeaks(t)
	for _, m := range transferPeers {
		t.Run(m.name, func(t *testing.T) {
			sw := newSwitch(t, nil)
			setScratchIdle(t, time.Hour)
			cfg := Config{Provider: sw, TransferSize: minTransfer, TransferMemory: chunkBytes, MaxReceiveSize: 1024, NoRDMARead: !m.reads}
			const size = 2 * chunkBytes
			// move returns how many regions and posts moving that much takes.
			move := func(from, to *Conn) (regions, posts int64) {
				regions, posts = sw.Calls(verbstest.RegMR), sw.Calls(verbstest.PostSend)
				data := pattern(1, size)
				wrote := make(chan error, 1)
				go func() {
					_, err := from.Write(data)
					wrote <- err
				}()
				got := make([]byte, size)
				for p := got; len(p) > 0; {
					n, err := to.Read(p[:min(1000, len(p))])
					require.NoError(t, err)
					p = p[n:]
				}
				require.NoError(t, <-wrote)
				require.True(t, bytes.Equal(data, got))
				return sw.Calls(verbstest.RegMR) - regions, sw.Calls(verbstest.PostSend) - posts
			}
			a, b := pipeOn(t, cfg)
			c, d := pipeOn(t, cfg)
			defer func() {
				setScratchIdle(t, 0)
				if p := poolOf(a.dom.dev); p != nil {
					p.trim()
				}
			}()
			defer closeBoth(t, a, b)
			defer closeBoth(t, c, d)
			_, posts := move(a, b)
			// Receive memory that grows or shrinks takes a region now and then, too, so the
			// least of several counts.
			warm, cold := int64(math.MaxInt64), int64(math.MaxInt64)
			for range 4 {
				n, _ := move(a, b)
				warm = min(warm, n)
				move(c, d)
				n, _ = move(a, b)
				cold = min(cold, n)
			}
			if m.reads {
				require.Less(t, warm, cold, "what it gets again is registered as it was")
			}
			for range 2 {
				for _, ends := range [][2]*Conn{{c, d}, {d, c}, {b, a}, {a, b}} {
					_, others := move(ends[0], ends[1])
					require.LessOrEqual(t, others, 8*posts)
				}
			}
			require.Equal(t, 1, chunksOf(a.dom.dev))
		})
	}
}

// Where no more can be registered a connection gets what others keep registered and do
// not use.
func TestScratchUnderMemoryLimit(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, nil)
	setScratchIdle(t, time.Hour)
	end := func() *Conn {
		return &Conn{&conn{dom: r.dom, qp: r.qp, set: settings{transferMemory: defaultTransfer}}}
	}
	owner, other := end(), end()
	kept, err := owner.getReceiveChunk()
	require.NoError(t, err)
	r.sw.LimitMemory(r.sw.RegisteredBytes())
	_, err = other.getReceiveChunk()
	require.ErrorIs(t, err, syscall.ENOBUFS, "it is in use")
	kept.release()
	got, err := other.getReceiveChunk()
	require.NoError(t, err)
	_, err = owner.getReceiveChunk()
	require.ErrorIs(t, err, syscall.ENOBUFS)
	got.release()

	r.sw.LimitMemory(0)
	var both []*bounceChunk
	for range 2 {
		s, err := owner.getReceiveChunk()
		require.NoError(t, err)
		both = append(both, s)
	}
	for _, s := range both {
		s.release()
	}
	r.sw.LimitMemory(r.sw.RegisteredBytes() - chunkBytes)
	got, err = other.getReceiveChunk()
	require.NoError(t, err, "two idle registrations make room for one")
	setScratchIdle(t, 0)
	got.release()
	require.Zero(t, chunksOf(r.dom.dev))
}

// A chunk that could not be taken from the device stays with it, and counts.
func TestScratchThatStaysRegistered(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, nil)
	setScratchIdle(t, time.Hour)
	end := func(chunks int) *Conn {
		return &Conn{&conn{dom: r.dom, qp: r.qp, set: settings{transferMemory: chunks * chunkBytes}}}
	}
	owner, other := end(1), end(1)
	kept, err := owner.getReceiveChunk()
	require.NoError(t, err)
	regions := []ibv.MR{kept.sink.mr}
	kept.release()
	f := r.sw.FailNth(1, nil, verbstest.CloseMR)
	require.Nil(t, other.getChunk(), "the device may use it")
	require.True(t, f.Fired())
	require.Nil(t, owner.getChunk())

	second, err := end(2).getReceiveChunk()
	require.NoError(t, err)
	require.NotSame(t, kept, second)
	regions = append(regions, second.sink.mr)
	second.release()
	require.Equal(t, 2, chunksOf(r.dom.dev))
	f = r.sw.FailNth(1, nil, verbstest.CloseMR)
	setScratchIdle(t, 0)
	poolOf(r.dom.dev).trim()
	require.True(t, f.Fired())
	p := poolOf(r.dom.dev)
	require.Equal(t, 2, p.chunks, "neither was unmapped")
	for i, s := range []*bounceChunk{kept, second} { // now it is done with them
		require.NoError(t, regions[i].Close())
		s.release()
	}
	require.Zero(t, p.chunks)
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

// A device that takes long to end a registration holds up no connection of another one.
func TestScratchOfSlowDevice(t *testing.T) {
	checkLeaks(t)
	devs := scratchDevices(t, 2)
	setScratchIdle(t, time.Hour)
	mr := &slowMR{closing: make(chan struct{}), release: make(chan struct{})}
	owner := scratchConn(devs[0], 1)
	kept := owner.getChunk()
	kept.by, kept.sink = owner.conn, sink{mr: mr}
	kept.release()
	taken := make(chan *bounceChunk)
	go func() { taken <- scratchConn(devs[0], 1).getChunk() }()
	<-mr.closing
	var s *bounceChunk
	within(t, "a chunk of the other device", func() {
		s = scratchConn(devs[1], 1).getChunk()
		setScratchIdle(t, 0)
		s.release()
	})
	close(mr.release)
	(<-taken).release()
	require.Zero(t, countScratch())
}
