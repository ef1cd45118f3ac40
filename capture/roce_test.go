package capture

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
)

const (
	mtu  = 1024
	near = 0x11 // QP that the packets of the builder's first host go to
	far  = 0x12
)

// kinds returns the messages of one kind.
func kinds(res *result, kind Kind) (list []Message) {
	for _, m := range res.messages {
		if m.Kind == kind {
			list = append(list, m)
		}
	}
	return list
}

// The first PSN is such that the sequence goes over its end in each message.
func TestWrap(t *testing.T) {
	for _, mode := range []string{"in order", "shuffled", "twice"} {
		x := newRoCEBuilder()
		const start = 0xfffffe
		send, write, read := pattern(5*mtu+1, 1), pattern(4*mtu, 2), pattern(6*mtu+3, 3)
		psn := x.send(near, start, send, mtu)
		x.reversed(func() { x.ack(far, psn-1) })
		psn = x.write(near, psn, 0x7000, 9, write, mtu)
		x.add(0x0c, near, psn, reth(0x9000, 8, uint32(len(read))), nil)
		x.reversed(func() { x.respond(far, psn, read, mtu, 0) })
		x.send(near, psn+uint32(packets(uint32(len(read)), mtu)), []byte("end"), mtu)
		ps := x.packets
		switch mode {
		case "shuffled":
			ps = slices.Clone(ps)
			slices.Reverse(ps[1:]) // the very first one tells where the capture begins
		case "twice":
			ps = slices.Concat(ps, ps)
		}
		res := run(t, Config{Data: true}, ps)
		if len(res.messages) != 4 || len(res.losses) > 0 {
			t.Fatalf("%s: %d messages, losses %v", mode, len(res.messages), res.losses)
		}
		for _, m := range res.messages {
			if !m.Complete {
				t.Errorf("%s: %+v", mode, m)
			}
		}
		if r := kinds(res, Read)[0]; !bytes.Equal(r.Data, read) || r.Key != 8 || r.Addr != 0x9000 {
			t.Errorf("%s: read %d bytes, %+v", mode, len(r.Data), r)
		}
		if w := kinds(res, Write)[0]; !bytes.Equal(w.Data, write) || w.Key != 9 || w.Addr != 0x7000 {
			t.Errorf("%s: wrote %d bytes, %+v", mode, len(w.Data), w)
		}
		if s := kinds(res, Send); !bytes.Equal(s[0].Data, send) || string(s[1].Data) != "end" {
			t.Errorf("%s: sent %d and %d bytes", mode, len(s[0].Data), len(s[1].Data))
		}
	}
}

// A Read that is tried again asks for the rest only, from the middle of its
// PSNs, and is answered without a First.
func TestReadRetry(t *testing.T) {
	x := newRoCEBuilder()
	read := pattern(20*mtu, 1)
	x.send(near, 99, pattern(2*mtu, 0), mtu)
	x.add(0x0c, near, 101, reth(0x10000, 8, 20*mtu), nil)
	x.reversed(func() { x.respond(far, 101, read[:7*mtu+mtu], mtu, 0) })
	cut := len(x.packets) - 1
	x.packets = slices.Delete(x.packets, cut, cut+1) // was a Last
	x.add(0x0c, near, 108, reth(0x10000+7*mtu, 8, 13*mtu), nil)
	x.reversed(func() { x.respond(far, 101, read, mtu, 7) })
	x.send(near, 121, []byte("next"), mtu)
	res := run(t, Config{Data: true}, x.packets)
	reads := kinds(res, Read)
	if len(reads) != 1 || !reads[0].Complete || !bytes.Equal(reads[0].Data, read) || len(res.losses) != 0 {
		t.Errorf("%+v, losses %v", reads, res.losses)
	}
	if s := kinds(res, Send); len(s) != 2 || !s[1].Complete || res.stats.Repeats != 1 {
		t.Errorf("%d Sends, %d repeats", len(s), res.stats.Repeats)
	}
}

