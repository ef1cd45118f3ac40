package rdmanet

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// keyDevices are the kinds of devices, by what a key of theirs opens to whom.
var keyDevices = []struct {
	name       string
	apart, lax bool
}{
	{"keys of a queue pair", false, false},
	{"keys of a domain", true, false},
	{"keys of a domain, all readable", true, true},
}

func keyDevice(t testing.TB, i int) *modest {
	m := newModest(t, 1<<20, 1<<14, false)
	m.apart, m.lax = keyDevices[i].apart, keyDevices[i].lax
	return m
}

func eachKeyDevice(t *testing.T, f func(t *testing.T, m *modest)) {
	for i, d := range keyDevices {
		t.Run(d.name, func(t *testing.T) { f(t, keyDevice(t, i)) })
	}
}

// What is exposed is open to the connection's own peer, within its bounds and
// rights, and only until it is closed. Whatever else is tried ends the connection
// of whoever tries it, and no other.
func TestExpose(t *testing.T) {
	const size, piece = 10000, 100
	for _, tt := range []struct {
		name      string
		op        ibv.Opcode
		at        int64
		neighbour bool // tries it
		closed    bool
	}{
		{"Write by a neighbour", ibv.OpWrite, 0, true, false},
		{"Read by a neighbour", ibv.OpRead, 0, true, false},
		{"Write one byte before", ibv.OpWrite, -1, false, false},
		{"Read one byte before", ibv.OpRead, -1, false, false},
		{"Write to one byte behind", ibv.OpWrite, size - piece + 1, false, false},
		{"Read to one byte behind", ibv.OpRead, size - piece + 1, false, false},
		{"Write after Close", ibv.OpWrite, 0, false, true},
		{"Read after Close", ibv.OpRead, 0, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachKeyDevice(t, func(t *testing.T, m *modest) {
				s := newSceneOn(t, m)
				c, p := s.conns(false, rdmanetPrivate)
				neighbour, q := s.conns(false, rdmanetPrivate)
				for _, buf := range []*Buffer{nil, alloc(t, size)} {
					mem := bytes.Repeat([]byte{1}, size+2*piece)[piece:][:size]
					if buf != nil {
						mem = buf.Bytes()
						copy(mem, bytes.Repeat([]byte{1}, size))
					}
					mr, err := c.expose(mem, ibv.AccessLocalWrite|ibv.AccessRemoteWrite|ibv.AccessRemoteRead)
					require.NoError(t, err)
					require.Equal(t, make([]byte, size), mem, "what was there is nobody's business")
					for i, at := range []uint64{0, size / 2, size - piece} {
						want := pattern(uint64(i), piece)
						require.Equal(t, ibv.WCSuccess, p.rdma(ibv.OpWrite, want, mr.Addr()+at, mr.RKey()))
						got := make([]byte, piece)
						require.Equal(t, ibv.WCSuccess, p.rdma(ibv.OpRead, got, mr.Addr()+at, mr.RKey()))
						require.Equal(t, want, got)
						require.Equal(t, want, mem[at:][:piece])
					}
					if buf == nil {
						require.NoError(t, mr.Close())
						continue
					}
					before := bytes.Clone(mem)
					culprit, victim := p, c
					if tt.neighbour {
						culprit, victim = q, neighbour
					}
					if tt.closed {
						require.NoError(t, mr.Close())
					}
					b := pattern(9, piece)
					status := culprit.rdma(tt.op, b, mr.Addr()+uint64(tt.at), mr.RKey())
					if overIWARP(t) {
						if tt.op == ibv.OpRead {
							require.NotEqual(t, ibv.WCSuccess, status)
						}
						culprit.ended() // on this side a Write is over before the other one sees it
					} else {
						require.Equal(t, ibv.WCRemAccessErr, status)
						victim.id.Disconnect() // nobody else does, with a peer that only waits
					}
					require.Equal(t, pattern(9, piece), b, "nothing was read")
					require.Equal(t, before, mem, "nothing was written")
					if tt.neighbour {
						got := make([]byte, piece)
						require.Equal(t, ibv.WCSuccess, p.rdma(ibv.OpRead, got, mr.Addr(), mr.RKey()))
						require.Equal(t, mem[:piece], got)
					}
					if !tt.closed {
						require.NoError(t, mr.Close())
					}
				}
			})
		})
	}
}

