package regmem

import (
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
	"github.com/rdmanet/rdmanet/internal/defect"
)

// keyDevices are the kinds of devices, by what a key of theirs opens to whom.
var keyDevices = []struct {
	name             string
	apart, unchecked bool
}{
	{"keys of a queue pair", false, false},
	{"keys of a domain", true, false},
	{"keys of a domain, all readable", true, true},
}

func keyDevice(i int) *limited {
	return &limited{Provider: provider, apart: keyDevices[i].apart, unchecked: keyDevices[i].unchecked}
}

func eachKeyDevice(t *testing.T, f func(t *testing.T, l *limited)) {
	for i, d := range keyDevices {
		t.Run(d.name, func(t *testing.T) { f(t, keyDevice(i)) })
	}
}

// A rig is two queue pairs, and two domains for one of them.
type rig struct {
	*Domain
	t     testing.TB
	sw    *verbstest.Switch
	pair  *verbstest.Pair
	qp    ibv.QP
	src   *verbstest.Mem // src is the peer's memory, to read from.
	other *Domain
}

func newRig(t testing.TB, p ibv.Provider) *rig {
	t.Helper()
	sw := newSwitch(t, p)
	pair := verbstest.NewPair(t, verbstest.Env{Passive: sw, Addr: netip.MustParseAddr(host)}, verbstest.PairConfig{})
	e := pair.Active
	attr := e.Dev.Attr()
	newDomain := func() *Domain {
		return &Domain{Dev: e.Dev, PD: e.PD, Private: !attr.Caps.Has(ibv.CapQPRegion), unchecked: attr.Quirks.ReadsUnchecked,
			advice: advice, pools: make(map[poolKey]*Pool)}
	}
	r := &rig{t: t, sw: sw, pair: pair, Domain: newDomain(), qp: e.QP, other: newDomain()}
	r.src = pair.Passive.Register(t, pattern(7, 1<<20), ibv.AccessRemoteRead)
	t.Cleanup(func() { require.NoError(t, r.forgetMemory()) }) // as free does
	return r
}

// fill reads from the peer into b.
func (r *rig) fill(b []byte, lkey uint32) {
	r.t.Helper()
	e := r.pair.Active
	e.Send(r.t, ibv.SendWR{ID: 1, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: b, LKey: lkey}},
		RemoteAddr: r.src.Addr(0), RKey: r.src.MR.RKey()})
	require.Equal(r.t, ibv.WCSuccess, r.next().Status)
	defect.Bytes(r.t, r.src.Buf[:len(b)], b, "what was read is not what is there")
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
func TestRegisterTarget(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, l *limited) {
		checkLeaks(t)
		r := newRig(t, l)
		const size = 300 << 10
		a := alloc(t, size)
		chunk := r.GetChunk(ChunkSize * 100)
		defer chunk.Release()
		for _, mem := range []struct {
			name  string
			b     []byte
			keeps bool
		}{
			{"heap", make([]byte, size), false},
			{"mapped", mapped(t, size).Bytes(), false},
			{"part of what is mapped", mapped(t, size).Bytes()[1:1000], false},
			{"chunk", chunk.B[:100], false},
			{"alloc", a.Bytes(), true},
			{"part of alloc", a.Bytes()[1000:2001], true},
			{"small alloc", alloc(t, 10).Bytes(), true},
		} {
			keeps, before := mem.keeps && !r.unchecked, r.regions()
			for round := range 3 {
				for i := range mem.b {
					mem.b[i] = 0xAA
				}
				calls := r.sw.Calls(verbstest.RegMR)
				s, err := r.RegisterTarget(mem.b)
				require.NoError(t, err)
				if r.unchecked {
					require.Equal(t, make([]byte, len(mem.b)), mem.b, mem.name)
				} else {
					require.Equal(t, byte(0xAA), mem.b[0], mem.name)
				}
				r.fill(mem.b, s.LKey)
				require.NoError(t, s.Close())
				require.NoError(t, s.Close(), "a second time there is nothing to close")
				switch {
				case !keeps:
					require.Equal(t, before, r.regions(), mem.name)
				case round > 0:
					require.Equal(t, calls, r.sw.Calls(verbstest.RegMR), "%s: registered twice", mem.name)
				}
			}
		}
		if r.unchecked {
			require.Zero(t, r.regions())
		} else {
			require.Equal(t, 2, r.regions())
		}
	})
}

