package capture

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func FuzzDecode(f *testing.F) {
	for _, name := range []string{"rxe-rping.pcap", "siw-rping.pcap"} {
		for i, p := range frames(f, name) {
			if i%7 == 0 {
				f.Add(p.Data, uint32(p.Link), uint16(0))
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, link uint32, cut uint16) {
		p := Packet{Link: LinkType(link), Data: b, Length: len(b) + int(cut)}
		var d datagram
		if d.decode(&p) != decoded {
			return
		}
		if len(d.payload) > d.size || len(d.header)+d.size > p.Length {
			t.Fatalf("%d bytes of payload captured, %d on the wire, %d of header, of a packet of %d", len(d.payload), d.size, len(d.header), p.Length)
		}
	})
}

func FuzzRoCE(f *testing.F) {
	for _, p := range frames(f, "rxe-nfs.pcap")[:40] {
		f.Add(p.Data[42:], uint16(len(p.Data)-42))
	}
	f.Fuzz(func(t *testing.T, b []byte, size uint16) {
		n := max(int(size), len(b))
		var p RoCE
		if p.Parse(b, n) != nil {
			return
		}
		if p.Size < 0 || len(p.Payload) > p.Size || p.Whole && len(p.Payload) != p.Size || p.Size+int(p.Pad)+bthLen+icrcLen > n {
			t.Fatalf("%+v of %d bytes", p, n)
		}
		if p.PSN > psnMask || p.DestQP > psnMask {
			t.Fatalf("more than 24 bits: %+v", p)
		}
	})
}

func FuzzCM(f *testing.F) {
	for _, p := range frames(f, "rxe-rping.pcap") {
		if len(p.Data) == 322 {
			f.Add(p.Data[62 : 62+madLen])
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m CM
		if !m.parse(b) {
			return
		}
		m.ports()
		if len(m.consumerPrivate()) > len(m.Private) || len(m.Private) > madLen {
			t.Fatalf("%d bytes of private data", len(m.Private))
		}
	})
}

func FuzzRPCHeader(f *testing.F) {
	for _, u := range sends(f, "rxe-nfs.pcap") {
		f.Add(u)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h rpcHeader
		if h.parse(b) != nil {
			return
		}
		segments := len(h.reads) + len(h.reply)
		for _, w := range h.writes {
			segments += len(w)
		}
		if h.size > len(b) || segments*16 > h.size {
			t.Fatalf("%d segments in a header of %d bytes", segments, h.size)
		}
	})
}

func FuzzSMBDirect(f *testing.F) {
	for _, name := range []string{"siw-smbdirect.pcap", "rxe-transfers.pcap"} {
		for _, b := range sends(f, name) {
			f.Add(b[:min(len(b), 256)], uint16(len(b)))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, size uint16) {
		var h smbdHeader
		if n := max(uint64(size), uint64(len(b))); h.parse(b, n) && uint64(h.offset)+uint64(h.length) > n {
			t.Fatalf("%+v of %d bytes", h, n)
		}
		var x transferHeader
		if x.parse(b, &h) && (len(b) < transferEnd || x.op < Offer || x.op > Withdraw || h.length > 0 && (x.op > Request || h.offset < transferEnd)) {
			t.Fatalf("%+v behind %+v of %d bytes", x, h, len(b))
		}
		m := &Message{head: b, Size: uint64(len(b)), Kind: Send}
		looksLikeSMBDirect(m)
		looksLikeRPC(m)
	})
}

// sends returns the Sends of a capture.
func sends(tb testing.TB, file string) (all [][]byte) {
	for _, m := range run(tb, Config{Data: true}, frames(tb, file)).messages {
		if m.Kind == Send {
			all = append(all, m.Data)
		}
	}
	return all
}

