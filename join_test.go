package rdmanet

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// joinScene is a connection to a peer that has granted plenty of credits, and that answers
// only when the test says so.
type joinScene struct {
	*scene
	c    *Conn
	p    *smbdpeer.Raw
	room int    // room is how much payload a segment has.
	sent []byte // sent is what was written so far.
}

func newJoinScene(t *testing.T, features uint16, credits int, set ...func(*Config)) *joinScene {
	t.Helper()
	setAskWithin(t, time.Hour) // Machines may be slow.
	s := &joinScene{scene: newScene(t)}
	var private []byte
	if features != 0 {
		private = smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true, Features: features, MaxReceiveSize: 8136}.Append(nil)
	}
	s.cfg.LingerTimeout = 50 * time.Millisecond
	for _, f := range set {
		f(&s.cfg)
	}
	s.c, s.p = s.conns(true, private)
	s.room = s.c.Info().MaxSendSize - smbdpeer.PayloadOffset
	if more := credits - int(goodResponse.CreditsGranted); more > 0 {
		s.grant(more)
	}
	return s
}

// setAskWithin sets askWithin for the test.
func setAskWithin(t *testing.T, d time.Duration) {
	before := askWithin
	askWithin = d
	t.Cleanup(func() { askWithin = before })
}

// grant sends credits, and returns when c has them.
func (s *joinScene) grant(n int) {
	s.t.Helper()
	before := s.c.Stats().EmptyReceived
	s.p.WaitCredit()
	s.p.Grant(uint16(n))
	require.True(s.t, eventually(func() bool { return s.c.Stats().EmptyReceived > before }))
}

// write writes the next n bytes.
func (s *joinScene) write(n int) {
	s.t.Helper()
	b := make([]byte, n)
	for i := range b {
		b[i] = byte((len(s.sent) + i) * 7 >> 2)
	}
	k, err := s.c.Write(b)
	require.NoError(s.t, err)
	require.Equal(s.t, n, k)
	s.sent = append(s.sent, b...)
}

// expect receives a segment with the next n bytes.
func (s *joinScene) expect(n int) (flags uint16) {
	s.t.Helper()
	h, payload := s.receive()
	require.Len(s.t, payload, n)
	defect.Bytes(s.t, s.sent[:n], payload)
	s.sent = s.sent[n:]
	return h.Flags
}

// receive receives the next message that has more than credits.
func (s *joinScene) receive() (smbdpeer.DataTransfer, []byte) {
	s.t.Helper()
	for {
		h, payload, ok := s.p.ReceiveData()
		require.True(s.t, ok, "the connection is over")
		if len(payload) > 0 || h.Flags&^smbdpeer.FlagWantsCredits != 0 {
			return h, payload
		}
	}
}

// exhaust uses up the credits for payload. One is left for FIN, and one for grants.
func (s *joinScene) exhaust() {
	s.t.Helper()
	for s.c.Stats().SendCredits > 2 {
		s.write(10)
		s.expect(10)
	}
}

// quiet fails the test if anything with payload is on its way.
func (s *joinScene) quiet() {
	s.t.Helper()
	time.Sleep(5 * time.Millisecond)
	for _, b := range s.p.Poll() {
		_, payload, err := smbdpeer.ParseDataTransfer(b)
		require.NoError(s.t, err)
		require.Empty(s.t, payload)
	}
}

// burst writes until Writes join others: the peer has been asked for an answer. A Write that
// meets another goroutine that is still posting does not count, and on a busy machine several
// may in turn.
func (s *joinScene) burst() {
	s.t.Helper()
	for n := 1; ; n++ {
		s.write(10)
		if s.expect(10) == smbdpeer.FlagResponseRequested {
			require.GreaterOrEqual(s.t, n, askAfter)
			return
		}
		require.Less(s.t, n, plenty-10)
	}
}

// plenty is more credits than a burst and what follows it need.
const plenty = 6 * askAfter

const joinFeatures = smbdpeer.FeatureFIN | smbdpeer.FeatureMessages

