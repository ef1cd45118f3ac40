package rdmanet

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSpendable(t *testing.T) {
	for _, c := range []struct {
		have, reserve, ungranted int
		want                     int
		control                  bool
	}{
		{0, 0, 0, 0, false},
		{0, 0, 5, 0, false},
		{1, 0, 0, 0, false}, // the last one waits for a grant
		{1, 0, 1, 1, true},
		{2, 0, 0, 1, true},
		{5, 0, 0, 4, true},
		{5, 0, 1, 4, true},  // the first of them would grant, the last one not
		{1, 1, 1, 0, false}, // FIN's
		{2, 1, 0, 0, false},
		{2, 1, 1, 0, true}, // that for grants
		{3, 1, 0, 1, true},
		{3, 1, 1, 1, true},
	} {
		cr := credits{have: c.have, reserveOut: c.reserve, ungranted: c.ungranted}
		require.Equal(t, c.want, cr.spendable(), "%+v", c)
		require.Equal(t, c.control, cr.maySendControl(), "%+v", c)
	}
}

func TestCreditWindow(t *testing.T) {
	c := credits{window: 4, initial: 4, maximum: 10, target: 100, readerWaited: true}
	require.Equal(t, 4, c.room(0, false))
	c.post(4, false)
	require.Equal(t, 0, c.room(0, false))
	require.Equal(t, 0, c.peerCredits())
	require.True(t, c.grantDue(0, false, false), "the peer has none at all")
	granted, _ := c.spend()
	require.EqualValues(t, 4, granted)
	require.Equal(t, 4, c.peerCredits())
	require.False(t, c.grantDue(0, false, true), "there is nothing to grant")

	h := &segmentHeader{CreditsRequested: 7, CreditsGranted: 3}
	for range 3 {
		c.receive(h)
	}
	require.Equal(t, 8, c.have, "nine were granted and one was spent")
	require.Equal(t, 1, c.posted)
	require.Equal(t, 4, c.window)
	c.receive(h) // the last one: it could do with more
	require.Equal(t, 8, c.window)
	require.Equal(t, 7, c.room(0, false), "no more than the peer asked for")
	require.Equal(t, 5, c.room(2, false), "what waits for the reader counts")
	c.receive(h)
	require.Equal(t, 8, c.window, "the reader has not caught up since")
	c.readerWaited = true
	c.receive(h)
	require.Equal(t, 10, c.window, "the maximum")

	c.receive(&segmentHeader{CreditsRequested: 1, CreditsGranted: math.MaxUint16})
	require.Equal(t, minCredits, c.target)
	require.Equal(t, math.MaxUint16, c.have, "the sum is bounded")
}

// A window whose grants go on their own in quick succession is too small; the
// reader must keep up, and a slow stream keeps its few receives.
func TestCreditWindowOfLoneGrants(t *testing.T) {
	c := credits{window: 4, initial: 4, maximum: 10, target: 100, readerWaited: true}
	now := time.Now()
	c.grantAlone(now)
	require.Equal(t, 4, c.window, "the first one says nothing")
	c.grantAlone(now.Add(growWithin))
	require.Equal(t, 4, c.window, "seldom enough")
	now = now.Add(growWithin)
	c.grantAlone(now.Add(growWithin - 1))
	require.Equal(t, 8, c.window)
	now = now.Add(growWithin)
	c.grantAlone(now)
	require.Equal(t, 8, c.window, "the reader has not caught up since")
	c.readerWaited = true
	c.grantAlone(now)
	require.Equal(t, 10, c.window, "the maximum")
}

// While the reader has much to do, grants are made a quarter of the window at
// a time.
func TestCreditsWithheld(t *testing.T) {
	// All 16 have come, and the reader has used up three.
	c := credits{window: 16, target: 255, posted: 3, ungranted: 3, ungrantedPayload: true}
	require.False(t, c.grantDue(13, true, false), "one wake-up for three messages")
	require.False(t, c.grantDue(13, true, true))
	require.True(t, c.grantDue(0, false, true), "nothing else is there to be read")
	c.post(1, false)
	require.True(t, c.grantDue(12, true, false))

	c = credits{window: 16, target: 4, posted: 1, have: 1, ungranted: 1, ungrantedPayload: true}
	require.True(t, c.grantDue(3, true, false), "a quarter of what the peer wants")

	c = credits{window: 16, target: 255, posted: 1, ungranted: 1}
	require.False(t, c.grantDue(15, true, false), "grants in answer to grants would not end")
	c = credits{window: 16, target: 255, posted: 2, ungranted: 2}
	require.True(t, c.grantDue(14, true, false), "one for two")
}

