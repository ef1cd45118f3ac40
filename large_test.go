package rdmanet

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// pinningDevices are devices that pin memory, so that receives are large only for bulk data:
// those under test, or the software device as if it did.
func pinningDevices() []limitedDevice {
	if onRDMA {
		return []limitedDevice{{}}
	}
	return []limitedDevice{{64, 1 << 14, true, false}, {0, 1 << 14, true, true}, {0, 16, true, true}}
}

// eachPinning runs f on each such device.
func eachPinning(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, l := range pinningDevices() {
		t.Run(fmt.Sprintf("%+v", l), func(t *testing.T) {
			checkLeaks(t)
			cfg := Config{TransferSize: -1}
			if !onRDMA {
				cfg.Provider = newSwitch(t, l.provider(t))
			}
			f(t, cfg)
		})
	}
}

// streamed writes data in pieces of size bytes from one end to the other.
func streamed(t *testing.T, from, to *Conn, data []byte, size int) {
	t.Helper()
	read := make(chan error, 1)
	go func() { read <- defect.ReadFull(to, data) }()
	for rest := data; len(rest) > 0; rest = rest[min(size, len(rest)):] {
		_, err := from.Write(rest[:min(size, len(rest))])
		require.NoError(t, err)
	}
	within(t, "the end of what is read", func() { require.NoError(t, <-read) })
}

// Bulk data goes in long segments, small messages and a program that bounds segments have
// short ones, and both ends have the memory of a fresh connection when they are idle.
func TestSegmentsFollowUse(t *testing.T) {
	mean := func(c *Conn, f func()) float64 {
		before := c.Stats()
		f()
		after := c.Stats()
		return float64(after.BytesReceived-before.BytesReceived) / float64(after.SegmentsReceived-before.SegmentsReceived)
	}
	bulk := pattern(5, 8<<20)
	eachPinning(t, func(t *testing.T, cfg Config) {
		a, b := pipeOn(t, cfg)
		require.True(t, a.Info().Extensions.LargeSegments)
		for i, c := range []*Conn{a, b} {
			other := []*Conn{b, a}[i]
			require.Greater(t, mean(c, func() { streamed(t, other, c, bulk, 64<<10) }), 2.0*pinnedSegment)
			streamed(t, other, c, pattern(6, 100<<10), 1<<10)
			for _, c := range []*Conn{a, b} {
				c.idleFor(idleAfter)
			}
			require.True(t, eventually(func() bool {
				sa, sb := a.Stats(), b.Stats()
				return max(sa.ReceiveCredits, sb.ReceiveCredits) <= idleReceives && a.keptLarge()+b.keptLarge() == 0
			}), "%+v\n%+v", a.Stats(), b.Stats())
		}
		closeBoth(t, a, b)
		cfg.MaxReceiveSize = pinnedSegment
		a, b = pipeOn(t, cfg)
		require.False(t, a.Info().Extensions.LargeSegments)
		require.Less(t, mean(b, func() { streamed(t, a, b, bulk, 64<<10) }), 1.0*pinnedSegment)
		closeBoth(t, a, b)
	})
}

// An end that is idle has given back all large receives, and the timer has nothing left to do,
// whatever length a stream had and however its Writes were cut.
func TestLargeReceivesAreGivenBack(t *testing.T) {
	for _, transfers := range []int{-1, 4 << 20} {
		t.Run(fmt.Sprint(transfers), func(t *testing.T) {
			eachPinning(t, func(t *testing.T, cfg Config) {
				cfg.TransferSize = transfers
				first, step := 0, 1
				if testing.Short() {
					step = 4
					first = rand.IntN(step)
				}
				for i := first; i < heavy(60); i += step {
					n, size := 200<<10+i*17500, []int{9000, 20000, 64 << 10}[i%3]
					a, b := pipeOn(t, cfg)
					streamed(t, a, b, pattern(uint64(i), n), size)
					ends := []*Conn{a, b}
					require.True(t, eventually(func() bool {
						rand.Shuffle(2, func(i, j int) { ends[i], ends[j] = ends[j], ends[i] })
						for _, c := range ends {
							c.idleFor(idleAfter)
						}
						time.Sleep(time.Millisecond)
						return a.keptLarge()+b.keptLarge() == 0 && max(a.Stats().ReceiveCredits, b.Stats().ReceiveCredits) <= idleReceives
					}), "%d bytes by %d: %+v, %d large\n%+v, %d large", n, size, a.Stats(), a.keptLarge(), b.Stats(), b.keptLarge())
					closeBoth(t, a, b)
				}
			})
		})
	}
}

