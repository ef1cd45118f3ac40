package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// exchange is a call that names a piece of memory, what is moved through that, and
// the answer, each of these as packets.
type exchange [3][]Packet

// caller makes exchanges through one piece of memory.
type caller struct {
	*talker
	id     int
	packet int    // the first that is in no exchange
	idle   bool   // The other side moves nothing.
	wait   func() // is called once, behind the next request
}

func newCaller() *caller {
	x := &caller{talker: newTalker(0)}
	x.packet = len(x.packets)
	return x
}

func (x *caller) tell(side Side, b []byte) []Packet {
	x.by(side, func(qp uint32, psn *uint32) { *psn = x.send(qp, *psn, b, mtu) })
	return x.rest()
}

func (x *caller) rest() []Packet {
	ps := x.packets[x.packet:]
	x.packet = len(x.packets)
	return ps
}

// move has the other side read data, or write it.
func (x *caller) move(kind Kind, data []byte) []Packet {
	if wait := x.wait; wait != nil {
		x.wait = nil
		wait()
	}
	if x.idle {
		return nil
	}
	if kind == Write {
		x.by(Responder, func(qp uint32, psn *uint32) { *psn = x.write(qp, *psn, sameAddr, sameKey, data, mtu) })
		return x.rest()
	}
	half := len(data) / 2
	x.pull(half, data[half:])
	x.pull(0, data[:half])
	return x.rest()
}

// rpc is a call with a read chunk or a write chunk.
func (x *caller) rpc(kind Kind, data []byte) exchange {
	x.id++
	xid, memory := uint32(x.id), ChunkSegment{sameKey, uint32(len(data)), sameAddr}
	var reads []readSegment
	var writes [][]ChunkSegment
	if kind == Read {
		reads = []readSegment{{8, memory}}
	} else {
		writes = [][]ChunkSegment{{memory}}
	}
	return exchange{
		x.tell(Initiator, rpcMessage(xid, rpcMsg, reads, writes, nil, rpc(xid, 0, "do"))),
		x.move(kind, data),
		x.tell(Responder, rpcMessage(xid, rpcMsg, nil, writes, nil, rpc(xid, 1, "done"))),
	}
}

// smb2 is a WRITE, or a READ. In front of it either side sends something else, as
// what comes first behind a gap may be the end of a longer message.
func (x *caller) smb2(kind Kind, data []byte) exchange {
	return x.answered(kind, data, func(response []byte) []byte { return response })
}

// answered is smb2 with another answer, which change makes of that of a success.
func (x *caller) answered(kind Kind, data []byte, change func([]byte) []byte) exchange {
	x.id++
	command := uint16(smb2Write)
	if kind == Write {
		command = smb2Read
	}
	le := binary.LittleEndian
	head := func(flags uint32) (b, body []byte) {
		b = make([]byte, smb2Header+48)
		copy(b, "\xfeSMB")
		le.PutUint16(b[12:], command)
		le.PutUint32(b[16:], flags)
		le.PutUint64(b[24:], uint64(x.id))
		return b, b[smb2Header:]
	}
	echo, _ := head(0)
	le.PutUint16(echo[12:], 13)
	first := slices.Concat(x.tell(Initiator, segmentOf(echo, 0)), x.tell(Responder, segmentOf(echo, 0)))
	request, body := head(0)
	channel, at := 36, 44
	if command == smb2Write {
		channel, at = 32, 40
	}
	le.PutUint64(body[8:], uint64(x.id)<<20)
	le.PutUint32(body[channel:], smb2RDMA)
	le.PutUint16(body[at:], uint16(len(request)))
	le.PutUint16(body[at+2:], 16)
	request = le.AppendUint64(request, sameAddr)
	request = le.AppendUint32(request, sameKey)
	request = le.AppendUint32(request, uint32(len(data)))
	response, body := head(smb2ResponseFlag)
	le.PutUint16(body, 17)
	if command == smb2Read {
		le.PutUint32(body[8:], uint32(len(data))) // DataRemaining. DataLength is 0.
	} else {
		le.PutUint32(body[4:], uint32(len(data))) // Count
	}
	return exchange{
		append(first, x.tell(Initiator, segmentOf(request, 0))...),
		x.move(kind, data),
		x.tell(Responder, segmentOf(change(response), 0)),
	}
}