// What goes back N sends packets again that were received, and a Write from its
// middle.
func TestGoBackN(t *testing.T) {
	x := newRoCEBuilder()
	data := pattern(6*mtu, 4)
	x.write(near, 50, 0x1000, 7, data, mtu)
	again := slices.Clone(x.packets[2:])
	lost := slices.Delete(slices.Clone(x.packets), 2, 3)
	res := run(t, Config{Data: true}, slices.Concat(lost, again))
	w := kinds(res, Write)
	if len(w) != 1 || !w[0].Complete || !bytes.Equal(w[0].Data, data) {
		t.Fatalf("%+v", w)
	}
	if res.stats.Repeats != 3 || len(res.losses) != 0 {
		t.Errorf("%d repeats, losses %v", res.stats.Repeats, res.losses)
	}
}

// One packet missing from within a message leaves a hole of its size; where it
// may have been an end and a beginning, there are two pieces.
func TestGapInMessage(t *testing.T) {
	for _, tt := range []struct {
		name    string
		make    func(x *roceBuilder)
		lose    []int
		missing []Range
		pieces  int
	}{
		{"Send, one", func(x *roceBuilder) { x.send(near, 10, pattern(5*mtu, 1), mtu) }, []int{2}, []Range{{2 * mtu, 3 * mtu}}, 1},
		{"Send, two", func(x *roceBuilder) { x.send(near, 10, pattern(6*mtu, 1), mtu) }, []int{2, 3}, nil, 2},
		{"Write, three", func(x *roceBuilder) { x.write(near, 10, 0, 1, pattern(6*mtu, 1), mtu) }, []int{1, 2, 3}, []Range{{mtu, 4 * mtu}}, 1},
		{"Write, the end", func(x *roceBuilder) {
			x.write(near, 10, 0, 1, pattern(6*mtu, 1), mtu)
			x.send(near, 16, []byte("x"), mtu)
		}, []int{4, 5}, []Range{{4 * mtu, 6 * mtu}}, 1},
		{"Write, the beginning", func(x *roceBuilder) {
			x.send(near, 9, []byte("x"), mtu)
			x.write(near, 10, 0, 1, pattern(3*mtu, 1), mtu)
		}, []int{1}, nil, 1},
	} {
		x := newRoCEBuilder()
		tt.make(x)
		want := PacketsLost
		first := uint64(10 + tt.lose[0])
		if tt.name == "Write, the beginning" {
			first = 10
		}
		ps := slices.Delete(slices.Clone(x.packets), tt.lose[0], tt.lose[len(tt.lose)-1]+1)
		res := run(t, Config{Data: true}, ps)
		var partial []Message
		for _, m := range res.messages {
			if !m.Complete {
				partial = append(partial, m)
			}
		}
		if len(partial) != tt.pieces {
			t.Errorf("%s: %d pieces, want %d", tt.name, len(partial), tt.pieces)
			continue
		}
		if tt.missing != nil && (!slices.Equal(partial[0].Missing, tt.missing) || partial[0].HeadLost || partial[0].TailLost) {
			t.Errorf("%s: missing %v, want %v", tt.name, partial[0].Missing, tt.missing)
		}
		if tt.pieces == 2 && !(partial[0].TailLost && partial[1].HeadLost) {
			t.Errorf("%s: %+v", tt.name, partial)
		}
		if len(res.losses) != 1 || res.losses[0].What != want || res.losses[0].First != first || res.losses[0].Count != uint64(len(tt.lose)) {
			t.Errorf("%s: losses %v", tt.name, res.losses)
		}
	}
}

