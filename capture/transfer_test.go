package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// talker makes the packets of two rdmanet ends over RoCE, the first of which
// sends data. Both move it through one piece of memory, so that every transfer has
// the key and address of the one before.
type talker struct {
	*roceBuilder
	psn  [2]uint32
	last uint32 // ID of the latest transfer
	sent []byte // what of it is in the stream
}

const (
	sameKey, sameAddr = 0x1234, 1 << 40
)

// newTalker connects two ends that offer those features.
func newTalker(features byte) *talker {
	x := &talker{roceBuilder: newRoCEBuilder()}
	private := []byte{0, 0, 0, 16, 0, 0, 0, 16, 'R', 'D', 'N', 'T', 1, 0, 0, features, 0, 0, 32, 0}
	be := binary.BigEndian
	mad := func(attribute CMAttribute) (packet, body []byte) {
		b := make([]byte, madLen)
		b[0], b[1] = 1, madClassCM
		be.PutUint16(b[16:], uint16(attribute))
		be.PutUint32(b[madHeader:], 77) // communication ID
		return b, b[madHeader:]
	}
	deth := make([]byte, 8)
	req, b := mad(CMConnect)
	be.PutUint64(b[8:], 1<<24|7777)
	be.PutUint32(b[32:], far<<8)
	b[50] = 3 << 4 // path MTU 1024
	copy(b[140+cmPrivateIP:], private)
	x.add(0x64, 1, 0, deth, req)
	rep, b := mad(CMReply)
	be.PutUint32(b[4:], 77)
	be.PutUint32(b[12:], near<<8)
	copy(b[36:], private)
	x.reversed(func() { x.add(0x64, 1, 0, deth, rep) })
	return x
}

// by has one side send something.
func (x *talker) by(side Side, f func(qp uint32, psn *uint32)) {
	if side == Responder {
		x.reversed(func() { f(far, &x.psn[1]) })
	} else {
		f(near, &x.psn[0])
	}
}

// say appends a Data Transfer message, with a transfer header if op is not 0.
func (x *talker) say(side Side, op TransferOp, flags byte, id uint32, length int, rest uint64, payload []byte) {
	le := binary.LittleEndian
	b := make([]byte, transferEnd)
	le.PutUint16(b, 255)
	start := transferStart
	if op != 0 {
		start = transferEnd
		le.PutUint16(b[4:], smbdTransfer)
		b[24], b[25] = byte(op), flags
		le.PutUint32(b[28:], id)
		if op == Offer || op == Grant {
			le.PutUint64(b[32:], sameAddr)
			le.PutUint32(b[40:], sameKey)
		}
		le.PutUint32(b[44:], uint32(length))
		le.PutUint64(b[48:], rest)
	}
	if len(payload) > 0 {
		le.PutUint32(b[12:], uint32(start))
		le.PutUint32(b[16:], uint32(len(payload)))
	}
	x.by(side, func(qp uint32, psn *uint32) { *psn = x.send(qp, *psn, append(b[:start], payload...), mtu) })
}

// pull is an RDMA Read of data, which lies at an offset of the memory.
func (x *talker) pull(off int, data []byte) {
	first := x.psn[1]
	x.by(Responder, func(qp uint32, psn *uint32) {
		x.add(0x0c, qp, *psn, reth(sameAddr+uint64(off), sameKey, uint32(len(data))), nil)
		*psn += uint32(packets(uint32(len(data)), mtu))
	})
	x.respond(near, first, data, mtu, 0)
}