// Two idle ends stop sending, also where one has no memory for other receives than large ones.
func TestIdleWithoutNormalReceives(t *testing.T) {
	skipOnRDMA(t)
	checkLeaks(t)
	sw := newSwitch(t, limitedDevice{64, 1 << 14, true, false}.provider(t))
	a, b := pipeOn(t, Config{Provider: sw, TransferSize: -1, KeepAlive: -1})
	streamed(t, a, b, pattern(1, 4<<20), 64<<10)
	require.NotZero(t, b.keptLarge())
	sw.LimitMemory(1)
	var taken []*regmem.Buffer
	drain := func() {
		for {
			buf, err := b.pool.Get()
			if err != nil {
				return
			}
			taken = append(taken, buf)
		}
	}
	for _, c := range []*Conn{b, a} {
		drain()
		c.idleFor(idleAfter)
	}
	require.True(t, eventually(func() bool { drain(); return b.keptLarge() > 0 && a.Stats().EmptySent > maxLateReturns/2 }))
	before := a.Stats().EmptySent + b.Stats().EmptySent
	time.Sleep(50 * time.Millisecond)
	require.LessOrEqual(t, a.Stats().EmptySent+b.Stats().EmptySent, before+4*maxLateReturns)
	sw.LimitMemory(0)
	for _, buf := range taken {
		buf.Release()
	}
	exchange(t, a, b, 1<<20)
	closeBoth(t, a, b)
}

// largeScene is a connection that grants large receives to a peer of the test's.
type largeScene struct {
	*scene
	c     *Conn
	p     *smbdpeer.Raw
	sizes []int // sizes has the receives that the peer may use, in order.
	rest  int   // rest is how many bytes of the peer's message have not been sent.
}

// newLargeScene makes the connection, and sends bulk data that is read until it has kept large
// receives.
func newLargeScene(t *testing.T, features uint16, receiveMemory int) *largeScene {
	t.Helper()
	l := limitedDevice{1 << 20, 1 << 14, true, false}
	s := &largeScene{scene: newSceneOn(t, l.provider(t))}
	s.cfg.ReceiveMemory, s.cfg.MaxReceiveCredits, s.cfg.KeepAlive = receiveMemory, 0, -1
	features |= smbdpeer.FeatureFIN | smbdpeer.FeatureMessages | smbdpeer.FeatureLarge
	s.c, s.p = s.conns(false, smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true, Features: features, MaxReceiveSize: 8136}.Append(nil))
	for range s.p.Credits {
		s.sizes = append(s.sizes, s.c.Info().MaxReceiveSize)
	}
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		for b := make([]byte, 64<<10); s.c.keptLarge() < 16; {
			if _, err := s.c.Read(b); err != nil {
				return
			}
		}
	}()
	for s.c.keptLarge() < 16 {
		s.fill()
		s.heard(s.p.Receive())
	}
	for done := false; !done; {
		select {
		case <-reading:
			done = true
		case <-time.After(time.Millisecond):
			s.hear()
			s.fill()
		}
	}
	return s
}

// heard notes the credits of a message.
func (s *largeScene) heard(b []byte) {
	h, _, err := smbdpeer.ParseDataTransfer(b)
	require.NoError(s.t, err)
	s.p.Credits += int(h.CreditsGranted)
	size := s.c.Info().MaxReceiveSize
	if h.Flags&smbdpeer.FlagLarge != 0 {
		size = smbdpeer.LargeReceiveSize
	}
	for range h.CreditsGranted {
		s.sizes = append(s.sizes, size)
	}
}