// RegisterSource makes memory ready to be sent from, without a change.
func TestRegisterSource(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, l *limited) {
		checkLeaks(t)
		r := newRig(t, l)
		in := r.pair.Passive.Register(t, make([]byte, 1000), ibv.AccessLocalWrite|ibv.AccessRemoteWrite)
		for i, b := range [][]byte{make([]byte, 1000), mapped(t, 1000).Bytes(), alloc(t, 5000).Bytes()[100:1100]} {
			copy(b, pattern(uint64(i), 1000))
			s, err := r.RegisterSource(b)
			require.NoError(t, err)
			defect.Bytes(t, pattern(uint64(i), 1000), b)
			r.pair.Active.Send(t, ibv.SendWR{Op: ibv.OpWrite, SGL: []ibv.SGE{{Buf: b, LKey: s.LKey}}, RemoteAddr: in.Addr(0), RKey: in.MR.RKey()})
			got := make([]byte, 8)
			target, err := r.RegisterTarget(got)
			require.NoError(t, err)
			r.fill(got, target.LKey) // behind the Write
			require.NoError(t, target.Close())
			defect.Bytes(t, pattern(uint64(i), 1000), in.Buf)
			require.NoError(t, s.Close())
		}
	})
}

// A Memory takes its registrations along, a domain those that it has, and neither
// pulls memory from under a transfer.
func TestMemoryAndDomainEnd(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, keyDevice(0))
	if r.unchecked {
		return // nothing is kept there
	}
	a, b := alloc(t, 1000), alloc(t, 1000)
	for _, d := range []*Domain{r.Domain, r.other} {
		for _, buf := range []*Memory{a, b} {
			s, err := d.RegisterTarget(buf.Bytes())
			require.NoError(t, err)
			require.NoError(t, s.Close())
		}
	}
	require.Equal(t, 4, r.regions())
	require.NoError(t, r.other.forgetMemory())
	require.Equal(t, 2, r.regions())
	require.Len(t, a.mrs, 1)
	b.Free()
	require.Equal(t, 1, r.regions())
	require.Len(t, r.cached, 1)

	s, err := r.RegisterTarget(a.Bytes()[:500])
	require.NoError(t, err)
	mem := a.Bytes()[:500]
	a.Free()
	require.Equal(t, 1, r.regions(), "it is in use")
	r.fill(mem, s.LKey)
	require.NoError(t, s.Close())
	require.Zero(t, r.regions())
	require.Empty(t, r.cached)

	// The same for what is exposed.
	a = alloc(t, 1000)
	mr, err := r.Expose(r.qp, a.Bytes(), ibv.AccessRemoteRead)
	require.NoError(t, err)
	mem = a.Bytes()
	a.Free()
	require.NotNil(t, Find(mem))
	require.NoError(t, mr.Close())
	require.Nil(t, Find(mem))
	require.Error(t, mr.Close(), "and it is not given up twice")
	require.Zero(t, r.regions())
}