// transfer sends data by a transfer, of which the first bytes come along.
func (x *talker) transfer(rnd *rand.Rand, op TransferOp, data []byte) {
	initial := rnd.IntN(min(len(data), 100))
	x.last++
	x.say(Initiator, op, 0, x.last, len(data)-initial, 0, data[:initial])
	for at := initial; at < len(data); {
		n := min(len(data)-at, 1+rnd.IntN(4000))
		if op == Offer {
			x.pull(at-initial, data[at:at+n])
		} else {
			x.say(Responder, Grant, 0, x.last, n, 0, nil)
			x.by(Initiator, func(qp uint32, psn *uint32) { *psn = x.write(qp, *psn, sameAddr, sameKey, data[at:at+n], mtu) })
			x.say(Initiator, Written, 0, x.last, n, 0, nil)
		}
		at += n
	}
	if op == Offer {
		x.say(Responder, Done, 0, x.last, len(data)-initial, 0, nil)
	}
	x.sent = append(x.sent, data...)
}

// reused is a stream of many transfers, all of one piece of memory, with
// something small between them and some that are withdrawn.
func reused(op TransferOp, n int) *talker {
	rnd := rand.New(rand.NewPCG(7, 7))
	x := newTalker(1 << 3)
	for i := range n {
		x.transfer(rnd, op, pattern(1+rnd.IntN(9000), i))
		if i%3 == 0 {
			small := pattern(1+rnd.IntN(50), 100+i)
			x.say(Initiator, 0, 0, 0, 0, 0, small)
			x.sent = append(x.sent, small...)
		}
		if i%4 == 1 {
			part := pattern(700, 200+i)
			x.last++
			x.say(Initiator, op, 0, x.last, 5000, 0, nil)
			if op == Offer {
				x.pull(0, part)
				x.say(Initiator, Withdraw, flagCut*byte(i>>2&1), x.last, 0, 0, nil)
				x.say(Responder, Done, 0, x.last, len(part), 0, nil)
			} else {
				x.by(Initiator, func(qp uint32, psn *uint32) { *psn = x.write(qp, *psn, sameAddr, sameKey, part, mtu) })
				x.say(Initiator, Written, 0, x.last, len(part), 0, nil)
				x.say(Initiator, Written, flagEnd, x.last, 0, 0, nil)
			}
			x.sent = append(x.sent, part...)
		}
	}
	return x
}

var transferWays = []TransferOp{Offer, Request}

func joined(res *result, from Side) (stream []byte) {
	for i := range res.uppers {
		if u := &res.uppers[i]; u.From == from && (u.Kind == Transfer || u.Kind == Payload) {
			stream = append(stream, u.Data...)
		}
	}
	return stream
}

// Transfers through the same memory, one after the other, are told apart, whatever
// becomes of their packets.
func TestMemoryUsedAgain(t *testing.T) {
	for _, op := range transferWays {
		t.Run(op.String(), func(t *testing.T) {
			x := reused(op, 30)
			whole := run(t, Config{Data: true}, x.packets)
			upperKinds(t, whole)
			if !bytes.Equal(joined(whole, Initiator), x.sent) {
				t.Fatal("other bytes than were sent")
			}
			want := summarise(whole)
			for seed := range uint64(140) {
				rnd := rand.New(rand.NewPCG(seed, 5))
				rate := []int{4, 10, 30, 200, 1 << 30}[seed%5]
				var kept []Packet
				for _, p := range x.packets[2:] {
					if rnd.IntN(rate) > 0 {
						kept = append(kept, p)
					}
				}
				if seed%2 == 1 {
					kept = shuffle(rnd, repeat(rnd, kept), []int{3, 20, 60}[seed%3])
				}
				cfg := Config{Data: true, Window: []int{32, 1024}[seed/2%2]}
				if seed%7 == 0 {
					kept = kept[len(kept)/3:] // the capture begins late
				} else {
					kept = slices.Concat(x.packets[:2], kept) // with the set-up
				}
				got := summarise(run(t, cfg, kept))
				what := fmt.Sprintf("seed %d, one in %d", seed, rate)
				for d, list := range got.uppers {
					if !within(list, want.uppers[d]) {
						t.Errorf("%s: %s: a complete message is none of those in the whole capture", what, d)
					}
				}
				if rate == 1<<30 && seed%7 != 0 && cfg.Window == 1024 {
					compare(t, what, got.uppers, want.uppers)
				}
			}
		})
	}
}