// With one credit left and none to give, one receive more than the window is
// posted, or than the maximum.
func TestLastCredit(t *testing.T) {
	c := credits{have: 1, posted: 4, window: 4, target: 4, maximum: 6}
	require.Equal(t, 0, c.room(0, false))
	require.Equal(t, 1, c.room(0, true))
	c.post(1, false)
	require.Equal(t, 0, c.room(0, true), "one is enough")
	require.Equal(t, 1, c.spendable())
	granted, _ := c.spend()
	require.EqualValues(t, 1, granted)
	require.Equal(t, 0, c.spendable())
	c.have = 1
	require.Equal(t, 1, c.room(0, true))
	require.Equal(t, 1, c.room(1, true), "one beyond the maximum")
	require.Equal(t, 0, c.room(2, true), "which includes what waits for the reader")
}

// creditSide is one end of a model of a connection: the credits, and what
// send.go and recv.go do with them, without a device.
type creditSide struct {
	credits
	rnd     *rand.Rand
	peer    *creditSide
	queued  []bool      // queued has the receives in the queue pair, and whether they are large.
	inbox   []creditMsg // sent by the peer and not yet handled
	unread  int         // buffers kept for the reader
	toSend  int         // messages that the program wants to send
	empty   bool        // without payload
	idle    bool        // has sent nothing for long
	ended   bool        // FIN was sent
	lenient bool        // the peer says of most of what it sends that there is no hurry
	reads   int
	memory  int  // buffers that can be had
	copies  bool // nobody reads, and what is unread is copied
	arrived int  // of those of the peer's program
	control int  // messages without payload that were sent

	awaited   int // answers of the peer's
	asking    int // grants of memory, and the like, that the peer is to be told of,
	answering int // and answers to its own
}

type creditMsg struct {
	segmentHeader
	program bool // sent for the program
	data    bool // has payload
	ask     bool // wants an answer,
	answer  bool // or is one
	large   bool // may be as long as a large receive
}

// postSome posts receives, which are large now and then where both ends know that.
func (s *creditSide) postSome(n int) {
	for range n {
		large := s.large.on && s.rnd.IntN(8) < 3
		s.post(1, large)
		s.queued = append(s.queued, large)
	}
}

func (s *creditSide) replenish(t *testing.T) {
	for s.room(s.unread, s.toSend > 0) > 0 && (s.posted+s.unread < s.memory || s.reserveShort() > 0 && s.posted+1 < s.memory) {
		s.postSome(1)
	}
	must(t, s.posted+s.unread <= s.maximum+3, "more than the maximum: %+v", s)
}

func (s *creditSide) send(t *testing.T, m creditMsg) {
	_, m.large = s.granted.next(s.have)
	granted, flags := s.spend()
	must(t, s.have >= s.reserveOut, "FIN's credit is gone: %+v", s)
	must(t, s.have > s.reserveOut || granted > 0 || s.ended, "the last credit went without a grant: %+v", s)
	want := uint16(255)
	if s.idle {
		want = uint16(s.initial)
	}
	m.segmentHeader = segmentHeader{CreditsRequested: want, CreditsGranted: granted, Flags: flags}
	s.peer.inbox = append(s.peer.inbox, m)
	must(t, len(s.peer.inbox) <= s.peer.posted, "a message without a receive: %+v", s)
}

// must is require.True for what is checked very often.
func must(t *testing.T, ok bool, format string, args ...any) {
	if !ok {
		t.Helper()
		t.Fatalf(format, args...)
	}
}

func (s *creditSide) sendControl(t *testing.T, idle bool) {
	for s.maySendControl() {
		switch {
		case s.asking > 0:
			s.asking--
			s.awaited++
			s.send(t, creditMsg{ask: true})
		case s.answering > 0:
			s.answering--
			s.send(t, creditMsg{answer: true})
		case s.grantDue(s.unread, s.unread > 0, idle):
			s.control++
			s.send(t, creditMsg{})
		default:
			return
		}
	}
}

// write sends one segment if it may.
func (s *creditSide) write(t *testing.T) bool {
	if s.toSend == 0 {
		return false
	}
	s.replenish(t)
	if s.spendable() == 0 {
		return false
	}
	s.toSend--
	s.idle, s.large.on = false, s.large.known && s.rnd.IntN(2) == 0
	s.send(t, creditMsg{program: true, data: !s.empty})
	return true
}

