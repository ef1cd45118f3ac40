package capture

import (
	"encoding/binary"
	"runtime"
	"testing"
)

// Whatever a capture has in it, what is kept of it fits into Config.Memory, and
// little more.
func TestHeapBounded(t *testing.T) {
	const (
		limit = 4 << 20
		slack = 4 << 20 // what connections cost, what is handed out, and what was there before
	)
	be, le := binary.BigEndian, binary.LittleEndian
	for _, tt := range []struct {
		name     string
		protocol Protocol
		packets  int
		next     func(x *talker, i int)
	}{
		{"calls without data", RPCRDMA, 20000, func(x *talker, i int) {
			b := be.AppendUint32(nil, uint32(i))
			b = append(b, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0)
			for j := range 30 { // read segments that nobody reads
				b = append(b, 0, 0, 0, 1, 0, 0, 0, 8)
				b = be.AppendUint32(be.AppendUint32(b, uint32(i*30+j)), 1<<20)
				b = be.AppendUint64(b, 1<<32)
			}
			b = append(b, make([]byte, 20)...)
			x.by(Initiator, func(qp uint32, psn *uint32) { *psn = x.send(qp, *psn, b, mtu) })
		}},
		{"SMB2 without responses", SMBDirect, 20000, func(x *talker, i int) {
			b := make([]byte, smb2Header+48+16*20)
			copy(b, "\xfeSMB")
			le.PutUint16(b[12:], smb2Read)
			le.PutUint64(b[24:], uint64(i))
			body := b[smb2Header:]
			le.PutUint32(body[36:], smb2RDMA)
			le.PutUint16(body[44:], smb2Header+48)
			le.PutUint16(body[46:], 16*20)
			for j := range 20 {
				d := body[48+16*j:]
				le.PutUint32(d[8:], uint32(i*20+j))
				le.PutUint32(d[12:], 1<<20)
			}
			x.say(Initiator, 0, 0, 0, 0, 0, b)
		}},
		{"memory that nobody names", SMBDirect, 20000, func(x *talker, i int) {
			x.by(Initiator, func(qp uint32, psn *uint32) { *psn = x.write(qp, *psn, uint64(i), uint32(i), make([]byte, 900), mtu) })
		}},
		{"what waits for a transfer", SMBDirect, 20000, func(x *talker, i int) {
			if i%100 == 0 {
				x.last++
				x.say(Initiator, Offer, 0, x.last, 1<<30, 0, nil)
			}
			x.say(Initiator, 0, 0, 0, 0, 0, make([]byte, 800))
		}},
		{"gaps", Unknown, 100000, func(x *talker, i int) {
			x.psn[0]++ // every second packet is missing
			x.by(Initiator, func(qp uint32, psn *uint32) { x.add(0x01, qp, *psn, nil, make([]byte, 256)); *psn++ })
		}},
		{"Reads without answers", SMBDirect, 20000, func(x *talker, i int) {
			x.by(Initiator, func(qp uint32, psn *uint32) { x.add(0x0c, qp, *psn, reth(1<<32, 7, 1<<31), nil); *psn++ })
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := newTalker(1 << 3)
			if tt.protocol != SMBDirect || tt.name == "SMB2 without responses" {
				x = newTalker(0)
			}
			r := NewReassembler(Config{Data: true, Memory: limit, Window: 64, Protocol: tt.protocol, Upper: func(*UpperMessage) {}, Message: func(*Message) {}})
			heap := func() uint64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			before := heap()
			most := uint64(0)
			for i := range tt.packets {
				tt.next(x, i)
				for j := range x.packets {
					r.Add(&x.packets[j])
				}
				x.packets = x.packets[:0]
				if i%(tt.packets/8) == tt.packets/8-1 {
					most = max(most, heap())
				}
			}
			if peak := r.Stats().MemoryPeak; most > before+limit+slack || peak > limit {
				t.Errorf("%d bytes of heap, %d accounted for; want at most %d and %d", most-before, peak, limit+slack, limit)
			} else {
				t.Logf("%d KiB of heap, %d KiB accounted for", (max(most, before)-before)>>10, peak>>10)
			}
			r.Flush()
		})
	}
}