// Writes with nothing ahead of them go one by one. After a burst without an answer they join
// until the answer comes, and each full segment goes at once.
func TestWritesJoin(t *testing.T) {
	s := newJoinScene(t, joinFeatures, plenty)
	s.burst()
	for range 5 {
		s.write(30)
	}
	s.quiet()
	s.grant(plenty) // Anything is an answer.
	s.expect(150)
	s.burst()
	s.write(s.room - 1)
	s.quiet()
	s.write(3)
	s.expect(s.room)
	s.quiet()
	s.grant(1)
	s.expect(2)
	for range 3 {
		s.write(1)
		s.expect(1)
	}
}

// Pauses between small Writes are as good as answers: nothing joins, nobody is asked.
func TestPacedWritesGo(t *testing.T) {
	s := newJoinScene(t, joinFeatures, plenty)
	setAskWithin(t, 10*time.Millisecond)
	for range askAfter + 4 {
		s.write(10)
		require.Zero(t, s.expect(10))
		time.Sleep(askWithin / 8)
	}
}

// Without credits Writes join until a segment is full. Then they wait for a credit.
func TestWritesJoinWithoutCredits(t *testing.T) {
	s := newJoinScene(t, joinFeatures, 0)
	s.exhaust()
	s.write(s.room - 100)
	s.c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
	b := bytes.Repeat([]byte("x"), 500)
	n, err := s.c.Write(b)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Equal(t, 100, n, "so much of it has joined")
	s.sent = append(s.sent, b[:n]...)
	s.c.SetWriteDeadline(time.Now().Add(patience))
	s.quiet()
	wrote := writing(s.c, b[n:])
	s.grant(2)
	s.expect(s.room)
	require.Equal(t, result{500 - n, nil}, s.await(wrote))
	s.sent = append(s.sent, b[n:]...)
	s.expect(500 - n)
}

// What has to follow what was written follows it.
func TestJoinedGoesFirst(t *testing.T) {
	const message = 70
	for name, f := range map[string]func(s *joinScene){
		"FIN": func(s *joinScene) {
			require.NoError(s.t, s.c.CloseWrite())
			require.Equal(s.t, smbdpeer.FlagFIN, s.expect(40))
		},
		"Close": func(s *joinScene) {
			require.NoError(s.t, s.c.Close())
			require.Equal(s.t, smbdpeer.FlagFIN, s.expect(40))
		},
		"message": func(s *joinScene) {
			_, err := s.c.WriteMsg(make([]byte, message))
			require.NoError(s.t, err)
			s.expect(40)
			_, payload := s.receive()
			require.Len(s.t, payload, message)
		},
		"empty message": func(s *joinScene) {
			_, err := s.c.WriteMsg(nil)
			require.NoError(s.t, err)
			s.expect(40)
			_, payload := s.receive()
			require.Empty(s.t, payload)
		},
		"queued message": func(s *joinScene) {
			_, err := s.c.QueueMsg(make([]byte, message)).Result()
			require.NoError(s.t, err)
			s.expect(40)
			_, payload := s.receive()
			require.Len(s.t, payload, message)
		},
		"message that must not wait": func(s *joinScene) {
			n, err := s.c.WriteMsg(make([]byte, message), NonBlocking)
			require.NoError(s.t, err)
			require.Equal(s.t, message, n)
			s.expect(40)
			_, payload := s.receive()
			require.Len(s.t, payload, message)
		},
		"long Write": func(s *joinScene) {
			s.write(5 * s.room)
			s.expect(40)
			for range 5 {
				s.expect(s.room)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newJoinScene(t, joinFeatures, plenty)
			s.burst()
			s.write(20)
			s.write(20)
			s.quiet()
			f(s)
		})
	}
}