// refusal is an answer with the status of an error and so many bytes that say more.
func refusal(status uint32, more int) func([]byte) []byte {
	return func(response []byte) []byte {
		le := binary.LittleEndian
		b := append(bytes.Clone(response[:smb2Header]), 9, 0, 0, 0)
		le.PutUint32(b[8:], status)
		b = le.AppendUint32(b, uint32(more))
		return append(b, make([]byte, max(more, 1))...) // There is always one.
	}
}

// again makes n exchanges, one after the other, of both kinds by turns.
func again(one func(*caller, Kind, []byte) exchange, n int) []Packet {
	x := newCaller()
	for i := range n {
		one(x, []Kind{Read, Write}[i%2], pattern(2000+i%3*600, i))
	}
	return x.packets
}

// chunkUsers are the protocols that name memory, with the number of messages that a
// call makes.
var chunkUsers = []struct {
	name     string
	protocol Protocol
	one      func(*caller, Kind, []byte) exchange
	messages int
}{{"RPC", RPCRDMA, (*caller).rpc, 2}, {"SMB2", SMBDirect, (*caller).smb2, 5}}

// Calls that name the same memory, one after the other, are told apart, whatever
// becomes of their packets.
func TestChunksUsedAgain(t *testing.T) {
	for _, tt := range chunkUsers {
		t.Run(tt.name, func(t *testing.T) {
			packets := again(tt.one, 30)
			whole := run(t, Config{Data: true, Protocol: tt.protocol}, packets)
			kinds := upperKinds(t, whole)
			if n := len(whole.uppers); n != 30*tt.messages {
				t.Fatalf("%d messages, want %d: %v", n, 30*tt.messages, kinds)
			}
			want := summarise(whole)
			for seed := range uint64(280) {
				rnd := rand.New(rand.NewPCG(seed, 6))
				rate := []int{4, 10, 30, 200, 1 << 30}[seed%5]
				kept := slices.Clone(packets[:2])
				for _, p := range packets[2:] {
					if rnd.IntN(rate) > 0 {
						kept = append(kept, p)
					} else if rnd.IntN(2) == 0 {
						p.Data, p.Length = p.Data[:min(len(p.Data), 54+rnd.IntN(150))], len(p.Data)
						kept = append(kept, p)
					}
				}
				if seed%2 == 1 {
					kept = append(kept[:2:2], shuffle(rnd, repeat(rnd, kept[2:]), []int{3, 20, 60}[seed%3])...)
				}
				cfg := Config{Data: true, Protocol: tt.protocol, Window: []int{4, 32, 1024}[seed/2%3]}
				got := summarise(run(t, cfg, kept))
				what := fmt.Sprintf("seed %d, one in %d, window %d", seed, rate, cfg.Window)
				for d, list := range got.uppers {
					if !within(list, want.uppers[d]) {
						t.Errorf("%s: %s: a complete message is none of those in the whole capture", what, d)
					}
				}
				if rate == 1<<30 && cfg.Window == 1024 {
					compare(t, what, got.uppers, want.uppers)
				}
			}
		})
	}
}

