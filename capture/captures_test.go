package capture

import (
	"maps"
	"testing"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// linuxCaptures are captures of Linux software devices. All counts are those
// of tshark 4.0.17.
var linuxCaptures = []struct {
	file     string
	packets  uint64
	opcodes  map[Opcode]uint64           // RoCE
	fpdus    map[iwarpwire.Opcode]uint64 // iWARP
	crc      bool
	conns    uint64
	messages map[Kind]int // all complete
	partial  map[Kind]int // those that are not
}{
	{
		file: "siw-rping.pcap", packets: 42, conns: 1,
		fpdus:    map[iwarpwire.Opcode]uint64{iwarpwire.Write: 4, iwarpwire.ReadRequest: 4, iwarpwire.ReadResponse: 4, iwarpwire.Send: 16},
		messages: map[Kind]int{StartRequest: 1, StartReply: 1, Write: 4, Read: 4, Send: 16},
	},
	{
		file: "siw-crc-p2p-rping.pcap", packets: 45, conns: 1, crc: true,
		fpdus:    map[iwarpwire.Opcode]uint64{iwarpwire.Write: 7, iwarpwire.ReadRequest: 3, iwarpwire.ReadResponse: 6, iwarpwire.Send: 12},
		messages: map[Kind]int{StartRequest: 1, StartReply: 1, Write: 4, Read: 3, Send: 12},
	},
	{
		file: "siw-terminate.pcap", packets: 21, conns: 1,
		fpdus:    map[iwarpwire.Opcode]uint64{iwarpwire.ReadRequest: 1, iwarpwire.ReadResponse: 7, iwarpwire.Send: 1, iwarpwire.Terminate: 1},
		messages: map[Kind]int{StartRequest: 1, StartReply: 1, Read: 1, Send: 1, Terminate: 1},
	},
	{
		file: "siw-smbdirect.pcap", packets: 727, conns: 1,
		fpdus:    map[iwarpwire.Opcode]uint64{iwarpwire.Write: 192, iwarpwire.ReadRequest: 1, iwarpwire.ReadResponse: 184, iwarpwire.Send: 73, iwarpwire.SendInv: 3},
		messages: map[Kind]int{StartRequest: 1, StartReply: 1, Write: 16, Read: 1, Send: 76},
	},
	{
		file: "siw-smbdirect-frag.pcap", packets: 135, conns: 1,
		fpdus:    map[iwarpwire.Opcode]uint64{iwarpwire.Send: 95},
		messages: map[Kind]int{StartRequest: 1, StartReply: 1, Send: 95},
	},
	{
		file: "rxe-rping.pcap", packets: 53, conns: 1,
		opcodes:  map[Opcode]uint64{0x04: 16, 0x0a: 4, 0x0c: 4, 0x10: 4, 0x11: 20, 0x64: 5},
		messages: map[Kind]int{Management: 5, Write: 4, Read: 4, Send: 16},
	},
	{
		file: "rxe-send8k.pcap", packets: 144, conns: 2,
		opcodes:  map[Opcode]uint64{0x00: 10, 0x01: 60, 0x02: 10, 0x04: 22, 0x11: 32, 0x64: 10},
		messages: map[Kind]int{Management: 10, Send: 32},
	},
	{
		file: "rxe-write.pcap", packets: 110, conns: 2,
		opcodes:  map[Opcode]uint64{0x04: 32, 0x06: 6, 0x07: 18, 0x08: 6, 0x11: 38, 0x64: 10},
		messages: map[Kind]int{Management: 10, Send: 32, Write: 6},
	},
	{
		file: "rxe-atomic.pcap", packets: 64, conns: 2,
		opcodes:  map[Opcode]uint64{0x04: 22, 0x11: 22, 0x12: 5, 0x14: 5, 0x64: 10},
		messages: map[Kind]int{Management: 10, Send: 22, FetchAdd: 5},
	},
	{
		file: "rxe-nfs.pcap", packets: 374, conns: 1,
		opcodes: map[Opcode]uint64{0x04: 70, 0x06: 9, 0x07: 91, 0x08: 9, 0x0a: 9, 0x0c: 4, 0x0d: 4, 0x0e: 61, 0x0f: 4,
			0x11: 98, 0x17: 10, 0x64: 5},
		messages: map[Kind]int{Management: 5, Send: 80, Write: 18, Read: 4},
	},
	{
		file: "siw-transfers.pcap", packets: 334, conns: 2,
		fpdus:    map[iwarpwire.Opcode]uint64{iwarpwire.Write: 34, iwarpwire.ReadRequest: 12, iwarpwire.ReadResponse: 38, iwarpwire.SendSE: 134},
		messages: map[Kind]int{StartRequest: 2, StartReply: 2, Write: 9, Read: 12, Send: 69},
	},
	{
		file: "rxe-transfers.pcap", packets: 341, conns: 2,
		opcodes: map[Opcode]uint64{0x00: 18, 0x01: 76, 0x02: 18, 0x04: 49, 0x06: 6, 0x07: 25, 0x08: 6, 0x0a: 4, 0x0c: 10,
			0x0d: 6, 0x0e: 25, 0x0f: 6, 0x10: 4, 0x11: 76, 0x64: 12},
		messages: map[Kind]int{Management: 12, Send: 67, Write: 10, Read: 10},
	},
}

func TestCaptures(t *testing.T) {
	for _, tt := range linuxCaptures {
		t.Run(tt.file, func(t *testing.T) {
			for _, data := range []bool{true, false} {
				res := run(t, Config{Data: data}, frames(t, tt.file))
				opcodes := map[Opcode]uint64{}
				for op, n := range res.stats.Opcodes {
					if n > 0 {
						opcodes[Opcode(op)] = n
					}
				}
				fpdus, total := map[iwarpwire.Opcode]uint64{}, uint64(0)
				for op, n := range res.stats.FPDUs {
					if n > 0 {
						fpdus[iwarpwire.Opcode(op)] = n
						total += n
					}
				}
				messages, partial := map[Kind]int{}, map[Kind]int{}
				for _, m := range res.messages {
					if m.Complete {
						messages[m.Kind]++
					} else {
						partial[m.Kind]++
					}
				}
				s := res.stats
				if s.Packets != tt.packets || s.Conns != tt.conns {
					t.Errorf("%d packets, %d connections; want %d, %d", s.Packets, s.Conns, tt.packets, tt.conns)
				}
				if !maps.Equal(opcodes, tt.opcodes) || !maps.Equal(fpdus, tt.fpdus) {
					t.Errorf("opcodes %v, FPDUs %v; want %v, %v", opcodes, fpdus, tt.opcodes, tt.fpdus)
				}
				if !maps.Equal(messages, tt.messages) || !maps.Equal(partial, tt.partial) {
					t.Errorf("messages %v, incomplete %v; want %v, %v", messages, partial, tt.messages, tt.partial)
				}
				good, none := uint64(0), total
				if tt.crc {
					good, none = total, 0
				}
				if s.GoodICRC != s.RoCE || s.GoodCRC != good || s.NoCRC != none || s.BadCRC+s.BadICRC+s.BadHeader+s.Broken != 0 {
					t.Errorf("checksums: %+v", s)
				}
				if s.Repeats != 0 || s.Reordered != 0 || len(res.losses) != 0 {
					t.Errorf("%d repeats, %d out of order, losses %v", s.Repeats, s.Reordered, res.losses)
				}
			}
		})
	}
}