// A transfer follows what was written before it.
func TestJoinedBeforeTransfer(t *testing.T) {
	for _, m := range transferPeers {
		t.Run(m.name, func(t *testing.T) {
			features := smbdpeer.FeatureFIN | smbdpeer.FeatureTransfer
			if !m.reads {
				features |= smbdpeer.FeatureNoRead
			}
			setPace(t, maxTransfers*fetchSize, time.Hour)
			setAskWithin(t, time.Hour)
			s := &joinScene{scene: newScene(t)}
			s.cfg.TransferSize, s.cfg.LingerTimeout = minTransfer, -1
			s.c, s.p = s.conns(true, smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true, Features: features, MaxReceiveSize: 8136}.Append(nil))
			s.grant(plenty)
			s.burst()
			s.write(40)
			s.quiet()
			data := bytes.Repeat([]byte("transfer"), minTransfer)
			wrote := writing(s.c, data)
			s.expect(40)
			begun, initial, ok := s.p.ReceiveTransfer()
			require.True(t, ok)
			got := append(initial, s.p.Take(m.reads, begun)...)
			defect.Bytes(t, data, got)
			require.Equal(t, result{len(data), nil}, s.await(wrote))
		})
	}
}

// An expedited message goes ahead of what has joined and cannot go, and what is written after
// it joins nothing from before.
func TestJoinedAndExpedited(t *testing.T) {
	s := newJoinScene(t, joinFeatures, 0)
	s.exhaust()
	s.write(20)
	urgent := make(chan error, 1)
	go func() {
		_, err := s.c.WriteMsg([]byte("urgent"), Expedited)
		urgent <- err
	}()
	wrote := make(chan result, 1)
	require.True(t, eventually(func() bool { return s.c.Stats().CreditStalls > 0 }))
	go func() {
		n, err := s.c.Write([]byte("after"))
		wrote <- result{n, err}
	}()
	time.Sleep(5 * time.Millisecond)
	s.grant(1)
	first, payload := s.receive()
	s.grant(2)
	if string(payload) == "urgent" {
		require.Equal(t, smbdpeer.FlagExpedited, first.Flags)
		s.expect(20)
	} else {
		require.Len(t, payload, 20)
		_, payload = s.receive()
		require.Equal(t, "urgent", string(payload))
	}
	require.NoError(t, <-urgent)
	_, payload = s.receive()
	require.Equal(t, "after", string(payload))
	require.Equal(t, result{5, nil}, s.await(wrote))
}

// For a peer without half-close, such as one of plain SMB Direct, each Write is a message.
func TestPlainPeerGetsWrites(t *testing.T) {
	s := newJoinScene(t, 0, plenty)
	for range 3 * askAfter / 2 {
		s.write(10)
		require.Zero(t, s.expect(10))
	}
}

// What has joined and cannot go is lost if the peer leaves, and Close says so.
func TestJoinedIsLost(t *testing.T) {
	for name, hold := range map[string]struct {
		credits int
		f       func(s *joinScene)
	}{
		"no credit": {0, (*joinScene).exhaust},
		"no answer": {plenty, (*joinScene).burst},
	} {
		t.Run(name, func(t *testing.T) {
			s := newJoinScene(t, joinFeatures, hold.credits)
			hold.f(s)
			s.write(20)
			s.p.Close()
			require.True(t, eventually(func() bool { _, err := s.c.Write(nil); return err != nil }))
			require.ErrorIs(t, s.c.CloseContext(t.Context()), syscall.ECONNRESET)
		})
	}
}

// A direction can be ended although its reader takes nothing, and all of it arrives.
func TestJoinedEndsWithoutCredits(t *testing.T) {
	for name, end := range map[string]func(s *joinScene) error{
		"CloseWrite": func(s *joinScene) error { return s.c.CloseWrite() },
		"Close":      func(s *joinScene) error { return s.c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			s := newJoinScene(t, joinFeatures, 0)
			s.exhaust()
			s.write(20)
			s.quiet()
			require.NoError(t, end(s))
			require.Equal(t, smbdpeer.FlagFIN, s.expect(20))
		})
	}
}