// Each right is the only one that the peer has.
func TestExposeRights(t *testing.T) {
	for _, op := range []ibv.Opcode{ibv.OpWrite, ibv.OpRead} {
		t.Run(op.String(), func(t *testing.T) {
			s := newScene(t)
			c, p := s.conns(false, rdmanetPrivate)
			if op == ibv.OpRead && c.dom.unchecked {
				return // as the device says of itself
			}
			access := ibv.AccessRemoteRead
			if op == ibv.OpRead {
				access = ibv.AccessLocalWrite | ibv.AccessRemoteWrite
			}
			mem := pattern(1, 100)
			mr, err := c.expose(mem, access)
			require.NoError(t, err)
			before := bytes.Clone(mem)
			b := pattern(2, 100)
			status := p.rdma(op, b, mr.Addr(), mr.RKey())
			if overIWARP(t) {
				p.ended()
			} else {
				require.Equal(t, ibv.WCRemAccessErr, status)
			}
			require.Equal(t, pattern(2, 100), b)
			require.Equal(t, before, mem)
			require.NoError(t, mr.Close())
		})
	}
}

// A rig is two queue pairs, and as much of a connection around one of them as
// its memory takes.
type rig struct {
	*Conn
	t     testing.TB
	sw    *verbstest.Switch
	pair  *verbstest.Pair
	src   *verbstest.Mem // of the peer's, to read from
	other *domain
}

func newRig(t testing.TB, p ibv.Provider) *rig {
	t.Helper()
	sw := newSwitch(t, p)
	pair := verbstest.NewPair(t, verbstest.Env{Passive: sw, Addr: netip.MustParseAddr(host4)}, verbstest.PairConfig{})
	e := pair.Active
	attr := e.Dev.Attr()
	newDomain := func() *domain {
		return &domain{dev: e.Dev, pd: e.PD, private: !attr.Caps.Has(ibv.CapQPRegion), unchecked: attr.Quirks.ReadsUnchecked,
			pools: make(map[int]*pool)}
	}
	r := &rig{t: t, sw: sw, pair: pair, Conn: &Conn{&conn{dom: newDomain(), qp: e.QP}}, other: newDomain()}
	r.src = pair.Passive.Register(t, pattern(7, 1<<20), ibv.AccessRemoteRead)
	t.Cleanup(func() { require.NoError(t, r.dom.forgetBuffers()) }) // as free does
	return r
}

// fill reads from the peer into b.
func (r *rig) fill(b []byte, lkey uint32) {
	r.t.Helper()
	e := r.pair.Active
	e.Send(r.t, ibv.SendWR{ID: 1, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: b, LKey: lkey}},
		RemoteAddr: r.src.Addr(0), RKey: r.src.MR.RKey()})
	require.Equal(r.t, ibv.WCSuccess, r.next().Status)
	require.True(r.t, bytes.Equal(r.src.Buf[:len(b)], b), "what was read is not what is there")
}

func (r *rig) next() ibv.WC {
	r.t.Helper()
	var wcs [1]ibv.WC
	require.True(r.t, eventually(func() bool {
		n, err := r.pair.Active.SendCQ.Poll(wcs[:])
		require.NoError(r.t, err)
		return n > 0
	}), "no completion came")
	return wcs[0]
}

// regions is how many there are besides those of the rig.
func (r *rig) regions() int { return r.sw.Live()["MR"] - 1 }

// What the device is to fill is registered for as long as that takes; memory of
// Alloc's for as long as it lives, unless peers could read it all the while.
func TestLand(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, m *modest) {
		checkLeaks(t)
		r := newRig(t, m)
		const size = 300 << 10
		a := alloc(t, size)
		scratch := (&conn{dom: r.dom, set: settings{transferMemory: defaultTransfer}}).getChunk()
		defer scratch.release()
		for _, mem := range []struct {
			name  string
			b     []byte
			keeps bool
		}{
			{"heap", make([]byte, size), false},
			{"mapped", mapped(t, size).Bytes(), false},
			{"part of what is mapped", mapped(t, size).Bytes()[1:1000], false},
			{"scratch", scratch.b[:100], false},
			{"alloc", a.Bytes(), true},
			{"part of alloc", a.Bytes()[1000:2001], true},
			{"small alloc", alloc(t, 10).Bytes(), true},
		} {
			keeps, before := mem.keeps && !r.dom.unchecked, r.regions()
			for round := range 3 {
				for i := range mem.b {
					mem.b[i] = 0xAA
				}
				calls := r.sw.Calls(verbstest.RegMR)
				s, err := r.land(mem.b)
				require.NoError(t, err)
				if r.dom.unchecked {
					require.Equal(t, make([]byte, len(mem.b)), mem.b, mem.name)
				} else {
					require.Equal(t, byte(0xAA), mem.b[0], mem.name)
				}
				r.fill(mem.b, s.lkey)
				require.NoError(t, s.close())
				require.NoError(t, s.close(), "a second time there is nothing to close")
				switch {
				case !keeps:
					require.Equal(t, before, r.regions(), mem.name)
				case round > 0:
					require.Equal(t, calls, r.sw.Calls(verbstest.RegMR), "%s: registered twice", mem.name)
				}
			}
		}
		if r.dom.unchecked {
			require.Zero(t, r.regions())
		} else {
			require.Equal(t, 2, r.regions())
		}
	})
}