// The input says for each packet of a capture what becomes of it. Whatever that
// is, what is called complete is among what was sent, in the same order.
func FuzzReassembly(f *testing.F) {
	captures := []string{"rxe-nfs.pcap", "rxe-rping.pcap", "rxe-send8k.pcap", "siw-crc-p2p-rping.pcap", "siw-smbdirect-frag.pcap", "siw-rping.pcap",
		"rxe-transfers.pcap", "siw-transfers.pcap"}
	packets := map[string][]Packet{}
	want := map[string]contents{}
	for _, op := range transferWays {
		name := op.String() // transfers through one piece of memory
		captures = append(captures, name)
		packets[name] = reused(op, 10).packets
	}
	protocols := map[string]Protocol{}
	for _, c := range chunkUsers {
		captures = append(captures, c.name)
		packets[c.name] = again(c.one, 10)
		protocols[c.name] = c.protocol
	}
	for i, name := range captures {
		if packets[name] == nil {
			packets[name] = frames(f, name)
		}
		want[name] = summarise(run(f, Config{Data: true, Protocol: protocols[name]}, packets[name]))
		f.Add(byte(i), byte(0), []byte("\x00\x01\x00\x02\x00\x03\x00\x14\x00\x31\x00"))
	}
	f.Fuzz(func(t *testing.T, which, window byte, fates []byte) {
		name := captures[int(which)%len(captures)]
		var ps, late []Packet
		for i, p := range packets[name] {
			fate := byte(0)
			if len(fates) > 0 {
				fate = fates[i%len(fates)]
				if i/len(fates)%2 == 1 {
					fate = 0 // what one does to the beginning one need not do again
				}
			}
			switch fate & 7 {
			case 1: // lost
			case 2: // twice
				ps = append(ps, p, p)
			case 3: // overtaken by the next ones
				late = append(late, p)
				continue
			case 4: // cut short
				q := p
				q.Data, q.Length = p.Data[:min(len(p.Data), 20+int(fate>>3)*8)], len(p.Data)
				ps = append(ps, q)
			case 5: // damaged
				q := p
				q.Data = bytes.Clone(p.Data)
				q.Data[len(q.Data)*int(fate>>3)/32] ^= 1 << (fate >> 5)
				if !protected(&p, &q) {
					q = p
				}
				ps = append(ps, q)
			default:
				ps = append(ps, p)
			}
			if len(late) > int(fate>>4) {
				ps, late = append(ps, late...), nil
			}
		}
		ps = append(ps, late...)
		res := run(t, Config{Data: true, Window: int(window), Protocol: protocols[name]}, ps)
		got := summarise(res)
		for d, list := range got.messages {
			if !within(list, want[name].messages[d]) {
				t.Errorf("%s: a complete message is none of those that were sent", d)
			}
		}
		for d, list := range got.uppers {
			if !within(list, want[name].uppers[d]) {
				t.Errorf("%s: a complete upper-layer message is none of those that were sent", d)
			}
		}
	})
}

// protected tells whether a checksum that is compared covers what differs.
func protected(p, q *Packet) bool {
	var d, e datagram
	if d.decode(p) != decoded || e.decode(q) != decoded || d.proto != protoUDP || e.proto != protoUDP {
		return false
	}
	var pk RoCE
	return len(e.payload) >= 8 && pk.Parse(e.payload[8:], e.size-8) == nil && !bytes.Equal(d.payload, e.payload)
}