// Without the messages of the connection manager both directions are found by
// what answers what.
func TestPairing(t *testing.T) {
	for _, file := range []string{"rxe-nfs.pcap", "rxe-rping.pcap", "rxe-send8k.pcap", "rxe-atomic.pcap"} {
		ps := frames(t, file)
		want := summarise(run(t, Config{Data: true}, ps))
		var bare []Packet
		for _, p := range ps {
			if p.Data[42] != 0x64 {
				bare = append(bare, p)
			}
		}
		res := run(t, Config{Data: true}, bare)
		got := summarise(res)
		compare(t, file, got.messages, want.messages)
		compare(t, file, got.uppers, want.uppers)
		if len(res.losses) > 0 {
			t.Errorf("%s: %v", file, res.losses)
		}
		for _, m := range res.messages {
			if m.Conn.SetUp || m.Conn.Ends[0].QP == 0 || m.Conn.Ends[1].QP == 0 {
				t.Errorf("%s: %v", file, m.Conn)
				break
			}
		}
	}
}

func TestConnectionManager(t *testing.T) {
	res := run(t, Config{}, frames(t, "rxe-nfs.pcap"))
	c := res.messages[0].Conn
	want := [2]netip.AddrPort{netip.MustParseAddrPort("10.77.0.2:34521"), netip.MustParseAddrPort("10.77.0.1:20049")}
	if c.Ends[1].Addr != want[1] || c.Ends[0].Addr.Addr() != want[0].Addr() || c.Ends[0].Addr.Port() == 0 {
		t.Errorf("%v", c)
	}
	if !c.SetUp || !c.Closed || c.MTU != 1024 || c.Protocol != RPCRDMA {
		t.Errorf("%+v", c)
	}
	// RFC 8797: magic, version, flags, sizes.
	if !bytes.HasPrefix(c.Ends[0].Private, []byte{0xf6, 0xab, 0x0e, 0x18, 1}) {
		t.Errorf("private data % x", c.Ends[0].Private[:8])
	}
	var seen []CMAttribute
	for _, m := range res.messages {
		if m.Kind == Management {
			seen = append(seen, m.CM.Attribute)
		}
	}
	if !slices.Equal(seen, []CMAttribute{CMConnect, CMReply, CMReady, CMDisconnect, CMDisconnected}) {
		t.Errorf("%v", seen)
	}
}

// A packet that was cut when captured has its place and size, but not its bytes.
func TestSnapLength(t *testing.T) {
	for _, tt := range linuxCaptures {
		if tt.crc || tt.file == "siw-transfers.pcap" {
			continue // nothing that was cut can be checked; a TCP segment has several FPDUs
		}
		ps := frames(t, tt.file)
		want := run(t, Config{}, ps)
		for i := range ps {
			ps[i].Length = len(ps[i].Data)
			ps[i].Data = ps[i].Data[:min(128, len(ps[i].Data))]
		}
		res := run(t, Config{Data: true}, ps)
		for _, kind := range []Kind{Send, Write, Read} {
			got, all := kinds(res, kind), kinds(want, kind)
			if len(got) != len(all) {
				t.Errorf("%s: %d of %v, want %d", tt.file, len(got), kind, len(all))
				continue
			}
			bySize := func(a, b Message) int { return cmp.Compare(a.Size, b.Size) }
			slices.SortStableFunc(got, bySize)
			slices.SortStableFunc(all, bySize)
			for i, m := range got {
				if m.Size != all[i].Size || m.Complete != (m.Got == m.Size) || m.Size > 128 && m.Complete {
					t.Errorf("%s: %v: %d of %d bytes, want size %d", tt.file, kind, m.Got, m.Size, all[i].Size)
				}
			}
		}
	}
}

// What has a wrong checksum is not used, unless it is asked for.
func TestICRC(t *testing.T) {
	for _, host := range []string{"192.0.2.2", "2001:db8::2"} {
		x := newRoCEBuilder()
		x.b = netip.MustParseAddr(host)
		if x.b.Is6() {
			x.a = netip.MustParseAddr("2001:db8::1")
		}
		x.send(near, 1, pattern(300, 1), mtu)
		good := x.packets[0].Data
		for i := range good {
			b := bytes.Clone(good)
			b[i] ^= 0x40
			ps := []Packet{{Link: LinkEthernet, Data: b}}
			n := len(run(t, Config{}, ps).messages)
			if taken := n > 0; taken != invariant(i-14, x.b.Is6()) {
				t.Errorf("%s: byte %d changed: taken %v", host, i, taken)
			}
		}
		b := bytes.Clone(good)
		b[len(b)-20] ^= 1
		if n := len(run(t, Config{IgnoreChecksums: true}, []Packet{{Link: LinkEthernet, Data: b}}).messages); n != 1 {
			t.Errorf("%d messages without checksums", n)
		}
	}
}