// hear takes what has come, and reports whether that is anything.
func (s *largeScene) hear() (any bool) {
	for _, b := range s.p.Poll() {
		s.heard(b)
		any = true
	}
	return any
}

// fill spends all credits on payload, those for grants included.
func (s *largeScene) fill() {
	for s.p.Credits > 0 {
		if s.rest == 0 {
			s.rest = minFragmentedSize
		}
		n := min(s.sizes[0]-smbdpeer.PayloadOffset, 40000, s.rest)
		s.rest -= n
		s.send(smbdpeer.DataTransfer{CreditsRequested: 255, CreditsGranted: 1, RemainingDataLength: uint32(s.rest),
			DataOffset: smbdpeer.PayloadOffset, DataLength: uint32(n)}.Message(smbdpeer.PayloadOffset + n))
	}
}

func (s *largeScene) send(b []byte) {
	s.sizes = s.sizes[1:]
	s.p.Credits--
	s.p.Send(b)
}

// A peer that fills large receives, with the credits for grants too, while nobody reads, gets no
// more memory than the budget has and normal receives for its grants, also when it has left.
func TestLargeReceivesOfGreedy(t *testing.T) {
	skipOnRDMA(t)
	const bound = 2 << 20
	s := newLargeScene(t, 0, bound)
	c := s.c
	for quiet := 0; quiet < 50; quiet++ {
		if s.hear() {
			quiet = 0
		}
		s.fill()
		time.Sleep(time.Millisecond)
	}
	require.NotZero(t, c.keptLarge())
	require.LessOrEqual(t, c.receiveMemory(), bound+(creditCeiling+idleReceives+2)*pinnedSegment)
	s.p.Close()
	require.True(t, eventually(func() bool { return c.Stats().ReceiveCredits == 0 }))
	require.GreaterOrEqual(t, c.dom.Budget.Used(), int64(c.keptLarge()*largeSegment-idleReceives*c.pool.Size))
	c.Close()
}

// An idle end grants all that it has posted beyond what it began with, so that its peer can use
// that up. When the peer has done so, no large receive is left.
func TestIdleGrantsSurplus(t *testing.T) {
	skipOnRDMA(t)
	for name, features := range map[string]uint16{"plain": 0, "transfers": smbdpeer.FeatureTransfer | smbdpeer.FeatureNoRead} {
		t.Run(name, func(t *testing.T) {
			s := newLargeScene(t, features, 0)
			go io.Copy(io.Discard, s.c)
			require.True(t, eventually(func() bool {
				s.hear()
				return s.c.unread() == 0
			}))
			least := s.p.Credits
			require.True(t, eventually(func() bool {
				s.c.idleFor(idleAfter)
				s.hear()
				st := s.c.Stats()
				return st.ReceiveCredits-s.p.Credits <= 1 || st.ReceiveCredits <= idleReceives
			}), "%d credits, before that %d: %+v", s.p.Credits, least, s.c.Stats())
			require.True(t, eventually(func() bool {
				for s.p.Credits > 1 && (s.p.Credits > minCredits || slices.Contains(s.sizes, smbdpeer.LargeReceiveSize)) {
					s.send(smbdpeer.EmptySegment(0, 1))
				}
				s.c.idleFor(idleAfter)
				s.hear()
				return s.c.keptLarge() == 0 && s.c.Stats().ReceiveCredits <= idleReceives
			}), "%d credits, %d are left: %+v", s.p.Credits, s.c.keptLarge(), s.c.Stats())
		})
	}
}

// unread returns how many segments wait for the reader.
func (c *conn) unread() int {
	c.mu.Lock()
	defer c.unlock()
	return c.in.unread.Len()
}

// skipOnRDMA skips a test whose device is the software device as if it pinned memory.
func skipOnRDMA(t *testing.T) {
	if onRDMA {
		t.Skip("the device is not the one under test")
	}
}

// keptLarge returns how many large receives the connection has, which no counter tells.
func (c *conn) keptLarge() int {
	c.mu.Lock()
	defer c.unlock()
	return c.credits.large.kept
}

