package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/nettest"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

type limitedDevice struct {
	inline, wrs int
	pins, apart bool
}

var limitedDevices = []limitedDevice{
	{1 << 20, 1 << 14, false, false}, // the software device as it is
	{0, 1 << 14, false, false},
	{64, 1 << 14, true, false},
	{0, 16, true, false},
	{64, 1 << 14, true, true},
	{0, 16, true, true},
}

func (l limitedDevice) provider(t testing.TB) *modest {
	m := newModest(t, l.inline, l.wrs, l.pins)
	m.apart = l.apart
	return m
}

// Connections of one device share its memory, the last one to go frees it; but
// where keys belong to a domain as a whole each has memory of its own.
func TestMemoryIsShared(t *testing.T) {
	checkLeaks(t)
	for _, l := range limitedDevices {
		t.Run(fmt.Sprintf("%+v", l), func(t *testing.T) {
			sw := newSwitch(t, l.provider(t))
			cfg := Config{Provider: sw}
			devs, err := sw.Devices()
			require.NoError(t, err)
			dom, err := acquireDomain(devs[0], false)
			require.NoError(t, err)

			a, b := pipeOn(t, cfg)
			exchange(t, a, b, 200<<10)
			c, d := pipeOn(t, cfg)
			exchange(t, c, d, 1<<10)
			conns := []*Conn{a, b, c, d}
			if devs[0].Attr().Caps.Has(ibv.CapQPRegion) {
				for _, x := range conns {
					require.Same(t, dom, x.dom)
				}
				// Which pools two connections use shows in nothing but the connections.
				require.Same(t, a.pool, d.pool)
				require.Same(t, a.lane.buffers, d.lane.buffers)
			} else {
				require.Equal(t, len(conns)+1, sw.Live()["PD"])
				for i, x := range conns {
					require.NotSame(t, dom, x.dom)
					require.NotSame(t, conns[(i+1)%len(conns)].dom, x.dom)
				}
			}
			for _, x := range conns {
				require.NoError(t, x.Close())
			}
			for _, x := range conns {
				require.True(t, eventually(func() bool { return x.dom.CheckFree() == nil }), "%v", x.dom.CheckFree())
			}
			kept := func() map[string]int {
				if dom.Private { // What a connection had to itself goes with it.
					return map[string]int{"PD": 1}
				}
				return map[string]int{"PD": 1, "MR": sw.Live()["MR"]}
			}
			if !eventually(func() bool { return maps.Equal(kept(), sw.Live()) }) {
				defect.Leak(t, "%v, where the connections are closed", sw.Live())
			}
			if !dom.Private {
				require.NotZero(t, sw.RegisteredBytes())
			}
			require.NoError(t, dom.Release())
			requireReleased(t, sw)
		})
	}
}

// The memory that an idle connection has to itself is about what it needs, and it
// takes more in steps when it is at work.
func TestPrivateMemoryIsSmall(t *testing.T) {
	for _, size := range []int{256, 1 << 10, pinnedSegment, pagedSegment, maxSegment} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			checkLeaks(t)
			sw := newSwitch(t, limitedDevice{64, 1 << 14, true, true}.provider(t))
			a, b := pipeOn(t, Config{Provider: sw, MaxSendSize: size, MaxReceiveSize: size, TransferSize: -1})
			const privateSlab = 64 << 10 // bytes
			idle := sw.RegisteredBytes() / 2
			need := int64(minCredits+2) * int64(size+regmem.PageSize)
			require.Less(t, idle, 2*need+2*regmem.PageSize, "one connection's")
			exchange(t, a, b, 4<<20)
			require.Greater(t, sw.RegisteredBytes()/2, idle)
			for _, c := range []*Conn{a, b} {
				c.pool.EachSlab(func(mem []byte) {
					require.LessOrEqual(t, len(mem), max(privateSlab, c.pool.Size))
				})
				require.NoError(t, c.Close())
			}
			requireReleased(t, sw)
		})
	}
}

// What is too long to go inline goes through registered buffers.
func TestLimitedDevice(t *testing.T) {
	for _, l := range limitedDevices[1:] {
		t.Run(fmt.Sprintf("%+v", l), func(t *testing.T) {
			checkLeaks(t)
			cfg := Config{Provider: l.provider(t), TransferSize: -1}
			a, b := pipeOn(t, cfg)
			defer b.Close()
			defer a.Close()
			exchange(t, a, b, 1<<20)
			st := a.Stats()
			require.GreaterOrEqual(t, st.BytesCopied, uint64(2<<20), "both ways are copied")
			if l.pins {
				require.Equal(t, pinnedSegment, a.Info().MaxSendSize)
			}
			t.Run("conn", func(t *testing.T) {
				nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
					client, server, err := makePipe("rdma4", local4, &ListenConfig{Config: cfg}, &Dialer{Config: cfg})
					if err != nil {
						return nil, nil, nil, err
					}
					return client, server, func() { client.Close(); server.Close() }, nil
				})
			})
		})
	}
}

