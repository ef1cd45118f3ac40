// Package capture finds the messages of RDMA in captured packets.
//
// A [Reassembler] is handed packets, from a file or as they come, and calls
// back with every operation of RDMA in them: Sends, Writes, Reads with their
// answers, atomic operations. It knows RoCEv2 and iWARP, compares the checksums
// of both, and finds the two directions of a connection, by its set-up or, where
// that was not captured, by what answers what. Above that it follows
// SMB Direct, rdmanet's own streams, which are SMB Direct and more, and
// RPC-over-RDMA: messages of many Sends, with what travelled by RDMA Write or
// Read put where it belongs.
//
//	r := capture.NewReassembler(capture.Config{
//		Message: func(m *capture.Message) { fmt.Println(m.Time, m.Conn, m.Kind, m.Size, m.Complete) },
//		Loss:    func(l capture.Loss) { fmt.Println(l) },
//	})
//	for packets.Next() {
//		r.Add(&capture.Packet{Time: ..., Link: capture.LinkEthernet, Data: ...})
//	}
//	r.Flush()
//
// # What is right and what is missing
//
// Packets may come out of order, several times, or not at all. A message is
// called complete only if every byte of it was there. What is missing is said:
// of a message as ranges of its bytes, of a connection as a [Loss], with PSNs or
// offsets in the TCP stream. Where packets are missing it may be impossible to
// tell what others belong to; these are then not used, rather than guessed at.
//
// # Memory
//
// It is bounded, see [Config]: by bytes for packets that wait and for messages
// that are not complete, and by the number of connections. Without Config.Data
// no data is kept but the beginning of Sends, and in the steady state a packet
// of RoCEv2 costs no allocation.
//
// # Segments
//
// [Segments], [Segment], [SubSegment] and [ReadRequest] are how memory is put
// together that was written or read in pieces. They can be used by themselves.
package capture