// Without memory to register there is an error that tells what to do, and nothing
// is held. Of a Memory the part that is needed is tried too.
func TestNoMemoryToRegister(t *testing.T) {
	eachKeyDevice(t, func(t *testing.T, l *limited) {
		checkLeaks(t)
		r := newRig(t, l)
		const limit = 64 << 10
		r.sw.LimitMemory(r.sw.RegisteredBytes() + limit)
		own, big := mapped(t, 1<<20), alloc(t, 1<<20)
		for _, b := range [][]byte{make([]byte, 1<<20), own.Bytes(), big.Bytes()} {
			_, target := r.RegisterTarget(b)
			_, source := r.RegisterSource(b)
			_, exposed := r.Expose(r.qp, b, ibv.AccessRemoteRead)
			for _, err := range []error{target, source, exposed} {
				require.ErrorIs(t, err, syscall.ENOBUFS)
				require.ErrorIs(t, err, syscall.ENOMEM)
				require.ErrorContains(t, err, "ulimit -l")
				require.ErrorContains(t, err, advice.Transfers)
				require.ErrorContains(t, err, r.Dev.Name())
			}
			require.Zero(t, r.regions())
			s, err := r.RegisterTarget(b[100:][:limit])
			require.NoError(t, err)
			r.fill(b[100:][:limit], s.LKey)
			require.NoError(t, s.Close())
			mr, err := r.Expose(r.qp, b[:limit], ibv.AccessRemoteRead)
			require.NoError(t, err)
			require.NoError(t, mr.Close())
			require.Zero(t, r.regions())
		}
		require.Zero(t, own.uses+big.uses)
	})
}

// Memory that the device does not let go of is never used again.
func TestRegistrationThatStays(t *testing.T) {
	checkLeaks(t)
	r := newRig(t, keyDevice(0))
	stays := func(mr ibv.MR, a *Memory) {
		t.Helper()
		require.True(t, a.stuck)
		mem := a.b
		a.Free()
		require.NotEqual(t, addressOf(mem), addressOf(alloc(t, len(mem)).Bytes()))
		require.NoError(t, mr.Close()) // at last
		memory.giveBack(a)
	}
	a := alloc(t, 1000)
	s, err := r.RegisterTarget(make([]byte, 1000))
	require.NoError(t, err)
	s.memory, s.LKey = a, 0
	require.True(t, a.borrow())
	mr := s.mr
	r.sw.FailNth(1, nil, verbstest.CloseMR)
	require.ErrorIs(t, s.Close(), verbstest.ErrInjected)
	stays(mr, a)

	a = alloc(t, 1000)
	mr, err = r.Expose(r.qp, a.Bytes(), ibv.AccessRemoteRead)
	require.NoError(t, err)
	r.sw.FailNth(1, nil, verbstest.CloseMR)
	require.ErrorIs(t, mr.Close(), verbstest.ErrInjected)
	stays(mr, a)
	if r.unchecked {
		return
	}

	for _, byDomain := range []bool{false, true} {
		a = alloc(t, 1000)
		s, err = r.RegisterTarget(a.Bytes())
		require.NoError(t, err)
		require.NoError(t, s.Close())
		mr = a.mrs[r.Domain]
		r.sw.FailNth(1, nil, verbstest.CloseMR)
		if byDomain {
			require.ErrorIs(t, r.forgetMemory(), verbstest.ErrInjected)
		} else {
			a.Free()
		}
		stays(mr, a)
	}
}

// Memory is registered and freed, and domains end, all at once.
func TestRegisterConcurrent(t *testing.T) {
	checkLeaks(t)
	setDomainIdle(t, 0)
	sw := newSwitch(t, nil)
	devs, err := sw.Devices()
	require.NoError(t, err)
	var mu sync.Mutex
	var bufs []*Memory
	for range 6 {
		bufs = append(bufs, alloc(t, 20000))
	}
	register := func(d *Domain, rnd *rand.Rand) (Registration, error) {
		mu.Lock() // the Memory is freed after this has begun, not before
		defer mu.Unlock()
		mem := bufs[rnd.IntN(len(bufs))].Bytes()
		return d.RegisterTarget(mem[:1+rnd.IntN(len(mem))])
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 2))
			for range heavy(1000) {
				dom, err := Acquire(devs[0], false, advice)
				if err != nil {
					panic(err)
				}
				for range rnd.IntN(8) {
					s, err := register(dom, rnd)
					if err == nil {
						runtime.Gosched()
						err = s.Close()
					}
					if err != nil {
						panic(err)
					}
				}
				if err := dom.Release(); err != nil {
					panic(fmt.Sprintf("the domain does not end: %v", err))
				}
			}
		})
	}
	wg.Go(func() {
		rnd := rand.New(rand.NewPCG(9, 9))
		for range heavy(2000) {
			fresh, err := newMemory(20000)
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