// Two calls name the same memory. The second is complete if it is certain what was
// moved for it, and never with what was moved for the first.
func TestCallsMissing(t *testing.T) {
	const (
		call1 = iota
		data1
		answer1
		call2
		data2
		answer2
	)
	all := []int{call1, data1, answer1, call2, data2, answer2}
	for _, tt := range []struct {
		name     string
		steps    []int // in this order
		cut      []int // of those, cut short
		complete bool  // the second
	}{
		{"all", all, nil, true},
		{"without the first call", all[1:], nil, true},
		{"without the first data", []int{call1, answer1, call2, data2, answer2}, nil, true},
		{"without the first answer", []int{call1, data1, call2, data2, answer2}, nil, true},
		{"without the first call and answer", []int{data1, call2, data2, answer2}, nil, true},
		{"without the second data", []int{call1, data1, answer1, call2, answer2}, nil, false},
		{"without the first call and the second data", []int{data1, answer1, call2, answer2}, nil, false},
		{"without the first answer and the second data", []int{call1, data1, call2, answer2}, nil, false},
		{"without the first call and answer and the second data", []int{data1, call2, answer2}, nil, false},
		{"the calls last", []int{data1, answer1, data2, answer2, call1, call2}, nil, true},
		{"the calls last, without the second data", []int{data1, answer1, answer2, call1, call2}, nil, false},
		{"the second call last, without the first", []int{data1, answer1, data2, answer2, call2}, nil, true},
		{"the first call cut short", all, []int{call1}, true},
		{"the first answer cut short", all, []int{answer1}, true},
		{"the first call cut short, without the second data", []int{call1, data1, answer1, call2, answer2}, []int{call1}, false},
		{"the first call and answer cut short, without the second data", []int{call1, data1, answer1, call2, answer2}, []int{call1, answer1}, false},
	} {
		for _, user := range chunkUsers {
			for _, kind := range []Kind{Read, Write} {
				for _, window := range []int{1, 1024} {
					x := newCaller()
					start := x.packets[:x.packet]
					data := [][]byte{pattern(3000, 1), pattern(3000, 2)}
					one, two := user.one(x, kind, data[0]), user.one(x, kind, data[1])
					steps := append(one[:], two[:]...)
					ps := slices.Clone(start)
					for _, i := range tt.steps {
						for _, p := range steps[i] {
							if slices.Contains(tt.cut, i) {
								p.Data, p.Length = p.Data[:70], len(p.Data)
							}
							ps = append(ps, p)
						}
					}
					what := fmt.Sprintf("%s, %v, %s, window %d", user.name, kind, tt.name, window)
					complete := false
					res := run(t, Config{Data: true, Protocol: user.protocol, Window: window}, ps)
					for i := range res.uppers {
						id, moved := moved(&res.uppers[i])
						if moved == nil {
							continue
						}
						if complete = complete || id == 2; !bytes.Equal(moved, data[id-1]) {
							t.Errorf("%s: number %d has other bytes", what, id)
						}
					}
					if complete != tt.complete && window > 1 {
						t.Errorf("%s: the second is complete: %v", what, complete)
					}
				}
			}
		}
	}
}

// moved returns the number of the call that u is of, and what was moved for it if
// that is all there; nil if this is another message.
func moved(u *UpperMessage) (id uint64, data []byte) {
	switch {
	case !u.Complete:
	case u.Kind == Transfer:
		return u.ID, u.Data
	case u.Kind == Call && len(u.ReadChunks) > 0:
		return uint64(u.XID), u.ReadChunks[0].Data
	case u.Kind == Reply && len(u.Writes) > 0:
		return uint64(u.XID), u.Writes[0].Data
	}
	return 0, nil
}

