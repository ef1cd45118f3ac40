package capture

import (
	"testing"

	"github.com/rdmanet/rdmanet/internal/printed/printedtest"
)

func TestPrinted(t *testing.T) {
	payload := printedtest.Payload(64 << 10)
	conn := &Conn{Ends: [2]End{{Private: payload[:200]}, {Private: payload[:200]}}}
	sub := NewSubSegment(1, 0x1000, uint32(len(payload)), len(payload))
	sub.Add(1, payload)
	var segs Segments
	seg := segs.Add(7, 0x1000, uint32(len(payload)))
	seg.Place(0x1000, payload)
	chunk := Chunk{Segments: make([]ChunkSegment, 1), Data: payload}
	printedtest.Check(t, map[string]any{
		"BTH": BTH{}, "CM": CM{Private: payload[:200]}, "CMAttribute": CMConnect, "Chunk": chunk, "ChunkSegment": ChunkSegment{},
		"Config": Config{}, "Conn": conn, "Counters": Counters{}, "Credit": Credit{Conn: conn}, "End": conn.Ends[0], "Kind": Send,
		"Latency": Latency{}, "LinkType": LinkEthernet, "Loss": Loss{Conn: conn}, "LossKind": LossKind(0),
		"Message": &Message{Conn: conn, Data: payload, head: payload}, "Opcode": Opcode(4), "Packet": Packet{Data: payload}, "Protocol": Detect,
		"Range": Range{}, "ReadRequest": ReadRequest{}, "Reassembler": NewReassembler(Config{}), "RoCE": RoCE{Payload: payload}, "Segment": seg,
		"Segments": &segs, "Side": Side(1), "Stats": Stats{}, "SubSegment": sub, "TransferOp": TransferOp(0), "Transport": RoCE2,
		"UpperKind": UpperKind(0), "UpperMessage": &UpperMessage{Conn: conn, Data: payload, ReadChunks: []Chunk{chunk}},
	})
}