// Any packets at all: there is no more to expect than that nothing breaks, and
// that all memory is given back. Checksums are passed over, or hardly anything
// would get through.
func FuzzPackets(f *testing.F) {
	for _, name := range []string{"rxe-nfs.pcap", "siw-smbdirect-frag.pcap", "rxe-atomic.pcap", "siw-terminate.pcap", "rxe-transfers.pcap", "siw-transfers.pcap"} {
		var b []byte
		for _, p := range frames(f, name) {
			if len(p.Data) > 400 || len(b) > 3000 {
				continue
			}
			b = binary.BigEndian.AppendUint16(b, uint16(len(p.Data)))
			b = append(b, p.Data...)
		}
		f.Add(b, byte(16), byte(3))
	}
	for _, tt := range givenUp {
		x := newPairScene()
		tt.make(x)
		if len(x.packets) > 100 {
			continue // which would take too long
		}
		var b []byte
		for _, p := range x.packets {
			b = append(binary.BigEndian.AppendUint16(b, uint16(len(p.Data))), p.Data...)
		}
		f.Add(b, byte(0), byte(tt.conns-1))
	}
	f.Fuzz(func(t *testing.T, b []byte, window, conns byte) {
		var ps []Packet
		for now := time.Unix(0, 0); len(b) >= 2; now = now.Add(time.Microsecond) {
			v := binary.BigEndian.Uint16(b)
			n := min(int(v&0x7ff), len(b)-2)
			ps = append(ps, Packet{Time: now, Link: LinkEthernet, Data: b[2 : 2+n], Length: n + int(v>>11)})
			b = b[2+n:]
		}
		for _, cfg := range []Config{
			{Data: true, Memory: 64 << 10, Conns: 1 + int(conns%8)},
			{},
			{Data: true, Protocol: SMBDirect},
			{Data: true, Protocol: RPCRDMA},
		} {
			cfg.Window, cfg.IgnoreChecksums = int(window), true
			if res := run(t, cfg, ps); res.stats.MemoryPeak > 256<<20 || cfg.Memory > 0 && res.stats.MemoryPeak > cfg.Memory {
				t.Errorf("%d bytes of memory", res.stats.MemoryPeak)
			}
		}
	})
}

// Upper-layer messages of any kind, in Sends of a connection that is understood.
func FuzzUpper(f *testing.F) {
	for i, name := range []string{"siw-smbdirect-frag.pcap", "rxe-nfs.pcap", "siw-smbdirect.pcap", "rxe-transfers.pcap"} {
		var b []byte
		for _, s := range sends(f, name)[:12] {
			b = append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
		}
		f.Add(b, i == 1)
	}
	f.Fuzz(func(t *testing.T, b []byte, rpc bool) {
		x := newRoCEBuilder()
		var psn [2]uint32
		for i := 0; len(b) >= 2; i++ {
			v := binary.BigEndian.Uint16(b)
			n := min(int(v&0xfff), len(b)-2)
			part := b[2 : 2+n]
			b = b[2+n:]
			side := int(v >> 12 & 1)
			send := func() {
				switch {
				case v>>13&3 == 1 && n >= 16: // a Write: key and address come first
					psn[side] = x.write(uint32(7+side), psn[side], binary.BigEndian.Uint64(part[4:]), binary.BigEndian.Uint32(part), part[12:], 1024)
				case v>>13&3 == 2 && n >= 16: // a Read: the same, of what comes behind them
					at := psn[side]
					x.add(0x0c, uint32(7+side), at, append(slices.Concat(part[4:12], part[:4]), 0, 0, byte(n-12>>8), byte(n-12)), nil)
					psn[side] += uint32(packets(uint32(n-12), 1024))
					x.reversed(func() { x.respond(uint32(8-side), at, part[12:], 1024, 0) })
				default:
					psn[side] = x.send(uint32(7+side), psn[side], part, 1024)
				}
			}
			if side == 1 {
				x.reversed(func() { send(); x.ack(7, psn[0]-1) })
			} else {
				send()
			}
		}
		cfg := Config{Data: true, Protocol: SMBDirect}
		if rpc {
			cfg.Protocol = RPCRDMA
		}
		for _, u := range run(t, cfg, x.packets).uppers {
			if u.Complete && (u.Got != u.Size || uint64(len(u.Data)) != u.Size && u.Kind != Credits) {
				t.Errorf("%v: %d of %d bytes, %d of data", u.Kind, u.Got, u.Size, len(u.Data))
			}
		}
	})
}

