package capture

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The queue pairs of one host are numbered from sideA on, their peers from sideB on. What
// number i reads is all bytes i+1, and so is its key.
const (
	sideA = 0x200
	sideB = 0x100
)

// checkPeers fails the test if a connection has queue pairs that are no peers, or a
// Read that is called complete has another's bytes.
func checkPeers(t *testing.T, what string, cfg Config, packets []Packet) *result {
	t.Helper()
	res := run(t, cfg, packets)
	for i := range res.messages {
		m := &res.messages[i]
		if a, b := m.Conn.Ends[0].QP, m.Conn.Ends[1].QP; a != 0 && b != 0 && max(a, b)-min(a, b) != sideA-sideB {
			t.Errorf("%s: QPs %#x and %#x are a connection", what, a, b)
		}
		if want := bytes.Repeat([]byte{byte(m.Key)}, int(m.Size)); m.Kind == Read && m.Complete && !bytes.Equal(m.Data, want) {
			t.Errorf("%s: a Read with key %d has others' bytes", what, m.Key)
		}
	}
	return res
}

// checkPairing is checkPeers, and returns how many connections were paired and how many
// Reads are complete.
func checkPairing(t *testing.T, what string, cfg Config, packets []Packet) (paired, reads int) {
	t.Helper()
	conns := map[*Conn]bool{}
	cfg.Data = true
	for _, m := range checkPeers(t, what, cfg, packets).messages {
		a, b := m.Conn.Ends[0].QP, m.Conn.Ends[1].QP
		assert.Equal(t, a == 0 || b == 0, m.Conn.Unpaired, "%s: QPs %#x and %#x", what, a, b)
		if a != 0 && b != 0 && !conns[m.Conn] {
			conns[m.Conn] = true
			paired++
		}
		if m.Kind == Read && m.Complete {
			reads++
		}
	}
	return paired, reads
}

func fill(i, n int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, n) }

// Two queue pairs that both count from 0: the second one's request comes while only
// the first one's answers have been seen.
func TestPairSharedNumbers(t *testing.T) {
	x := newRoCEBuilder()
	ask := func(i int, psn uint32) { x.add(0x0c, sideB+uint32(i), psn, reth(0x1000, uint32(i+1), 256), nil) }
	answer := func(i int, psn uint32) {
		x.reversed(func() { x.respond(sideA+uint32(i), psn, fill(i, 256), 1024, 0) })
	}
	ask(0, 0)
	ask(1, 0)
	answer(0, 0)
	ask(1, 1)
	answer(1, 0)
	answer(1, 1)
	ask(0, 1)
	answer(0, 1)
	paired, _ := checkPairing(t, "two", Config{}, x.packets)
	assert.Zero(t, paired, "either may be the other's")
}

// lockstep is traffic of n queue pairs that all count from first(i), not more than a few
// packets apart, as collective operations make it.
func lockstep(rnd *rand.Rand, n int, reads, bidirectional bool, first func(i int) uint32) []Packet {
	type event struct {
		at float64
		p  Packet
	}
	var events []event
	for _, active := range []bool{true, false}[:map[bool]int{true: 2, false: 1}[bidirectional]] {
		for i := range n {
			x := newRoCEBuilder()
			to, back := uint32(sideB+i), uint32(sideA+i)
			if !active {
				x.a, x.b = x.b, x.a
				to, back = back, to
			}
			at, psn := rnd.Float64()*3, first(i)
			take := func(at, step float64) {
				for _, p := range x.packets {
					events = append(events, event{at, p})
					at += step
				}
				x.packets = nil
			}
			for range 60 {
				if reads {
					x.add(0x0c, to, psn, reth(0x1000, uint32(i+1), 1024), nil)
					take(at, 0)
					x.reversed(func() { x.respond(back, psn, fill(i, 1024), 256, 0) })
					take(at+10, 0.5)
					at, psn = at+15, psn+4
					continue
				}
				m := []int{1, 4, 8}[rnd.IntN(3)]
				psn = x.write(to, psn, 0x1000, uint32(i+1), fill(i, m*256), 256)
				take(at, 1+rnd.Float64()*0.1)
				at += float64(m)
				x.reversed(func() { x.ack(back, psn-1) })
				take(at+8+rnd.Float64()*4, 0)
			}
		}
	}
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	var ps []Packet
	for _, e := range events {
		ps = append(ps, e.p)
	}
	return ps
}