// source makes memory ready to be sent from, without a change.
func TestSource(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, m *modest) {
		checkLeaks(t)
		r := newRig(t, m)
		in := r.pair.Passive.Register(t, make([]byte, 1000), ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
		for i, b := range [][]byte{make([]byte, 1000), mapped(t, 1000).Bytes(), alloc(t, 5000).Bytes()[100:1100]} {
			copy(b, pattern(uint64(i), 1000))
			s, err := r.source(b)
			require.NoError(t, err)
			require.Equal(t, pattern(uint64(i), 1000), b)
			r.pair.Active.Send(t, ibv.SendWR{Op: ibv.OpWrite, SGL: []ibv.SGE{{Buf: b, LKey: s.lkey}}, RemoteAddr: in.Addr(0), RKey: in.MR.RKey()})
			got := make([]byte, 8)
			sink, err := r.land(got)
			require.NoError(t, err)
			r.fill(got, sink.lkey) // behind the Write
			require.NoError(t, sink.close())
			require.Equal(t, pattern(uint64(i), 1000), in.Buf)
			require.NoError(t, s.close())
		}
	})
}

// A Buffer takes its registrations along, a domain those that it has, and neither
// pulls memory from under a transfer.
func TestBufferAndDomainEnd(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, keyDevice(t, 0))
	if r.dom.unchecked {
		return // nothing is kept there
	}
	second := &Conn{&conn{dom: r.other, qp: r.qp}}
	a, b := alloc(t, 1000), alloc(t, 1000)
	for _, c := range []*Conn{r.Conn, second} {
		for _, buf := range []*Buffer{a, b} {
			s, err := c.land(buf.Bytes())
			require.NoError(t, err)
			require.NoError(t, s.close())
		}
	}
	require.Equal(t, 4, r.regions())
	require.NoError(t, r.other.forgetBuffers())
	require.Equal(t, 2, r.regions())
	require.Len(t, a.mrs, 1)
	b.Free()
	require.Equal(t, 1, r.regions())
	require.Len(t, r.dom.cached, 1)

	s, err := r.land(a.Bytes()[:500])
	require.NoError(t, err)
	mem := a.Bytes()[:500]
	a.Free()
	require.Equal(t, 1, r.regions(), "it is in use")
	r.fill(mem, s.lkey)
	require.NoError(t, s.close())
	require.Zero(t, r.regions())
	require.Empty(t, r.dom.cached)

	// The same for what is exposed.
	a = alloc(t, 1000)
	mr, err := r.expose(a.Bytes(), ibv.AccessRemoteRead)
	require.NoError(t, err)
	mem = a.Bytes()
	a.Free()
	require.NotNil(t, findRegion(mem))
	require.NoError(t, mr.Close())
	require.Nil(t, findRegion(mem))
	require.Error(t, mr.Close(), "and it is not given up twice")
	require.Zero(t, r.regions())
}

