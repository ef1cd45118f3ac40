package capture

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// direction names one side of a connection by what every packet of it tells.
func direction(c *Conn, from Side) string {
	a, b := c.Ends[from], c.Ends[from.Other()]
	if c.Transport == RoCE2 {
		return fmt.Sprintf("%v > %v QP 0x%x", a.Addr.Addr(), b.Addr.Addr(), b.QP)
	}
	return fmt.Sprint(a.Addr, " > ", b.Addr)
}

// contents are the messages of each direction in order: of RDMA, and of the
// upper layer.
type contents struct {
	messages, uppers map[string][]string
	partial          int
}

// summarise describes what is complete, to the last byte. Management messages
// belong to no sequence.
func summarise(res *result) contents {
	c := contents{messages: map[string][]string{}, uppers: map[string][]string{}}
	for i := range res.messages {
		m := &res.messages[i]
		if m.Kind == Management {
			continue
		}
		if !m.Complete {
			c.partial++
			continue
		}
		// Sends and Writes are in order, and so are Reads; not one among the
		// others.
		d := direction(m.Conn, m.From)
		if m.Kind == Read || m.Kind == CompareSwap || m.Kind == FetchAdd {
			d += " reads"
		}
		c.messages[d] = append(c.messages[d], fmt.Sprintf("%v %x+%x %d %x %s %d", m.Kind, m.Key, m.Addr, m.Size, m.Invalidate, digest(m.Data), m.Original))
	}
	for i := range res.uppers {
		u := &res.uppers[i]
		if !u.Complete {
			c.partial++
			continue
		}
		d := direction(u.Conn, u.From)
		switch {
		case u.Kind == Transfer && u.Op == 0:
			d += " SMB2"
		case u.Kind == Credits || u.Kind == Control:
			d += " asides" // which do not wait for what is sent by RDMA
		}
		line := fmt.Sprintf("%v %d %d %x %s %v %d %d", u.Kind, u.Sends, u.Size, u.XID, digest(u.Data), u.Op, u.ID, u.Rest)
		for _, k := range u.Writes {
			line += fmt.Sprint(" write ", k.Size, digest(k.Data))
		}
		c.uppers[d] = append(c.uppers[d], line)
	}
	return c
}

// shuffle moves each packet back by less than window places.
func shuffle(rnd *rand.Rand, ps []Packet, window int) []Packet {
	type placed struct {
		at int
		p  Packet
	}
	all := make([]placed, len(ps))
	for i, p := range ps {
		all[i] = placed{i + rnd.IntN(window), p}
	}
	slices.SortStableFunc(all, func(a, b placed) int { return cmp.Compare(a.at, b.at) })
	out := make([]Packet, len(ps))
	for i := range all {
		out[i] = all[i].p
	}
	return out
}

// repeat has a third of the packets come again.
func repeat(rnd *rand.Rand, ps []Packet) (out []Packet) {
	for _, p := range ps {
		out = append(out, p)
		if rnd.IntN(3) == 0 {
			out = append(out, p)
		}
	}
	return out
}

func compare(t *testing.T, what string, got, want map[string][]string) {
	t.Helper()
	for d, list := range want {
		if !slices.Equal(got[d], list) {
			t.Errorf("%s: %s: %d messages, want %d", what, d, len(got[d]), len(list))
			for i := range min(len(list), len(got[d])) {
				if got[d][i] != list[i] {
					t.Errorf("  the first other one is number %d: %s, want %s", i, got[d][i], list[i])
					break
				}
			}
		}
	}
	for d := range got {
		if want[d] == nil {
			t.Errorf("%s: there is a %s", what, d)
		}
	}
}

// Packets that overtake each other, or come twice, change nothing.
func TestPermutation(t *testing.T) {
	for _, tt := range linuxCaptures {
		t.Run(tt.file, func(t *testing.T) {
			ps := frames(t, tt.file)
			want := summarise(run(t, Config{Data: true}, ps))
			for seed := range uint64(12) {
				rnd := rand.New(rand.NewPCG(seed, 1))
				window := []int{2, 5, 16, 60}[seed%4]
				mixed := repeat(rnd, shuffle(rnd, ps, window))
				if seed%3 == 0 {
					mixed = shuffle(rnd, repeat(rnd, ps), window)
				}
				res := run(t, Config{Data: true}, mixed)
				got := summarise(res)
				what := fmt.Sprintf("seed %d, window %d", seed, window)
				compare(t, what, got.messages, want.messages)
				compare(t, what, got.uppers, want.uppers)
				if len(res.losses) > 0 || got.partial > want.partial {
					t.Errorf("%s: %d incomplete, losses %v", what, got.partial, res.losses)
				}
			}
		})
	}
}

// within tells whether all of got is in want, in the same order.
func within(got, want []string) bool {
	i := 0
	for _, g := range got {
		for i < len(want) && want[i] != g {
			i++
		}
		if i == len(want) {
			return false
		}
		i++
	}
	return true
}