// invariant tells whether a byte behind the Ethernet header may change on the
// way.
func invariant(i int, v6 bool) bool {
	if i < 0 {
		return i < -2 // Ethernet addresses
	}
	if v6 {
		return i >= 1 && i <= 3 || i == 7 || i == 46 || i == 47 || i == 52
	}
	return i == 1 || i == 8 || i == 10 || i == 11 || i == 26 || i == 27 || i == 32
}

func TestImmediateAndInvalidate(t *testing.T) {
	x := newRoCEBuilder()
	word := []byte{1, 2, 3, 4}
	x.add(0x05, near, 1, word, []byte("imm"))
	x.add(0x17, near, 2, word, []byte("inv"))
	x.add(0x0b, near, 3, append(reth(5, 6, 3), word...), []byte("wri"))
	x.add(0x24, near+1, 1, nil, []byte("unreliable"))
	x.add(0x65, near+2, 1, []byte{0, 0, 0, 9, 0, 0, 0, 7, 1, 2, 3, 4}, []byte("datagram"))
	res := run(t, Config{Data: true}, x.packets)
	if len(res.messages) != 5 {
		t.Fatalf("%d messages", len(res.messages))
	}
	for _, m := range res.messages {
		switch string(m.Data) {
		case "imm", "wri":
			if !m.HasImm || m.Imm != 0x01020304 || m.HasInvalidate {
				t.Errorf("%+v", m)
			}
		case "inv":
			if !m.HasInvalidate || m.Invalidate != 0x01020304 || m.HasImm {
				t.Errorf("%+v", m)
			}
		case "datagram":
			if m.Kind != Datagram || m.SrcQP != 7 || m.QKey != 9 || m.Imm != 0x01020304 {
				t.Errorf("%+v", m)
			}
		}
		if !m.Complete {
			t.Errorf("%+v", m)
		}
	}
}

// A QP that is connected again begins anywhere.
func TestRestart(t *testing.T) {
	x := newRoCEBuilder()
	for i := range uint32(20) {
		x.send(near, 1000+i, []byte("first"), mtu)
	}
	for i := range uint32(80) {
		x.send(near, 900000+i, []byte("second"), mtu)
	}
	res := run(t, Config{}, x.packets)
	if len(res.messages) != 100 || len(res.losses) != 1 || res.losses[0].What != Restarted {
		t.Errorf("%d messages, losses %v", len(res.messages), res.losses)
	}
}

// Packets wait in no more memory than there may be, and then what they wait for
// is given up.
func TestMemoryBound(t *testing.T) {
	x := newRoCEBuilder()
	psn := x.send(near, 1, []byte("x"), mtu)
	psn++ // missing
	for range 100 {
		psn = x.send(near, psn, pattern(mtu, 1), mtu)
	}
	const limit = 32 << 10
	res := run(t, Config{Data: true, Memory: limit}, x.packets)
	if res.stats.MemoryPeak > limit || len(res.messages) != 101 {
		t.Errorf("%d bytes, %d messages", res.stats.MemoryPeak, len(res.messages))
	}
	x = newRoCEBuilder()
	x.write(near, 1, 0, 1, pattern(64*mtu, 1), mtu)
	res = run(t, Config{Data: true, Memory: limit}, x.packets)
	if m := res.messages[0]; m.Complete || !m.Overflow || m.Got != 64*mtu || m.Data != nil ||
		len(res.losses) == 0 || res.losses[len(res.losses)-1].What != MemoryShort {
		t.Errorf("%d of %d bytes, complete %v, overflow %v, data %v, losses %v", m.Got, m.Size, m.Complete, m.Overflow, m.Data != nil, res.losses)
	}
}