// Programs of all sizes and paces, in both directions and with idle times between, arrive as
// they were written.
func TestSegmentsOfAllSizes(t *testing.T) {
	sizes := []int{1, 100, 4000, pinnedSegment - dataOffset, pinnedSegment - dataOffset + 1, 20000,
		largeSegment - dataOffset, largeSegment - dataOffset + 1, 200000, 1 << 20}
	eachPinning(t, func(t *testing.T, cfg Config) {
		for seed := range uint64(repeats(12)) {
			rnd := rand.New(rand.NewPCG(seed, 11))
			cfg.MaxReceiveCredits = []int{0, 80, minCredits, 255}[rnd.IntN(4)]
			cfg.InitialReceiveCredits = []int{0, minCredits + rnd.IntN(8)}[rnd.IntN(2)]
			a, b := pipeOn(t, cfg)
			ends := []*Conn{a, b}
			for range 6 {
				n := [2]int{}
				done := make(chan error, 4)
				for i, c := range ends {
					var program []int
					for range rnd.IntN(40) {
						program = append(program, sizes[rnd.IntN(1+rnd.IntN(len(sizes)))])
					}
					for _, k := range program {
						n[i] += k
					}
					data, pause := pattern(seed, n[i]), rnd.IntN(20)
					go func() {
						var err error
						for at, j := 0, 0; j < len(program) && err == nil; j++ {
							if pause == 0 {
								time.Sleep(time.Millisecond)
							}
							_, err = c.Write(data[at : at+program[j]])
							at += program[j]
						}
						done <- err
					}()
					other, slow := ends[1-i], rnd.IntN(3) == 0
					go func() {
						got := make([]byte, len(data))
						var err error
						for at := 0; at < len(got) && err == nil; {
							if slow {
								time.Sleep(100 * time.Microsecond)
							}
							var k int
							k, err = other.Read(got[at:min(len(got), at+40000)])
							at += k
						}
						if err == nil {
							err = defect.Differ(data, got)
						}
						if err != nil {
							err = fmt.Errorf("seed %d: %w", seed, err)
						}
						done <- err
					}()
				}
				within(t, "the program", func() {
					for range 4 {
						require.NoError(t, <-done)
					}
				})
				if rnd.IntN(2) == 0 {
					ends[rnd.IntN(2)].idleFor(idleAfter)
				}
			}
			closeBoth(t, a, b)
		}
	})
}

// Where there is no memory for them, segments stay short, and everything goes on.
func TestLargeSegmentsWithoutMemory(t *testing.T) {
	for _, l := range []limitedDevice{{64, 1 << 14, true, false}, {0, 1 << 14, true, true}} {
		t.Run(fmt.Sprintf("%+v", l), func(t *testing.T) {
			checkLeaks(t)
			sw := newSwitch(t, l.provider(t))
			a, b := pipeOn(t, Config{Provider: sw, TransferSize: -1})
			exchange(t, a, b, 64)
			sw.LimitMemory(sw.RegisteredBytes())
			exchange(t, a, b, 2<<20)
			require.Zero(t, a.keptLarge()+b.keptLarge())
			sw.LimitMemory(sw.RegisteredBytes() + 3*pinnedSlabOfTests) // Enough for receives, and perhaps not for sends.
			exchange(t, a, b, 8<<20)
			sw.LimitMemory(0)
			exchange(t, a, b, 8<<20)
			require.NotZero(t, a.keptLarge()+b.keptLarge())
			closeBoth(t, a, b)
		})
	}
}

