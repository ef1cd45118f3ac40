package rdmanet

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// keyDevices are the kinds of devices, by what a key of theirs opens to whom.
var keyDevices = []struct {
	name       string
	apart, lax bool
}{
	{"keys of a queue pair", false, false},
	{"keys of a domain", true, false},
	{"keys of a domain, all readable", true, true},
}

func keyDevice(t testing.TB, i int) *modest {
	m := newModest(t, 1<<20, 1<<14, false)
	m.apart, m.lax = keyDevices[i].apart, keyDevices[i].lax
	return m
}

func eachKeyDevice(t *testing.T, f func(t *testing.T, m *modest)) {
	for i, d := range keyDevices {
		t.Run(d.name, func(t *testing.T) { f(t, keyDevice(t, i)) })
	}
}

// What is exposed is open to the connection's own peer, within its bounds and
// rights, and only until it is closed. Whatever else is tried ends the connection
// of whoever tries it, and no other.
func TestExpose(t *testing.T) {
	const size, piece = 10000, 100
	for _, tt := range []struct {
		name      string
		op        ibv.Opcode
		at        int64
		neighbour bool // tries it
		closed    bool
	}{
		{"Write by a neighbour", ibv.OpWrite, 0, true, false},
		{"Read by a neighbour", ibv.OpRead, 0, true, false},
		{"Write one byte before", ibv.OpWrite, -1, false, false},
		{"Read one byte before", ibv.OpRead, -1, false, false},
		{"Write to one byte behind", ibv.OpWrite, size - piece + 1, false, false},
		{"Read to one byte behind", ibv.OpRead, size - piece + 1, false, false},
		{"Write after Close", ibv.OpWrite, 0, false, true},
		{"Read after Close", ibv.OpRead, 0, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachKeyDevice(t, func(t *testing.T, m *modest) {
				s := newSceneOn(t, m)
				c, p := s.conns(false, rdmanetPrivate)
				neighbour, q := s.conns(false, rdmanetPrivate)
				for _, buf := range []*Buffer{nil, alloc(t, size)} {
					mem := bytes.Repeat([]byte{1}, size+2*piece)[piece:][:size]
					if buf != nil {
						mem = buf.Bytes()
						copy(mem, bytes.Repeat([]byte{1}, size))
					}
					// Expose is what transfers open the caller's memory by. The test calls it with the
					// connection's own queue pair, as a transfer opens no memory with both rights.
					mr, err := c.dom.Expose(c.lane.qp, mem, ibv.AccessLocalWrite|ibv.AccessRemoteWrite|ibv.AccessRemoteRead)
					require.NoError(t, err)
					require.Equal(t, make([]byte, size), mem, "what was there is nobody's business")
					for i, at := range []uint64{0, size / 2, size - piece} {
						want := pattern(uint64(i), piece)
						require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want, mr.Addr()+at, mr.RKey()))
						got := make([]byte, piece)
						require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, mr.Addr()+at, mr.RKey()))
						defect.Bytes(t, want, got)
						defect.Bytes(t, want, mem[at:][:piece])
					}
					if buf == nil {
						require.NoError(t, mr.Close())
						continue
					}
					before := bytes.Clone(mem)
					culprit, victim := p, c
					if tt.neighbour {
						culprit, victim = q, neighbour
					}
					if tt.closed {
						require.NoError(t, mr.Close())
					}
					b := pattern(9, piece)
					status := culprit.RDMA(tt.op, b, mr.Addr()+uint64(tt.at), mr.RKey())
					if overIWARP(t) {
						if tt.op == ibv.OpRead {
							require.NotEqual(t, ibv.WCSuccess, status)
						}
						culprit.WaitEnd() // on this side a Write is over before the other one sees it
					} else {
						// The disconnect of the victim, whose device has told it, may overtake the answer.
						require.Contains(t, []ibv.WCStatus{ibv.WCRemAccessErr, ibv.WCFlushErr}, status)
						s.end(victim).Disconnect() // not every device tells
					}
					require.Equal(t, pattern(9, piece), b, "nothing was read")
					require.Equal(t, before, mem, "nothing was written")
					if tt.neighbour {
						got := make([]byte, piece)
						require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, mr.Addr(), mr.RKey()))
						require.Equal(t, mem[:piece], got)
					}
					if !tt.closed {
						require.NoError(t, mr.Close())
					}
				}
			})
		})
	}
}

// Each right is the only one that the peer has.
func TestExposeRights(t *testing.T) {
	for _, op := range []ibv.Opcode{ibv.OpWrite, ibv.OpRead} {
		t.Run(op.String(), func(t *testing.T) {
			s := newScene(t)
			c, p := s.conns(false, rdmanetPrivate)
			if op == ibv.OpRead && testDevice(t).Attr().Quirks.ReadsUnchecked {
				return // as the device says of itself
			}
			access := ibv.AccessRemoteRead
			if op == ibv.OpRead {
				access = ibv.AccessLocalWrite | ibv.AccessRemoteWrite
			}
			mem := pattern(1, 100)
			// A transfer opens memory as its caller means it; the test calls Expose for one right.
			mr, err := c.dom.Expose(c.lane.qp, mem, access)
			require.NoError(t, err)
			before := bytes.Clone(mem)
			b := pattern(2, 100)
			status := p.RDMA(op, b, mr.Addr(), mr.RKey())
			if overIWARP(t) {
				p.WaitEnd()
			} else {
				require.Equal(t, ibv.WCRemAccessErr, status)
			}
			defect.Bytes(t, pattern(2, 100), b)
			require.Equal(t, before, mem)
			require.NoError(t, mr.Close())
		})
	}
}