// Packets that are missing take messages with them, but never change one; and
// what is missing is said.
func TestDrops(t *testing.T) {
	for _, tt := range linuxCaptures {
		t.Run(tt.file, func(t *testing.T) {
			ps := frames(t, tt.file)
			whole := run(t, Config{Data: true}, ps)
			want := summarise(whole)
			for seed := range uint64(40) {
				rnd := rand.New(rand.NewPCG(seed, 2))
				rate := []int{4, 10, 30, 200}[seed%4]
				var kept []Packet
				var dropped [][]byte
				for _, p := range ps {
					if rnd.IntN(rate) == 0 {
						dropped = append(dropped, p.Data)
					} else {
						kept = append(kept, p)
					}
				}
				if seed%2 == 1 {
					kept = shuffle(rnd, kept, 8)
				}
				cfg := Config{Data: true, Window: []int{16, 1024}[seed/2%2]}
				res := run(t, cfg, kept)
				got := summarise(res)
				what := fmt.Sprintf("seed %d, one in %d", seed, rate)
				for d, list := range got.messages {
					if !within(list, want.messages[d]) {
						t.Errorf("%s: %s: a complete message is none of those in the whole capture", what, d)
					}
				}
				for d, list := range got.uppers {
					if !within(list, want.uppers[d]) {
						t.Errorf("%s: %s: a complete upper-layer message is none of those in the whole capture", what, d)
					}
				}
				if len(dropped) == 0 {
					compare(t, what, got.messages, want.messages)
				}
			}
		})
	}
}

// What is said to be missing is exactly what was taken out, as far as something
// came before and after.
func TestGapsExact(t *testing.T) {
	const mtu = 1024
	type key struct {
		dst addr
		qp  uint32
	}
	for _, file := range []string{"rxe-rping.pcap", "rxe-send8k.pcap", "rxe-write.pcap", "rxe-nfs.pcap"} {
		t.Run(file, func(t *testing.T) {
			ps := frames(t, file)
			for seed := range uint64(20) {
				rnd := rand.New(rand.NewPCG(seed, 3))
				var kept []Packet
				gone, there := map[key]map[uint32]bool{}, map[key]map[uint32]bool{}
				first, last := map[key]uint32{}, map[key]uint32{}
				for _, p := range ps {
					drop := rnd.IntN(20) == 0
					if !drop {
						kept = append(kept, p)
					}
					k, psn, n := requestOf(t, p, mtu)
					if n == 0 {
						continue
					}
					set := there
					if drop {
						set = gone
					} else {
						if _, ok := first[key(k)]; !ok {
							first[key(k)] = psn
						}
						last[key(k)] = psn
					}
					if set[key(k)] == nil {
						set[key(k)] = map[uint32]bool{}
					}
					for i := range n {
						set[key(k)][(psn+uint32(i))&psnMask] = true
					}
				}
				said := map[key]map[uint32]bool{}
				for _, l := range run(t, Config{}, kept).losses {
					if l.What != PacketsLost {
						continue
					}
					to := l.Conn.Ends[l.From.Other()]
					k := key{to.Addr.Addr().As16(), to.QP}
					if said[k] == nil {
						said[k] = map[uint32]bool{}
					}
					for i := range l.Count {
						said[k][uint32(l.First+i)&psnMask] = true
					}
				}
				for k := range first {
					for psn := first[k]; psn != last[k]; psn = (psn + 1) & psnMask {
						if missing := gone[k][psn] && !there[k][psn]; missing != said[k][psn] {
							t.Errorf("seed %d: QP 0x%x, PSN %d: missing %v, said to be %v", seed, k.qp, psn, missing, said[k][psn])
						}
					}
				}
			}
		})
	}
}

// requestOf returns where a RoCE request goes, and how many PSNs from which on
// it takes; 0 if the packet is none.
func requestOf(t *testing.T, p Packet, mtu int) (to struct {
	dst addr
	qp  uint32
}, psn uint32, n int) {
	t.Helper()
	var d datagram
	var pk RoCE
	if d.decode(&p) != decoded || pk.Parse(d.payload[8:], d.size-8) != nil {
		t.Fatalf("not RoCE: % x", p.Data)
	}
	to.dst, to.qp = d.dst, pk.DestQP
	switch opcodes[pk.Opcode].class {
	case classSend, classWrite, classAtomic:
		if pk.Opcode.transport() == transportRC {
			return to, pk.PSN, 1
		}
	case classReadRequest:
		return to, pk.PSN, packets(pk.Length, mtu)
	}
	return to, 0, 0
}

// Of a TCP stream, too, all bytes that were taken out are said to be missing:
// at least these, for what cannot be made out without them is as good as gone.
func TestStreamGaps(t *testing.T) {
	for _, file := range []string{"siw-rping.pcap", "siw-crc-p2p-rping.pcap", "siw-smbdirect.pcap", "siw-smbdirect-frag.pcap"} {
		t.Run(file, func(t *testing.T) {
			ps := frames(t, file)
			for seed := range uint64(20) {
				rnd := rand.New(rand.NewPCG(seed, 4))
				kept, gone := slices.Clone(ps[:8]), 0
				for _, p := range ps[8 : len(ps)-8] {
					if rnd.IntN(30) > 0 {
						kept = append(kept, p)
						continue
					}
					var d datagram
					if d.decode(&p) != decoded {
						t.Fatalf("% x", p.Data)
					}
					gone += d.size - int(d.payload[12]>>4)*4
				}
				kept = append(kept, ps[len(ps)-8:]...)
				said, lost := 0, uint64(0)
				res := run(t, Config{}, kept)
				for _, l := range res.losses {
					if l.What == BytesLost {
						said += int(l.Count)
					}
				}
				for _, m := range res.messages {
					lost = m.Conn.Sent[0].Lost + m.Conn.Sent[1].Lost
				}
				if said < gone || int(lost) < gone {
					t.Errorf("seed %d: %d bytes gone, %d said, %d counted", seed, gone, said, lost)
				}
				if gone == 0 && said > 0 {
					t.Errorf("seed %d: nothing gone, %d bytes said", seed, said)
				}
			}
		})
	}
}