// copyUnread is what is done where nobody reads.
func (s *creditSide) copyUnread() {
	for s.copies && s.unread > s.keptUnread(s.unread) {
		s.unread--
		s.oweGrant(s.lenient)
		if s.room(s.unread, s.toSend > 0) > 0 {
			s.postSome(1)
		}
	}
}

// shrinkIdle is what the timer does after a while without payload.
func (s *creditSide) shrinkIdle(t *testing.T) {
	s.window, s.idle, s.large.on = s.initial, true, false
	s.copyUnread()
	for max(s.have-s.initial, s.granted.untilNormal()) > 0 && s.maySendControl() {
		s.send(t, creditMsg{})
	}
	if s.lacksReserve(s.unread) && s.posted < s.memory {
		s.postSome(1)
	}
	for s.surplusDue() && s.maySendControl() {
		s.send(t, creditMsg{})
	}
}

// end sends FIN, which has a credit of its own.
func (s *creditSide) end(t *testing.T) {
	if s.reserveOut > 0 && s.toSend == 0 && s.have > 0 {
		s.ended, s.reserveOut = true, 0
		s.send(t, creditMsg{})
	}
}

// poll handles one message.
func (s *creditSide) poll(t *testing.T) bool {
	if len(s.inbox) == 0 {
		return false
	}
	m := s.inbox[0]
	s.inbox = s.inbox[1:]
	must(t, m.large == s.queued[0], "the sender takes the receive for one of the other size: %+v", s)
	s.queued = s.queued[1:]
	s.credits.receive(&m.segmentHeader)
	switch {
	case m.program:
		s.arrived++
	case m.ask:
		s.answering++
		s.pendingGrant = true
	case m.answer:
		s.awaited--
		s.pendingGrant = true
	}
	if m.data {
		s.unread++
	} else if s.room(s.unread, s.toSend > 0) > 0 {
		s.postSome(1)
	}
	s.copyUnread()
	s.replenish(t)
	s.sendControl(t, false)
	return true
}

// read uses up one buffer, or waits.
func (s *creditSide) read(t *testing.T) bool {
	if s.unread == 0 {
		s.readerWaited = true
		before := s.control
		s.sendControl(t, true)
		return s.control > before
	}
	s.unread--
	s.reads++
	s.oweGrant(s.lenient && s.reads%8 != 0)
	s.replenish(t)
	s.sendControl(t, false)
	return true
}