// The receives of all connections together stay within Config.ReceiveMemory, be they large or
// normal, also where peers write and nobody reads.
func TestLargeReceiveMemory(t *testing.T) {
	const bound = 2 << 20
	eachPinning(t, func(t *testing.T, cfg Config) {
		cfg.ReceiveMemory = bound
		var conns []*Conn
		for range 6 {
			a, b := pipeOn(t, cfg)
			conns = append(conns, a, b)
			streamed(t, a, b, pattern(7, 1<<20), 64<<10)
			require.NoError(t, a.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
			for {
				if _, err := a.Write(make([]byte, 64<<10)); err != nil {
					break
				}
			}
		}
		taken := 0
		for _, c := range conns {
			taken += c.receiveMemory()
			require.LessOrEqual(t, c.receiveMemory(), defaultLarge*(largeSegment+regmem.PageSize)+creditCeiling*pinnedSegment)
		}
		require.LessOrEqual(t, taken, bound+len(conns)*(idleReceives+2)*pinnedSegment)
		for i := 0; i < len(conns); i += 2 {
			closeBoth(t, conns[i], conns[i+1])
		}
	})
}

// receiveMemory returns how many bytes the connection's receives have, posted and unread.
func (c *conn) receiveMemory() int {
	c.mu.Lock()
	defer c.unlock()
	n := c.in.posted.Len() + c.in.held
	return (n-c.credits.large.kept)*pinnedSegment + c.credits.large.kept*(largeSegment+regmem.PageSize)
}

// pinnedSlabOfTests is the size in bytes of a slab of large buffers.
const pinnedSlabOfTests = 256 << 10

// Each message is as long as the receive that it uses up: receives are used up in the order in
// which a peer grants them, be they normal or large.
func TestSegmentFitsReceive(t *testing.T) {
	for seed := range uint64(repeats(40)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			const began = 32 // began is how many receives the peer begins with.
			rnd := rand.New(rand.NewPCG(seed, 3))
			s := newJoinScene(t, joinFeatures|smbdpeer.FeatureLarge, began)
			normal := s.c.Info().MaxSendSize
			var granted []int // granted has the sizes of the receives that the connection may use.
			for range s.c.Stats().SendCredits {
				granted = append(granted, normal)
			}
			again := 0 // again is how many normal receives the peer has posted again.
			type message struct {
				h       smbdpeer.DataTransfer
				payload []byte
			}
			var arrived []message // arrived has messages that were received and not looked at.
			receive := func() {
				h, payload, ok := s.p.ReceiveData()
				require.True(t, ok)
				arrived = append(arrived, message{h, payload})
			}
			grant := func(n int, flags uint16) {
				for s.p.Credits < 1 {
					receive()
				}
				s.p.GrantWith(uint16(n), flags)
			}
			for range 30 {
				n := 1 + rnd.IntN(1+rnd.IntN(300000))
				b := pattern(uint64(n), n)
				wrote := writing(s.c, b)
				for at := 0; at < n; {
					for len(granted) < 3+rnd.IntN(8) {
						// What was posted first has to be granted first.
						if again > 0 {
							grant(again, 0)
							for range again {
								granted = append(granted, normal)
							}
							again = 0
							continue
						}
						large := 1 + rnd.IntN(4)
						for range large {
							s.p.PostReceive(smbdpeer.LargeReceiveSize)
							granted = append(granted, smbdpeer.LargeReceiveSize)
						}
						grant(large, smbdpeer.FlagLarge)
					}
					if len(arrived) == 0 {
						receive()
					}
					h, payload := arrived[0].h, arrived[0].payload
					arrived = arrived[1:]
					size := granted[0]
					if granted = granted[1:]; size == normal {
						again++
					}
					if len(payload) == 0 {
						continue
					}
					defect.Bytes(t, b[at:at+len(payload)], payload)
					at += len(payload)
					require.LessOrEqual(t, len(payload), size-smbdpeer.PayloadOffset)
					if h.RemainingDataLength > 0 {
						require.Equal(t, size-smbdpeer.PayloadOffset, len(payload), "a segment with more behind it is full")
					}
				}
				require.Equal(t, result{n, nil}, s.await(wrote))
			}
		})
	}
}

// A peer that has not offered large receives does not grant any, whatever its flags say.
func TestLargeFlagWithoutFeature(t *testing.T) {
	s := newJoinScene(t, joinFeatures, 8)
	s.p.GrantWith(20, smbdpeer.FlagLarge)
	wrote := writing(s.c, make([]byte, 200000))
	for n := 0; n < 100000; {
		_, payload, ok := s.p.ReceiveData()
		require.True(t, ok)
		require.LessOrEqual(t, len(payload), s.room)
		n += len(payload)
	}
	s.p.Close()
	<-wrote
}