// Segments against a model that is a byte array.
func FuzzSegment(f *testing.F) {
	f.Add([]byte("\x00\x10\x20\x05\x30\x02"), uint16(100))
	f.Fuzz(func(t *testing.T, ops []byte, length uint16) {
		var table Segments
		const base = 1<<63 + 5
		s := table.Add(7, base, uint32(length))
		model, there := make([]byte, length), make([]bool, length)
		for i := 0; i+2 < len(ops); i += 3 {
			off, n := uint64(ops[i])<<3, int(ops[i+1])
			data := pattern(n, i)
			fits := off+uint64(n) <= uint64(length)
			switch ops[i+2] & 3 {
			case 0:
				if table.At(7, base+off, uint64(n)) != nil != fits {
					t.Fatalf("At(%d, %d) of %d", off, n, length)
				}
				if !fits {
					continue
				}
				gap := Range{uint64(n) / 4, uint64(n) / 2}
				var missing []Range
				if gap.Len() > 0 {
					missing = []Range{gap}
				}
				s.placed(base+off, uint64(n), missing, data)
				for j := range n {
					at := int(off) + j
					there[at] = uint64(j) < gap.From || uint64(j) >= gap.To
					if model[at] = data[j]; !there[at] {
						model[at] = 0
					}
				}
			default:
				if s.Place(base+off, data) != fits {
					t.Fatalf("Place(%d, %d bytes) of %d", off, n, length)
				}
				if fits {
					copy(model[off:], data)
					for j := range n {
						there[int(off)+j] = true
					}
				}
			}
		}
		size := 0
		var missing []Range
		for i, ok := range there {
			if ok {
				size++
				continue
			}
			if k := len(missing); k > 0 && missing[k-1].To == uint64(i) {
				missing[k-1].To++
			} else {
				missing = append(missing, Range{uint64(i), uint64(i) + 1})
			}
		}
		if s.Size(false) != size || s.Size(true)%4 != 0 || s.Size(true) < size || s.Size(true) > size+3 {
			t.Errorf("size %d, with padding %d; want %d", s.Size(false), s.Size(true), size)
		}
		if !slices.Equal(s.Missing(), missing) || s.Complete() != (len(missing) == 0) {
			t.Errorf("missing %v, complete %v; want %v", s.Missing(), s.Complete(), missing)
		}
		if !bytes.Equal(s.Data(false), model) {
			t.Error("other bytes than were placed")
		}
	})
}

// Queue pairs of two hosts that count from numbers of their own or all from 0, of which
// every packet was captured. The input says who says something next. However few
// connections may be open, those that are paired are peers, and no Read has another's
// bytes.
func FuzzPairing(f *testing.F) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		steps := make([]byte, 400)
		for i := range steps {
			steps[i] = byte(rnd.Uint32())
		}
		f.Add(byte(seed%9), []byte{0, 1, 20, 100}[seed/2%4], byte(rnd.Uint32()), steps)
	}
	f.Fuzz(func(t *testing.T, conns, window, own byte, steps []byte) {
		x := newPairScene()
		var next, answered [8]uint32
		for i := range next {
			if own>>i&1 != 0 {
				next[i] = uint32(i) << 20
			}
			answered[i] = next[i]
		}
		for _, s := range steps {
			i := int(s & 7)
			switch due := answered[i] != next[i]; {
			case s>>3 == 0:
				x.reversed(func() { x.write(sideA+uint32(i), next[i], 0, 0, nil, 256) })
			case s>>3 == 1:
				x.between(1, func() { x.write(sideA, uint32(s), 0, 0, nil, 256) })
			case s>>3 < 14 && !due, s>>3 < 6:
				x.ask(i, next[i])
				next[i]++
			case due:
				x.answer(i, answered[i])
				answered[i]++
			}
		}
		checkPeers(t, "", Config{Data: true, Conns: int(conns), Window: int(window)}, x.packets)
	})
}