// Two ends play against each other at random: there is never a message without
// a receive for it, whatever both want to send arrives once both read, and then
// there is silence.
func TestCreditsModel(t *testing.T) {
	for seed := range uint64(repeats(3000)) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var ends [2]*creditSide
		reserve := int(seed % 2)
		for i := range ends {
			// The smallest windows are the hardest.
			initial := minCredits + rnd.IntN(2)*rnd.IntN(6)
			ends[i] = &creditSide{credits: credits{target: 255, window: initial, initial: initial,
				maximum: initial + rnd.IntN(2)*rnd.IntN(20), readerWaited: true, reserveOut: reserve, reserveIn: reserve}}
			if reserve > 0 {
				ends[i].transferReserve = rnd.IntN(2)
				if seed%4 == 1 {
					ends[i].large = largeReceives{known: true, on: true, weight: 1, most: ends[i].maximum}
				}
			}
			ends[i].copies = rnd.IntN(2) == 0
			ends[i].memory = ends[i].maximum + 1
			if rnd.IntN(3) == 0 { // no more than it started with
				ends[i].memory = initial + ends[i].transferReserve
			}
			ends[i].empty = rnd.IntN(3) == 0
			ends[i].lenient = reserve > 0 && rnd.IntN(2) == 0
			ends[i].post(initial+ends[i].transferReserve, false)
			ends[i].queued, ends[i].rnd = make([]bool, initial+ends[i].transferReserve), rnd
		}
		ends[0].peer, ends[1].peer = ends[1], ends[0]
		// The response grants what the passive side has; the active side's
		// credits come with its first message.
		ends[0].have, ends[1].ungranted = ends[1].window, ends[1].transferReserve
		ends[0].sendControl(t, true)

		step := func(e *creditSide, op int) bool {
			switch op {
			case 0:
				return e.write(t)
			case 1:
				return e.poll(t)
			default:
				return e.read(t)
			}
		}
		wanted, asked := [2]int{}, 0
		for range 300 {
			i := rnd.IntN(2)
			if rnd.IntN(4) == 0 && !ends[i].ended {
				n := rnd.IntN(20)
				ends[i].toSend += n
				wanted[i] += n
			}
			switch {
			case reserve > 0 && rnd.IntN(20) == 0: // plain peers keep their credits
				ends[i].shrinkIdle(t)
			case reserve > 0 && rnd.IntN(100) == 0:
				ends[i].end(t)
			case ends[0].transferReserve > 0 && ends[1].transferReserve > 0 && rnd.IntN(4) == 0:
				n := 1 + rnd.IntN(4)
				asked += n
				ends[i].asking += n
				ends[i].sendControl(t, false)
			default:
				step(ends[i], rnd.IntN(3))
			}
		}
		settle := func(ops int) {
			for steps, progress := 0, true; progress; steps++ {
				progress = false
				for _, e := range ends {
					for op := range ops {
						progress = step(e, op) || progress
					}
				}
				must(t, steps < 10000, "seed %d: it never ends: %+v and %+v", seed, ends[0], ends[1])
			}
		}
		settle(2) // nobody reads
		for i, e := range ends {
			require.Zero(t, e.asking+e.awaited, "seed %d: end %d: a transfer is stuck: %+v against %+v", seed, i, e, e.peer)
			must(t, reserve == 0 || !e.peer.copies || e.toSend == 0, "seed %d: end %d waits for a reader: %+v against %+v", seed, i, e, e.peer)
		}
		if reserve > 0 {
			// What one writes reaches the other, though it does not read itself.
			for progress := true; progress; {
				progress = false
				for op := range 3 {
					progress = step(ends[0], op) || progress
				}
				for op := range 2 {
					progress = step(ends[1], op) || progress
				}
			}
			must(t, ends[1].toSend == 0, "seed %d: it is stuck: %+v against %+v", seed, ends[1].credits, ends[0].credits)
		}
		settle(3)
		for i, e := range ends {
			require.Zero(t, e.toSend, "seed %d: end %d is stuck: %+v against %+v", seed, i, e.credits, e.peer.credits)
			require.Equal(t, wanted[i], e.peer.arrived)
			require.GreaterOrEqual(t, e.have, e.reserveOut)
			// A message grants receives of one size.
			most := (wanted[0] + wanted[1] + 2*asked + 2) * map[bool]int{false: 1, true: 2}[e.large.known]
			require.LessOrEqual(t, e.control, most, "seed %d: more control than payload", seed)
		}
	}
}

// The smallest windows, both directions full: nothing wedges.
func TestSmallWindows(t *testing.T) {
	for _, lb := range loopbacks {
		for _, maximum := range []int{minCredits, minCredits + 1} {
			for _, cfg := range []Config{
				{InitialReceiveCredits: minCredits, MaxReceiveCredits: maximum, MaxSendSize: minSegment},
				{InitialReceiveCredits: minCredits, MaxReceiveCredits: maximum},
				{InitialReceiveCredits: minCredits, MaxReceiveCredits: maximum, MaxReceiveSize: minSegment, SendCreditTarget: minCredits},
			} {
				t.Run(fmt.Sprintf("%s/%d/%d/%d", lb.network, maximum, cfg.MaxSendSize, cfg.MaxReceiveSize), func(t *testing.T) {
					checkLeaks(t)
					a, b := pipe(t, lb.network, lb.address, &ListenConfig{Config: cfg}, &Dialer{Config: cfg})
					exchange(t, a, b, heavy(300<<10))
					exchange(t, b, a, 100)
					require.LessOrEqual(t, a.Stats().ReceiveWindow, maximum)
					require.NoError(t, a.Close())
					require.NoError(t, b.Close())
				})
			}
		}
	}
}

// The window grows while it is used up, and what it took is given back when
// nothing moves any more.
func TestWindowFollowsUse(t *testing.T) {
	checkLeaks(t)
	const initial = 4
	a, b := pipeOn(t, withCredits(t, Config{TransferSize: -1, InitialReceiveCredits: initial}))
	require.Equal(t, initial, a.Stats().ReceiveWindow)
	require.True(t, eventually(func() bool {
		exchange(t, a, b, 4<<20) // whether the window is used up is a matter of who runs when
		return max(a.Stats().ReceiveWindow, b.Stats().ReceiveWindow) > initial
	}))
	go io.Copy(io.Discard, a)
	go io.Copy(io.Discard, b)
	require.True(t, eventually(func() bool {
		for _, c := range []*Conn{a, b} {
			s := c.Stats()
			if s.ReceiveWindow != initial || s.ReceiveCredits > 2*initial || s.SendCredits > 2*initial {
				return false
			}
		}
		return true
	}), "%+v %+v", a.Stats(), b.Stats())
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}