// Devices have memory of their own each.
func TestDevicesAreApart(t *testing.T) {
	checkLeaks(t)
	var switches [2]*verbstest.Switch
	var conns [2][2]*Conn
	for i := range switches {
		switches[i] = newSwitch(t, nil)
		conns[i][0], conns[i][1] = pipeOn(t, Config{Provider: switches[i]})
		exchange(t, conns[i][0], conns[i][1], 10<<10)
	}
	require.NotSame(t, conns[0][0].dom, conns[1][0].dom)
	for i := range switches {
		pds := 1
		if conns[i][0].dom.Private {
			pds = 2
		}
		require.Equal(t, pds, switches[i].Live()["PD"])
		require.NoError(t, conns[i][0].Close())
		require.NoError(t, conns[i][1].Close())
		requireReleased(t, switches[i])
		if i == 0 {
			exchange(t, conns[1][0], conns[1][1], 10<<10)
		}
	}
}

// A limit on locked memory that is met at set-up is an error that tells what to
// do about it.
func TestNoMemoryToDial(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	ln, err := Listen("rdma4", local4) // with memory
	require.NoError(t, err)
	defer ln.Close()
	for _, address := range []string{ln.Addr().String(), mute(t)} { // for receives, for the negotiation
		f := sw.FailNth(1, syscall.ENOMEM, verbstest.RegMR)
		_, err = (&Dialer{Config: Config{Provider: sw}}).Dial("rdma4", address)
		require.True(t, f.Fired())
		var op *net.OpError
		require.ErrorAs(t, err, &op)
		require.Equal(t, "dial", op.Op)
		require.ErrorIs(t, err, syscall.ENOBUFS)
		require.ErrorIs(t, err, syscall.ENOMEM)
		require.ErrorContains(t, err, "ulimit -l")
		require.ErrorContains(t, err, "Config.MaxReceiveCredits")
		require.ErrorContains(t, err, deviceName(t))
		requireReleased(t, sw)
	}
}

// The listening side that has none refuses in SMB Direct's words.
func TestNoMemoryToAccept(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	ln, err := (&ListenConfig{Config: Config{Provider: sw}}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	fails := []int{1, 3} // both times for receives
	if !negotiatesEarly(t) {
		fails = []int{2} // so the only time
	}
	for _, n := range fails {
		sw.FailNth(n, syscall.ENOMEM, verbstest.RegMR)
	}
	_, err = Dial("rdma4", ln.Addr().String())
	require.Error(t, err)
	require.ErrorContains(t, err, "INSUFFICIENT_RESOURCES")
	c, err := Dial("rdma4", ln.Addr().String())
	require.NoError(t, err, "the next one finds memory")
	require.NoError(t, c.Close())
}

// A connection that cannot grow goes on with what it has.
func TestNoMemoryToGrow(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, withCredits(t, Config{}).Provider)
	cfg := Config{Provider: sw, MaxReceiveSize: maxSegment, MaxSendSize: maxSegment, MaxFragmentedSize: 4 << 20}
	a, b := pipeOn(t, cfg)
	refusal := sw.FailAll(syscall.ENOMEM, verbstest.RegMR)
	exchange(t, a, b, 16<<20)
	require.True(t, refusal.Fired(), "they tried to grow")
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
	requireReleased(t, sw)
}

// When others have taken all memory, connections go on with what is theirs, in
// every kind of send.
func TestNoMemoryToSend(t *testing.T) {
	for _, l := range limitedDevices[1:] {
		t.Run(fmt.Sprintf("%+v", l), func(t *testing.T) {
			checkLeaks(t)
			sw := newSwitch(t, l.provider(t))
			var conns [3][2]*Conn
			for i := range conns {
				conns[i][0], conns[i][1] = pipeOn(t, Config{Provider: sw})
			}
			sw.FailAll(syscall.ENOMEM, verbstest.RegMR)
			a, b := conns[0][0], conns[0][1]
			held := takeFree(a.lane.buffers) // as the sends of many other connections would
			within(t, "exchanges", func() {
				var wg sync.WaitGroup
				for _, pair := range conns {
					wg.Go(func() { exchange(t, pair[0], pair[1], heavy(200<<10)) })
				}
				wg.Wait()
			})
			within(t, "messages", func() {
				sent := make(chan error, 1)
				go func() {
					var err error
					for range 100 {
						err = errors.Join(err, writeMsg(a, nil))
					}
					sent <- errors.Join(err, writeMsg(a, pattern(1, 10<<10)))
				}()
				for range 100 {
					n, err := b.ReadMsg(nil)
					require.NoError(t, err)
					require.Zero(t, n)
				}
				n, err := b.ReadMsg(make([]byte, 10<<10))
				require.NoError(t, err)
				require.NoError(t, <-sent)
				require.Equal(t, 10<<10, n)
			})
			within(t, "ends", func() {
				require.NoError(t, a.CloseWrite())
				_, err := b.Read(make([]byte, 1))
				require.Equal(t, io.EOF, err)
				for _, pair := range conns {
					for _, x := range pair {
						require.NoError(t, x.Close())
					}
				}
			})
			for _, buf := range held {
				buf.Release()
			}
			requireReleased(t, sw)
		})
	}
}

// takeFree takes all buffers of a pool that nobody has. The pool cannot grow.
func takeFree(p *regmem.Pool) (bufs []*regmem.Buffer) {
	for b, err := p.Get(); err == nil; b, err = p.Get() {
		bufs = append(bufs, b)
	}
	return bufs
}