// What belongs to a message says how much more of it comes, whether or not it is
// transferred; a transfer that is very long comes in parts; and where not all
// fits into memory nothing else is put in its place.
func TestLongTransfer(t *testing.T) {
	const read = 4 << 20
	data := stream(2*partLen+5000, 'x')
	for _, memory := range []int{64 << 20, 1 << 20} {
		x := newTalker(1 << 3)
		x.last = 1
		x.say(Initiator, Offer, 0, 1, len(data), 77+33, nil)
		x.say(Initiator, 0, 0, 0, 0, 0, nil) // credits do not wait
		for at := 0; at < len(data); at += read {
			x.pull(at, data[at:min(at+read, len(data))])
		}
		x.say(Initiator, Offer, 0, 0, 0, 33, pattern(77, 1))
		x.say(Responder, Done, 0, 1, len(data), 0, nil)
		x.say(Initiator, Offer, 0, 0, 0, 0, pattern(33, 2))
		res := run(t, Config{Data: true, Memory: memory}, x.packets)
		var sizes []uint64
		complete := 0
		left := uint64(len(data) + 77 + 33)
		for i := range res.uppers {
			u := &res.uppers[i]
			if u.Kind != Transfer && u.Kind != Payload {
				continue
			}
			sizes = append(sizes, u.Size)
			if left -= u.Size; u.Rest != left {
				t.Errorf("%v: %d more to come, want %d", u.Kind, u.Rest, left)
			}
			if u.Complete {
				complete++
				if u.Kind == Transfer && !bytes.Equal(u.Data, data[u.Offset:u.Offset+u.Size]) {
					t.Errorf("other bytes at %d", u.Offset)
				}
			}
		}
		if !slices.Equal(sizes, []uint64{partLen, partLen, 5000, 77, 33}) {
			t.Errorf("parts of %v", sizes)
		}
		if enough := memory > partLen; (complete == 5) != enough || (len(res.losses) == 0) != enough || res.stats.MemoryPeak > memory {
			t.Errorf("%d MiB: %d complete, %d losses, peak %d", memory>>20, complete, len(res.losses), res.stats.MemoryPeak)
		}
	}
}

// The receiver may end a transfer that it has no use for, and the sender may have
// to take one back of which nothing has come.
func TestTransferWithoutData(t *testing.T) {
	x := newTalker(1 << 3)
	x.say(Initiator, Request, 0, 1, 5000, 0, pattern(10, 1))
	x.say(Responder, Done, 0, 1, 5000, 0, nil)
	x.say(Initiator, Request, 0, 2, 5000, 0, nil)
	x.say(Initiator, Written, flagEnd|flagCut, 2, 0, 0, nil)
	x.say(Initiator, 0, 0, 0, 0, 0, pattern(20, 2))
	res := run(t, Config{Data: true}, x.packets)
	var seen []string
	for _, u := range res.uppers {
		if u.Kind != Control {
			seen = append(seen, fmt.Sprint(u.Kind, " ", u.ID, " ", u.Got, "/", u.Size, " ", u.Complete, u.Withdrawn, u.Cut))
		}
	}
	want := []string{"Transfer 1 10/5010 false false false", "Transfer 2 0/0 true true true", "Payload 0 20/20 true false false"}
	if !slices.Equal(seen, want) {
		t.Errorf("%q, want %q", seen, want)
	}
}

// Where large transfers were not agreed their flag means nothing.
func TestTransferFlagIgnored(t *testing.T) {
	for _, features := range []byte{0, 1 << 3} {
		x := newTalker(features)
		x.say(Initiator, Offer, 0, 1, 5000, 0, pattern(100, 1))
		var kinds []UpperKind
		for _, u := range run(t, Config{Data: true}, x.packets).uppers {
			kinds = append(kinds, u.Kind)
		}
		want := Payload
		if features != 0 {
			want = Transfer
		}
		if !slices.Equal(kinds, []UpperKind{want}) {
			t.Errorf("features %d: %v, want %v", features, kinds, want)
		}
	}
}