func TestPairLockstep(t *testing.T) {
	zero := func(int) uint32 { return 0 }
	for _, reads := range []bool{false, true} {
		for _, both := range []bool{false, true} {
			for seed := range uint64(10) {
				rnd := rand.New(rand.NewPCG(seed, 0))
				ps := lockstep(rnd, 8, reads, both, zero)
				what := fmt.Sprintf("reads: %t, both ways: %t, seed %d", reads, both, seed)
				checkPairing(t, what, Config{}, ps)
				checkPairing(t, what+", begun late", Config{}, ps[len(ps)*3/10:])
				var some []Packet
				for _, p := range ps {
					if rnd.IntN(20) > 0 {
						some = append(some, p)
					}
				}
				checkPairing(t, what+", packets missing", Config{}, some)
				checkPairing(t, what+", out of order", Config{}, shuffle(rnd, slices.Clone(ps), 20))
			}
		}
	}
}

// Queue pairs whose numbers have nothing to do with each other are paired, also where
// the capture began late.
func TestPairProved(t *testing.T) {
	for seed := range uint64(10) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		for _, reads := range []bool{false, true} {
			ps := lockstep(rnd, 8, reads, false, func(i int) uint32 { return uint32(i)<<20 + uint32(seed)<<16 })
			paired, _ := checkPairing(t, "whole", Config{}, ps)
			require.Equal(t, 8, paired, "seed %d, reads: %t", seed, reads)
			paired, complete := checkPairing(t, "begun late", Config{}, ps[len(ps)*3/10:])
			require.Equal(t, 8, paired, "seed %d, reads: %t", seed, reads)
			if reads {
				require.GreaterOrEqual(t, complete, 8*40)
			}
		}
	}
}

// One queue pair after the other, all from 0, each with a peer before the next begins.
func TestPairOneAfterAnother(t *testing.T) {
	var ps []Packet
	for i := range 4 {
		x := newRoCEBuilder()
		for psn := range uint32(300) {
			x.add(0x0c, uint32(sideB+i), psn, reth(0x1000, uint32(i+1), 256), nil)
			x.reversed(func() { x.respond(uint32(sideA+i), psn, fill(i, 256), 1024, 0) })
		}
		ps = append(ps, x.packets...)
	}
	for _, window := range []int{0, 1, 10, 64, 100, 127, 200} {
		what := fmt.Sprintf("window %d", window)
		paired, complete := checkPairing(t, what, Config{Window: window}, ps)
		assert.Equal(t, 4, paired, what)
		if window == 0 || window >= startHold { // or answers do not wait until the first request is known
			assert.Equal(t, 4*300, complete, what)
		}
	}
}

// An answer that may be another's is tried again for as long as answers come: what stood
// in the way may have found its own peer.
func TestPairBehindFullWindow(t *testing.T) {
	const n = 2000
	for _, window := range []int{10, 64, 0} {
		x := newPairScene()
		x.ask(0, 0)
		x.ask(1, 0)
		for psn := range uint32(n) {
			x.ask(1, psn+1)
			x.answer(1, psn)
		}
		x.connect(0, 0)
		for psn := range uint32(n) {
			x.ask(1, n+psn+1)
			x.answer(1, n+psn)
		}
		paired, complete := checkPairing(t, "", Config{Window: window}, x.packets)
		assert.Equal(t, 2, paired, "window %d", window)
		assert.GreaterOrEqual(t, complete, n-pairAgain, "window %d", window)
	}
}
