package capture

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

// pairScene is traffic of queue pairs whose connections come to an end before it is known
// what belongs together.
type pairScene struct{ *roceBuilder }

func newPairScene() pairScene { return pairScene{newRoCEBuilder()} }

func (x pairScene) ask(i int, psn uint32) {
	x.add(0x0c, sideB+uint32(i), psn, reth(0x1000, uint32(i+1), 256), nil)
}

func (x pairScene) answer(i int, psn uint32) {
	x.reversed(func() { x.respond(sideA+uint32(i), psn, fill(i, 256), 1024, 0) })
}

// between has the two other hosts of that number talk.
func (x pairScene) between(n byte, f func()) {
	a, b := x.a, x.b
	x.a, x.b = netip.AddrFrom4([4]byte{198, 51, n, 1}), netip.AddrFrom4([4]byte{198, 51, n, 2})
	f()
	x.a, x.b = a, b
}

// connect has the connection manager connect queue pair i, which counts from psn.
func (x pairScene) connect(i int, psn uint32) {
	x.connectQPs(sideA+uint32(i), sideB+uint32(i), psn)
}

func (x pairScene) connectQPs(from, to, psn uint32) {
	be := binary.BigEndian
	mad := func(attribute CMAttribute, qpn uint32, qpnAt, psnAt int) {
		b := make([]byte, madLen)
		b[0], b[1] = 1, madClassCM
		be.PutUint16(b[16:], uint16(attribute))
		be.PutUint32(b[madHeader:], from<<8|to&0xff) // communication IDs
		be.PutUint32(b[madHeader+4:], from<<8|to&0xff)
		be.PutUint32(b[madHeader+qpnAt:], qpn<<8)
		be.PutUint32(b[madHeader+psnAt:], psn<<8)
		x.add(0x64, 1, 0, make([]byte, 8), b)
	}
	mad(CMConnect, from, 32, 44)
	x.reversed(func() { mad(CMReply, to, 12, 20) })
}

const others = 2 // first number of the other hosts

// givenUp has traffic in which a queue pair is given up, after which it can no longer be
// told whom an answer is for.
var givenUp = []struct {
	name  string
	reads int
	conns int
	make  func(x pairScene)
}{
	{"what was given up last", 4, 3, func(x pairScene) {
		x.ask(0, 0)
		x.ask(1, 0)
		x.answer(1, 0)
		x.between(others, func() { x.ask(7, 0) }) // which evicts 0
		x.answer(1, 1)
		x.between(others+1, func() { x.ask(8, 0) }) // which evicts 1
		for psn := range uint32(130) {
			x.answer(1, psn+2)
		}
	}},
	{"the oldest", 6, 3, func(x pairScene) {
		for psn := range uint32(80) {
			x.reversed(func() { x.send(sideA+1, psn, []byte("x"), 256) })
		}
		x.ask(0, 0)
		x.ask(1, 0)
		x.answer(1, 0)
		x.between(others, func() { x.ask(7, 0) })
		x.answer(1, 1)
		x.between(others+1, func() { x.ask(8, 0) })
		x.between(others, func() { x.ask(7, 1) })
		x.between(others+2, func() { x.ask(9, 0) })
	}},
	{"connected anew", 3, 9, func(x pairScene) {
		x.ask(0, 0)
		x.ask(1, 0)
		x.answer(2, 0)
		x.connect(0, 1<<20)
		x.connect(1, 1<<20)
		x.between(others, func() { x.ask(7, 0) })
		for psn := range uint32(130) {
			x.answer(2, psn+1)
		}
	}},
	{"the true one", 3, 3, func(x pairScene) {
		x.ask(0, 0)
		x.ask(1, 0)
		x.answer(1, 0)
		x.ask(0, 1)
		x.between(others, func() { x.send(7, 0, []byte("x"), 256) }) // which evicts 1
		for psn := range uint32(130) {
			x.answer(1, psn+1)
		}
	}},
	{"before any answer", 5, 3, func(x pairScene) {
		x.ask(0, 0)
		x.between(others, func() { x.ask(7, 0) })
		x.between(others+1, func() { x.ask(8, 0) })
		x.ask(1, 0) // which evicts 0
		x.between(others+1, func() { x.ask(8, 1) })
		x.answer(0, 0)
	}},
	{"peers, while a Read is open", 8, 3, func(x pairScene) {
		x.ask(0, 0)
		x.answer(0, 0)
		x.between(others, func() { x.ask(7, 0) })
		x.between(others+1, func() { x.ask(8, 0) }) // which pairs 0
		x.ask(0, 1)
		x.between(others, func() { x.ask(7, 1) })
		x.between(others+1, func() { x.ask(8, 1) })
		x.ask(1, 1) // which evicts 0
		x.between(others+1, func() { x.ask(8, 2) })
		x.answer(0, 1)
	}},
	{"one that answered", 3, 3, func(x pairScene) {
		x.ask(0, 0)
		x.ask(0, 1)
		x.answer(0, 0)
		x.answer(1, 1) // and what asked for that was not captured
		x.ask(0, 2)
		x.between(others, func() { x.send(7, 0, []byte("x"), 256) }) // which evicts the first that answered
	}},
}

// A request that was given up is still among those that an answer may be for.
func TestPairGivenUp(t *testing.T) {
	for _, tt := range givenUp {
		t.Run(tt.name, func(t *testing.T) {
			x := newPairScene()
			tt.make(x)
			reads := 0
			for _, m := range checkPeers(t, "", Config{Data: true, Conns: tt.conns}, x.packets).messages {
				if m.Kind == Read {
					reads++
				}
			}
			assert.Equal(t, tt.reads, reads, "Reads handed out")
		})
	}
}

// A connection manager that connects a queue pair to itself connects nothing, and what
// is open stays so.
func TestConnectedToItself(t *testing.T) {
	x := newPairScene()
	x.between(others, func() { x.ask(1, 0) })
	x.b = x.a
	x.connectQPs(sideA, sideA, 0)
	x.add(0x0c, sideA, 0, reth(0x1000, 1, 256), nil)
	res := run(t, Config{Data: true}, x.packets)
	assert.Len(t, kinds(res, Read), 2)
	assert.Len(t, kinds(res, Management), 2)
}

// A connection manager may connect a queue pair that has a peer to another one: then what
// the former peer answers is no longer for it.
func TestConnectedToAnother(t *testing.T) {
	x := newPairScene()
	for psn := range uint32(200) {
		x.ask(0, psn)
		x.answer(0, psn)
	}
	x.ask(0, 200)
	x.connectQPs(sideA+7, sideB, 0)
	x.answer(0, 200)
	x.ask(0, 201)
	x.answer(0, 201)
	complete := map[[2]uint32]int{}
	for _, m := range kinds(run(t, Config{Data: true}, x.packets), Read) {
		if m.Complete {
			complete[[2]uint32{m.Conn.Ends[0].QP, m.Conn.Ends[1].QP}]++
		}
	}
	assert.Equal(t, map[[2]uint32]int{{sideA, sideB}: 200}, complete)
}