// The same between two ends of this package, with as much unread as there can be.
func TestEndBeforeReading(t *testing.T) {
	for range heavy(20) {
		a, b := pipeOn(t, Config{MaxReceiveSize: 1024, MaxSendSize: 1024, MaxReceiveCredits: 8, TransferSize: -1})
		sent := 0
		require.NoError(t, a.SetWriteDeadline(time.Now().Add(20*time.Millisecond)))
		for p := make([]byte, 999); ; {
			n, err := a.Write(p)
			if sent += n; err != nil {
				require.ErrorIs(t, err, os.ErrDeadlineExceeded)
				break
			}
		}
		require.NoError(t, a.SetWriteDeadline(time.Time{}))
		within(t, "CloseWrite", func() { require.NoError(t, a.CloseWrite()) })
		got, err := io.ReadAll(b)
		require.NoError(t, err)
		defect.Bytes(t, make([]byte, sent), got)
		_, err = b.Write([]byte("answer"))
		require.NoError(t, err)
		require.NoError(t, defect.ReadFull(a, "answer"))
		a.Close()
		b.Close()
	}
}

// Where there are no buffers Writes wait instead of joining, and nothing is lost.
func TestJoinWithoutBuffers(t *testing.T) {
	s := newJoinScene(t, joinFeatures, 0)
	s.exhaust()
	s.device.LimitMemory(0)
	s.write(20)
	s.grant(10)
	s.expect(20)
}

// Bursts of all sizes and paces, written by several goroutines, arrive as they were written,
// also the last of them, after which nothing follows.
func TestBurstsArrive(t *testing.T) {
	for _, lb := range loopbacks {
		t.Run(lb.network, func(t *testing.T) {
			checkLeaks(t)
			a, b := pipe(t, lb.network, lb.address, &ListenConfig{}, &Dialer{})
			defer a.Close()
			defer b.Close()
			for round := range 30 {
				burst(t, a, b, uint64(round))
				burst(t, b, a, uint64(round))
			}
		})
	}
}

// burst writes records from several goroutines, and expects each of them whole and the
// records of one goroutine in order.
func burst(t *testing.T, from, to *Conn, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	writers := 1 + r.IntN(4)
	var sizes [4][]int
	total := 0
	for w := range writers {
		for range r.IntN(200) {
			n := 3 + r.IntN(1+r.IntN(1+r.IntN(20000)))
			sizes[w] = append(sizes[w], n)
			total += n
		}
	}
	to.SetReadDeadline(time.Now().Add(patience))
	var wg sync.WaitGroup
	for w := range writers {
		pace := r.IntN(3)
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for i, n := range sizes[w] {
				if pace == 2 && r.IntN(20) == 0 {
					time.Sleep(time.Duration(r.IntN(300)) * time.Microsecond)
				}
				record := bytes.Repeat([]byte{byte(i)}, n)
				record[0], record[1] = byte(w)<<4|byte(n>>8&15), byte(n)
				record[2] = byte(n >> 12)
				if k, err := from.Write(record); err != nil || k != n {
					t.Errorf("%d of %d bytes: %v", k, n, err)
				}
			}
		})
	}
	got := make([]byte, total)
	if r.IntN(2) == 0 {
		time.Sleep(time.Duration(r.IntN(2000)) * time.Microsecond)
	}
	_, err := io.ReadFull(to, got)
	require.NoError(t, err)
	wg.Wait()
	var next [4]int
	for len(got) > 0 {
		w := int(got[0] >> 4)
		n := int(got[0]&15)<<8 | int(got[1]) | int(got[2])<<12
		require.Less(t, next[w], len(sizes[w]))
		i := next[w]
		if n != sizes[w][i] {
			t.Fatal(defect.Wrong("record %d of writer %d has a length of %d and not %d", i, w, n, sizes[w][i]))
		}
		defect.Bytes(t, bytes.Repeat([]byte{byte(i)}, n-3), got[3:n], "record %d of writer %d", i, w)
		next[w]++
		got = got[n:]
	}
}
