package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
)

// rpcMessage makes the header of a message and what follows it.
func rpcMessage(xid, proc uint32, reads []readSegment, writes [][]ChunkSegment, reply []ChunkSegment, inline []byte) []byte {
	be := binary.BigEndian
	var b []byte
	words := func(v ...uint32) {
		for _, w := range v {
			b = be.AppendUint32(b, w)
		}
	}
	segment := func(g ChunkSegment) { words(g.Handle, g.Length, uint32(g.Offset>>32), uint32(g.Offset)) }
	words(xid, 1, 32, proc)
	for _, g := range reads {
		words(1, g.position)
		segment(g.ChunkSegment)
	}
	words(0)
	for _, list := range writes {
		words(1, uint32(len(list)))
		for _, g := range list {
			segment(g)
		}
	}
	words(0)
	if reply == nil {
		words(0)
	} else {
		words(1, uint32(len(reply)))
		for _, g := range reply {
			segment(g)
		}
	}
	return append(b, inline...)
}

// rpc returns the beginning of an RPC message: XID, direction, and a text.
func rpc(xid, direction uint32, text string) []byte {
	b := binary.BigEndian.AppendUint32(nil, xid)
	return append(binary.BigEndian.AppendUint32(b, direction), text...)
}

// only returns the first message of that kind; sides are in no order to each
// other.
func only(res *result, kind UpperKind) *UpperMessage {
	for i := range res.uppers {
		if res.uppers[i].Kind == kind {
			return &res.uppers[i]
		}
	}
	return &UpperMessage{}
}

// Two read chunks, one of two segments; each goes to its position, rounded up
// to words. The second position counts from the beginning of the whole. The list may have them
// in any order.
func TestReadChunks(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2}, {2, 0, 1}, {0, 2, 1}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) { testReadChunks(t, order) })
	}
}

func testReadChunks(t *testing.T, order []int) {
	x := newRoCEBuilder()
	one, two := pattern(3000, 1), pattern(77, 2)
	inline := rpc(5, 0, "aaaabbbbcccc")
	segments := []readSegment{
		{12, ChunkSegment{100, 2000, 1 << 32}},
		{12, ChunkSegment{101, 1000, 7}},
		{3016, ChunkSegment{102, 77, 9}},
	}
	var list []readSegment
	for _, i := range order {
		list = append(list, segments[i])
	}
	call := rpcMessage(5, rpcMsg, list, nil, nil, inline)
	x.send(near, 1, call, mtu)
	psn := uint32(500)
	read := func(key uint32, va uint64, data []byte) {
		x.reversed(func() { x.add(0x0c, far, psn, reth(va, key, uint32(len(data))), nil) })
		x.respond(near, psn, data, mtu, 0)
		psn += uint32(packets(uint32(len(data)), mtu))
	}
	read(102, 9, two)
	read(100, 1<<32, one[:1024])
	read(101, 7, one[2000:])
	read(100, 1<<32+1024, one[1024:2000])
	x.reversed(func() { x.send(far, psn, rpcMessage(5, rpcMsg, nil, nil, nil, rpc(5, 1, "done")), mtu) })

	res := run(t, Config{Data: true, Protocol: RPCRDMA}, x.packets)
	if len(res.uppers) != 2 {
		t.Fatalf("%d messages, losses %v", len(res.uppers), res.losses)
	}
	want := append(append([]byte(nil), inline[:12]...), one...)
	want = append(want, inline[12:16]...) // "bbbb" is at 3012
	want = append(append(want, two...), 0, 0, 0)
	want = append(want, inline[16:]...)
	u := only(res, Call)
	if u.Kind != Call || !u.Complete || !bytes.Equal(u.Data, want) || len(u.ReadChunks) != 2 || u.ReadChunks[0].Size != 3000 {
		t.Errorf("%v, complete %v, %d bytes, want %d", u.Kind, u.Complete, len(u.Data), len(want))
	}
	if r := only(res, Reply); string(r.Data[8:]) != "done" {
		t.Errorf("%+v", r)
	}
}

// The call may be nothing but a chunk, and so may the reply. Of the memory that
// was offered for the reply only a part is used.
func TestLongMessages(t *testing.T) {
	x := newRoCEBuilder()
	long, answer := append(rpc(6, 0, "long"), pattern(5000, 1)...), append(rpc(6, 1, "answer"), pattern(2990, 2)...)
	offered := []ChunkSegment{{200, 1000, 0}, {201, 4000, 0}, {202, 4000, 0}}
	used := []ChunkSegment{{200, 1000, 0}, {201, uint32(len(answer)) - 1000, 0}, {202, 0, 0}}
	x.send(near, 1, rpcMessage(6, rpcNoMsg, []readSegment{{0, ChunkSegment{100, uint32(len(long)), 64}}}, nil, offered, nil), mtu)
	x.reversed(func() { x.add(0x0c, far, 1, reth(64, 100, uint32(len(long))), nil) })
	x.respond(near, 1, long, mtu, 0)
	x.reversed(func() {
		psn := x.write(far, 6, 0, 200, answer[:1000], mtu)
		psn = x.write(far, psn, 0, 201, answer[1000:], mtu)
		x.send(far, psn, rpcMessage(6, rpcNoMsg, nil, nil, used, nil), mtu)
	})
	res := run(t, Config{Data: true, Protocol: RPCRDMA}, x.packets)
	if len(res.uppers) != 2 {
		t.Fatalf("%d messages", len(res.uppers))
	}
	for kind, want := range map[UpperKind][]byte{Call: long, Reply: answer} {
		if u := only(res, kind); !u.Complete || !bytes.Equal(u.Data, want) || u.XID != 6 {
			t.Errorf("%v: complete %v, %d bytes, want %d", u.Kind, u.Complete, len(u.Data), len(want))
		}
	}
}

// A handle that is used again does not bring back what was written under it
// before.
func TestHandleReuse(t *testing.T) {
	x := newRoCEBuilder()
	chunk := func(n uint32) [][]ChunkSegment { return [][]ChunkSegment{{{300, n, 4096}}} }
	old := pattern(2000, 1)
	psn := x.send(near, 1, rpcMessage(1, rpcMsg, nil, chunk(2000), nil, rpc(1, 0, "")), mtu)
	back := uint32(1)
	x.reversed(func() { back = x.write(far, back, 4096, 300, old, mtu) })
	back++ // the reply is missing
	x.send(near, psn, rpcMessage(2, rpcMsg, nil, chunk(2000), nil, rpc(2, 0, "")), mtu)
	x.reversed(func() {
		back = x.write(far, back, 4096, 300, pattern(1000, 2), mtu)
		back++ // and the second half
		x.send(far, back, rpcMessage(2, rpcMsg, nil, chunk(2000), nil, rpc(2, 1, "")), mtu)
	})
	for _, u := range run(t, Config{Data: true, Protocol: RPCRDMA, Window: 2}, x.packets).uppers {
		if u.Kind == Reply && (u.Complete || u.Writes[0].Complete) {
			t.Errorf("%+v", u)
		}
	}
}