// Without memory to register there is an error that tells what to do, and nothing
// is held. Of a Buffer the part that is needed is tried too.
func TestNoMemoryToLand(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, m *modest) {
		checkLeaks(t)
		r := newRig(t, m)
		const limit = 64 << 10
		r.sw.LimitMemory(r.sw.RegisteredBytes() + limit)
		own, big := mapped(t, 1<<20), alloc(t, 1<<20)
		for _, b := range [][]byte{make([]byte, 1<<20), own.Bytes(), big.Bytes()} {
			_, lands := r.land(b)
			_, sources := r.source(b)
			_, exposes := r.expose(b, ibv.AccessRemoteRead)
			for _, err := range []error{lands, sources, exposes} {
				require.ErrorIs(t, err, syscall.ENOBUFS)
				require.ErrorIs(t, err, syscall.ENOMEM)
				require.ErrorContains(t, err, "ulimit -l")
				require.ErrorContains(t, err, "Config.TransferMemory")
				require.ErrorContains(t, err, deviceName(t))
			}
			require.Zero(t, r.regions())
			s, err := r.land(b[100:][:limit])
			require.NoError(t, err)
			r.fill(b[100:][:limit], s.lkey)
			require.NoError(t, s.close())
			mr, err := r.expose(b[:limit], ibv.AccessRemoteRead)
			require.NoError(t, err)
			require.NoError(t, mr.Close())
			require.Zero(t, r.regions())
		}
		require.Zero(t, own.uses+big.uses)
	})
}

// Memory that the device does not let go of is never used again.
func TestRegionThatStays(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, keyDevice(t, 0))
	stays := func(mr ibv.MR, a *Buffer) {
		t.Helper()
		require.True(t, a.stuck)
		mem := a.b
		a.Free()
		require.NotEqual(t, addressOf(mem), addressOf(alloc(t, len(mem)).Bytes()))
		require.NoError(t, mr.Close()) // at last
		memory.giveBack(a)
	}
	a := alloc(t, 1000)
	s, err := r.land(make([]byte, 1000))
	require.NoError(t, err)
	s.buf, s.lkey = a, 0
	require.True(t, a.hold())
	mr := s.mr
	r.sw.FailNth(1, nil, verbstest.CloseMR)
	require.ErrorIs(t, s.close(), verbstest.ErrInjected)
	stays(mr, a)

	a = alloc(t, 1000)
	mr, err = r.expose(a.Bytes(), ibv.AccessRemoteRead)
	require.NoError(t, err)
	r.sw.FailNth(1, nil, verbstest.CloseMR)
	require.ErrorIs(t, mr.Close(), verbstest.ErrInjected)
	stays(mr, a)
	if r.dom.unchecked {
		return
	}

	for _, byDomain := range []bool{false, true} {
		a = alloc(t, 1000)
		s, err = r.land(a.Bytes())
		require.NoError(t, err)
		require.NoError(t, s.close())
		mr = a.mrs[r.dom]
		r.sw.FailNth(1, nil, verbstest.CloseMR)
		if byDomain {
			require.ErrorIs(t, r.dom.forgetBuffers(), verbstest.ErrInjected)
		} else {
			a.Free()
		}
		stays(mr, a)
	}
}

// Buffers are landed on and freed, and domains end, all at once.
func TestLandConcurrent(t *testing.T) {
	checkLeaks(t)
	setDomainIdle(t, 0)
	sw := newSwitch(t, nil)
	devs, err := sw.Devices()
	require.NoError(t, err)
	var mu sync.Mutex
	var bufs []*Buffer
	for range 6 {
		bufs = append(bufs, alloc(t, 20000))
	}
	land := func(c *Conn, rnd *rand.Rand) (sink, error) {
		mu.Lock() // the Buffer is freed after this has begun, not before
		defer mu.Unlock()
		mem := bufs[rnd.IntN(len(bufs))].Bytes()
		return c.land(mem[:1+rnd.IntN(len(mem))])
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 2))
			for range heavy(1000) {
				dom, err := acquireDomain(devs[0], false)
				if err != nil {
					panic(err)
				}
				c := &Conn{&conn{dom: dom}}
				for range rnd.IntN(8) {
					s, err := land(c, rnd)
					if err == nil {
						runtime.Gosched()
						err = s.close()
					}
					if err != nil {
						panic(err)
					}
				}
				if err := dom.release(); err != nil {
					panic(fmt.Sprintf("the domain does not end: %v", err))
				}
			}
		})
	}
	wg.Go(func() {
		rnd := rand.New(rand.NewPCG(9, 9))
		for range heavy(2000) {
			fresh, err := Alloc(20000)
			if err != nil {
				panic(err)
			}
			mu.Lock()
			i := rnd.IntN(len(bufs))
			old := bufs[i]
			bufs[i] = fresh
			mu.Unlock()
			old.Free()
		}
	})
	wg.Wait()
	for _, b := range bufs {
		b.Free()
	}
	requireReleased(t, sw)
}