func TestConnBound(t *testing.T) {
	x := newRoCEBuilder()
	for qp := range uint32(50) {
		x.send(qp+2, 1, []byte("x"), mtu)
	}
	res := run(t, Config{Conns: 8}, x.packets)
	if len(res.messages) != 50 || res.stats.Evicted != 42 || res.stats.Conns != 50 {
		t.Errorf("%d messages, %+v", len(res.messages), res.stats)
	}
}

func TestLatency(t *testing.T) {
	x := newRoCEBuilder()
	psn := x.send(near, 5, pattern(3*mtu, 1), mtu) // 3 µs from its first packet on
	x.reversed(func() { x.ack(far, psn-1) })
	res := run(t, Config{}, x.packets)
	l := res.messages[0].Conn.Sent[0].Latency
	if l.Count != 1 || l.Min != 3000 || l.Max != 3000 || l.Mean() != 3000 || l.Quantile(0.5) != 3000 {
		t.Errorf("%+v", l)
	}
}

func TestDecodeLinks(t *testing.T) {
	x := newRoCEBuilder()
	x.send(near, 1, []byte("x"), mtu)
	ip := x.packets[0].Data[14:]
	be := binary.BigEndian
	vlan := append(bytes.Clone(x.packets[0].Data[:12]), 0x88, 0xa8, 0, 1, 0x81, 0, 0, 2, 8, 0)
	sll := be.AppendUint16(make([]byte, 14), etherIPv4)
	sllVLAN := append(be.AppendUint16(make([]byte, 14), 0x8100), 0, 5, 8, 0)
	sll2VLAN := append(be.AppendUint16(nil, 0x8100), append(make([]byte, 18), 0, 5, 8, 0)...)
	sll2 := append(be.AppendUint16(nil, etherIPv4), make([]byte, 18)...)
	frag := bytes.Clone(x.packets[0].Data)
	frag[20] = 0x20
	for _, tt := range []struct {
		name string
		p    Packet
		want int
	}{
		{"VLAN", Packet{Link: LinkEthernet, Data: append(vlan, ip...)}, 1},
		{"cooked", Packet{Link: LinkLinuxSLL, Data: append(sll, ip...)}, 1},
		{"cooked, version 2", Packet{Link: LinkLinuxSLL2, Data: append(sll2, ip...)}, 1},
		{"cooked, VLAN", Packet{Link: LinkLinuxSLL, Data: append(sllVLAN, ip...)}, 1},
		{"cooked, version 2, VLAN", Packet{Link: LinkLinuxSLL2, Data: append(sll2VLAN, ip...)}, 1},
		{"VLAN tag cut", Packet{Link: LinkEthernet, Data: vlan[:len(vlan)-2]}, 0},
		{"loopback", Packet{Link: LinkNull, Data: append([]byte{2, 0, 0, 0}, ip...)}, 1},
		{"raw", Packet{Link: LinkRaw, Data: ip}, 1},
		{"raw, the number of most systems", Packet{Link: 12, Data: ip}, 1},
		{"raw, the number of OpenBSD", Packet{Link: 14, Data: ip}, 1},
		{"Ethernet padding", Packet{Link: LinkEthernet, Data: append(bytes.Clone(x.packets[0].Data), 0, 0, 0)}, 1},
		{"fragment", Packet{Link: LinkEthernet, Data: frag}, 0},
		{"other link", Packet{Link: 9999, Data: ip}, 0},
		{"empty", Packet{Link: LinkEthernet}, 0},
	} {
		res := run(t, Config{}, []Packet{tt.p})
		if n := len(res.messages); n != tt.want {
			t.Errorf("%s: %d messages, want %d", tt.name, n, tt.want)
		}
		if other := res.stats.OtherLinks == 1 && res.stats.OtherLink == tt.p.Link; other != (tt.name == "other link") {
			t.Errorf("%s: %d packets of other links", tt.name, res.stats.OtherLinks)
		}
	}
}