// An answer of SMB2 that is an error ends its request, whatever its status and length, and the
// memory that was named can be named again. A status alone does not make it an error.
func TestErrorAnswers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		wrong func([]byte) []byte
		moved bool
	}{
		{"the end of a file", refusal(0xc0000011, 0), false},
		{"an error with one byte more", refusal(0xc0000022, 1), false},
		{"an error with what it means", refusal(0xc000026e, 40), false},
		{"a warning", refusal(0x80000006, 0), false},
		{"nothing but the header and the length of the body", func(b []byte) []byte { return refusal(0xc0000011, 0)(b)[:smb2Header+2] }, false},
		{"an error without a status", refusal(0, 0), false},
		{"a warning, and data", func(b []byte) []byte {
			binary.LittleEndian.PutUint32(b[8:], 0x80000005)
			return b
		}, true},
	} {
		for _, kind := range []Kind{Read, Write} {
			t.Run(fmt.Sprintf("%s, %v", tt.name, kind), func(t *testing.T) {
				x := newCaller()
				data := [][]byte{pattern(3000, 1), pattern(3000, 2)}
				x.idle = !tt.moved
				x.answered(kind, data[0], tt.wrong)
				x.idle = false
				x.smb2(kind, data[1])
				want := map[uint64][]byte{2: data[1]}
				if tt.moved {
					want[1] = data[0]
				}
				res := run(t, Config{Data: true, Protocol: SMBDirect}, x.packets)
				for i := range res.uppers {
					u := &res.uppers[i]
					if u.Kind != Transfer {
						continue
					}
					if !u.Complete || !bytes.Equal(u.Data, want[u.ID]) {
						t.Errorf("number %d: complete %v, %d bytes, want %d", u.ID, u.Complete, len(u.Data), len(want[u.ID]))
					}
					delete(want, u.ID)
				}
				if len(want) > 0 || len(res.losses) > 0 {
					t.Errorf("%d transfers are missing; losses %v", len(want), res.losses)
				}
			})
		}
	}
}

// An answer that says that the answer is yet to come ends nothing.
func TestPendingAnswers(t *testing.T) {
	x := newCaller()
	data := pattern(3000, 1)
	x.wait = func() {
		pending := make([]byte, smb2Header)
		copy(pending, "\xfeSMB")
		binary.LittleEndian.PutUint16(pending[12:], smb2Read)
		binary.LittleEndian.PutUint32(pending[16:], smb2ResponseFlag)
		binary.LittleEndian.PutUint64(pending[24:], uint64(x.id))
		x.tell(Responder, segmentOf(refusal(0x103, 0)(pending), 0))
	}
	x.smb2(Write, data)
	res := run(t, Config{Data: true, Protocol: SMBDirect}, x.packets)
	u := only(res, Transfer)
	if u == nil || !u.Complete || !bytes.Equal(u.Data, data) {
		t.Error(u, res.losses)
	}
}

// Requests to which no answer was captured are given up when many later ones have come, and
// that is reported. Those that are not so old are kept.
func TestForgottenRequests(t *testing.T) {
	for name, ask := range map[string]func(x *caller){
		"SMB2": func(x *caller) {
			x.answered(Write, nil, func(response []byte) []byte {
				binary.LittleEndian.PutUint16(response[12:], 13) // of another command
				return response
			})
		},
		"RPC": func(x *caller) {
			x.id++
			x.tell(Initiator, rpcMessage(uint32(x.id), rpcMsg, nil, nil, nil, rpc(uint32(x.id), 0, "do")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := newCaller()
			asks := func(n int) {
				for range n {
					ask(x)
				}
			}
			const before = maxTransfers * 5 / 8
			asks(before)
			x.wait = func() { asks(maxTransfers + 10 - before) }
			cfg, data := Config{Data: true, Protocol: SMBDirect}, pattern(3000, 1)
			if name == "RPC" {
				cfg.Protocol = RPCRDMA
				x.rpc(Read, data)
			} else {
				x.smb2(Write, data)
			}
			res := run(t, cfg, x.packets)
			if len(res.losses) != 1 {
				t.Fatal(res.losses)
			}
			if l := res.losses[0]; l.From != Initiator || l.What != AnswersLost || l.Count != maxTransfers/2 {
				t.Error(l)
			}
			complete := false
			for i := range res.uppers {
				u := &res.uppers[i]
				if _, b := moved(u); bytes.Equal(b, data) {
					complete = u.Complete
				}
			}
			if !complete {
				t.Error("a request of the newer half is not complete")
			}
		})
	}
}
